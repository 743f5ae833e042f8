"""State of sessions and links: windows, credit and unsettled messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from muster.core import errors
from muster.gateways.amqp import memory_budget
from muster.gateways.amqp.protocol import frames

# Larger than the credit of many producers: Qpid JMS stops sending in the middle of its credit when the window
# of its session was used up, until the next heartbeat. Memory is limited by the bytes in transit.
WINDOW: Final = 16_384  # frames that a session may send before the next flow
UNSETTLED_BYTES_MAX: Final = 64 << 20  # of unsettled messages of a session
LARGE_BYTES: Final = 640 << 10  # above this size, an incomplete message is passed on in parts
_UNLIMITED: Final = 1 << 63
_TOKEN_BYTES: Final = 256  # approximate size of a token besides its message
TAG_BYTES_MAX: Final = 32
MASK: Final = 0xFFFFFFFF

#: A message without an outcome: its link, its backlog (empty: the link is not notified of acceptance), its
#: number there, and its data.
Token = tuple[Any, str, int, bytes]
LinkKey = tuple[str, bool]  # the name of a link, and whether this side receives


def ignore(*_: Any) -> None:
    """Default handler of a link before it has an owner."""


def numbers_from(deliveries: Collection[int], first: int, last: int) -> list[int]:
    """The numbers of deliveries from ``first`` to ``last``. They wrap around after the highest."""
    count = (last - first + 1) & MASK
    if count > MASK >> 1:
        raise ValueError(f"the deliveries from {first} to {last} end before they begin")
    if first + count > MASK or count > len(deliveries):
        return [number for number in deliveries if (number - first) & MASK < count]
    return [number for number in range(first, first + count) if number in deliveries]


class LargeMessageReceiver(Protocol):
    """Receives the rest of a large message."""

    def add(self, part: bytes) -> None: ...

    def end(self, settled: bool, state: bytes | None, *, aborted: bool) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class AmqpSession:
    incoming: int  # number of the peer's next frame
    window: int  # number of frames this side may send
    budget: memory_budget.ConnectionBudget
    channel: int | None = None  # of this side, while it is open
    wrapper: Any = None
    links: dict[int, AmqpLink] = field(default_factory=dict)  # by the peer's handle
    incoming_window: int = WINDOW  # number of frames the peer may send
    outgoing: int = 0
    next_number: int = 0  # of the next delivery
    unsettled: dict[int, Token] = field(default_factory=dict)
    unsettled_bytes: int = 0
    over_unsettled_limit: bool = False  # no more deliveries until half of it is settled
    # Link, first and last accepted delivery, not sent yet
    accepted: tuple[AmqpLink, int, int] | None = None
    # Deliveries that this side settles after the peer: their links and tags, by number
    received: dict[int, tuple[LinkKey, bytes]] = field(default_factory=dict)
    blocked: deque[tuple[AmqpLink, int, bytes, bool, bool]] = field(default_factory=deque)
    # Called once when more may be sent, or never
    on_room: list[Callable[[], None]] = field(default_factory=list)
    # To be drained after their blocked messages are sent
    draining: set[AmqpLink] = field(default_factory=set)

    def sent(self, number: int, token: Token) -> None:
        self.unsettled[number] = token
        size = len(token[3]) + _TOKEN_BYTES
        self.unsettled_bytes += size
        self.budget.add_unsettled(size)
        if self.unsettled_bytes > UNSETTLED_BYTES_MAX:
            self.over_unsettled_limit = True

    def settle(self, number: int) -> Token | None:
        token = self.unsettled.pop(number, None)
        if token is not None:
            size = len(token[3]) + _TOKEN_BYTES
            self.unsettled_bytes -= size
            self.budget.remove_unsettled(size)
        return token

    def window_state(self, *, held: bool) -> tuple[int, int, int]:
        """Next incoming number, incoming window, next outgoing number. The window does not grow while
        ``held``.
        """
        if not held:
            self.incoming_window = WINDOW
        return self.incoming, max(self.incoming_window, 0), self.outgoing & MASK

    def shut(self) -> None:
        """Nothing more is sent in this session."""
        self.channel = None
        self.draining.clear()
        waiting, self.on_room = self.on_room, []
        for report in waiting:
            report()
        for link in self.links.values():
            link.shut()

    def forget(self) -> None:
        """The session has ended: nothing is unsettled any more."""
        self.budget.remove_unsettled(self.unsettled_bytes)
        self.unsettled.clear()
        self.received.clear()
        self.unsettled_bytes = 0


class ResumedDelivery:
    """Ignores a message that the peer sends again. ``complete`` is called after the last part."""

    def __init__(self, complete: Callable[[bool], None]) -> None:
        self._complete = complete

    def add(self, part: bytes) -> None:
        pass

    def end(self, settled: bool, state: bytes | None, *, aborted: bool) -> None:
        if not aborted:
            self._complete(settled)


@dataclass(slots=True, eq=False, repr=False)
class AmqpLink:
    """The owner sets the handlers: ``on_message`` for a message (number, data, settled, state), ``on_large``
    for the first frames of a large one (number, data), ``on_oversize`` for one that exceeds ``bytes_max``
    (state), ``on_budget_exceeded`` if too many bytes of messages are incomplete, ``on_aborted`` for a message
    that the peer aborted, ``on_credit`` when the link may send more or has to drain.
    """

    session: AmqpSession
    key: LinkKey
    namesake: AmqpLink | None = None  # the link of another session that had this key
    peer_detached: bool | None = None  # whether the peer closed it with its detach
    problem: errors.MusterError | None = None  # why it is refused
    overdrawn: bool = False  # the peer sent a message while it was being attached
    incomplete: bool = False  # its attach named some of its unsettled deliveries only
    can_reject: bool = True  # the peer knows this outcome of what it sends
    default_outcome: bytes | None = None  # of messages that the peer settles without an outcome
    wrapper: Any = None
    handle: int | None = None  # of this side, while it is open
    lead: bytes = b""  # common beginning of its transfers
    credit: int = 0
    delivered: int = 0
    drain: bool = False
    send_mode: int | None = None  # of the peer: it settles nothing (0) or everything (1)
    settles_second: bool = False  # of the messages that it receives: after the peer has settled them
    parts: bytearray = field(
        default_factory=bytearray
    )  # of the message that is incomplete; a list would not limit their number
    partial: tuple[int, bool, bytes | None] | None = None
    identity: tuple[bytes | None, int | None] = (None, None)  # tag and format of that message
    size: int = 0  # of the message that is incomplete, so far
    bytes_max: int = _UNLIMITED  # of a message that it receives
    on_oversize: Callable[[bytes | None], None] = ignore
    on_message: Callable[[int, bytes, bool, bytes | None], None] = ignore
    large: LargeMessageReceiver | None = None  # for the rest of the message that is incomplete
    on_large: Callable[[int, bytes], LargeMessageReceiver] | None = None
    on_budget_exceeded: Callable[[], None] = ignore
    on_aborted: Callable[[], None] = ignore
    on_credit: Callable[[], None] = ignore

    def opened(self, channel: int, handle: int) -> None:
        self.handle, self.lead = handle, frames.transfer_lead(channel, handle)

    def shut(self) -> None:
        self.handle, self.lead = None, b""

    def add(self, part: bytes, settled: bool, state: bytes | None, *, more: bool, aborted: bool) -> None:
        """Add a part of an incomplete message."""
        assert self.partial is not None, "no message has been started"
        number, was_settled, before = self.partial
        settled, state = settled or was_settled, before if state is None else state
        self.size += len(part)
        if self.size > self.bytes_max and not aborted:
            self.on_oversize(state)
            return
        if self.large is not None:
            receiver = self.large
            receiver.add(part)
            if aborted or not more:
                self.drop_parts()
                receiver.end(settled, state, aborted=aborted)
            if aborted:
                self.on_aborted()
            return
        self.parts += part
        fits = self.session.budget.add_unfinished(len(part))
        if len(self.parts) > LARGE_BYTES and self.on_large is not None and not aborted:
            data, partial, size = bytes(self.parts), self.partial, self.size
            self.drop_parts()
            receiver = self.on_large(number, data)
            if more:
                self.partial, self.large, self.size = partial, receiver, size
            else:
                receiver.end(settled, state, aborted=False)
        elif more and not aborted:
            if not fits:
                self.on_budget_exceeded()
        else:
            data = bytes(self.parts)
            self.drop_parts()
            if aborted:
                self.on_aborted()
            else:
                self.on_message(number, data, settled, state)

    def misuse(self, number: int | None, tag: bytes | None, form: int | None, settled: bool) -> str | None:
        """What is wrong with the numbers of a transfer that begins or continues a message. Proton's clients
        write an empty tag of a settled message as none.
        """
        if self.partial is None:
            if number is None or (tag is None and not settled):
                return "the first transfer of a message without a delivery-id or a delivery-tag"
            if tag is not None and (tag[0] != 0xA0 or len(tag) > 2 + TAG_BYTES_MAX):
                return f"a delivery-tag that is not a binary of at most {TAG_BYTES_MAX} bytes"
            if form:
                return f"the message-format {form}: 0 is the only one"
        elif number not in (None, self.partial[0]):
            return f"message {number} begins before the one before it ends"
        elif tag not in (None, self.identity[0]) or form not in (None, self.identity[1] or 0):
            return "the delivery-tag or message-format has changed within a message"
        return None

    def drop_parts(self) -> None:
        """Remove the parts of a message that is complete or aborted."""
        self.session.budget.remove_unfinished(len(self.parts))
        self.parts.clear()
        self.partial, self.large, self.size = None, None, 0

    def abort(self) -> None:
        """The message that is incomplete will not be completed."""
        if self.large is not None:
            self.large.end(True, None, aborted=True)
        self.drop_parts()

    def detach(self) -> None:
        """Release the link. This breaks the reference cycle with its owner, so that objects of the proton
        library are freed here, not by the garbage collector in another thread.
        """
        self.shut()
        self.abort()
        self.credit = 0
        self.on_large = None
        self.on_message = self.on_credit = self.on_budget_exceeded = self.on_aborted = ignore
        self.on_oversize = ignore
