"""Where clients receive: a queue or subscription, a topic's listener, a browser.

Each is told when its client grants credit, drains or goes, and hands messages to the bridge to transmit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import proton

from muster.bus import api
from muster.core import errors
from muster.message import destinations, listening, messages, protocol, selectors, slowing
from muster.message.amqp import codec, engine, frames

if TYPE_CHECKING:
    from muster.message.amqp import bridge


class Outlet:
    """Nothing: what a link without a message source has."""

    def __init__(self, owner: bridge.Bridge, over: engine.Engine, wrapper: Any) -> None:
        self.bridge = owner
        self.engine = over
        self.wrapper = wrapper
        self.link = over.link_of(wrapper)
        self.closed = False
        self.presettled = wrapper.remote_snd_settle_mode == proton.Link.SND_SETTLED

    async def open(self) -> None:
        pass

    def begin(self) -> None:
        """The link is open: from now on we hear of its credit."""
        self.link.flowed = self.flowed

    def flowed(self) -> None:
        """The client's credit has changed."""
        self.bridge.spawn(self.flow())

    async def flow(self) -> None:
        self._drained()

    def _is_closed(self) -> bool:
        return self.closed

    def _drained(self) -> None:
        if not self.closed:
            self.engine.drained(self.link)

    def returned(self, number: int, data: bytes, code: int, state: bytes | None) -> None:
        """The client has not accepted a message of no backlog."""

    def refused(self) -> None:
        """A new dispatcher has given to somebody else what this was the end of."""
        self.bridge.end_outlet(self, "amqp:resource-locked", "somebody else has it now")

    async def close(self, *, destroy: bool) -> None:
        self.closed = True


class Fed(Outlet):
    """Fed by the dispatcher as far as the client's credit goes."""

    def __init__(
        self, owner: bridge.Bridge, over: engine.Engine, wrapper: Any, attach: protocol.Attach
    ) -> None:
        super().__init__(owner, over, wrapper)
        self.number = attach.consumer
        self._attach = attach
        self._granted = 0

    def request(self) -> protocol.Attach:
        self._granted = 0 if self.closed else self.link.credit
        return msgspec.structs.replace(self._attach, credit=self._granted)

    async def open(self) -> None:
        await self.bridge.jms.attach(self)

    def deliver(self, delivery: protocol.Delivery) -> None:
        self._granted -= 1
        if self.closed or (delivery.count and self.bridge.has(delivery.key, delivery.sequence)):
            self.flowed()
            return  # a new dispatcher repeats what the client has
        try:
            data = codec.encode(messages.decode_meta(delivery.meta), delivery.data, delivery.count)
        except errors.MusterError as error:
            release = protocol.Release(
                self.bridge.jms.name, {delivery.key: [delivery.sequence]}, reason=error.message
            )
            self.bridge.spawn(self.bridge.jms.tell(release))
            return
        self.bridge.transmit(self, data, delivery.key, delivery.sequence)

    async def flow(self) -> None:
        jms = self.bridge.jms
        if self.closed:
            return
        more = self.link.credit - self._granted
        if more > 0:
            self._granted += more
            await jms.tell(protocol.Credit(jms.name, self.number, more))
        if self.link.drain and not self._is_closed():
            await jms.ask(protocol.Stop(jms.name, [self.number]))
            self._granted = 0
            self._drained()

    async def close(self, *, destroy: bool) -> None:
        self.closed = True
        await self.bridge.jms.detach(self.number, {})
        if destroy and self._attach.durable and not self._attach.shared:
            jms = self.bridge.jms
            await jms.ask(protocol.Unsubscribe(jms.name, self._attach.subscription or ""))


class Heard(listening.Heard):
    """A message of a topic, as AMQP; what an AMQP client said goes through as it is.

    Many links hear it: what one found out, the others need not.
    """

    __slots__ = ("_amqp", "_matches", "_origin", "_raw")

    def __init__(self, message: api.Message) -> None:
        super().__init__(message)
        self._raw = message.header(messages.HEADER)
        self._amqp: bytes | None = None
        self._origin: str | None = None
        self._matches: dict[selectors.Matches, bool] = {}

    @property
    def _foreign(self) -> str | None:
        """The header, if an AMQP client wrote it."""
        return self._raw if self._raw is not None and self._raw[:1] == messages.FOREIGN else None

    @property
    def origin(self) -> str | None:
        if self._origin is None:
            raw = self._foreign
            self._origin = self.meta.origin if raw is None else codec.origin_of(raw)
        return self._origin

    def matches(self, selector: selectors.Matches) -> bool:
        found = self._matches.get(selector)
        if found is None:
            found = self._matches[selector] = selector(self.meta.lookup())
        return found

    @property
    def amqp(self) -> bytes:
        if self._amqp is None:
            raw, data = self._foreign, self.message.data
            self._amqp = codec.encode(self.meta, data, 0) if raw is None else codec.unwrapped(raw, data)
        return self._amqp


