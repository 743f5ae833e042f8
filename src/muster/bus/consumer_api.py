"""The interface of durable consumers of `muster.bus.api.Stream`: the broker remembers their positions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muster.bus import api

FETCH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """A durable reader of a stream: the broker remembers its position."""

    name: str
    filter_subjects: tuple[str, ...] = ()
    start_sequence: int | None = None  # None: from the first message there is
    ack_wait_s: float = 30.0
    max_deliver: int = 0  # 0: no limit
    max_ack_pending: int = 10_000


class StreamDelivery(Protocol):
    """A stored message delivered to a consumer, which must acknowledge it."""

    @property
    def message(self) -> api.StoredMessage: ...
    @property
    def redelivered(self) -> bool: ...
    async def ack(self, *, confirmed: bool = False) -> None:
        """``confirmed``: wait until the broker has confirmed it, so that it is never delivered again."""
        ...


class StreamConsumer(Protocol):
    async def fetch(self, count: int, *, timeout_s: float = FETCH_TIMEOUT_S) -> Sequence[StreamDelivery]:
        """At least one, at most ``count``; empty when ``timeout_s`` passed without any."""
        ...

    def __aiter__(self) -> AsyncIterator[StreamDelivery]: ...
    async def close(self) -> None: ...
