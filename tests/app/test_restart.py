"""A domain that a service manager restarts after a crash: only its brokers and resources run on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from muster.app import home
from muster.bus.http import client as http_client
from muster.supervision import os_process
from muster.testing.eventually import eventually
from tests.cli import driver

SETTINGS = ("web.enabled=false", "manage.managers=1", "manage.registries=1", "notify.enabled=false")


@contextlib.asynccontextmanager
async def started(folder: Path, notify: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """``muster up``, as systemd starts it."""
    environment = {**os.environ, **driver.environment(folder), "NOTIFY_SOCKET": str(notify)}
    with (folder.parent / "output").open("ab") as output:
        process = await asyncio.to_thread(
            subprocess.Popen,
            driver.command_line("--home", folder, "up"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


async def status(folder: home.DomainFolder, pid: int) -> dict[str, Any]:
    async def page() -> dict[str, Any]:
        running = await asyncio.to_thread(folder.running)
        if running is None or running.pid != pid:
            return {}
        shown: dict[str, Any] = (await http_client.get(f"{running.health_url}/status")).json()
        ready = shown["ready"] and all(row["state"] == "running" for row in shown["management"])
        return shown if ready else {}

    return await eventually(page, timeout_s=120)


def pids(shown: dict[str, Any], rows: str) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in shown[rows]}


async def test_a_restarted_domain_adopts_its_brokers_and_replaces_its_other_processes(tmp_path: Path):
    root, notify = tmp_path / "home", tmp_path / "notify"
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    assert (await asyncio.to_thread(driver.run, "init", "--port", "0", *options, home=root)).code == 0
    folder = home.DomainFolder(root / "local")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(notify))
        async with started(root, notify) as first:
            before = await status(folder, first.pid)
            frozen = pids(before, "management")["registry-1"]
            os.kill(frozen, signal.SIGSTOP)
            first.kill()
            await asyncio.to_thread(first.wait)
        async with started(root, notify) as second:
            after = await status(folder, second.pid)
            assert pids(after, "brokers") == pids(before, "brokers")
            assert not set(pids(after, "management").values()) & set(pids(before, "management").values())
            assert not os_process.start_time(frozen), "it would act again later"
        assert not any(map(os_process.start_time, pids(after, "brokers").values())), "a regular stop"
