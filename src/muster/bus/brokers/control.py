"""The brokers of a running domain, as operators see and change them: a client of the domain's process.

    muster.bus.from.<identity>.brokers.<verb>  verbs: list, links, topics, start, stop, link, unlink, alerts,
                                                components

The command line, the REST API and the dashboard derive their fields from the types here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages, subjects

PART = "bus"
KIND = "brokers"
TIMEOUT_S = 60.0  # a broker with storage may have to drain first
RETRY_S = 3.0

T = TypeVar("T")


class BrokerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A broker. ``problem``: a fault with which it continues to run, such as a full disk. The last fields are
    None while it does not respond."""

    name: str
    state: str
    pid: int | None = None
    url: str | None = None
    monitor_url: str | None = None
    leaf_url: str | None = None
    websocket_url: str | None = None
    mqtt_url: str | None = None
    restarts: int = 0
    problem: str | None = None
    version: str | None = None
    connections: int | None = None
    memory_bytes: int | None = None
    cpu_percent: float | None = None
    in_messages: int | None = None
    out_messages: int | None = None
    slow_consumers: int | None = None


class BrokerDescription(BrokerRow, frozen=True, kw_only=True):
    """A broker, with its files on the domain's machine."""

    storage: str | None = None
    log_file: str


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two brokers. ``near`` maintains it; ``far`` is a broker, a cluster or an address."""

    id: str
    kind: str
    near: str
    far: str
    up: bool
    round_trip_ms: float | None = None
    in_messages: int = 0
    out_messages: int = 0


class ComponentRow(msgspec.Struct, frozen=True, kw_only=True):
    """A component that the domain's process supervises."""

    name: str
    state: str
    reason: str = ""


class RemovedLink(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class BrokerControl:
    """Requests to the domain's process. Only the role ``operator`` may change brokers.

    A change may make a broker reload its configuration, which can lose a reply: a request is repeated after
    ``retry_s``, and executed once. ``waits``: for a domain process, if there is none.
    """

    def __init__(
        self,
        bus: api.Bus,
        *,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = RETRY_S,
        waits: bool = False,
    ) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._waits = waits

    async def brokers(self) -> list[BrokerDescription]:
        return await self.request(list[BrokerDescription], "list")

    async def links(self) -> list[LinkRow]:
        return await self.request(list[LinkRow], "links")

    async def alerts(self) -> list[messages.Alert]:
        """The alerts of the domain's process that are firing now."""
        return await self.request(list[messages.Alert], "alerts")

    async def components(self) -> list[ComponentRow]:
        return await self.request(list[ComponentRow], "components")

    async def start(self, name: str, *, below: str | None = None, storage: bool = True) -> BrokerDescription:
        """Start another broker: a leaf ``below`` another, or unlinked."""
        return await self.request(BrokerDescription, "start", name=name, below=below, storage=storage)

    async def stop(self, name: str) -> BrokerDescription:
        """Stop a broker that `start` started."""
        return await self.request(BrokerDescription, "stop", name=name)

    async def link(self, near: str, far: str) -> LinkRow:
        """Link ``near`` to ``far``: a broker of the domain, or the URL of a leaf listener elsewhere."""
        return await self.request(LinkRow, "link", near=near, far=far)

    async def unlink(self, id: str) -> RemovedLink:
        return await self.request(RemovedLink, "unlink", id=id)

    async def request(self, kind: type[T], verb: str, **arguments: Any) -> T:
        absent = errors.Unavailable(
            "no domain process listens on this bus", hint="were these brokers started by `muster up`?"
        )
        reply = await client.call(
            self._bus,
            subjects.from_identity(PART, self._bus.identity, KIND, verb),
            arguments,
            timeout_s=self._timeout_s,
            try_s=self._retry_s,
            waits=self._waits,
            absent=absent,
        )
        return msgspec.convert(reply, kind)
