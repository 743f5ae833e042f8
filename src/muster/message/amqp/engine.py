"""Proton's engine without a socket: bytes in, events out, bytes out again.

What happens for every message (deliveries, dispositions, credit) is done on the C library itself: Python's
wrappers build five objects for each event, which costs more than everything else together.  What is seldom
(connections, sessions, links, transactions) goes through the wrappers, which read better.  The pointers that
go with messages (`Pointer`) are compared and hashed by value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import proton
from cproton_ffi import ffi, lib

Pointer: TypeAlias = Any

ACCEPTED: Final = 0x24
REJECTED: Final = 0x25
MODIFIED: Final = 0x27
TRANSACTIONAL: Final = 0x34
FRAME_BYTES_MAX: Final = 64 << 10  # a session lets in as many frames as its bytes hold of the largest
_OUT_BYTES: Final = 1 << 18
_IN_BYTES: Final = 1 << 16
_in: Final = ffi.new(f"char[{_IN_BYTES}]")  # used within one call only

# Called for every message, so by names of their own.
link_credit = lib.pn_link_credit
link_flow = lib.pn_link_flow
settle = lib.pn_delivery_settle
remote_state = lib.pn_delivery_remote_state
is_settled = lib.pn_delivery_settled


class Engine:
    """``on_delivery`` hears of a delivery and its link, ``on_flow`` of a link, ``on_event`` of all else."""

    def __init__(
        self,
        idle_s: float,
        on_delivery: Callable[[Pointer, Pointer], None],
        on_flow: Callable[[Pointer], None],
        on_event: Callable[[Any], None],
    ) -> None:
        self.connection = proton.Connection()
        self._collector = proton.Collector()
        self.connection.collect(self._collector)
        self.transport = proton.Transport(proton.Transport.SERVER)
        self.transport.max_frame_size = FRAME_BYTES_MAX
        self.transport.idle_timeout = idle_s
        self.transport.bind(self.connection)
        self._raw_transport = self.transport._impl
        self._raw_collector = self._collector._impl
        self._out = ffi.new(f"char[{_OUT_BYTES}]")
        self._on_delivery = on_delivery
        self._on_flow = on_flow
        self._on_event = on_event
        self._tags = 0

    @property
    def closed(self) -> bool:
        return bool(self.transport.closed)

    def push(self, data: bytes) -> bool:
        """Take in what the peer sent. False: it broke the protocol."""
        transport = self._raw_transport
        view = ffi.from_buffer(data)
        at, size = 0, len(data)
        while at < size:
            room = lib.pn_transport_capacity(transport)
            if room <= 0:
                break
            taken = lib.pn_transport_push(transport, view + at, min(room, size - at))
            if taken < 0:
                break
            at += taken
            self.process()
        self.process()
        return at >= size

    def process(self) -> None:
        collector = self._raw_collector
        peek, pop, type_of, null = (
            lib.pn_collector_peek,
            lib.pn_collector_pop,
            lib.pn_event_type,
            ffi.NULL,
        )
        event = peek(collector)
        while event != null:
            kind = type_of(event)
            if kind == lib.PN_DELIVERY:
                delivery = lib.pn_event_delivery(event)
                self._on_delivery(delivery, lib.pn_delivery_link(delivery))
            elif kind == lib.PN_LINK_FLOW:
                self._on_flow(lib.pn_event_link(event))
            elif kind != lib.PN_TRANSPORT:
                self._on_event(proton.Event.wrap(event))
            pop(collector)
            event = peek(collector)

    def pull(self) -> tuple[bytes, bool]:
        """What is to be sent, and whether more may follow (False: the engine has said its last)."""
        transport, out = self._raw_transport, self._out
        parts = []
        while (size := lib.pn_transport_pending(transport)) > 0:
            size = lib.pn_transport_peek(transport, out, min(size, _OUT_BYTES))
            if size <= 0:
                break
            parts.append(ffi.buffer(out, size)[:])
            lib.pn_transport_pop(transport, size)
        return b"".join(parts), size >= 0

    def tick(self, now_s: float) -> None:
        self.transport.tick(now_s)

    # Messages.

    def send(self, link: Pointer, data: bytes, *, settled: bool) -> Pointer:
        self._tags = (self._tags + 1) & 0xFFFFFFFF
        tag = self._tags.to_bytes(4, "big")
        delivery = lib.pn_delivery(link, (4, ffi.from_buffer(tag)))
        lib.pn_link_send(link, data, len(data))
        lib.pn_link_advance(link)
        if settled:
            settle(delivery)
        return delivery


def receive(link: Pointer, delivery: Pointer) -> bytes | None:
    """The message, if it is there as a whole."""
    if not lib.pn_delivery_readable(delivery) or lib.pn_delivery_partial(delivery):
        return None
    size = lib.pn_delivery_pending(delivery)
    if not size and lib.pn_delivery_aborted(delivery):
        lib.pn_link_advance(link)
        settle(delivery)
        return None
    buffer = _in if size <= _IN_BYTES else ffi.new("char[]", size)
    lib.pn_link_recv(link, buffer, size)
    data: bytes = ffi.buffer(buffer, size)[:]
    lib.pn_link_advance(link)
    return data


def pending_bytes(delivery: Pointer) -> int:
    return int(lib.pn_delivery_pending(delivery))


def accept(delivery: Pointer) -> None:
    lib.pn_delivery_update(delivery, ACCEPTED)
    settle(delivery)


def is_updated(delivery: Pointer) -> bool:
    return bool(lib.pn_delivery_updated(delivery))


def is_draining(link: Pointer) -> bool:
    return bool(lib.pn_link_get_drain(link))


def drained(link: Pointer) -> None:
    lib.pn_link_drained(link)


def wrapped(delivery: Pointer) -> Any:
    """The delivery as an object, for what is seldom done with one."""
    return proton.Delivery.wrap(delivery)
