"""Listening to topics on the bus: one subscription for all consumers over a connection that want the same.

A message comes once to a connection, and is made into what a consumer wants when the first one asks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from muster.bus import api
from muster.core import errors, topics
from muster.message import destinations, messages
from muster.message.dispatcher.log import ledger


class TopicMessage:
    """A message of a topic."""

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
                meta = messages.from_plain(message.data, message.headers)
            else:
                meta = messages.decode_meta_header(message.data, raw)
            self._meta = meta
            if meta.destination is None:
                meta.destination = str(destinations.of_subject(message.subject))
        return self._meta


H = TypeVar("H", bound=TopicMessage)
H_contra = TypeVar("H_contra", bound=TopicMessage, contravariant=True)


def group(identity: str, client_id: str | None, name: str) -> str:
    """Of the bus, for those who share a subscription of this name."""
    return destinations.token(ledger.subscription_key(identity, client_id, name))


class TopicTap(Protocol[H_contra]):
    @property
    def owner(self) -> object:
        """Whose it is: those of one owner hear a message together."""
        ...

    def offer(self, message: H_contra) -> None: ...


def enqueue(taps: Sequence[TopicTap[H]], message: H) -> None:
    for tap in taps:
        try:
            tap.offer(message)
        except (errors.MusterError, ValueError):
            continue  # one may have to read what another need not


class TopicListener(Generic[H]):
    def __init__(
        self,
        bus: api.Bus,
        name: str,
        group: str | None,
        kind: type[H],
        pass_on: Callable[[Sequence[TopicTap[H]], H], None],
    ) -> None:
        self._bus = bus
        self._pattern = topics.TopicPattern.parse(name)
        self._subjects = destinations.topic(name).patterns
        self._several = len(self._subjects) > 1
        self._group = group
        self._kind = kind
        self._pass_on = pass_on
        self._subscriptions: list[api.Subscription] = []
        self._opening = asyncio.Lock()
        self._taps: dict[object, tuple[TopicTap[H], ...]] = {}  # by owner
        self.users = 0  # taps, and those that are being added

    async def add(self, tap: TopicTap[H]) -> None:
        async with self._opening:
            for via, subject in list(enumerate(self._subjects))[len(self._subscriptions) :]:
                self._subscriptions.append(
                    await self._bus.subscribe(
                        subject, group=self._group, handler=functools.partial(self._heard, via)
                    )
                )
            self._taps[tap.owner] = (*self._taps.get(tap.owner, ()), tap)

    def remove(self, tap: TopicTap[H]) -> bool:
        """Whether it was there."""
        taps = self._taps.get(tap.owner, ())
        if tap not in taps:
            return False
        self._taps[tap.owner] = tuple(other for other in taps if other is not tap)
        if not self._taps[tap.owner]:
            del self._taps[tap.owner]
        return True

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def _heard(self, via: int, message: api.Message) -> None:
        if self._several and self._pattern.take(message.subject, via) is None:
            return
        topic_message = self._kind(message)
        for taps in list(self._taps.values()):
            self._pass_on(taps, topic_message)


class TopicListeners(Generic[H]):
    """Those of one connection to the bus, by what they listen to. ``pass_on`` gives a message to the taps of
    one owner, now or later.
    """

    def __init__(
        self, bus: api.Bus, kind: type[H], pass_on: Callable[[Sequence[TopicTap[H]], H], None] = enqueue
    ) -> None:
        self.bus = bus
        self._kind = kind
        self._pass_on = pass_on
        self._ears: dict[object, TopicListener[H]] = {}

    async def add(self, key: object, name: str, group: str | None, tap: TopicTap[H]) -> None:
        ear = self._ears.get(key)
        if ear is None:
            ear = self._ears[key] = TopicListener(self.bus, name, group, self._kind, self._pass_on)
        ear.users += 1
        try:
            await ear.add(tap)
        except BaseException:
            await self._left(key, ear)
            raise

    async def remove(self, key: object, tap: TopicTap[H]) -> None:
        ear = self._ears.get(key)
        if ear is not None and ear.remove(tap):
            await self._left(key, ear)

    async def _left(self, key: object, ear: TopicListener[H]) -> None:
        ear.users -= 1
        if not ear.users:
            del self._ears[key]
            await ear.close()
