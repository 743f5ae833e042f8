"""A broker with a configuration of its own, as the unit muster-broker.service runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

from muster.app import service_manager
from muster.app.brokers import external_broker
from muster.bus.brokers import broker, config, files, monitor, ports
from muster.supervision import children
from muster.testing.eventually import eventually


async def test_a_frozen_broker_is_replaced_until_it_is_stopped(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(broker, "PROBE_POLICY", children.ProbePolicy(period_s=0.05, failures_max=1))
    monkeypatch.setattr(monitor, "SILENT_S", 0.3)
    monkeypatch.setattr(monitor, "CONFIRM_S", 0.2)
    held: ports.Held = {}
    settings = ports.reserve(config.BrokerConfig(name="b", directory=tmp_path / "b"), held)
    files.prepare(settings)
    ports.release(held)
    url = f"http://127.0.0.1:{settings.monitor_port}"

    async def pid() -> int:
        with_pid = await monitor.health(url)
        return int(settings.pid_path.read_text()) if with_pid.ok else 0

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        stop = asyncio.Event()
        running = asyncio.create_task(external_broker.run(settings.config_path, stop, monitor_url=url))
        first = await eventually(pid)
        await eventually(lambda: service_manager.READY.encode() == _report(systemd), what="ready")
        os.kill(first, signal.SIGSTOP)

        async def replaced() -> bool:
            return await pid() not in (0, first)

        await eventually(replaced, timeout_s=30)
        stop.set()
        await running
        await eventually(lambda: service_manager.STOPPING.encode() == _report(systemd), what="stopping")
    assert not (await monitor.health(url)).ok


def _report(systemd: socket.socket) -> bytes:
    try:
        return systemd.recv(100)
    except BlockingIOError:
        return b""
