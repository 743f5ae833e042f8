"""The operations of the brokers of a domain: see `muster.bus.rpc.operations`."""

from __future__ import annotations

import functools

from muster.bus.rpc import operations

_CLIENT = "muster.bus.brokers.control:BrokerControl"
_operation = functools.partial(operations.ServiceOperation, _CLIENT, "brokers")

BROKERS = _operation(
    "brokers",
    "List the brokers of the domain.",
    columns=("name", "state", "url", "leaf_url?", "connections", "restarts", "pid?"),
)
LINKS = _operation(
    "links",
    "List the links between brokers.",
    columns=("id", "kind", "up", "round_trip_ms", "in_messages?", "out_messages?"),
)
START = _operation(
    "start",
    "Start another broker on the domain's machine.",
    action="broker-start",
    target="{name}",
)
STOP = _operation(
    "stop",
    "Stop a broker that `muster broker start` started.",
    action="broker-stop",
    target="{name}",
)
LINK = _operation(
    "link",
    "Connect the broker NEAR to FAR with a leaf link, while both run.",
    action="broker-link",
    target="{near}>{far}",
)
UNLINK = _operation(
    "unlink",
    "Remove a leaf link, while both brokers run.",
    action="broker-unlink",
    target="{id}",
)
