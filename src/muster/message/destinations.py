"""Destinations: queues and topics, by name.

A topic name is any notation of `muster.core.topics`; a queue name is any text. The name of a temporary
destination begins with `TEMPORARY` and the name of the connection that owns it, and only that connection may
consume from it, unless the name ends with `OPEN`. The name decides, not the kind that a client states.

Messages of a temporary topic are published in the reply space of its owner (`muster.core.subjects`), not
below ``topic.``: every identity with topics may publish there, and the broker lets only the owner subscribe.
"""

from __future__ import annotations

import base64
import enum
import functools
from dataclasses import dataclass, field
from typing import Final

from muster.core import errors, queue_names, subjects, topics
from muster.message import errors as message_errors

TEMPORARY: Final = queue_names.TEMPORARY
OPEN: Final = ":open"
TEMPORARY_TOPIC: Final = f"path:{TEMPORARY}"
DEAD_LETTERS: Final = queue_names.DEAD_LETTERS
QUEUE_NAME_BYTES_MAX: Final = 300


class DestinationKind(enum.StrEnum):
    QUEUE = "queue"
    TOPIC = "topic"
    TEMPORARY_QUEUE = "temporary-queue"
    TEMPORARY_TOPIC = "temporary-topic"


@dataclass(frozen=True, slots=True)
class Destination:
    kind: DestinationKind
    name: str
    # Computed once: a dispatcher asks for these several times for each message.
    is_queue: bool = field(init=False, repr=False, compare=False)
    is_temporary: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_queue = self.kind in (DestinationKind.QUEUE, DestinationKind.TEMPORARY_QUEUE)
        object.__setattr__(self, "is_queue", is_queue)
        object.__setattr__(self, "is_temporary", self._bare.startswith(TEMPORARY))
        if is_queue:
            size = len(self.name.encode("utf-8", "replace"))
            if not 1 <= size <= QUEUE_NAME_BYTES_MAX:
                raise message_errors.InvalidDestination(
                    f"the name of a queue has 1 to {QUEUE_NAME_BYTES_MAX} bytes, not {size}"
                )
        elif len(self.name) > topics.MAX_CHARACTERS:
            raise message_errors.InvalidDestination(
                f"a topic of {len(self.name)} characters is too long: the maximum is {topics.MAX_CHARACTERS}"
            )

    @property
    def _bare(self) -> str:
        return self.name if self.is_queue else self.name.removeprefix("path:")

    @property
    def owner(self) -> str:
        """The name of the connection that owns a temporary destination."""
        return self._bare.removeprefix(TEMPORARY).replace("/", ":").split(":")[0]

    @property
    def is_direct(self) -> bool:
        """Whether non-persistent messages go to the bus directly. Those of temporary topics do not, because
        the dispatcher knows which of them were deleted.
        """
        return not self.is_queue and not self.is_temporary

    def may_consume(self, connection: str) -> bool:
        """Whether a connection may consume from this temporary destination."""
        return self.owner == connection or self.name.endswith(OPEN)

    def check_consumer(self, connection: str) -> None:
        if self.is_temporary and not self.may_consume(connection):
            kind = "queue" if self.is_queue else "topic"
            raise errors.Forbidden(f"only the connection that owns a temporary {kind} may consume from it")

    @property
    def topic(self) -> topics.Topic:
        return _topic(self.name)

    @property
    def subject(self) -> str:
        """The subject on which messages of a topic are published."""
        return _temporary_subject(self._bare) if self.is_temporary else _topic(self.name).subject

    @property
    def patterns(self) -> tuple[str, ...]:
        """The subjects to which a consumer of a topic, or of a topic pattern, subscribes."""
        return (self.subject,) if self.is_temporary else tuple(topics.TopicPattern.parse(self.name).subjects)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Parse ``queue:orders`` or ``topic:Course/CPS616``. Without a kind the name is a topic."""
        return _parse(text)


# A process uses few destinations and parses one for every message, so these are cached.


@functools.lru_cache(8192)
def _parse(text: str) -> Destination:
    kind, colon, name = text.partition(":")
    if colon and kind in _KINDS:
        return Destination(DestinationKind(kind), name)
    return Destination(DestinationKind.TOPIC, text)


@functools.lru_cache(8192)
def _topic(name: str) -> topics.Topic:
    try:
        return topics.Topic.parse(name)
    except errors.InvalidInput as error:
        raise message_errors.InvalidDestination(
            f"{name!r} is not a topic: {error.message}", hint=error.hint
        ) from error


@functools.lru_cache(8192)
def _temporary_subject(name: str) -> str:
    try:
        connection, number = name.removeprefix(TEMPORARY).split("/")
        identity, _, session = connection.rpartition("-")
        requester = f"{subjects.token(identity)}.{subjects.token(session)}"
        return subjects.reply_subject(subjects.APP, requester, subjects.token(number))
    except (ValueError, errors.InvalidInput) as error:
        raise message_errors.InvalidDestination(f"{name!r} is not a temporary topic") from error


_KINDS: Final = frozenset(DestinationKind)


def queue(name: str) -> Destination:
    return Destination(DestinationKind.QUEUE, name)


def topic(name: str) -> Destination:
    return Destination(DestinationKind.TOPIC, name)


def temporary_topic(connection: str, number: int) -> Destination:
    return Destination(DestinationKind.TEMPORARY_TOPIC, f"{TEMPORARY_TOPIC}{connection}/{number}")


_REPLIES: Final = f"{subjects.REPLY_PREFIX}.{subjects.APP}."


def from_subject(subject: str) -> Destination:
    """The topic that a subject belongs to."""
    if subject.startswith(_REPLIES):
        identity, session, number = subject.removeprefix(_REPLIES).split(".")
        return Destination(DestinationKind.TEMPORARY_TOPIC, f"path:{TEMPORARY}{identity}-{session}/{number}")
    return topic(str(topics.Topic.from_subject(subject)))


@functools.lru_cache(8192)
def token(name: str) -> str:
    """Encode any text as one subject token."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=") or "_"


def of_token(text: str) -> str:
    """The text that `token` encoded."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
