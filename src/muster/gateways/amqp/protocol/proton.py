"""The library's part of a connection: frames in, events out, frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import proton

_IGNORED: Final = (proton.Event.TRANSPORT, proton.Event.LINK_FLOW, proton.Event.DELIVERY)


class ProtonTransport:
    """The server side of a connection. ``on_event`` is called with each event, but not for frames that
    transfer messages.
    """

    def __init__(self, idle_s: float, frame_bytes_max: int, on_event: Callable[[proton.Event], None]) -> None:
        self.connection = proton.Connection()
        self._collector = proton.Collector()
        self.connection.collect(self._collector)
        self.transport = proton.Transport(proton.Transport.SERVER)
        self.transport.max_frame_size = frame_bytes_max
        self.transport.idle_timeout = idle_s
        self.transport.bind(self.connection)
        self._on_event = on_event
        self._greeted = False
        self._rest = b""
        self.ended = False  # it produces no more output

    def push(self, data: bytes) -> bool:
        """False: proton did not accept all of it."""
        at = 0
        try:
            while at < len(data) and (room := self.transport.capacity()) > 0:
                self.transport.push(data[at : at + room])
                at += room
                self.process()
        except proton.ProtonException:
            at = 0
        self.process()
        return at >= len(data)

    def process(self) -> None:
        collector = self._collector
        while (event := collector.peek()) is not None:
            if event.type not in _IGNORED:
                self._on_event(event)
            collector.pop()

    def pull(self) -> Iterator[bytes]:
        """The output: the protocol header, and frames."""
        transport = self.transport
        while (size := transport.pending()) > 0:
            self._rest += transport.peek(size) or b""
            transport.pop(size)
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
