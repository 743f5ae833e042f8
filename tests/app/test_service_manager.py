"""Reports to systemd, on a socket as systemd makes it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from muster.app import service_manager
from muster.testing.eventually import eventually


@pytest.fixture
def systemd(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(tmp_path / "notify"))
        yield listener


def reports(systemd: socket.socket) -> list[str]:
    received = []
    while True:
        try:
            received.append(systemd.recv(100).decode())
        except BlockingIOError:
            return received


async def test_a_process_reports_that_it_works_until_it_ends(systemd):
    environment = {
        "NOTIFY_SOCKET": systemd.getsockname(),
        "WATCHDOG_USEC": "30000",
        "WATCHDOG_PID": "1",
        "HOME": "/",
    }
    manager = service_manager.ServiceManager(environment)
    assert environment == {"HOME": "/"}, "children must not report for their parent"
    seen: list[str] = []

    def alive() -> bool:
        seen.extend(reports(systemd))
        return seen.count(service_manager.ALIVE) >= 3

    async with manager.reporting():
        manager.notify(service_manager.READY)
        await eventually(alive)
        manager.notify(service_manager.STOPPING)
        seen.clear()
        await eventually(alive)
    assert service_manager.STOPPING in seen
    reports(systemd)
    await asyncio.sleep(0)
    assert reports(systemd) == []


@pytest.mark.may_block(reason="a process that hardly gets processor time")
async def test_a_process_that_starts_or_was_late_gets_more_time(systemd, monkeypatch):
    monkeypatch.setattr(service_manager, "CALM_S", 0.2)
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "500000"}
    times: list[str] = []

    def asked() -> list[str]:
        times.extend(report for report in reports(systemd) if report.startswith("WATCHDOG_USEC"))
        return times

    manager = service_manager.ServiceManager(environment)
    async with manager.reporting():
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)  # its start takes long
        await eventually(lambda: asked() == ["WATCHDOG_USEC=3000000"])
        manager.notify(service_manager.READY)
        await eventually(lambda: asked() == ["WATCHDOG_USEC=3000000", "WATCHDOG_USEC=500000"])
        times.clear()
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)
        await eventually(lambda: asked()[:1] == ["WATCHDOG_USEC=3000000"])


async def test_without_systemd_nothing_is_sent():
    manager = service_manager.ServiceManager({})
    async with manager.reporting():
        manager.notify(service_manager.READY)


async def test_a_socket_that_is_gone_ends_nothing(tmp_path: Path):
    manager = service_manager.ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    manager.notify(service_manager.READY)
