"""The connections of clients that are registered with a dispatcher."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from muster.bus import api
from muster.core import queue_names, quotas
from muster.message import protocol
from muster.message.dispatcher.log import ledger

DELETED_MAX: Final = 10_000  # deleted temporary destinations that a connection's entry contains


@dataclass(slots=True)
class StagedWork:
    """Messages that wait for the rest of their work. A connection has one work in progress at a time."""

    work: int
    sends: list[protocol.SendMessage] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class ClientConnection:
    name: str
    identity: str
    client_id: str | None
    last_seen: float
    at: api.ConnectionId | None = None
    consumers: dict[int, str] = field(default_factory=dict)  # consumer number -> backlog
    outbox: list[protocol.MessageDelivery] = field(default_factory=list)
    registration: int = 0  # of its last hello
    delivered: int = 0  # deliveries sent since then
    notified: int = 0  # notifications from it since then
    staged: StagedWork | None = None
    # Its deleted temporary destinations, latest last
    deleted: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def add_deleted(self, name: str) -> None:
        self.deleted[name] = None
        if len(self.deleted) > DELETED_MAX:
            self.deleted.popitem(last=False)

    @property
    def origin(self) -> str:
        return protocol.origin(self.identity, self.client_id) if self.client_id else self.name


class ClientTable:
    def __init__(self, depths: dict[str, int], queues_per_identity: int) -> None:
        """``depths``: of the queues that exist, by key."""
        self.connections: dict[str, ClientConnection] = {}
        self.names: dict[str, str] = {}  # of connections with a client id, by origin
        self._depths = depths
        self._queues_max = queues_per_identity
        self._created: dict[str, set[str]] = {}  # keys of queues by the identity that created them

    def create_queues(self, identity: str, keys: Iterable[str]) -> None:
        """Note that an identity sends to these; `errors.LimitExceeded` if it has created too many."""
        temporary = ledger.queue_key(queue_names.TEMPORARY)
        new = {key for key in keys if key not in self._depths and not key.startswith(temporary)}
        if not new:
            return
        own, most = self._created.get(identity, set()) | new, self._queues_max
        if len(own) > most:  # some may not exist any more
            own = {key for key in own if key in self._depths} | new
        if len(own) > most:
            raise quotas.exceeded(identity, len(own - new), "queues", most, "message.queues_per_identity")
        self._created[identity] = own
