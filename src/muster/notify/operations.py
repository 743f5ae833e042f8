"""Operations of notification that commands and REST offer as they are: see `muster.bus.rpc.operations`."""

from __future__ import annotations

import functools

from muster.bus.rpc import operations

_operation = functools.partial(operations.ServiceOperation, "muster.notify.queries", "notify")

RECEIVERS = _operation(
    "list_receivers",
    "List receivers with their states and policies.",
    columns=("receiver", "model", "state", "policy", "delivery?"),
)
MODELS = _operation(
    "list_models", "List the models of receivers and events.", columns=("name", "of", "attributes")
)
GRANTS = _operation(
    "list_grants",
    "List grants and whether they are in force.",
    columns=("serial", "holder", "attributes", "tier?", "authority?", "scope?", "expires_at", "status"),
)
CHECK = _operation("check", "Check a policy against the domain's models and show its cost.")
