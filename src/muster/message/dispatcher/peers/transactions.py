"""Transactions that acknowledge messages of several partitions.

The dispatcher that receives the transaction coordinates it:

    prepare    each other partition reserves the messages, and stores that (`PreparedAcks`)
    decide     one record of the coordinator: its own acknowledgements, all messages, and ``decided``
    resolve    each other partition acknowledges the messages, and stores that
    complete   a record of the coordinator: nothing is left to resolve

Before the decision the attempt has failed, whatever happens; after it, it will be completed by the
coordinator or its successor. A partition that waits for a decision asks for it. Every attempt has its own
name, so a repeated transaction is another attempt, and a late request of a former coordinator has no effect
on it. A former coordinator cannot decide: its log has another owner.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from muster.bus import api
from muster.core import errors
from muster.message import partitions, protocol
from muster.message.dispatcher import clients
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_log
from muster.message.dispatcher.peers import peer_protocol

if TYPE_CHECKING:  # equivalent: annotations are not evaluated
    from muster.message.dispatcher import delivery

ASK_S = 2.0  # how long a partition waits before it asks for the decision
RETRY_S: Final = 0.2

#: The messages of a work that a connection may acknowledge, if it may acknowledge all of them.
AcknowledgedBy = Callable[[clients.ClientConnection, dict[str, list[int]]], dict[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to commit a transaction, and the other partitions that prepare it."""

    name: str
    participants: list[int]


