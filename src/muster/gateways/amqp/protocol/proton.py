"""Binding to the C functions of proton: frames in, events out, frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import proton
from cproton_ffi import ffi, lib

Pointer: TypeAlias = Any  # a pointer to a proton object; compared and hashed by value

_BUFFER_BYTES: Final = 1 << 16
_IGNORED: Final = (lib.PN_TRANSPORT, lib.PN_LINK_FLOW, lib.PN_DELIVERY)


class ProtonTransport:
    """The server side of a connection. ``on_event`` is called with an event and its link, if any, but not for
    frames that transfer messages.
    """

    def __init__(
        self, idle_s: float, frame_bytes_max: int, on_event: Callable[[proton.Event, Pointer], None]
    ) -> None:
        self.connection = proton.Connection()
        self._collector = proton.Collector()
        self.connection.collect(self._collector)
        self.transport = proton.Transport(proton.Transport.SERVER)
        self.transport.max_frame_size = frame_bytes_max
        self.transport.idle_timeout = idle_s
        self.transport.bind(self.connection)
        self._raw_transport = self.transport._impl
        self._raw_collector = self._collector._impl
        self._buffer = ffi.new(f"char[{_BUFFER_BYTES}]")
        self._on_event = on_event
        self._greeted = False
        self._rest = b""
        self.ended = False  # it produces no more output

    def push(self, data: bytes) -> bool:
        """False: proton did not accept all of it."""
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
        while (event := lib.pn_collector_peek(collector)) != ffi.NULL:
            if lib.pn_event_type(event) not in _IGNORED:
                self._on_event(proton.Event.wrap(event), lib.pn_event_link(event))
            lib.pn_collector_pop(collector)

    def pull(self) -> Iterator[bytes]:
        """The output: the protocol header, and frames."""
        transport, buffer = self._raw_transport, self._buffer
        while (size := lib.pn_transport_pending(transport)) > 0:
            size = lib.pn_transport_peek(transport, buffer, min(size, _BUFFER_BYTES))
            if size <= 0:
                break
            self._rest += ffi.buffer(buffer, size)[:]
            lib.pn_transport_pop(transport, size)
        self.ended = size < 0
        data = self._rest
        if data:
            at = 0
            if not self._greeted and len(data) >= 8:
                self._greeted = True
                yield data[:8]
                at = 8
            while len(data) - at >= 8 and (end := at + int.from_bytes(data[at : at + 4], "big")) <= len(data):
                yield data[at:end]
                at = end
            self._rest = data[at:]
