"""From whom only acknowledgements come is read less often; from everyone else as it comes."""

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


async def test_after_some_acknowledgements_there_is_a_lull():
    sockets: Any = [Socket(), Socket(), Socket()]
    quiet = read_schedule.ReadSchedule()
    ears = [read_schedule.ReadObserver(quiet, one) for one in sockets]
    ears[0].on_read(read_schedule.ACCEPTED_MAX)
    ears[1].on_read(read_schedule.ACCEPTED_MAX - 1)
    ears[1].on_read(0)  # a message, say
    ears[1].on_read(read_schedule.ACCEPTED_MAX - 1)
    ears[2].on_read(read_schedule.ACCEPTED_MAX)
    assert [one.reading for one in sockets] == [False, True, False]
    sockets[2].closing = True
    await eventually.eventually(lambda: sockets[0].reading, timeout_s=30)
    assert not sockets[2].reading


async def test_a_few_now_and_then_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    socket: Any = Socket()
    ear = read_schedule.ReadObserver(read_schedule.ReadSchedule(), socket)
    monkeypatch.setattr(ear, "_now_s", lambda: now_s)
    for _ in range(3 * read_schedule.ACCEPTED_MAX):
        ear.on_read(1)
        now_s += read_schedule.PAUSE_S
    assert socket.reading
