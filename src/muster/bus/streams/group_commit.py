"""Group commit: sends the durable publishes of a connection for one stream to the broker, in rounds.

The decisions are in `muster.bus.streams.commit_groups`. Guarantees: every publish gets its own outcome, in
the order of the calls. A publish is sent again only if that cannot store it twice: if the broker reported
that it stored nothing, if there was no subscriber (a stream without a leader), or with a ``message_id``.
Otherwise a publish without an acknowledgement ends, at its own deadline, in `errors.TimedOut`, and others do
not wait for it.

A rejection counts only if no earlier attempt can have been stored: otherwise the ids are looked up first
(`PublishCommitter._resolved`). So a batch, or a publish with an expectation, that was stored by an attempt
whose acknowledgement was lost is not reported as a conflict or a duplicate.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from muster.bus import api, message_format
from muster.bus.client import connection, requests
from muster.bus.streams import commit_groups, jetstream
from muster.core import errors
from muster.supervision import tasks

PATIENCE_S = 5.0  # how long a round waits for its acknowledgements before the next one starts
GRACE_S = 0.5  # the same after a reconnection: acknowledgements on the old connection are lost
MAX_PENDING_BYTES = 64 << 20

Part = tuple[str, bytes, bytes]  # subject, data and header lines of a message
Parts = Sequence[Part]

_PREFIX = b"NATS/1.0\r\n"
_CONDITIONS = (b"Nats-Expected-", b"Nats-Rollup")  # headers with which a message may be refused


class PendingPublish:
    """One message, or the messages of one atomic batch, in progress."""

    __slots__ = (
        "alarm",
        "alone",
        "future",
        "guarded",
        "in_doubt",
        "message_id",
        "message_ids",
        "parts",
        "repeatable",
        "size",
        "subject",
    )

    def __init__(self, messages: Sequence[api.OutgoingMessage], future: asyncio.Future[int]) -> None:
        first = messages[0]
        self.parts = [(message.subject, message.data, header_lines(message)) for message in messages]
        self.subject = first.subject
        self.message_id = first.message_id
        self.message_ids = [message.message_id for message in messages if message.message_id is not None]
        self.guarded = first.expected_last_subject_sequence is not None
        self.alone = len(messages) > 1 or first.expected_last_sequence is not None
        self.repeatable = len(self.message_ids) == len(messages)
        self.in_doubt = False  # whether an attempt may have been stored without an acknowledgement
        self.size = sum(len(data) + len(lines) + 100 for _, data, lines in self.parts)
        self.future = future
        self.alarm: asyncio.TimerHandle | None = None

    def settle(self, sequence: int) -> None:
        if not self.future.done():
            self.future.set_result(sequence)
            self.calm()

    def fail(self, error: errors.MusterError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.calm()

    def calm(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()

    def may_repeat(self, outcome: errors.MusterError) -> bool:
        """Whether sending it again can neither store it twice nor exceed its deadline."""
        return not self.future.done() and (self.repeatable or not isinstance(outcome, errors.TimedOut))


def header_lines(message: api.OutgoingMessage) -> bytes:
    """The header lines of the message: its own, and the conditions and options for the broker."""
    headers = message_format.with_trace_headers(message.headers)
    lines = message_format.header_lines(headers) if headers else b""
    if message.message_id is not None:
        lines += message_format.header_lines({"Nats-Msg-Id": message.message_id})
    if message.expected_last_sequence is not None:
        lines += b"Nats-Expected-Last-Sequence: %d\r\n" % message.expected_last_sequence
    if message.expected_last_subject_sequence is not None:
        lines += b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % message.expected_last_subject_sequence
    if message.ttl_s is not None:
        lines += b"Nats-TTL: %ds\r\n" % message_format.whole_seconds(message.ttl_s)
    return lines


# how to send it, its messages, and its owner
Post = tuple[Callable[[str], None], Parts, Sequence[PendingPublish]]


class _Flight:
    """Publishes in progress, and their known outcomes."""

    __slots__ = ("done", "outcomes", "waiting")

    def __init__(self, count: int) -> None:
        self.outcomes: list[int | errors.MusterError] = [_UNKNOWN] * count
        self.waiting = set(range(count))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def land(self, place: int, outcome: int | errors.MusterError) -> bool:
        """False if no caller waits for it any more."""
        if place not in self.waiting or self.done.done():
            return False
        self.outcomes[place] = outcome
        self.waiting.discard(place)
        if not self.waiting:
            self.end()
        return True

    def end(self) -> None:
        """Wait no longer."""
        if not self.done.done():
            self.done.set_result(None)


class PublishCommitter:
    """The publishes of one connection to one stream."""

    def __init__(self, stream: str, over: connection.NatsConnection, on_full: Callable[[], None]) -> None:
        self._stream = stream
        self._wire = over
        self._on_full = on_full
        self._queue: deque[PendingPublish] = deque()
        self._queued_bytes = 0
        self._tasks = tasks.TaskSupervisor(f"commits to {stream}")
        self._task: asyncio.Task[None] | None = None
        self._costs = commit_groups.CommitCosts()
        self._batch_prefix = secrets.token_hex(8)
        self._batches = itertools.count(1)

    def submit(self, messages: Sequence[api.OutgoingMessage], timeout_s: float) -> asyncio.Future[int]:
        """Store one message, or several as one atomic batch. Returns the sequence of the last."""
        loop = asyncio.get_running_loop()
        item = PendingPublish(messages, loop.create_future())
        if self._queued_bytes + item.size > MAX_PENDING_BYTES and self._queue:
            raise errors.Overloaded(
                f"{self._queued_bytes} bytes wait to be stored in {self._stream!r} already", retry_after_s=1.0
            )
        item.alarm = loop.call_later(timeout_s, self._expired, item, timeout_s)
        express = None
        if self._task is None and self._wire.is_connected:
            express = item, self._launch([(self._sender(item.parts), item.parts, (item,))])
        else:
            self._queue.append(item)
            self._queued_bytes += item.size
        if self._task is None:
            self._task = self._tasks.spawn("rounds", self._run(express))
        return item.future

    def _expired(self, item: PendingPublish, timeout_s: float) -> None:
        item.fail(
            errors.TimedOut(
                f"{self._stream!r} did not acknowledge within {timeout_s:g} s; it may be stored all the same",
                hint="with a message_id it can be published again safely",
            )
        )

    async def drained(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    # Rounds.

    async def _run(self, express: tuple[PendingPublish, _Flight] | None) -> None:
        """``express``: a publish that had no others before it, and has been sent already."""
        try:
            if express is not None:
                item, flight = express
                outcome = await self._resolved(item, (await self._landed(flight))[0])
                await self._again([] if self._settle(item, outcome) else [item])
            while self._queue:
                await self._wire.connected()  # an abandoned publish must not be stored after a reconnection
                await self._again(await self._round(*self._take_round()))
        except errors.MusterError as error:
            while self._queue:
                self._queue.popleft().fail(error)
        finally:
            self._queued_bytes = sum(item.size for item in self._queue)
            self._task = None

    async def _again(self, items: list[PendingPublish]) -> None:
        """Put them back at the front, and wait for a short time."""
        if items:
            self._queue.extendleft(reversed(items))
            self._queued_bytes += sum(item.size for item in items)
            await asyncio.sleep(0.05 + random.random() * 0.1)

    def _take_round(self) -> tuple[list[PendingPublish], bool]:
        """The items of the next round, and whether they go as one batch."""
        head: list[PendingPublish] = []
        while self._queue and len(head) < commit_groups.MAX_BATCH:
            item = self._queue.popleft()
            self._queued_bytes -= item.size
            if not item.future.done():  # neither timed out nor cancelled while it waited
                head.append(item)
        if not head:
            return [], False
        count, together = commit_groups.next_group(head, self._costs)
        self._queue.extendleft(reversed(head[count:]))
        self._queued_bytes += sum(item.size for item in head[count:])
        return head[:count], together

    async def _round(self, items: list[PendingPublish], together: bool) -> list[PendingPublish]:
        """Send them, and give each its fate. Returns those to be sent again."""
        began = asyncio.get_running_loop().time()
        if together and len(items) >= commit_groups.MIN_BATCH:
            outcomes = await self._post_together(items)
        else:
            together = False
            outcomes = await self._post([(self._sender(item.parts), item.parts, (item,)) for item in items])
        if together and isinstance(outcomes[0], errors.MusterError) and not _retry(outcomes[0]):
            # The broker rejected the batch because of some messages: find them by halving.
            middle = len(items) // 2
            again = await self._round(items[:middle], True)
            return again + await self._round(items[middle:], True)
        again = [
            item
            for item, outcome in zip(items, outcomes, strict=True)
            if not self._settle(item, await self._resolved(item, outcome))
        ]
        if not again:
            took_s = asyncio.get_running_loop().time() - began
            self._costs.observe(len(items), together, took_s)
        return again

    async def _resolved(
        self, item: PendingPublish, outcome: int | errors.MusterError
    ) -> int | errors.MusterError:
        """The outcome of all attempts: an earlier one may have stored what this one was refused."""
        if isinstance(outcome, errors.TimedOut):
            item.in_doubt = True
        if (
            not isinstance(outcome, errors.MusterError)
            or _retry(outcome)
            or not item.repeatable
            or item.future.done()
            or not (item.in_doubt or isinstance(outcome, errors.AlreadyExists))
        ):
            return outcome
        try:
            sequences = [await self._look_up(part) for part in item.parts]
        except errors.Conflict:
            return outcome
        except errors.MusterError as error:
            return _UNKNOWN if item.in_doubt or _retry(error) else outcome
        if sequences != list(range(sequences[0], sequences[0] + len(sequences))):
            return outcome  # stored by others, one by one
        return api.Duplicate(sequences[-1])

    async def _look_up(self, part: Part) -> int:
        """The sequence under which this message is stored; `errors.Conflict` if it is not.

        It has a header with an invalid value, which the broker checks after the id and before it stores or
        replicates anything. An expectation of another last id is no alternative: replicas check it when they
        store, and nats-server 2.15 stops a replicated stream for ever if it does not hold. The message is
        complete, because plain subscribers of its subject receive it once more, as with every repetition.
        """
        subject, data, lines = part
        # It may have been met only before the message was stored.
        lines = b"".join(line for line in lines.splitlines(True) if not line.startswith(_CONDITIONS))
        invalid = message_format.header_lines({"Nats-Rollup": "none"})
        answer = await self._wire.requests.exchange(
            subject, data, b"%b%b%b\r\n" % (_PREFIX, lines, invalid), timeout_s=jetstream.TRY_S, stored=True
        )
        outcome = self._outcome(answer)
        if isinstance(outcome, errors.LimitExceeded):  # the invalid value
            raise errors.Conflict("the message is not stored")
        if isinstance(outcome, errors.MusterError):
            raise outcome
        return outcome

    def _settle(self, item: PendingPublish, outcome: int | errors.MusterError) -> bool:
        """Set its outcome; False if it is to be sent again."""
        if isinstance(outcome, int):
            item.settle(outcome)
        elif not _retry(outcome) or self._wire.is_closed:
            if isinstance(outcome, jetstream.StreamFull) and not item.future.done():
                self._on_full()
            item.fail(outcome)
        else:
            return not item.may_repeat(outcome)
        return True

    async def _post_together(self, items: list[PendingPublish]) -> list[int | errors.MusterError]:
        parts = [part for item in items for part in item.parts]
        (outcome,) = await self._post([(self._sender(parts), parts, items)])
        if isinstance(outcome, errors.MusterError):
            return [outcome] * len(items)
        return list(range(outcome - len(items) + 1, outcome + 1))

    def _sender(self, parts: Parts) -> Callable[[str], None]:
        if len(parts) > 1:
            return lambda reply: self._send_batch(parts, reply)
        subject, data, lines = parts[0]
        raw_headers = b"%b%b\r\n" % (_PREFIX, lines) if lines else None

        def send(reply: str) -> None:
            self._wire.send(subject, data, reply, raw_headers)

        return send

    def _send_batch(self, parts: Parts, reply: str) -> None:
        batch = f"{self._batch_prefix}-{next(self._batches)}".encode()
        last = len(parts)
        messages = []
        for place, (subject, data, lines) in enumerate(parts, 1):
            commit = b"Nats-Batch-Commit: 1\r\n" if place == last else b""
            raw_headers = b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b%b\r\n" % (
                _PREFIX, batch, place, commit, lines,
            )  # fmt: skip
            messages.append((subject, data, raw_headers))
        self._wire.send_all(messages, reply)

    async def _post(self, posts: Sequence[Post]) -> list[int | errors.MusterError]:
        """Send all at once and wait for the outcome of each, at most `PATIENCE_S`."""
        return await self._landed(self._launch(posts))

    def _launch(self, posts: Sequence[Post]) -> _Flight:
        """Send all. Each acknowledged publish is completed at once.

        For an item that must not be sent again, an acknowledgement is accepted until its deadline; for an
        item that its publisher has abandoned, until the end of the round.
        """
        flight = _Flight(len(posts))

        def settled(place: int, outcome: int | errors.MusterError) -> None:
            items = posts[place][2]
            if self._queue:  # the next round starts before the callers of this one continue
                waited_for = flight.land(place, outcome)
                _settle_stored(items, outcome)
            else:
                _settle_stored(items, outcome)
                waited_for = flight.land(place, outcome)
            if not waited_for and len(items) == 1:
                self._settle(items[0], outcome)

        def answered(place: int, answer: requests.InboxReply) -> None:
            settled(place, self._outcome(answer))

        def failed(place: int, error: errors.MusterError) -> None:
            settled(place, error if isinstance(error, errors.Refused) else _UNKNOWN)

        for place, (send, parts, items) in enumerate(posts):
            reply, end = self._wire.requests.expect(
                [part[0] for part in parts],
                functools.partial(answered, place),
                functools.partial(failed, place),
                stored=True,
            )
            landed = functools.partial(flight.done.add_done_callback, functools.partial(_then, end))
            if len(items) == 1 and not items[0].repeatable:
                items[0].future.add_done_callback(functools.partial(_then, landed))
            else:
                landed()
            try:
                send(reply)
            except errors.MusterError as error:
                settled(place, error)
        return flight

    async def _landed(self, flight: _Flight) -> list[int | errors.MusterError]:
        loop = asyncio.get_running_loop()
        if flight.waiting:
            alarms = [loop.call_later(PATIENCE_S, flight.end)]

            def another_connection() -> None:
                alarms.append(loop.call_later(GRACE_S, flight.end))

            self._wire.on_state_change.add(another_connection)
            try:
                await flight.done
            finally:
                self._wire.on_state_change.discard(another_connection)
                for alarm in alarms:
                    alarm.cancel()
        return flight.outcomes

    def _outcome(self, answer: requests.InboxReply) -> int | errors.MusterError:
        """The sequence, or the error."""
        if requests.is_no_responders(answer):
            return errors.Unavailable(f"the stream {self._stream!r} has no leader now")
        report: dict[str, Any] = json.loads(answer.data)
        if "error" in report:
            return jetstream.error_of(report["error"], f"storing in {self._stream}")
        return api.Duplicate(report["seq"]) if report.get("duplicate") else int(report["seq"])


def _retry(outcome: errors.MusterError) -> bool:
    """Whether a retry could succeed; `errors.TimedOut` means that the outcome of this attempt is unknown."""
    return isinstance(outcome, errors.Unavailable)


def _settle_stored(items: Sequence[PendingPublish], outcome: int | errors.MusterError) -> None:
    if isinstance(outcome, api.Duplicate):
        items[-1].settle(outcome)  # the broker accepts no batch with a duplicate
    elif isinstance(outcome, int):
        for sequence, item in enumerate(items, outcome - len(items) + 1):
            item.settle(sequence)


def _then(end: Callable[[], object], _: object) -> None:
    end()


_UNKNOWN = errors.TimedOut("no acknowledgement arrived; it may have been stored")
