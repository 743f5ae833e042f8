"""Subscriptions to topics: consumers of a connection with the same topic share one bus subscription.

A message arrives once per connection, and is decoded when the first consumer needs it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from muster.bus import api
from muster.core import errors, topics
from muster.message import codec, destinations, messages
from muster.message.dispatcher.log import ledger


class TopicMessage:
    """A message of a topic, decoded on demand."""

    __slots__ = ("_meta", "message")

    def __init__(self, message: api.Message) -> None:
        self.message = message
        self._meta: messages.MessageMeta | None = None

    @property
    def meta(self) -> messages.MessageMeta:
        if self._meta is None:
            message = self.message
            raw = message.header(messages.HEADER)
            if raw is None:
                meta = codec.from_plain(message.data, message.headers)
            else:
                meta = codec.decode_meta_header(message.data, raw)
            self._meta = meta
            if meta.destination is None:
                meta.destination = str(destinations.from_subject(message.subject))
        return self._meta


H = TypeVar("H", bound=TopicMessage)
H_contra = TypeVar("H_contra", bound=TopicMessage, contravariant=True)


def group(identity: str, client_id: str | None, name: str) -> str:
    """The queue group on the bus for consumers that share a subscription of this name."""
    return destinations.token(ledger.subscription_key(identity, client_id, name))


class TopicReceiver(Protocol[H_contra]):
    @property
    def owner(self) -> object:
        """Receivers of the same owner get a message together."""
        ...

    def offer(self, message: H_contra) -> None: ...


def enqueue(receivers: Sequence[TopicReceiver[H]], message: H) -> None:
    for receiver in receivers:
        try:
            receiver.offer(message)
        except (errors.MusterError, ValueError):
            continue  # a message may be malformed for one receiver only


class TopicListener(Generic[H]):
    def __init__(
        self,
        bus: api.Bus,
        name: str,
        group: str | None,
        kind: type[H],
        forward: Callable[[Sequence[TopicReceiver[H]], H], None],
    ) -> None:
        self._bus = bus
        self._pattern = topics.TopicPattern.parse(name)
        self._subjects = destinations.topic(name).patterns
        self._several = len(self._subjects) > 1
        self.group = group
        self._kind = kind
        self._forward = forward
        self._subscriptions: list[api.Subscription] = []
        self._opening = asyncio.Lock()
        self._receivers: dict[object, tuple[TopicReceiver[H], ...]] = {}  # by owner
        self.users = 0  # receivers, including those being added

    async def add(self, receiver: TopicReceiver[H]) -> None:
        async with self._opening:
            for via, subject in list(enumerate(self._subjects))[len(self._subscriptions) :]:
                self._subscriptions.append(
                    await self._bus.subscribe(
                        subject, group=self.group, handler=functools.partial(self._received, via)
                    )
                )
            self._receivers[receiver.owner] = (*self._receivers.get(receiver.owner, ()), receiver)

    def remove(self, receiver: TopicReceiver[H]) -> bool:
        """Whether the receiver was registered."""
        receivers = self._receivers.get(receiver.owner, ())
        if receiver not in receivers:
            return False
        self._receivers[receiver.owner] = tuple(other for other in receivers if other is not receiver)
        if not self._receivers[receiver.owner]:
            del self._receivers[receiver.owner]
        return True

    @property
    def receivers(self) -> Iterator[TopicReceiver[H]]:
        return itertools.chain.from_iterable(self._receivers.values())

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def _received(self, via: int, message: api.Message) -> None:
        if self._several and self._pattern.take(message.subject, via) is None:
            return
        topic_message = self._kind(message)
        for receivers in list(self._receivers.values()):
            self._forward(receivers, topic_message)


class TopicListeners(Generic[H]):
    """The topic subscriptions of a bus connection. ``forward`` passes a message to the receivers of one
    owner, now or later.
    """

    def __init__(
        self, bus: api.Bus, kind: type[H], forward: Callable[[Sequence[TopicReceiver[H]], H], None] = enqueue
    ) -> None:
        self.bus = bus
        self._kind = kind
        self._forward = forward
        self._listeners: dict[object, TopicListener[H]] = {}

    async def add(self, key: object, name: str, group: str | None, receiver: TopicReceiver[H]) -> None:
        listener = self._listeners.get(key)
        if listener is None:
            listener = self._listeners[key] = TopicListener(self.bus, name, group, self._kind, self._forward)
        listener.users += 1
        try:
            await listener.add(receiver)
        except BaseException:
            await self._release(key, listener)
            raise

    async def remove(self, key: object, receiver: TopicReceiver[H]) -> None:
        listener = self._listeners.get(key)
        if listener is not None and listener.remove(receiver):
            await self._release(key, listener)

    def sharing(self, group: str) -> list[TopicReceiver[H]]:
        """Receivers here that share the subscription of this group."""
        return [
            receiver
            for listener in self._listeners.values()
            if listener.group == group
            for receiver in listener.receivers
        ]

    async def _release(self, key: object, listener: TopicListener[H]) -> None:
        listener.users -= 1
        if not listener.users:
            del self._listeners[key]
            await listener.close()
