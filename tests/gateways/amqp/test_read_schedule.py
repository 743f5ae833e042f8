"""Clients that send only acknowledgements are read less often; all others are read immediately."""

from __future__ import annotations

from typing import Any

import pytest

from muster.gateways.amqp import read_schedule
from muster.testing import eventually


class Socket:
    def __init__(self) -> None:
        self.reading = True
        self.closing = False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing


async def test_reading_pauses_after_several_acknowledgements():
    sockets: Any = [Socket(), Socket(), Socket()]
    schedule = read_schedule.ReadSchedule()
    observers = [read_schedule.ReadObserver(schedule, socket) for socket in sockets]
    observers[0].on_read(read_schedule.ACCEPTED_MAX)
    observers[1].on_read(read_schedule.ACCEPTED_MAX - 1)
    observers[1].on_read(0)  # the read contained a message
    observers[1].on_read(read_schedule.ACCEPTED_MAX - 1)
    observers[2].on_read(read_schedule.ACCEPTED_MAX)
    assert [socket.reading for socket in sockets] == [False, True, False]
    sockets[2].closing = True
    await eventually.eventually(lambda: sockets[0].reading, timeout_s=30)
    assert not sockets[2].reading


async def test_a_client_with_few_acknowledgements_is_not_paused(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    socket: Any = Socket()
    observer = read_schedule.ReadObserver(read_schedule.ReadSchedule(), socket)
    monkeypatch.setattr(observer, "_now_s", lambda: now_s)
    for _ in range(3 * read_schedule.ACCEPTED_MAX):
        observer.on_read(1)
        now_s += read_schedule.PAUSE_S
    assert socket.reading
