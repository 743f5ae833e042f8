"""REST: alerts, silences, and the progress of the pipeline."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from pydantic import Field

from muster.core import messages
from muster.pipeline import operations, protocol
from muster.web import request_state
from muster.web.data import read_model
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

router = route.RouteTable("alerts")


class AlertBody(StrictBody):
    rule: str = Field(min_length=1, max_length=256)
    about: str = Field(min_length=1, max_length=256)


class SilenceBody(StrictBody):
    covers: str = Field(min_length=1, max_length=4096, description="A predicate over rule, about, group, …")
    for_s: float = Field(gt=0, le=366 * 86400)
    from_ms: int | None = Field(
        None, ge=0, le=(1 << 53) - 1, description="Start time; in the future: a maintenance window."
    )
    reason: str = Field("", max_length=1000)


@router.of("GET /alerts", "List unresolved alerts, the most severe first", key=read_model.alert_order)
async def alerts(call: request_state.Call) -> list[messages.Alert]:
    return await call.source.alerts()


acknowledge = router.operation("POST /alerts/acknowledgements", operations.ACKNOWLEDGE, body=AlertBody)
resolve = router.operation("POST /alerts/resolutions", operations.RESOLVE, body=AlertBody)
router.operation("GET /silences", operations.SILENCES, key=("id",))
silence = router.operation("POST /silences", operations.SILENCE, body=SilenceBody, status=201)
unsilence = router.operation(
    "DELETE /silences/{id}", operations.UNSILENCE, id=Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
)
router.operation("GET /pipeline/progress", operations.PROGRESS)


@router.of("GET /pipeline/batches", "Micro-batches of the last minutes, newest first")
async def batches(
    call: request_state.Call, limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> route.RowPage[protocol.BatchProgress]:
    newest_first = list(reversed(call.source.feed.batches))
    rows, next_ = base.behind(
        newest_first, cursor, limit, lambda reported: f"{reported.at_ms}-{reported.batch}"
    )
    return route.RowPage(rows, next_, len(newest_first))
