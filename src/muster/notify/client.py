"""The client: the receivers of a process. For queries about all receivers see `muster.notify.queries`.

    async with client.NotifyClient(bus) as receivers:
        await receivers.define(model)
        web = await receivers.advertise("web-1", "WebServer", {"load": 0.39}, policy="alert AND level >= 4")
        await web.update(load=0.8)
        await web.send("alert", {"level": 5}, to="application = 'IIS'")
        async for event in web:
            ...

A durable event is acknowledged when the loop requests the next one, so an event whose handling was
interrupted is delivered again.  Duplicates are dropped here (`muster.notify.receipts`): the loop gets each
event once during the lifetime of the process.

An event that violates its model is rejected here, before it is sent, and again by the notifier.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from muster.bus import api
from muster.bus.rpc import client, error_replies
from muster.core import errors, messages, subjects
from muster.notify import authorities, models, protocol, queries, receipts
from muster.predicates import types

PART = protocol.PART
QUEUE_MAX = 10_000
PATIENCE_S = 30.0  # longer than the move of a shard
TRY_S = 5.0  # wait for a reply before the request is repeated
RETRY_S = 0.05
CHANGING_MAX = 4  # concurrent requests for large changes, so that each gets its reply in time
CHANGES_PER_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """An event as its receiver gets it. ``sender``: the sender's attributes at the time of admission."""

    id: str
    type: str
    content: Mapping[str, types.Value]
    sender: Mapping[str, types.Value]
    at_ms: int
    sequence: int = 0  # of a durable event

    def __getitem__(self, name: str) -> types.Value:
        return self.content[name]


OnEvent = Callable[[Sequence[str], ReceivedEvent], None]


