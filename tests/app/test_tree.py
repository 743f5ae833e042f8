"""A bootstrap tree of real processes: a killed child is restarted, and continues without its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster.app import home
from muster.app.supervisor import domain_tree
from muster.manage import settings
from muster.testing.eventually import eventually
from tests.cli import driver


def pid_in(root: Path) -> Any:
    for lock in root.glob("**/run/lock"):
        folder = home.DomainFolder(lock.parents[1])
        if folder.running() is not None:
            return folder.holder()
    return None


def has_ended(pid: int) -> bool:
    """Also if it was not waited for: its parent was killed, and this process is its parent now."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
async def test_a_child_is_kept_alive_and_outlives_its_parent(tmp_path, start_process):
    top, below = tmp_path / "top", tmp_path / "below"
    for place in (top, below):
        assert driver.quick("init", "--port", "0", "--home", place, home=place).code == 0
    children = f"manage.children={below}"
    up = driver.command_line("up", "--home", top, "--set", children)

    async def begin() -> Any:
        return await start_process(*up, env=driver.environment(top))

    parent = await begin()
    first = await eventually(lambda: pid_in(below), timeout_s=40)
    os.kill(first, signal.SIGKILL)
    second = await eventually(lambda: (pid_in(below) or first) != first and pid_in(below), timeout_s=40)
    os.kill(parent.pid, signal.SIGKILL)
    await eventually(lambda: pid_in(top) is None)
    assert pid_in(below) == second, "the child carries on"
    parent = await begin()
    await parent.line("is up", timeout_s=60)
    assert pid_in(below) == second, "and is found again"
    os.kill(parent.pid, signal.SIGTERM)
    await eventually(lambda: has_ended(second), timeout_s=40)


@pytest.mark.parametrize("by_hand", [True, False])
async def test_a_child_that_was_started_by_hand_is_not_ended_for_its_silence(
    by_hand, tmp_path, start_process, monkeypatch
):
    words = [] if by_hand else ["--set", f"{domain_tree.PARENT}127.0.0.1:1"]
    code = "import time; print('ready'); time.sleep(600)"
    child = await start_process(sys.executable, "-c", code, *words)
    await child.line("ready")
    monkeypatch.setattr(domain_tree, "_pid_of", lambda _: child.pid)
    monkeypatch.setattr(domain_tree, "SILENT_S", 0.0)
    home_ = str(tmp_path)
    parent = domain_tree.ParentNode(settings.ManageSettings(children=(home_,)))
    await parent._supervise(home_)
    try:
        assert await parent._is_heard(home_) is by_hand
        if by_hand:
            parent._last_beat_s[home_] = 0.0
            assert not await parent._is_heard(home_), "one that beats is expected to go on beating"
            del parent._last_beat_s[home_]
    finally:
        await parent.stop()
    if by_hand:
        os.kill(child.pid, 0)  # it runs
    else:
        await eventually(lambda: child.exit_code is not None)


@pytest.mark.virtual_time
async def test_a_machine_that_was_paused_does_not_end_its_children(tmp_path):
    home_, loop = str(tmp_path), asyncio.get_running_loop()
    parent = domain_tree.ParentNode(settings.ManageSettings(children=(home_,)))
    parent._last_beat_s[home_] = loop.time()
    assert await parent._is_heard(home_)
    await asyncio.sleep(2 * domain_tree.SILENT_S)  # neither a probe nor a heartbeat
    for _ in range(int(domain_tree.SILENT_S) + 1):
        assert await parent._is_heard(home_)
        await asyncio.sleep(domain_tree.BEAT_S)
    assert not await parent._is_heard(home_), "it has been silent since the pause"