class Transactions:
    def __init__(
        self,
        bus: api.Bus,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        client_table: clients.ClientTable,
        delivery_queue: delivery.DeliveryQueue,
        acknowledged: AcknowledgedBy,
    ) -> None:
        self._bus = bus
        self._log = log
        self._ledger = log.ledger
        self._lifetime = lifetime
        self._clients = client_table
        self._delivery = delivery_queue
        self._acknowledged = acknowledged
        self._undecided: set[str] = set()  # attempts that this dispatcher coordinates
        self._completing: dict[str, asyncio.Event] = {}
        self._reserving: dict[str, dict[str, list[int]]] = {}  # attempts whose preparation is being stored
        self._resolving: dict[str, asyncio.Future[list[int]]] = {}

    # The coordinator.

    def remote_acks(self, acks: dict[str, list[int]]) -> dict[int, dict[str, list[int]]]:
        """The acknowledgements of messages of other partitions."""
        remote: dict[int, dict[str, list[int]]] = {}
        for key, numbers in acks.items():
            partition = partitions.of_key(key, self._log.partition_count)
            if partition != self._log.partition:
                remote.setdefault(partition, {})[key] = numbers
        return remote

    def begin(self, connection: str, number: int, participants: list[int]) -> Attempt:
        unique = secrets.token_hex(8)  # equivalent: any length that is never repeated
        attempt = Attempt(f"{connection}/{number}/{unique}", participants)
        self._undecided.add(attempt.name)
        return attempt

    async def prepare(
        self, attempt: Attempt, connection: clients.ClientConnection, remote: dict[int, dict[str, list[int]]]
    ) -> None:
        """Raises the first error; the caller then calls `abort`."""
        requests = [
            peer_protocol.call(
                self._bus,
                partition,
                peer_protocol.PrepareAcks(
                    attempt.name, self._log.partition, connection.name, connection.identity, acks
                ),
            )
            for partition, acks in remote.items()
        ]
        for result in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def abort(self, attempt: Attempt) -> None:
        """The attempt is not decided and never will be."""
        self._undecided.discard(attempt.name)
        for partition in attempt.participants:
            self._lifetime.spawn(self._tell_aborted(attempt.name, partition))

    async def _tell_aborted(self, attempt: str, partition: int) -> None:
        try:
            request = peer_protocol.ResolveAcks(attempt, commit=False)
            await peer_protocol.call(self._bus, partition, request)
        except errors.MusterError:
            return  # it asks for the outcome

    def decided(self, attempt: Attempt) -> None:
        """The decision is stored."""
        self._undecided.discard(attempt.name)

    def complete_all(self) -> None:
        """Continue the transactions of an earlier dispatcher."""
        for attempt in self._ledger.decided:
            self._start_complete(attempt)

    def _start_complete(self, attempt: str) -> asyncio.Event:
        completed = self._completing.get(attempt)
        if completed is None:
            completed = self._completing[attempt] = asyncio.Event()
            self._lifetime.spawn(self._complete(attempt, completed))
        return completed

    async def wait_completed(self, attempts: list[str]) -> None:
        """Wait until these attempts, which are decided, are resolved."""
        for completed in [
            self._start_complete(attempt) for attempt in attempts if attempt in self._ledger.decided
        ]:
            await completed.wait()

    async def _complete(self, attempt: str, completed: asyncio.Event) -> None:
        await asyncio.gather(
            *(self._tell_committed(attempt, partition) for partition in self._ledger.decided[attempt])
        )
        await self._store(ledger.LogRecord(completed=[attempt]))
        del self._completing[attempt]
        completed.set()

    async def _tell_committed(self, attempt: str, partition: int) -> None:
        while True:
            try:
                request = peer_protocol.ResolveAcks(attempt, commit=True)
                await peer_protocol.call(self._bus, partition, request)
                return
            except (errors.Unavailable, errors.LimitExceeded):
                await asyncio.sleep(RETRY_S)

    async def _store(self, record: ledger.LogRecord) -> None:
        while True:
            try:
                await self._log.store(journal.JournalItem([], record))
                return
            except errors.LimitExceeded:  # the log is full
                await asyncio.sleep(RETRY_S)

    async def outcome(self, attempt: str) -> protocol.DispatcherReply:
        if attempt in self._ledger.decided:
            outcome = peer_protocol.Outcome.COMMITTED
        elif attempt in self._undecided:
            outcome = peer_protocol.Outcome.UNDECIDED
        else:
            # Only the owner of the log can store this; a former one does not know what is decided.
            await self._log.store(journal.JournalItem([], ledger.LogRecord(completed=[attempt])))
            outcome = peer_protocol.Outcome.ABORTED
        return protocol.DispatcherReply(count=outcome)

    # The other partitions.

    async def reserve(self, request: peer_protocol.PrepareAcks) -> protocol.DispatcherReply:
        connection = self._clients.connections.get(request.connection)
        if connection is None or connection.identity != request.identity:
            raise errors.NotConnected(f"the connection {request.connection!r} is not registered here")
        await self._resolve_earlier(request)
        acks = self._acknowledged(connection, request.acks)
        for key, numbers in acks.items():
            self._ledger.backlogs[key].start_finish(numbers)
        prepared = ledger.PreparedAcks(request.attempt, request.coordinator, request.connection, acks)
        self._reserving[request.attempt] = acks
        try:
            await self._log.store(journal.JournalItem([], ledger.LogRecord(prepared=[prepared])))
        except errors.MusterError:
            self._cancel(acks)
            raise
        finally:
            del self._reserving[request.attempt]
        return protocol.DispatcherReply()

    def _cancel(self, acks: dict[str, list[int]]) -> None:
        for key, numbers in acks.items():
            if (source := self._ledger.backlogs.get(key)) is not None:
                source.cancel_finish(numbers)
                self._delivery.pump(source)

    async def _resolve_earlier(self, request: peer_protocol.PrepareAcks) -> None:
        """An earlier attempt of the same transaction has to be resolved first: it reserves the messages."""
        transaction = request.attempt.rpartition("/")[0]
        for entry in list(self._ledger.prepared.values()):
            if entry.attempt != request.attempt and entry.attempt.rpartition("/")[0] == transaction:
                await self._ask(entry)
                if entry.attempt in self._ledger.prepared:
                    raise errors.Unavailable("an earlier attempt of the transaction is not resolved yet")

    async def resolve(self, request: peer_protocol.ResolveAcks) -> protocol.DispatcherReply:
        await self._resolve(request.attempt, commit=request.commit)
        return protocol.DispatcherReply()

    async def _resolve(self, attempt: str, *, commit: bool) -> None:
        if attempt in self._resolving:  # a repeated request
            await asyncio.shield(self._resolving[attempt])
            return
        entry = self._ledger.prepared.get(attempt)
        # A coordinator that no longer waits for the preparation aborts the attempt before it is stored.
        acks = entry.acks if entry is not None else self._reserving.get(attempt, {})
        # Stored even if it was resolved before: a former owner of the log must not reply.
        resolving = self._resolving[attempt] = asyncio.ensure_future(
            self._log.store(
                journal.JournalItem([], ledger.LogRecord(acked=acks if commit else {}, resolved=[attempt]))
            )
        )
        try:
            await resolving
        finally:
            del self._resolving[attempt]
        if not commit:
            self._cancel(acks)

    async def run(self) -> None:
        """Ask for decisions that do not arrive. Runs until cancelled."""
        waiting: set[str] = set(self._ledger.prepared)  # of an earlier dispatcher: ask at once
        while True:
            for attempt in waiting & self._ledger.prepared.keys():
                await self._ask(self._ledger.prepared[attempt])
            waiting = set(self._ledger.prepared)
            await asyncio.sleep(ASK_S)

    async def _ask(self, entry: ledger.PreparedAcks) -> None:
        try:
            reply = await peer_protocol.call(
                self._bus, entry.coordinator, peer_protocol.AskOutcome(entry.attempt)
            )
            if reply.count != peer_protocol.Outcome.UNDECIDED:
                await self._resolve(entry.attempt, commit=reply.count == peer_protocol.Outcome.COMMITTED)
        except (errors.Unavailable, errors.LimitExceeded):
            return  # asked again later
