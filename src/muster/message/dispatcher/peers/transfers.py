"""Messages for queues of other partitions: stored in the own log, then transferred exactly once, in order.

A message that is sent in a transaction, or moved, may belong to another partition than the record that it
results from. It is stored together with that record, on a subject of its own, and is thereby accepted. Then
it is sent to its partition until that has stored it. The receiver stores with it the number of the last
message of the channel, and ignores those that it already has. Numbers belong to a channel, which begins with
each start of a dispatcher, so that a log that was restored from a backup does not repeat any.

A former owner of the log may transfer as well: the log contains all that it transfers, and the receiver
ignores what it has.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.message import destinations, messages, partitions
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_log
from muster.message.dispatcher.peers import peer_protocol

BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 512 << 10
MEMORY_BYTES_MAX: Final = 8 << 20  # of messages that wait; others are read from the log
RETRY_S: Final = (0.05, 1.0)  # the first delay, and the longest
RESUME_S: Final = 1800.0  # how long a large body that is stored in part is continued

events = log.EventLog("message")


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    channel: str
    destination: str
    republish: bool
    due: bool = False


@dataclass(slots=True)
class _MovingBody:
    """A large body of which a part is stored in the other partition. A repeated attempt continues there:
    otherwise each one would leave a part behind.
    """

    until: float  # the other partition keeps a body without a message for `large_bodies.UPLOAD_S`
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    chunks: list[int] = field(default_factory=list)


def meta_of(raw: str) -> str:
    """The header of a message that is stored for a transfer."""
    return raw.partition("\n")[2]


class Transfers:
    def __init__(
        self, bus: api.Bus, message_log: message_log.MessageLog, lifetime: lifetime_.DispatcherLifetime
    ) -> None:
        self._bus = bus
        self._log = message_log
        self._lifetime = lifetime
        self._channel = secrets.token_hex(8)
        #: By partition: the numbers of messages, with those that are in memory.
        self._waiting: dict[int, deque[tuple[int, journal.JournalMessage | None]]] = {}
        self._bytes = 0  # of those in memory
        self._active: set[int] = set()
        self._waiters: list[tuple[dict[int, int], asyncio.Future[None]]] = []
        self._moving: dict[int, _MovingBody] = {}  # by the number of the message
        self._accepting: dict[str, int] = {}  # by channel: the last number that is being stored here

    # Sending.

    def is_remote(self, destination: destinations.Destination) -> bool:
        return self._partition_of(destination) != self._log.partition

    def _partition_of(self, destination: destinations.Destination) -> int:
        return partitions.of_destination(destination, self._log.partition_count)

    def copy_to(
        self,
        destination: destinations.Destination,
        meta: messages.MessageMeta,
        raw: str,
        data: bytes,
        *,
        republish: bool,
        due: bool,
    ) -> journal.JournalMessage:
        envelope = _Envelope(self._channel, str(destination), republish, due)
        raw = f"{msgspec.json.encode(envelope).decode()}\n{raw}"
        subject = self._log.subjects.transfer(self._partition_of(destination))
        return journal.JournalMessage(destination, meta, raw, data, subject, deferred=True)

    async def recover(self) -> None:
        """Continue the transfers of an earlier dispatcher."""
        for partition in range(self._log.partition_count):
            if partition == self._log.partition:
                continue
            done = self._log.ledger.transferred.get(partition, 0)
            subject = self._log.subjects.transfer(partition)
            async for together in self._log.reader.read(subject, done):
                for number, _, _ in together:
                    if number > done:
                        self._put(partition, number, None)

    def add(self, copy: journal.JournalMessage, number: int) -> None:
        """A message is in the log."""
        size = len(copy.data) + len(copy.raw)
        fits = self._bytes + size <= MEMORY_BYTES_MAX
        if fits:
            self._bytes += size
        self._put(self._partition_of(copy.destination), number, copy if fits else None)

    def _put(self, partition: int, number: int, copy: journal.JournalMessage | None) -> None:
        self._waiting.setdefault(partition, deque()).append((number, copy))
        if partition not in self._active:
            self._active.add(partition)
            self._lifetime.spawn(self._transfer(partition))

    def last_waiting(self, copies: Iterable[journal.JournalMessage] | None = None) -> dict[int, int]:
        """By partition, the last of the messages that wait; of these ``copies``, which were just stored."""
        if not self._waiting:
            return {}
        concerned = (
            self._waiting.keys()
            if copies is None
            else {self._partition_of(copy.destination) for copy in copies if copy.deferred}
        )
        return {
            partition: waiting[-1][0] for partition in concerned if (waiting := self._waiting.get(partition))
        }

    async def wait_done(self, last: dict[int, int]) -> None:
        """Wait until the messages up to these have been transferred."""
        if not all(self._is_transferred(partition, number) for partition, number in last.items()):
            done: asyncio.Future[None] = self._lifetime.loop.create_future()
            self._waiters.append((last, done))
            await done

    async def _transfer(self, partition: int) -> None:
        waiting, pause_s = self._waiting[partition], RETRY_S[0]
        while waiting:
            try:
                batch = await self._next_batch(partition)
                await peer_protocol.call(self._bus, partition, peer_protocol.TransferMessages(batch))
            except (errors.Unavailable, errors.LimitExceeded):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
                continue
            pause_s = RETRY_S[0]
            last = batch[-1].number
            await self._record(partition, last)
            while waiting and waiting[0][0] <= last:
                number, copy = waiting.popleft()
                self._moving.pop(number, None)
                if copy is not None:
                    self._bytes -= len(copy.data) + len(copy.raw)
            self._wake_waiters()
        self._active.discard(partition)

    async def _record(self, partition: int, last: int) -> None:
        record = ledger.LogRecord(transferred={partition: last})
        while True:
            try:
                await self._log.store(journal.JournalItem([], record))
                return
            except errors.LimitExceeded:  # the log is full
                await asyncio.sleep(RETRY_S[1])

    def _wake_waiters(self) -> None:
        left = []
        for last, done in self._waiters:
            if all(self._is_transferred(partition, number) for partition, number in last.items()):
                if not done.done():
                    done.set_result(None)
            else:
                left.append((last, done))
        self._waiters = left

    def _is_transferred(self, partition: int, number: int) -> bool:
        waiting = self._waiting.get(partition)
        return not waiting or waiting[0][0] > number

    async def _next_batch(self, partition: int) -> list[peer_protocol.TransferredMessage]:
        batch: list[peer_protocol.TransferredMessage] = []
        size = 0
        for number, copy in list(self._waiting[partition])[:BATCH_MESSAGES]:
            raw, data = (copy.raw, copy.data) if copy is not None else await self._read(partition, number)
            if batch and size + len(raw) + len(data) > BATCH_BYTES:
                break
            size += len(raw) + len(data)
            head, _, meta = raw.partition("\n")
            envelope = msgspec.json.decode(head, type=_Envelope)
            if messages.MAY_BE_LARGE in meta:
                meta = await self._move_body(partition, number, meta)
            batch.append(
                peer_protocol.TransferredMessage(
                    envelope.channel,
                    number,
                    envelope.destination,
                    meta,
                    data,
                    envelope.republish,
                    envelope.due,
                )
            )
        return batch

    async def _read(self, partition: int, number: int) -> tuple[str, bytes]:
        held = await self._log.reader.message(self._log.subjects.transfer(partition), number)
        if held is None:
            raise errors.InvariantViolation(f"message {number} was deleted before its transfer")
        return held.raw, held.data

    async def _move_body(self, partition: int, number: int, raw: str) -> str:
        """Store a large body in the other partition; returns the header that refers to it.

        A header that refers to other chunks than those of its body is returned unchanged: any client may have
        written it, and no consumer can read such a body.
        """
        meta = messages.decode_meta(raw)
        if meta.large is None or meta.large.partition != self._log.partition:
            return raw
        moving = self._moving.get(number)
        if moving is None or self._lifetime.loop.time() > moving.until:
            moving = self._moving[number] = _MovingBody(self._lifetime.loop.time() + RESUME_S)
        for chunk in meta.large.chunks[len(moving.chunks) :]:
            data = await self._log.reader.chunk(meta.large.id, chunk)
            if data is None:
                events.warning("body-missing", partition=self._log.partition, chunk=chunk)
                return raw
            request = peer_protocol.StoreBody(moving.id, data)
            moving.chunks.append((await peer_protocol.call(self._bus, partition, request)).count)
        meta.large = messages.LargeBody(moving.id, meta.large.size, moving.chunks, partition)
        return messages.encode_meta(meta).decode()

    # Receiving.

    def accept(
        self, request: peer_protocol.TransferMessages
    ) -> tuple[list[peer_protocol.TransferredMessage], dict[str, int]]:
        """The messages that are new, and the last number of each channel in the request."""
        last: dict[str, int] = {}
        new: list[peer_protocol.TransferredMessage] = []
        for message in request.messages:
            known = max(
                self._accepting.get(message.channel, 0), self._log.ledger.received.get(message.channel, 0)
            )
            if message.number > known:
                new.append(message)
                self._accepting[message.channel] = message.number
            last[message.channel] = max(message.number, last.get(message.channel, 0))
        return new, last

    def stored(self, last: dict[str, int]) -> bool:
        """Whether everything up to these numbers is stored. What is not may be accepted again."""
        received = self._log.ledger.received
        is_stored = True
        for channel, number in last.items():
            if received.get(channel, 0) < number:
                is_stored = False
                self._accepting.pop(channel, None)
            elif self._accepting.get(channel, 0) <= received[channel]:
                self._accepting.pop(channel, None)
        return is_stored
