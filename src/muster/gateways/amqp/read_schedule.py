"""Clients that send only acknowledgements are read less often, and then more at once.

A client that receives many messages usually acknowledges each in its own packet, and reading a packet costs
more than processing it. Acknowledgements are not urgent, so after several of them the client is not read for
a short time. A client that sends anything else is read immediately, because it may wait for a reply.
"""

from __future__ import annotations

import asyncio
from typing import Final

PAUSE_S: Final = 0.002
ACCEPTED_MAX: Final = 8  # accepted messages within that time


class ReadSchedule:
    """Pauses reading; all pauses end together."""

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
    """Counts the messages accepted in each read of one client; 0: the read contained something else."""

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
