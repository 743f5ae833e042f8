"""A domain below another one: a resource of it, which is restarted, and continues without its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from muster.app import home
from muster.testing.eventually import eventually
from tests.cli import driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pid_in(root: Path) -> int | None:
    folders = (home.DomainFolder(lock.parents[1]) for lock in root.glob("*/run/lock"))
    return next((folder.holder() for folder in folders if folder.running() is not None), None)


def manifest(below: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = driver.command_line("up", "--log-file", "--home", below, "--set", f"health.port={port}")
    check = {"kind": "http", "url": f"http://127.0.0.1:{port}/livez", "every_s": 1, "timeout_s": 1}
    entry = {
        "name": "below",
        "type": "process",
        "agent": "local",
        "config": {
            "command": words,
            "environment": driver.environment(below),
            "health": check | {"start_s": 60},
            "stop_s": 30,
        },
    }
    return json.dumps({"resources": [entry]})


@pytest.mark.may_block(reason="it types commands")
async def test_a_domain_below_is_kept_alive_and_outlives_its_parent(tmp_path: Path, start_process: Any):
    top, below = tmp_path / "top", tmp_path / "below"
    for place in (top, below):
        assert driver.quick("init", "--port", "0", "--home", place, home=place).code == 0
    (tmp_path / "tree.yaml").write_text(manifest(below))
    up = driver.command_line("up", "--home", top)

    async def begin() -> Any:
        started = await start_process(*up, env=driver.environment(top))
        await started.line("is up", timeout_s=60)
        return started

    async def other_than(*pids: int) -> int:
        def pid() -> int:
            return 0 if (found := pid_in(below)) in (None, *pids) else found or 0

        return await eventually(pid, timeout_s=90)

    parent = await begin()
    applied = await asyncio.to_thread(
        driver.run, "apply", "-f", tmp_path / "tree.yaml", "--wait", "90s", home=top
    )
    assert applied.code == 0, applied.err
    first = await other_than()
    os.kill(first, signal.SIGKILL)
    second = await other_than(first)
    os.kill(second, signal.SIGSTOP)  # it runs, and does not reply
    third = await other_than(first, second)
    os.kill(parent.pid, signal.SIGKILL)
    await eventually(lambda: pid_in(top) is None)
    assert pid_in(below) == third, "it carries on"
    await begin()
    assert pid_in(below) == third, "and is found again"
    deleted = await asyncio.to_thread(driver.run, "delete", "below", "--wait", "60s", home=top)
    assert deleted.code == 0, deleted.err
    assert pid_in(below) is None
