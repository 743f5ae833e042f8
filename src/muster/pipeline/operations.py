"""Operations of the pipeline that commands and REST offer as they are: see `muster.bus.rpc.operations`."""

from __future__ import annotations

import functools

from muster.bus.rpc import operations

_operation = functools.partial(operations.ServiceOperation, "muster.pipeline.client:PipelineClient", "alerts")

ALERTS = _operation(
    "alerts",
    "List the alerts that are not resolved, of the pipeline and of the domain's budgets.",
    columns=("rule", "about", "severity", "state", "since_ms", "value", "reason?"),
)
ACKNOWLEDGE = _operation(
    "acknowledge", "Acknowledge an alert.", action="acknowledge", target="{rule} {about}"
)
RESOLVE = _operation("resolve", "Resolve an alert.", action="resolve", target="{rule} {about}")
SILENCES = _operation(
    "silences",
    "List silences and maintenance windows.",
    columns=("id", "covers", "from_ms", "until_ms", "by", "reason"),
)
SILENCE = _operation("silence", "Silence alerts.", action="silence", target="{covers}")
UNSILENCE = _operation(
    "unsilence", "End a silence or a maintenance window.", action="unsilence", target="{id}"
)
PROGRESS = operations.ServiceOperation(
    "muster.pipeline.client:PipelineClient", "pipeline", "progress", "Progress of the pipeline."
)
