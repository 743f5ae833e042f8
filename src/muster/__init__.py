"""Muster: a publish/subscribe control plane for fleets of services.

    with muster.open() as m:                              # the domain that the command line uses
        m.publish("orders/eu", "17 boxes")                # messages of topics
        m.queue("orders").send("four chairs")             # persistent messages
        m.contexts["servers/web"] = "host-1"              # metadata under keys
        m.notify.send("alert", {"level": 4}, to="load > 0.8")   # events to receivers selected by their state
        m.fleet.resources(where="group = 'web'")          # managed resources, also `.to_pandas()`
        m.history.sql("SELECT * FROM alerts_current")     # what the pipeline stored

`open_async` is the same for programs with an event loop.  `connect` and `blocking.connect` return the bus
itself, with streams, key/value buckets and subjects.  ARCHITECTURE.md is the map of the packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster import blocking_connection as blocking
    from muster.client.front import AsyncMuster, open_async
    from muster.client.messages import PublishedMessage as Message
    from muster.client.rows import Rows
    from muster.client.services import HandlerCall
    from muster.client.synchronous import Muster, open
    from muster.connection import connect
    from muster.core import errors
    from muster.core.errors import MusterError
    from muster.manage.adapters.base import Adapter
    from muster.message.client.api import AcknowledgeMode
    from muster.message.messages import JmsMessage as QueueMessage
    from muster.message.retries import Retry

__all__ = [
    "AcknowledgeMode",
    "Adapter",
    "AsyncMuster",
    "HandlerCall",
    "Message",
    "Muster",
    "MusterError",
    "QueueMessage",
    "Retry",
    "Rows",
    "__version__",
    "blocking",
    "connect",
    "errors",
    "open",
    "open_async",
]
__version__ = "0.2.0"

# Imported when they are first used: `import muster` alone must stay quick.
_PLACES = {
    "AcknowledgeMode": "muster.message.client.api:AcknowledgeMode",
    "Adapter": "muster.manage.adapters.base:Adapter",
    "AsyncMuster": "muster.client.front:AsyncMuster",
    "HandlerCall": "muster.client.services:HandlerCall",
    "Message": "muster.client.messages:PublishedMessage",
    "Muster": "muster.client.synchronous:Muster",
    "MusterError": "muster.core.errors:MusterError",
    "QueueMessage": "muster.message.messages:JmsMessage",
    "Retry": "muster.message.retries:Retry",
    "Rows": "muster.client.rows:Rows",
    "blocking": "muster.blocking_connection",
    "connect": "muster.connection:connect",
    "errors": "muster.core.errors",
    "open": "muster.client.synchronous:open",
    "open_async": "muster.client.front:open_async",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def __dir__() -> list[str]:
    return sorted(__all__)
