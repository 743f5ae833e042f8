"""Messages of topics: what is published, what a subscriber receives, and subscriptions to topic patterns.

All notations of topics (`muster.core.topics`) are accepted: ``Course/CPS616``, ``Course=CPS616``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, overload

import msgspec

from muster.bus import api
from muster.bus.client import requests
from muster.bus.rpc import error_replies
from muster.core import errors, topics
from muster.predicates.backends import python
from muster.predicates.syntax import parser
from muster.supervision import tasks

T = TypeVar("T")
#: The content of a message: text is sent as UTF-8, a mapping or a list as JSON.
Content = str | bytes | Mapping[str, Any] | Sequence[Any]
SHOWN_CHARACTERS = 60
#: Headers of a reply that is an error, as services of NATS have them; its data is the error in JSON.
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"
_STATUS = {"invalid-input": "400", "refused": "403", "not-found": "404", "unavailable": "503"}


def encode(content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    try:
        return content.encode() if isinstance(content, str) else msgspec.json.encode(content)
    except UnicodeEncodeError as error:
        raise errors.InvalidInput(f"a message that is text contains no surrogates: {error}") from error
    except (TypeError, RecursionError) as error:
        raise errors.InvalidInput(
            f"a message is text, bytes or JSON, not {type(content).__name__}: {error}"
        ) from error


def error_reply(fault: error_replies.ErrorReply) -> tuple[bytes, dict[str, str]]:
    """Data and headers of the reply of a handler that failed."""
    described = " ".join(fault.message.split())  # a header is one line
    headers = {ERROR_HEADER: described, ERROR_CODE_HEADER: _STATUS.get(fault.kind or fault.code, "500")}
    return msgspec.json.encode(fault), headers


def raise_error(reply: api.Message) -> None:
    """Raise the error that a reply contains."""
    if (described := reply.header(ERROR_HEADER)) is None:
        return
    try:
        fault = msgspec.json.decode(reply.data, type=error_replies.ErrorReply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # of another library
        fault = error_replies.ErrorReply(code="handler-failed", message=described)
    raise error_replies.from_error_reply(fault)


async def request(
    bus: api.Bus,
    topic: str,
    subject: str,
    data: bytes,
    *,
    headers: Mapping[str, str] | None,
    timeout_s: float,
) -> api.Message:
    """The reply to a request; raises the error that it contains. ``topic``: for people."""
    try:
        reply = await bus.request(subject, data, headers=headers, timeout_s=timeout_s)
    except requests.NoResponders as error:
        raise errors.Unavailable(
            f"there is no subscriber on {topic}",
            hint=f"start a service that replies, or test with `muster sub {topic} --reply TEXT`",
        ) from error
    except errors.TimedOut as error:
        raise errors.TimedOut(
            f"no reply on {topic} in {timeout_s:g} s",
            hint="a handler replies with what it returns; one that returns None does not reply",
        ) from error
    raise_error(reply)
    return reply


def to_subject(topic: str) -> str:
    subject = topics.Topic.parse(topic).subject
    warn_of_dots(topic, level=4)
    return subject


def warn_of_dots(topic: str, *, level: int = 3) -> None:
    """For those who know the subjects of NATS: a dot separates nothing in a topic. ``level``: of the line
    that names the topic, as for `warnings.warn`."""
    if "." in topic and not any(mark in topic for mark in "/=:"):
        warnings.warn(
            f"the topic {topic!r} has one level: write {topic.replace('.', '/')!r} for several",
            stacklevel=level,
        )


@dataclass(frozen=True, slots=True, repr=False)
class PublishedMessage:
    """A received message; users write `muster.Message`.

    >>> message = Message("orders/eu", b'{"boxes": 17}')
    >>> message
    Message('orders/eu', '{"boxes": 17}')
    >>> message.text
    '{"boxes": 17}'
    >>> message.json()["boxes"]
    17
    """

    topic: str  # as in the command line; the subject, if it is no topic
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    received: api.Message | None = field(default=None, compare=False)  # as the bus delivered it

    @classmethod
    def from_bus(cls, message: api.Message) -> PublishedMessage:
        """The message that the bus delivered."""
        topic = message.subject
        with contextlib.suppress(errors.MusterError):
            topic = str(topics.Topic.from_subject(topic))
        return cls(topic, message.data, message.headers, message)

    @property
    def text(self) -> str:
        """The data as text; `errors.InvalidInput` if it is not UTF-8."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise errors.InvalidInput(f"the message on {self.topic} is not text: {error}") from error

    @overload
    def json(self) -> Any: ...
    @overload
    def json(self, kind: type[T]) -> T: ...
    def json(self, kind: Any = Any) -> Any:
        """The data decoded from JSON, as ``kind`` if it is given: a dataclass, a msgspec struct, `int`, …"""
        try:
            return msgspec.json.decode(self.data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidInput(f"the message on {self.topic}: {error}") from error

    @property
    def wants_reply(self) -> bool:
        """Whether its sender waits for a reply."""
        return self.received is not None and bool(self.received.reply)

    def __repr__(self) -> str:
        text = self.data.decode("utf-8", "replace")
        shown = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
        return f"Message({self.topic!r}, {shown!r})"


def selector(where: str | None) -> Callable[[api.Message], bool]:
    """A predicate over the headers of a message and, if its data is a JSON object, its fields."""
    if where is None:
        return lambda message: True
    matches = python.compile(parser.parse(where))

    def selects(message: api.Message) -> bool:
        attributes: dict[str, Any] = dict(message.headers)
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(message.data)
            if isinstance(fields, dict):
                attributes |= fields
        return bool(matches(attributes.get))

    return selects


class AsyncSubscription:
    """The messages of a topic or a pattern of topics: iterate, or read the `next` one.

    A pattern of tags may need several subscriptions of the bus; their messages are merged.
    """

    def __init__(self, topic: str, subscriptions: Sequence[api.Subscription], accepts: _Accepts) -> None:
        self.topic = topic
        self._subscriptions = subscriptions
        self._accepts = accepts
        # Size 1: the bus itself bounds the number of waiting messages.
        self._queue: asyncio.Queue[api.Message | errors.MusterError] = asyncio.Queue(maxsize=1)
        self._pumps = [
            asyncio.create_task(self._pump(subscription, index))
            for index, subscription in enumerate(subscriptions)
        ]
        self._ended: errors.MusterError | None = None

    @classmethod
    async def open(
        cls,
        bus: api.Bus,
        topic: str,
        *,
        where: str | None = None,
        group: str | None = None,
        raw: bool = False,
    ) -> Self:
        """``raw``: the topic is a subject of the broker."""
        selects = selector(where)
        pattern = None if raw else topics.TopicPattern.parse(topic)
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(await bus.subscribe(subject, group=group))
                for subject in ((topic,) if pattern is None else pattern.subjects)
            ]
            await bus.flush()  # the broker knows it, so that no later message is missed
            stack.pop_all()

        def accepts(message: api.Message, index: int) -> bool:
            return (pattern is None or pattern.take(message.subject, index) is not None) and selects(message)

        return cls(topic, opened, accepts)

    async def next(self, *, timeout_s: float | None = None) -> PublishedMessage:
        """The next message; `errors.TimedOut` if there is none within ``timeout_s``."""
        return PublishedMessage.from_bus(await self.next_delivery(timeout_s=timeout_s))

    async def next_delivery(self, *, timeout_s: float | None = None) -> api.Message:
        """As `next`; the message as the bus delivered it."""
        if self._ended is not None:
            raise self._ended
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            raise errors.TimedOut(f"no message on {self.topic} in {timeout_s:g} s") from None
        if isinstance(item, errors.MusterError):
            self._ended = item
            self._queue.put_nowait(item)  # for others that wait
            raise item
        return item

    async def __aiter__(self) -> AsyncIterator[PublishedMessage]:
        while True:
            try:
                yield await self.next()
            except errors.NotConnected:
                return

    async def close(self) -> None:
        """End the subscription; a waiting `next` raises `errors.NotConnected`."""
        self._ended = self._ended or errors.NotConnected(f"the subscription to {self.topic} is closed")
        await tasks.finish(self._close())

    async def _close(self) -> None:
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<subscription to {self.topic!r}>"

    async def _pump(self, subscription: api.Subscription, index: int) -> None:
        try:
            async for message in subscription:
                if self._accepts(message, index):
                    await self._queue.put(message)
            await self._queue.put(errors.NotConnected(f"the subscription to {self.topic} has ended"))
        except errors.MusterError as error:
            await self._queue.put(error)
        except Exception as error:  # noqa: BLE001 - the reader gets it, instead of waiting for ever
            await self._queue.put(errors.InvariantViolation(f"{type(error).__name__}: {error}"))


_Accepts = Callable[[api.Message, int], bool]
