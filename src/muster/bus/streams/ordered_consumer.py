"""Reads a stream continuously, without a position stored by the broker.

A short-lived consumer without acknowledgements pushes numbered messages into an inbox. After a gap in the
numbers, a heartbeat that reports missing messages, silence, or a reconnection, the consumer is discarded and
created again from the message after the last one seen. So the result is gapless and in order, whatever
happened to connections and brokers. A slow reader slows the broker down: its flow control requests are in the
queue among the messages, and are answered when the reader reaches them.

If sequences may be missing (deleted messages, a filter), a jump can also mean that retention dropped messages
before they were read. So before the message after a jump is delivered, the first sequence of the stream is
requested: if it is after the position of the reader, the reader gets an error, and may continue with the
remaining messages. One request covers all messages that had arrived when it was sent.

Without a position (``first=None``) the last message of every subject comes first, and again after each new
consumer, between two marks (`key_value.Mark`): a deletion in between shows only by its absence.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from muster.bus import api, message_format
from muster.bus.streams import jetstream, key_value
from muster.core import errors, lifecycle
from muster.supervision import tasks

BEAT_S = 1.5  # of the broker, without messages: a consumer ends unnoticed with the broker that has it
BEATS_MISSED = 2.5
RETRY_S = 0.25


class NatsOrderedConsumer(lifecycle.ClosingContext):
    """See `api.OrderedConsumer`, and `key_value.BucketMessages` where there is no ``first``."""

    def __init__(
        self,
        storage: jetstream.JetStreamApi,
        stream: str,
        *,
        first: int | None,
        filters: Sequence[str] = (),
        strict: bool = False,
        headers_only: bool = False,
    ) -> None:
        if first is not None and first < 1:
            raise errors.InvalidInput("sequences begin with 1")
        self._api = storage
        self._wire = storage.wire
        self._stream = stream
        self._filters = list(filters)
        self._strict = strict  # every sequence is required
        self._replays = first is None
        self._headers_only = headers_only
        self._next = first or 1  # the next sequence to be received
        self._position = self._next  # the next sequence to be read
        self._intact_to = 0  # up to here, missing sequences were not dropped by retention
        # A str is a reply subject for flow control, an int the first sequence that is left.
        self._queue: deque[api.StoredMessage | str | int | key_value.Mark] = deque()
        self._arrived = asyncio.Event()
        self._broken = asyncio.Event()
        self._beat_at = 0.0
        self._consumer_sequence = 0
        self._caught_up = False
        self._error: errors.MusterError | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    # The reading side.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> api.StoredMessage:
        while True:
            item = await self.step()
            if isinstance(item, api.StoredMessage):
                return item

    async def step(self) -> api.StoredMessage | key_value.Mark:
        if self._task is None and not self._ended:
            self._task = tasks.TaskSupervisor(f"consumer of {self._stream}").spawn("read", self._run())
        while True:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise StopAsyncIteration
                self._arrived.clear()
                await self._arrived.wait()
            item = self._queue[0]
            if isinstance(item, api.StoredMessage) and not self._replays:
                position = self._position
                if item.sequence > max(position, self._intact_to) and (kept := await self._kept()) > position:
                    self._position = item.sequence  # so that a new iteration returns this one next
                    raise self._dropped(position, kept)
                self._position = item.sequence + 1
            self._queue.popleft()
            if isinstance(item, str):
                with contextlib.suppress(errors.Unavailable):
                    self._wire.send(item, b"")
            elif isinstance(item, int):
                position, self._position = self._position, max(item, self._position)
                if item > position:
                    raise self._dropped(position, item)
            else:
                return item

    async def _kept(self) -> int:
        """The first retained sequence. Up to the last received message, nothing from there on was dropped."""
        while True:
            received = self._next - 1
            try:
                kept = await self._first_kept()
            except errors.Unavailable:
                self._wire.check_open()
                await asyncio.sleep(RETRY_S)
                continue
            self._intact_to = received
            return kept

    async def _first_kept(self) -> int:
        state = (await self._api.stream_info(self._stream))["state"]
        return int(state["first_seq"] if state["messages"] else state["last_seq"] + 1)

    async def close(self) -> None:
        self._ended = True
        self._arrived.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # The receiving side.

    async def _run(self) -> None:
        try:
            while self._error is None:
                self._wire.check_open()
                try:
                    await self._once()
                except errors.Unavailable:
                    # No connection or no leader, for however long: only a closed connection ends it.
                    await asyncio.sleep(RETRY_S)
        except errors.MusterError as error:
            self._error = error
            self._arrived.set()
        except Exception as error:  # else its reader would wait for ever
            self._error = errors.InvariantViolation(f"following {self._stream}: {error!r}")
            self._arrived.set()
            raise

    async def _once(self) -> None:
        """One consumer, from its creation until it is unreliable."""
        loop = asyncio.get_running_loop()
        name = f"follow-{secrets.token_hex(8)}"
        self._broken.clear()
        self._consumer_sequence = 0
        self._beat_at = loop.time()
        self._caught_up = not self._replays
        if self._replays:
            self._put(key_value.Mark.REPLAY)
        inbox = self._wire.fresh_inbox()
        number = await self._wire.listen(inbox, "", self._take, timeout_s=jetstream.TRY_S, stored=True)
        self._wire.on_state_change.add(self._broken.set)
        try:
            report = await self._api.call(
                f"CONSUMER.CREATE.{self._stream}.{name}",
                {"stream_name": self._stream, "config": self._config(name, inbox)},
            )
            if not self._replays:
                await self._check_kept()
            if report["num_pending"] == 0 and report["delivered"]["consumer_seq"] == 0:
                self._catch_up()
            while not self._broken.is_set():
                left_s = self._beat_at + BEAT_S * BEATS_MISSED - loop.time()
                try:
                    async with asyncio.timeout(max(0.0, left_s)):
                        await self._broken.wait()
                except TimeoutError:
                    if loop.time() - self._beat_at >= BEAT_S * BEATS_MISSED:
                        break  # silence
        except jetstream.JetStreamRefused as error:
            raise errors.InvalidInput(error.message) from error
        finally:
            self._wire.on_state_change.discard(self._broken.set)
            self._wire.forget(number)
            if not self._wire.is_closed and self._wire.is_connected:
                # Without waiting for the reply; a consumer that cannot be reached expires by itself.
                with contextlib.suppress(errors.MusterError):
                    self._wire.send(f"{jetstream.PREFIX}.CONSUMER.DELETE.{self._stream}.{name}", b"")

    def _config(self, name: str, inbox: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": name,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": round(BEAT_S * 1e9),
            "inactive_threshold": round(60e9),
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": self._headers_only,
        }
        if self._filters:
            config["filter_subjects"] = self._filters
        if self._replays:
            config["deliver_policy"] = "last_per_subject"
        else:
            config.update(deliver_policy="by_start_sequence", opt_start_seq=self._next)
        return config

    async def _check_kept(self) -> None:
        """There may be no message that would show a jump."""
        kept = await self._first_kept()
        if self._consumer_sequence == 0 and kept > self._next:
            if self._strict:
                raise self._dropped(self._next, kept)
            self._next = kept
            self._put(kept)

    def _dropped(self, position: int, kept: int) -> errors.Dropped:
        return errors.Dropped(
            f"{self._stream!r} does not retain {position} to {kept - 1} any more",
            first=position,
            last=kept - 1,
        )

    def _take(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        self._beat_at = asyncio.get_running_loop().time()
        if message_format.status_of(raw_headers) == 100:
            headers = message_format.decode_headers(raw_headers)
            stalled = reply.decode() or headers.get("Nats-Consumer-Stalled")
            if stalled:
                self._put(stalled)
            sent = int(headers.get("Nats-Last-Consumer", 0))
            if sent > self._consumer_sequence:
                self._broken.set()  # it sent more than we got
            elif not stalled and sent == self._consumer_sequence and not self._broken.is_set():
                self._catch_up()  # it has nothing more to send
            return
        if self._broken.is_set() or not reply:
            return
        metadata = jetstream.DeliveryMetadata(reply)
        if metadata.consumer_sequence != self._consumer_sequence + 1:
            self._broken.set()
            return
        if self._strict and metadata.sequence != self._next:
            self._error = self._dropped(self._next, metadata.sequence)
            self._arrived.set()
            self._broken.set()
            return
        self._consumer_sequence = metadata.consumer_sequence
        self._next = metadata.sequence + 1
        if subject:  # else malformed
            headers = jetstream.public_headers_of(raw_headers)
            self._put(
                api.StoredMessage(subject.decode(), data, headers, metadata.sequence, metadata.stored_at_ns)
            )
        if metadata.pending == 0:
            self._catch_up()

    def _catch_up(self) -> None:
        if not self._caught_up:
            self._caught_up = True
            self._put(key_value.Mark.CURRENT)

    def _put(self, item: api.StoredMessage | str | int | key_value.Mark) -> None:
        self._queue.append(item)
        self._arrived.set()
