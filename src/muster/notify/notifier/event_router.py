"""Admission and routing of events.

An event goes to the shard of its sender, where the sender's attributes are known.  The notifier there checks
the event and forwards it to each notifier that may hold a matching receiver.  Senders take turns, so a sender
that floods delays only its own events.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from muster.bus import api
from muster.bus.rpc import server
from muster.core import errors, messages, subjects
from muster.notify import models, protocol
from muster.notify.matcher import grant_scopes
from muster.notify.notifier import decision_log, fair_queue, grants
from muster.notify.notifier import state as common_
from muster.notify.notifier.shards import members
from muster.predicates import ast

PART = protocol.PART
ALL = "all"
BY = "Muster-Notifier"
ADDRESSES_MAX = 10_000
NAMES_BYTES = 400_000  # total size of receiver names in one delivery

Waiting = asyncio.Future[protocol.NotifyReply]
Keep = Callable[[protocol.AdmittedEvent, Waiting], Awaitable[None]]


class EventRouter:
    def __init__(
        self,
        common: common_.NotifierState,
        others: members.NotifierMembers,
        grant_view: grants.GrantView,
        past: decision_log.DecisionLog,
    ) -> None:
        self._common = common
        self._members = others
        self._grants = grant_view
        self._history = past
        self._queue: fair_queue.FairQueue[tuple[server.RpcCall, Waiting]] = fair_queue.FairQueue(
            common.settings.sender_pending
        )
        # Decoded when its turn comes, so a flood costs little.  A transient event that is sent again may be
        # delivered again; a durable one is stored once (`protocol.SendEvent.id`).
        self.send = server.RpcOperation(
            "event.*", self._sent, audited=False, decode=bytes, once=False, is_charged=False
        )
        self._addresses: dict[str, ast.Condition] = {}
        self._version = -1  # of the vocabulary against which the addresses were checked

    async def start(self, keep: Keep) -> None:
        """Start. ``keep`` stores durable events."""
        self._keep = keep
        for target in (self._common.name, ALL):
            await self._common.listen(subjects.log_subject(PART, "match", target), self._on_forwarded)

    # -- admission

    async def _sent(self, call: server.RpcCall, data: bytes) -> protocol.NotifyReply:
        waiting: Waiting = asyncio.get_running_loop().create_future()
        if not self._queue.put(call.identity, (call, waiting), len(data)):
            most = self._common.settings.sender_pending
            raise errors.Overloaded(f"{call.identity} has {most} events waiting already")
        return await waiting

    def close(self) -> None:
        while self._queue:
            common_.finish(self._queue.take()[1], common_.moving())

    async def admit_all(self) -> None:
        common = self._common
        turn = 0
        while True:
            call, waiting = await self._queue.get()
            is_new = False
            try:
                common.held_of(call.message.subject)
                send = messages.decode(call.message.data, protocol.SendEvent)
                is_new = send.address not in self._addresses
                if is_new:  # some 20 ms for a large one
                    common.server.measure(call.identity, functools.partial(self.address, send.address))
                event, address = self.admit(call.identity, send)
                if send.delivery == "durable":
                    await self._keep(event, waiting)
                else:
                    await self._decide(event, address)
                    common_.finish(waiting, protocol.NotifyReply())
            except errors.MusterError as error:
                common_.finish(waiting, error)
            except BaseException:
                common_.finish(waiting, common_.moving())
                raise
            else:
                common.count("admitted")
            turn += 1
            if is_new or turn % 16 == 0:
                await asyncio.sleep(0)

    def admit(
        self, process: str, send: protocol.SendEvent, *, state: models.State | None = None
    ) -> tuple[protocol.AdmittedEvent, ast.Condition]:
        """Check an event and add the current attributes of its sender.

        ``state``: of the sender, if another notifier holds it and the request is only a query.
        """
        subjects.token(send.sender)
        address = self.address(send.address)
        content = self._common.known.vocabulary.event(send.type, protocol.from_wire(send.content))
        attributes, within = self._grants.sender_attributes(process, send.sender, state)
        event = protocol.AdmittedEvent(
            id=send.id,
            type=send.type,
            sender=protocol.participant_id(process, send.sender),
            content=protocol.to_wire(content),
            attributes=protocol.to_wire(attributes),
            within=within,
            address=send.address,
            at_ms=send.at_ms or int(time.time() * 1000),
        )
        models.require_size(len(messages.encode(event)))
        return event, address

    def address(self, text: str) -> ast.Condition:
        if self._version != self._grants.version or len(self._addresses) >= ADDRESSES_MAX:
            self._addresses.clear()
            self._version = self._grants.version
        condition = self._addresses.get(text)
        if condition is None:
            condition = self._addresses[text] = self._common.known.vocabulary.address(text)
        return condition

    # -- transient events

    async def _decide(self, event: protocol.AdmittedEvent, address: ast.Condition) -> None:
        """Deliver here, and forward to the notifiers that may hold a receiver."""
        await self._deliver_here(event, address)
        attributes = event.attribute_values()
        for scope in event.within:  # at least one receiver accepts the grant
            attributes.update(
                (f"sender.{name}", True) for name, held in scope.attributes.items() if held is True
            )
        others = self._members.forward_candidates(attributes, address)
        bus = self._common.bus
        if others is None:
            self._common.count("unserved")  # receivers in a shard that no notifier holds miss the event
            subject = subjects.log_subject(PART, "match", ALL)
            await bus.publish(subject, messages.encode(event), headers={BY: self._common.name})
            return
        for other in others:
            await bus.publish(subjects.log_subject(PART, "match", other), messages.encode(event))

    async def _on_forwarded(self, message: api.Message) -> None:
        if message.headers.get(BY) == self._common.name:
            return
        event = messages.decode(message.data, protocol.AdmittedEvent)
        await self._deliver_here(event, self.address(event.address))

    async def _deliver_here(self, event: protocol.AdmittedEvent, address: ast.Condition) -> None:
        self._grants.expire()
        engine, deciding = self._common.engine, self._common.deciding()
        if deciding.sum() < len(self._common.held):
            self._common.count("in-doubt")  # no delivery to receivers of a shard whose lease is in doubt
        results = engine.of_shards(grant_scopes.find(engine, event, address), deciding)
        receivers = engine.names(results)
        self._history.decided(event, 0, receivers)
        await self.deliver(event, receivers)

    async def deliver(self, event: protocol.AdmittedEvent, receivers: list[str]) -> None:
        """Deliver once, to the receivers that are connected."""
        for process, names in by_process(receivers):
            delivered = protocol.EventDelivery(to=tuple(names), event=event, shard=-1, epoch=0)
            await self._common.bus.publish(
                subjects.to_identity(PART, process, "event"), messages.encode(delivered)
            )
        self._common.count("delivered", len(receivers))


def by_process(receivers: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Group receivers by process, as many names as fit into a message."""
    names_of: dict[str, list[str]] = {}
    for receiver in receivers:
        process, _, name = receiver.partition("/")
        names_of.setdefault(process, []).append(name)
    for process, names in names_of.items():
        chunk: list[str] = []
        size = 0
        for name in names:
            chunk.append(name)
            size += 3 + 4 * len(name)
            if size >= NAMES_BYTES:
                yield process, chunk
                chunk, size = [], 0
        if chunk:
            yield process, chunk
