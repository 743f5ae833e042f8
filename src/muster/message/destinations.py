"""Where messages go: queues and topics, by name.

A topic's name is any notation of `muster.core.topics`; a queue's any text.  A temporary one begins with
`TEMPORARY` and the name of its owner's connection, which alone may consume from it.  The name decides, not
the kind, which a client may claim of any queue.
"""

from __future__ import annotations

import base64
import enum
import functools
from dataclasses import dataclass
from typing import Final

from muster.core import errors, queues, topics
from muster.message import faults

TEMPORARY: Final = queues.TEMPORARY
DEAD_LETTERS: Final = queues.DEAD_LETTERS
QUEUE_NAME_BYTES_MAX: Final = 300


class Kind(enum.StrEnum):
    QUEUE = "queue"
    TOPIC = "topic"
    TEMPORARY_QUEUE = "temporary-queue"
    TEMPORARY_TOPIC = "temporary-topic"


@dataclass(frozen=True, slots=True)
class Destination:
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if self.is_queue:
            size = len(self.name.encode("utf-8", "replace"))
            if not 1 <= size <= QUEUE_NAME_BYTES_MAX:
                raise faults.InvalidDestination(
                    f"a queue's name has 1 to {QUEUE_NAME_BYTES_MAX} bytes, not {size}"
                )

    @property
    def is_queue(self) -> bool:
        return self.kind in (Kind.QUEUE, Kind.TEMPORARY_QUEUE)

    @property
    def is_temporary(self) -> bool:
        return self._bare.startswith(TEMPORARY)

    @property
    def _bare(self) -> str:
        return self.name if self.is_queue else self.name.removeprefix("path:")

    @property
    def owner(self) -> str:
        """Of a temporary one: the name of its connection."""
        return self._bare.removeprefix(TEMPORARY).replace("/", ":").split(":")[0]

    def check_consumer(self, connection: str) -> None:
        if self.is_temporary and self.owner != connection:
            kind = "queue" if self.is_queue else "topic"
            raise errors.Forbidden(f"only its own connection consumes from a temporary {kind}")

    @property
    def topic(self) -> topics.Topic:
        return _topic(self.name)

    @property
    def subject(self) -> str:
        """The users' subject of a topic."""
        return _topic(self.name).subject

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Destination:
        """``queue:orders``, ``topic:Course/CPS616``; without a kind it is a topic."""
        return _parse(text)


# A process uses few destinations, and names one with every message.


@functools.lru_cache(8192)
def _parse(text: str) -> Destination:
    kind, colon, name = text.partition(":")
    if colon and kind in _KINDS:
        return Destination(Kind(kind), name)
    return Destination(Kind.TOPIC, text)


@functools.lru_cache(8192)
def _topic(name: str) -> topics.Topic:
    try:
        return topics.Topic.parse(name)
    except errors.InvalidInput as error:
        raise faults.InvalidDestination(f"{name!r} is no topic: {error.message}") from error


_KINDS: Final = frozenset(Kind)


def queue(name: str) -> Destination:
    return Destination(Kind.QUEUE, name)


def topic(name: str) -> Destination:
    return Destination(Kind.TOPIC, name)


@functools.lru_cache(8192)
def token(name: str) -> str:
    """Any text as one token of a subject."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=") or "_"
