"""What the engine knows of sessions and links: who may say how much more, and what waits for its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from muster.message.amqp import frames

WINDOW: Final = 512  # frames that a session may send us before it hears from us: 32 MiB of the largest

#: What is kept of a message until its outcome is known: whose it was, the backlog it is of (of none: then its
#: owner does not hear that it was accepted), its number there, and itself.
Token = tuple[Any, str, int, bytes]


def ignore(*_: Any) -> None:
    """What a link does with messages and credit before somebody owns it."""


class Session:
    __slots__ = (
        "accepted",
        "blocked",
        "channel",
        "incoming",
        "links",
        "next_number",
        "outgoing",
        "room",
        "unsettled",
        "window",
        "wrapper",
    )

    def __init__(self, incoming: int, window: int) -> None:
        self.channel: int | None = None  # ours, while it is open
        self.wrapper: Any = None
        self.links: dict[int, Link] = {}  # by the peer's handle
        self.incoming = incoming  # number of the peer's next frame
        self.room = WINDOW  # how many of them it may send
        self.outgoing = 0
        self.window = window  # how many frames we may send
        self.next_number = 0  # of a delivery
        self.unsettled: dict[int, Token] = {}
        self.accepted: tuple[int, int] | None = None  # first and last of what we accept, not yet told
        self.blocked: deque[tuple[Link, int, bytes, bool, bool]] = deque()

    def shut(self) -> None:
        """Nothing more is to be said in it."""
        self.channel = None
        for link in self.links.values():
            link.shut()


class Link:
    """Its owner sets what is to happen: ``take`` for a message (number, data, settled, state), ``too_large``
    for the beginning of one that is, ``flowed`` when it may send more, or is to drain.
    """

    __slots__ = (
        "credit",
        "delivered",
        "drain",
        "flowed",
        "handle",
        "key",
        "lead",
        "partial",
        "parts",
        "parts_bytes",
        "session",
        "take",
        "too_large",
        "wrapper",
    )

    def __init__(self, session: Session, key: tuple[str, bool]) -> None:
        self.session = session
        self.key = key  # its name, and whether we receive
        self.wrapper: Any = None
        self.handle: int | None = None  # ours, while it is open,
        self.lead = b""  # and how its transfers begin then
        self.credit = 0
        self.delivered = 0
        self.drain = False
        self.parts: list[bytes] = []
        self.parts_bytes = 0
        self.partial: tuple[int, bool, bytes | None] | None = None
        self.take: Callable[[int, bytes, bool, bytes | None], None] = ignore
        self.too_large: Callable[[], None] = ignore
        self.flowed: Callable[[], None] = ignore

    def opened(self, channel: int, handle: int) -> None:
        self.handle, self.lead = handle, frames.transfer_lead(channel, handle)

    def shut(self) -> None:
        self.handle, self.lead = None, b""
