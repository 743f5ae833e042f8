"""Clients from which nothing comes but acknowledgements are read less often, and then more at once.

A client that receives much mostly acknowledges each message in a packet of its own, and to read a packet
costs more than to understand it.  Nobody waits for these, so after some of them nothing is read from that
client for a moment.  From a client that says anything else is read as it comes: somebody may wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Final

PAUSE_S: Final = 0.002
ACCEPTED_MAX: Final = 8  # messages, within that time


class ReadSchedule:
    """Those of all clients end together."""

    def __init__(self) -> None:
        self._paused: list[asyncio.Transport] = []

    def pause(self, socket: asyncio.Transport) -> None:
        if not self._paused:
            asyncio.get_running_loop().call_later(PAUSE_S, self._end)
        self._paused.append(socket)
        socket.pause_reading()

    def _end(self) -> None:
        paused, self._paused = self._paused, []
        for socket in paused:
            if not socket.is_closing():
                socket.resume_reading()


class ReadObserver:
    """Hears of each read from one client how many messages it accepted; 0: that was not all it said."""

    def __init__(self, schedule: ReadSchedule, socket: asyncio.Transport) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._schedule = schedule
        self._socket = socket
        self._accepted = 0
        self._until_s = 0.0

    def on_read(self, accepted: int) -> None:
        if not accepted:
            self._accepted = 0
            return
        now_s = self._now_s()
        if now_s > self._until_s:
            self._accepted, self._until_s = 0, now_s + PAUSE_S
        self._accepted += accepted
        if self._accepted >= ACCEPTED_MAX:
            self._schedule.pause(self._socket)
