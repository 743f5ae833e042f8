"""The operations of the brokers of a domain: see `muster.bus.rpc.operations`."""

from __future__ import annotations

import functools

from muster.bus.rpc import operations

_operation = functools.partial(operations.Operation, "muster.bus.brokers.control:BrokerControl", "brokers")

START = _operation("start", "Start another broker.", action="broker-start", target="{name}")
STOP = _operation(
    "stop", "Stop a broker that was started at run time.", action="broker-stop", target="{name}"
)
LINK = _operation(
    "link", "Connect a broker to another with a leaf link.", action="broker-link", target="{near}>{far}"
)
UNLINK = _operation("unlink", "Remove a leaf link.", action="broker-unlink", target="{id}")
