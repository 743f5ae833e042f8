"""What stands at our end of a link: a queue or subscription, a topic's listener, a browser.

Each is told when its client grants credit, drains, settles or goes, and hands messages to the bridge to
transmit.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from muster.bus import api
from muster.core import errors, topics
from muster.message import destinations, messages, protocol, selectors
from muster.message.amqp import codec

if TYPE_CHECKING:
    from muster.message.amqp import bridge

BACKLOG_MAX: Final = 10_000  # messages of a topic that wait for a slow client; then the oldest go


class Outlet:
    """Nothing: what a link without a message source has."""

    def __init__(self, owner: bridge.Bridge, link: Any) -> None:
        self.bridge = owner
        self.link = link

    async def open(self) -> None:
        pass

    async def flow(self) -> None:
        if self.link.drain_mode:
            self.link.drained()

    async def close(self, *, destroy: bool) -> None:
        pass


class Fed(Outlet):
    """Fed by the dispatcher as far as the client's credit goes."""

    def __init__(self, owner: bridge.Bridge, link: Any, attach: protocol.Attach) -> None:
        super().__init__(owner, link)
        self.number = attach.consumer
        self._attach = attach
        self._granted = 0

    def request(self) -> protocol.Attach:
        self._granted = self.link.credit
        return protocol.Attach(
            self._attach.connection,
            self.number,
            self._attach.destination,
            subscription=self._attach.subscription,
            durable=self._attach.durable,
            shared=self._attach.shared,
            selector=self._attach.selector,
            no_local=self._attach.no_local,
            credit=self._granted,
            everyone=self._attach.everyone,
        )

    async def open(self) -> None:
        await self.bridge.jms.attach(self)

    def deliver(self, delivery: protocol.Delivery) -> None:
        self._granted -= 1
        if self.link is None or (delivery.key, delivery.sequence) in self.bridge.unsettled:
            self.bridge.spawn(self.flow())
            return  # a new dispatcher repeats what the client has
        try:
            message = messages.rebuild(messages.decode_meta(delivery.meta), delivery.data)
            data = codec.encode(message, delivery.count)
        except errors.MusterError as error:
            release = protocol.Release(
                self.bridge.jms.name, {delivery.key: [delivery.sequence]}, reason=error.message
            )
            self.bridge.spawn(self.bridge.jms.tell(release))
            return
        self.bridge.transmit(self.link, data, (delivery.key, delivery.sequence))

    async def flow(self) -> None:
        jms = self.bridge.jms
        if self.link is None:
            return
        more = self.link.credit - self._granted
        if more > 0:
            self._granted += more
            await jms.tell(protocol.Credit(jms.name, self.number, more))
        if self.link is not None and self.link.drain_mode:
            await jms.ask(protocol.Stop(jms.name, [self.number]))
            self._granted = 0
            if self.link is not None:
                self.link.drained()

    async def close(self, *, destroy: bool) -> None:
        self.link = None
        await self.bridge.jms.detach(self.number, {})
        if destroy and self._attach.durable and not self._attach.shared:
            jms = self.bridge.jms
            await jms.ask(protocol.Unsubscribe(jms.name, self._attach.subscription or ""))


class Tap(Outlet):
    """Listens to a topic on the bus."""

    def __init__(
        self,
        owner: bridge.Bridge,
        link: Any,
        destination: destinations.Destination,
        *,
        selector: str | None,
        no_local: bool,
        group: str | None,
    ) -> None:
        super().__init__(owner, link)
        self._pattern = topics.Pattern.parse(destination.name)
        self._matches = selectors.compiled(selector) if selector else None
        self._not_from = owner.jms.origin if no_local else None
        self._group = group
        self._subscriptions: list[api.Subscription] = []
        self._waiting: deque[bytes] = deque(maxlen=BACKLOG_MAX)
        self.rejected = 0

    async def open(self) -> None:
        for via, subject in enumerate(self._pattern.subjects):
            self._subscriptions.append(
                await self.bridge.jms.bus.subscribe(
                    subject, group=self._group, handler=functools.partial(self._heard, via)
                )
            )

    def _heard(self, via: int, message: api.Message) -> None:
        if self.link is None or (
            len(self._pattern.subjects) > 1 and self._pattern.take(message.subject, via) is None
        ):
            return
        try:
            meta = messages.meta_of(message.data, message.headers)
            if (self._not_from is not None and meta.origin == self._not_from) or (
                self._matches is not None and not self._matches(meta.lookup())
            ):
                self.rejected += 1
                return
            name = meta.destination or str(topics.Topic.from_subject(message.subject))
            found = messages.rebuild(meta, message.data, destinations.Destination.parse(name))
            data = codec.encode(found, 0)
        except errors.MusterError:
            return
        self._waiting.append(data)
        self._pump()

    def _pump(self) -> None:
        while self._waiting and self.link is not None and self.link.credit > 0:
            self.bridge.transmit(self.link, self._waiting.popleft(), None)

    async def flow(self) -> None:
        self._pump()
        if self.link is not None and self.link.drain_mode:
            await self.bridge.jms.bus.flush()
            self._pump()
            if self.link is not None:
                self.link.drained()

    async def close(self, *, destroy: bool) -> None:
        self.link = None
        for one in self._subscriptions:
            await one.close()


class Browser(Outlet):
    """A snapshot of a queue, page by page."""

    def __init__(self, owner: bridge.Bridge, link: Any, queue: str, selector: str | None) -> None:
        super().__init__(owner, link)
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
        while self.link is not None and self.link.credit > 0:
            if not self._waiting and not self._ended:
                asked = protocol.Browse(self._queue, self._selector, self._after)
                found = (await self.bridge.jms.ask(asked)).messages
                self._ended = not found
                for one in found:
                    self._after = one.sequence
                    message = messages.rebuild(messages.decode_meta(one.meta), one.data)
                    self._waiting.append(codec.encode(message, one.count))
            if not self._waiting:
                break
            self.bridge.transmit(self.link, self._waiting.popleft(), None)
        if self.link is not None and self.link.drain_mode:
            self.link.drained()

    async def close(self, *, destroy: bool) -> None:
        self.link = None


class Ending(Outlet):
    """A client's handle on a subscription that it wants to end: closing the link ends it."""

    def __init__(self, owner: bridge.Bridge, link: Any, name: str, *, everyone: bool) -> None:
        super().__init__(owner, link)
        self._name = name
        self._everyone = everyone

    async def close(self, *, destroy: bool) -> None:
        if destroy:
            jms = self.bridge.jms
            await jms.ask(protocol.Unsubscribe(jms.name, self._name, self._everyone))


class Temporary(Outlet):
    """A temporary queue lives as long as the link that made it."""

    def __init__(self, owner: bridge.Bridge, link: Any, destination: destinations.Destination) -> None:
        super().__init__(owner, link)
        self._destination = destination

    async def close(self, *, destroy: bool) -> None:
        if self._destination.is_queue:
            await self.bridge.jms.ask(protocol.DropQueue(self._destination.name))