class NotifyClient:
    """The receivers of one process.

    ``on_event`` is called with the names of receivers and an event, instead of iteration over each receiver.
    When it returns, the event is acknowledged.
    """

    def __init__(self, bus: api.Bus, *, on_event: OnEvent | None = None, queue_max: int = QUEUE_MAX) -> None:
        self._bus = bus
        self._on_event = on_event
        self._queue_max = queue_max
        self._receivers: dict[str, ReceiverHandle] = {}
        self._vocabulary: models.Vocabulary | None = None
        self._receipts = receipts.EventReceipts(bus)
        self._subscription: api.Subscription | None = None
        self.counts: collections.Counter[str] = collections.Counter()

    async def __aenter__(self) -> Self:
        self._subscription = await self._bus.subscribe(
            subjects.to_identity(PART, self._bus.identity, "event"), handler=self._on_delivery
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        await self._receipts.close()
        for receiver in self._receivers.values():
            receiver._close()

    # -- requests

    async def define(self, model: models.Model) -> None:
        """Define a model of receivers or of events in the domain."""
        await self._request(
            subjects.from_identity(PART, self._bus.identity, "define"), authorities.define_of(model)
        )
        self._vocabulary = None  # to be queried again

    async def present(self, chain: Sequence[str]) -> None:
        """Submit a grant of an authority."""
        await self._request(
            subjects.from_identity(PART, self._bus.identity, "trust"),
            protocol.PresentGrant(chain=tuple(chain)),
        )

    async def revoke(self, sealed: str) -> None:
        """Submit an authority's list of revocations."""
        await self._request(
            subjects.from_identity(PART, self._bus.identity, "trust"),
            protocol.PresentGrant(revocations=sealed),
        )

    async def advertise(
        self,
        name: str,
        model: str,
        state: models.State | None = None,
        *,
        policy: str = "",
        durable: bool = False,
    ) -> ReceiverHandle:
        """Join as a receiver; if the receiver exists, replace it."""
        join = protocol.JoinReceiver(
            receiver=subjects.token(name),
            model=model,
            state=protocol.to_wire(state or {}),
            policy=policy,
            delivery="durable" if durable else "transient",
        )
        receiver = self._receivers.get(name)
        if receiver is None:
            receiver = self._receivers[name] = ReceiverHandle(self, name, self._queue_max)
        await self.change([join])
        return receiver

    def sender(self, name: str) -> ReceiverHandle:
        """Return a participant that only sends: it has no state, only attributes that authorities granted."""
        return self._receivers.setdefault(subjects.token(name), ReceiverHandle(self, name, self._queue_max))

    async def change(self, changes: Sequence[protocol.Change]) -> None:
        """Send many changes; when this returns, they are in effect. Raises the first rejection, if any."""
        by_shard: dict[int, list[protocol.Change]] = {}
        for change in changes:
            if isinstance(change, protocol.UpdateReceivers | protocol.JoinReceivers):
                for name, cells in change.values.items():
                    models.require_finite(name, cells)
                for shard, part in self._split(change).items():
                    by_shard.setdefault(shard, []).append(part)
                continue
            if isinstance(change, protocol.JoinReceiver):
                for name, value in change.state.items():
                    models.require_finite(name, (value,))
            by_shard.setdefault(self._shard(change.receiver), []).append(change)
        turns = asyncio.Semaphore(CHANGING_MAX)
        await asyncio.gather(*(self._change(turns, shard, in_shard) for shard, in_shard in by_shard.items()))

    async def _change(self, turns: asyncio.Semaphore, shard: int, changes: Sequence[protocol.Change]) -> None:
        """Send all changes of one shard in order: the next message after the reply to the previous one."""
        subject = subjects.from_identity(PART, self._bus.identity, "change", str(shard))
        refusal: errors.MusterError | None = None
        for start in range(0, len(changes), CHANGES_PER_MESSAGE):
            batch = tuple(changes[start : start + CHANGES_PER_MESSAGE])
            async with turns:
                try:
                    await self._request(subject, protocol.ReceiverChanges(changes=batch))
                except errors.Unavailable:
                    raise
                except errors.MusterError as error:  # of one change; the others of its message are in effect
                    refusal = refusal or error
        if refusal is not None:
            raise refusal

    async def update(self, receivers: Sequence[str], **values: Sequence[types.Value]) -> None:
        """Set new values for many receivers: ``update(["a", "b"], load=[0.1, 0.7])``."""
        columns = {name: [protocol.cell(value) for value in cells] for name, cells in values.items()}
        await self.change([protocol.UpdateReceivers(receivers=tuple(receivers), values=columns)])

    def _shard(self, receiver: str) -> int:
        return protocol.shard_of(protocol.participant_id(self._bus.identity, receiver))

    def _split(
        self, change: protocol.UpdateReceivers | protocol.JoinReceivers
    ) -> Mapping[int, protocol.UpdateReceivers | protocol.JoinReceivers]:
        places: dict[int, list[int]] = {}
        for place, receiver in enumerate(change.receivers):
            places.setdefault(self._shard(receiver), []).append(place)
        if len(places) == 1:
            return {next(iter(places)): change}
        return {shard: _subset(change, chosen) for shard, chosen in places.items()}

    async def send(
        self,
        name: str,
        kind: str,
        content: models.State | None = None,
        *,
        to: str = "TRUE",
        durable: bool = False,
        id: str = "",
        defined: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> str:
        """Send an event. Return its id when it is admitted; a durable event is stored then. ``defined``: only
        if a model defines its type.
        """
        await self._check(kind, content or {}, defined=defined)
        event = protocol.SendEvent(
            id=id or secrets.token_hex(12),
            sender=subjects.token(name),
            type=kind,
            content=protocol.to_wire(content or {}),
            address=to,
            delivery="durable" if durable else "transient",
            at_ms=int(time.time() * 1000),
        )
        subject = subjects.from_identity(PART, self._bus.identity, "event", str(self._shard(name)))
        await self._request(subject, event, timeout_s=timeout_s)
        return event.id

    async def _check(self, kind: str, content: models.State, *, defined: bool) -> None:
        """Reject an event that violates its model; the model may have been extended since it was queried."""
        for attempt in (1, 2):
            fetched = self._vocabulary is None
            if self._vocabulary is None:
                self._vocabulary = await vocabulary_of(self._bus)
            try:
                if defined:
                    self._vocabulary.require_type(kind)
                self._vocabulary.event(kind, content)
                return
            except errors.InvalidInput:
                self._vocabulary = None
                if fetched or attempt == 2:
                    raise

    async def _request(
        self, subject: str, message: messages.WireMessage, *, timeout_s: float = PATIENCE_S
    ) -> protocol.NotifyReply:
        """Repeat the request until there is a reply: while a shard moves, no notifier holds it."""
        data = messages.encode(message)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wait_s = RETRY_S
        while True:
            left_s = max(0.1, deadline - loop.time())
            reply = await client.exchange(self._bus, subject, data, timeout_s=left_s, try_s=TRY_S)
            answer = messages.decode(reply.data, protocol.NotifyReply)
            try:
                for _, fault in answer.refused:
                    raise error_replies.from_error_reply(fault)
                return answer
            except errors.Throttled as error:
                wait_s = error.retry_after_s or wait_s
                if loop.time() + wait_s >= deadline:
                    raise
            except errors.Overloaded:
                raise
            except errors.Unavailable:
                if loop.time() + wait_s >= deadline:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(1.0, wait_s * 1.5)

    # -- receiving

    def _on_delivery(self, message: api.Message) -> None:
        try:
            delivered = messages.decode(message.data, protocol.EventDelivery)
        except errors.MusterError:
            self.counts["malformed"] += 1
            return
        if delivered.sequence and self._receipts.is_stale(delivered):
            self.counts["stale-epoch"] += 1
            return
        came = delivered.event
        event = ReceivedEvent(
            came.id,
            came.type,
            protocol.from_wire(came.content),
            {**protocol.from_wire(came.attributes), "_id": came.sender},
            came.at_ms,
            delivered.sequence,
        )
        if self._on_event is not None:
            self._call(delivered, event)
            return
        for name in delivered.to:
            receiver = self._receivers.get(name)
            if receiver is None:
                self.counts["unknown-receiver"] += 1
            elif not event.sequence:
                receiver._enqueue(event, delivered.shard)
            elif not self._is_repeat(name, delivered):
                if receiver._enqueue(event, delivered.shard):
                    self._receipts.add(name, delivered)
            elif not receiver._has(event.sequence):
                self._receipts.acknowledge(delivered.shard, delivered.sequence, name)

    def _call(self, delivered: protocol.EventDelivery, event: ReceivedEvent) -> None:
        assert self._on_event is not None
        names: Sequence[str] = delivered.to
        if delivered.sequence:
            names = [name for name in names if not self._is_repeat(name, delivered)]
        if names:
            self._on_event(names, event)
            self.counts["delivered"] += len(names)
        if delivered.sequence:
            for name in names:
                self._receipts.add(name, delivered)
            for name in delivered.to:
                self._receipts.acknowledge(delivered.shard, delivered.sequence, name)

    def _is_repeat(self, name: str, delivered: protocol.EventDelivery) -> bool:
        repeated = self._receipts.has(name, delivered)
        self.counts["repeats"] += repeated
        return repeated


async def vocabulary_of(bus: api.Bus) -> models.Vocabulary:
    """The models of the domain; empty while no notifier answers, which checks every event itself."""
    vocabulary = models.Vocabulary()
    with contextlib.suppress(errors.Unavailable, errors.LimitExceeded):
        for row in await queries.list_models(bus):
            vocabulary.add(authorities.model_of(row))
    return vocabulary


class ReceiverHandle:
    """A receiver: iterate over it to receive events."""

    def __init__(self, receivers: NotifyClient, name: str, queue_max: int) -> None:
        self.name = name
        self._client = receivers
        self._queue: collections.deque[tuple[ReceivedEvent, int]] = collections.deque()
        self._queue_max = queue_max
        self._waiting: set[int] = set()  # durable events that have not been handled
        self._arrived = asyncio.Event()
        self._closed = False
        self._handled: tuple[ReceivedEvent, int] | None = None
        self.dropped = 0  # transient events that arrived while the queue was full

    @property
    def id(self) -> str:
        return protocol.participant_id(self._client._bus.identity, self.name)

    async def update(self, **values: types.Value) -> None:
        await self._client.update([self.name], **{name: [value] for name, value in values.items()})

    async def policy(self, text: str) -> None:
        await self._client.change([protocol.SetReceiverPolicy(receiver=self.name, policy=text)])

    async def leave(self) -> None:
        await self._client.change([protocol.LeaveReceiver(receiver=self.name)])
        self._client._receivers.pop(self.name, None)
        self._close()

    async def send(
        self,
        kind: str,
        content: models.State | None = None,
        *,
        to: str = "TRUE",
        durable: bool = False,
        id: str = "",
        timeout_s: float = PATIENCE_S,
    ) -> str:
        return await self._client.send(
            self.name, kind, content, to=to, durable=durable, id=id, timeout_s=timeout_s
        )

    async def next(self, *, timeout_s: float | None = None) -> ReceivedEvent:
        """Return the next event, and acknowledge the previous one. `errors.TimedOut` if none arrives."""
        self._finish()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._queue:
                    if self._closed:
                        raise errors.NotConnected(f"{self.name} has left")
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise errors.TimedOut(f"no event for {self.name} in {timeout_s:g} s") from None
        self._handled = self._queue.popleft()
        return self._handled[0]

    async def __aiter__(self) -> AsyncIterator[ReceivedEvent]:
        try:
            while True:
                yield await self.next()
        except errors.NotConnected:
            return

    def acknowledge(self) -> None:
        """Acknowledge the last event; an ``async for`` loop does this itself."""
        self._finish()

    def _finish(self) -> None:
        if self._handled is not None:
            event, shard = self._handled
            self._handled = None
            if event.sequence:
                self._waiting.discard(event.sequence)
                self._client._receipts.acknowledge(shard, event.sequence, self.name)

    def _has(self, sequence: int) -> bool:
        return sequence in self._waiting

    def _enqueue(self, event: ReceivedEvent, shard: int) -> bool:
        """Add an event. False if the queue is full: a durable event comes again, a transient one is lost."""
        if len(self._queue) >= self._queue_max:
            if event.sequence:
                self._client.counts["put-off"] += 1
                return False
            self.dropped += 1
            self._client.counts["dropped"] += 1
            return False
        if event.sequence:
            self._waiting.add(event.sequence)
        self._queue.append((event, shard))
        self._arrived.set()
        return True

    def _close(self) -> None:
        self._closed = True
        self._arrived.set()


def _subset(
    change: protocol.UpdateReceivers | protocol.JoinReceivers, places: Sequence[int]
) -> protocol.UpdateReceivers | protocol.JoinReceivers:
    """Return the part of a change for the receivers at these positions."""
    receivers = tuple(change.receivers[place] for place in places)
    values = {name: [cells[place] for place in places] for name, cells in change.values.items()}
    if isinstance(change, protocol.UpdateReceivers):
        return protocol.UpdateReceivers(receivers=receivers, values=values)
    durable = set(change.durable)
    which = [change.which[place] for place in places] if change.which else []
    if not all(0 <= number < len(change.policies) for number in which):
        raise errors.InvalidInput(
            f"there are {len(change.policies)} policies, but the change refers to others"
        )
    # Only their policies: there may be as many policies as receivers.
    own = {policy: number for number, policy in enumerate(dict.fromkeys(which))}
    return protocol.JoinReceivers(
        receivers=receivers,
        model=change.model,
        values=values,
        policies=tuple(change.policies[policy] for policy in own) if which else change.policies,
        which=[own[policy] for policy in which],
        durable=[new for new, place in enumerate(places) if place in durable],
    )
