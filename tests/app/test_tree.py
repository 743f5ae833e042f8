"""A bootstrap tree of real processes: a child comes back, and goes on when its parent falls."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from muster.app import home
from muster.testing.eventually import eventually
from tests.cli import driver


def pid_in(root: Path) -> Any:
    for lock in root.glob("**/run/lock"):
        folder = home.Folder(lock.parents[1])
        if folder.running() is not None:
            return folder.holder()
    return None


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
    await eventually(lambda: pid_in(top), timeout_s=40)
    assert pid_in(below) == second, "and is found again"
    os.kill(parent.pid, signal.SIGTERM)
    await eventually(lambda: pid_in(below) is None, timeout_s=40)