class Tap(Outlet):
    """Listens to a topic on the bus."""

    def __init__(
        self,
        owner: bridge.Bridge,
        over: engine.Engine,
        wrapper: Any,
        destination: destinations.Destination,
        asked: protocol.Attach,
    ) -> None:
        super().__init__(owner, over, wrapper)
        self.destination = destination
        self.number = asked.consumer
        self._asked = asked
        self._matches = selectors.compiled(asked.selector) if asked.selector else None
        self._not_from = owner.jms.origin if asked.no_local else None
        group = None
        if asked.shared and asked.subscription:
            group = listening.group(None if asked.everyone else owner.jms.client_id, asked.subscription)
        # Links that share a subscription with others must not share it among themselves.
        self._key = (destination.name, group, self if group else None)
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._ears: listening.Ears[Heard] | None = None
        self._sent = 0
        self._again: list[tuple[int, bytes]] = []  # what came back, the first of it last
        self.rejected = 0
        self.dropped = 0

    async def open(self) -> None:
        name, group, _ = self._key
        if self._asked.shared:
            await self.bridge.jms.attach(self)
        try:
            self._ears = await self.bridge.ears_for(no_local=self._not_from is not None)
            await self._ears.add(self._key, name, group, self)
        except BaseException:
            await self.close(destroy=False)
            raise

    def request(self) -> protocol.Attach:
        return self._asked

    @property
    def owner(self) -> object:
        return self.bridge

    def deliver(self, delivery: protocol.Delivery) -> None:
        raise errors.InvariantBroken("the dispatcher feeds nobody who listens to a topic")

    def offer(self, heard: Heard) -> None:
        if self.closed:
            return
        if (self._not_from is not None and heard.origin == self._not_from) or (
            self._matches is not None and not heard.matches(self._matches)
        ):
            self.rejected += 1
            return
        data = heard.amqp
        if self._waiting or self._again or not self.engine.may_send(self.link):
            self._wait(data)
        else:
            self._transmit(data)

    def _wait(self, data: bytes) -> None:
        self._waiting.append(data)
        self._bytes += len(data)
        if len(self._waiting) > slowing.WAITING_SLOW or self._bytes > slowing.WAITING_SLOW_BYTES:
            self.bridge.jms.slow(self)
            if len(self._waiting) > slowing.WAITING_MAX or self._bytes > slowing.WAITING_BYTES_MAX:
                self._bytes -= len(self._waiting.popleft())
                self.dropped += 1

    def _transmit(self, data: bytes) -> None:
        self._sent += 1
        self.engine.send(self.link, data, (self, "", self._sent, data), settled=self.presettled)
        self.bridge.flush_soon()

    def returned(self, number: int, data: bytes, code: int, state: bytes | None) -> None:
        if code == frames.TRANSACTIONAL:
            self.bridge.transactions.hold(state, self, number, data)
            return
        counted, undeliverable = frames.modified(state) if code == frames.MODIFIED else (False, False)
        if code in (frames.RELEASED, frames.MODIFIED) and not undeliverable:
            self.take_back(number, data, counted=counted)

    def take_back(self, number: int, data: bytes, *, counted: bool) -> None:
        """It comes again, in its place before what has not been sent yet."""
        if not self.closed:
            if not self._again:
                self.bridge.soon(self.flowed)
            self._again.append((number, codec.redelivered(data) if counted else data))
            self._again.sort(reverse=True)

    def is_slow(self) -> bool:
        return not self.closed and (
            len(self._waiting) > slowing.WAITING_SLOW // 2 or self._bytes > slowing.WAITING_SLOW_BYTES // 2
        )

    def _pump(self) -> None:
        while not self.closed and self.engine.may_send(self.link):
            if self._again:
                self._transmit(self._again.pop()[1])
            elif self._waiting:
                data = self._waiting.popleft()
                self._bytes -= len(data)
                self._transmit(data)
            else:
                return

    def flowed(self) -> None:
        self._pump()
        if not self.closed and self.link.drain:
            self.bridge.spawn(self.flow())

    async def flow(self) -> None:
        self._pump()
        if not self.closed and self.link.drain and self._ears is not None:
            await self._ears.bus.flush()
            self._pump()
            self._drained()

    async def close(self, *, destroy: bool) -> None:
        self.closed = True
        if self._ears is not None:
            await self._ears.remove(self._key, self)
        if self._asked.shared:
            await self.bridge.jms.detach(self.number, {})


class Browser(Outlet):
    """A snapshot of a queue, page by page."""

    def __init__(
        self, owner: bridge.Bridge, over: engine.Engine, wrapper: Any, queue: str, selector: str | None
    ) -> None:
        super().__init__(owner, over, wrapper)
        self._queue = queue
        self._selector = selector
        self._after = 0
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self._paging = asyncio.Lock()

    async def flow(self) -> None:
        async with self._paging:
            await self._send()

    async def _send(self) -> None:
        while not self.closed and self.engine.may_send(self.link):
            if not self._waiting and not self._ended:
                asked = protocol.Browse(self._queue, self._selector, self._after)
                found = (await self.bridge.jms.ask(asked)).messages
                self._ended = not found
                for one in found:
                    self._after = one.sequence
                    self._waiting.append(codec.encode(messages.decode_meta(one.meta), one.data, one.count))
            if not self._waiting or self.closed:
                break
            self.bridge.transmit(self, self._waiting.popleft())
        self._drained()


class Ending(Outlet):
    """A client's handle on a subscription that it wants to end: closing the link ends it."""

    def __init__(
        self, owner: bridge.Bridge, over: engine.Engine, wrapper: Any, name: str, *, everyone: bool
    ) -> None:
        super().__init__(owner, over, wrapper)
        self._name = name
        self._everyone = everyone

    async def close(self, *, destroy: bool) -> None:
        if destroy:
            jms = self.bridge.jms
            await jms.ask(protocol.Unsubscribe(jms.name, self._name, self._everyone))


class Temporary(Outlet):
    """A temporary queue lives as long as the link that made it."""

    def __init__(
        self, owner: bridge.Bridge, over: engine.Engine, wrapper: Any, destination: destinations.Destination
    ) -> None:
        super().__init__(owner, over, wrapper)
        self._destination = destination

    async def close(self, *, destroy: bool) -> None:
        self.bridge.attaching.temporaries.discard(self._destination.name)
        if self._destination.is_queue:
            await self.bridge.jms.ask(protocol.DropQueue(self._destination.name))
