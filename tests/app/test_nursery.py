"""The fork server: one process for each request that was waited for, and none besides."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster.app.supervisor import fork_server, worker
from muster.core import errors
from muster.testing.eventually import eventually

# A child of the fork server that waits for its lifeline: it needs no domain.
IDLE = """
import asyncio, os, sys
from muster.app.supervisor import fork_server, worker

async def idle(task, lifeline, ready):
    ready()
    await asyncio.to_thread(os.read, lifeline, 1)

worker.run_worker = idle
sys.argv[0] = "fork_server"
fork_server.main()
"""


def task(tmp_path: Path, name: str) -> worker.WorkerConfig:
    log_file = str(tmp_path / f"{name}.log")
    return worker.WorkerConfig(
        kind="agent", name=name, servers=(), creds="", known_as=name, log_file=log_file
    )


def log_of(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/fd/2").readlink().stem


@pytest.fixture
async def made(monkeypatch, tmp_path):
    create = asyncio.create_subprocess_exec

    async def idle(*words: Any, **options: Any) -> Any:
        program, _, _, lifeline = words
        return await create(program, "-c", IDLE, lifeline, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", idle)
    ready: list[str] = []
    server = fork_server.ForkServer(ready.append)
    server.ready = ready  # type: ignore[attr-defined]
    yield server
    await server.close()


@pytest.mark.may_block(reason="the test looks at processes")
async def test_a_process_that_starts_too_late_is_ended(made, monkeypatch, tmp_path):
    first = await made.spawn("a", task(tmp_path, "a-1"))
    await eventually(lambda: made.ready == ["a"])
    os.kill(first, signal.SIGKILL)
    nest = psutil.Process(made.pid)
    nest.suspend()
    monkeypatch.setattr(fork_server, "START_S", 0.05)
    with pytest.raises(errors.TimedOut):
        await made.spawn("a", task(tmp_path, "a-2"))
    monkeypatch.setattr(fork_server, "START_S", 20.0)
    again = asyncio.create_task(made.spawn("a", task(tmp_path, "a-3")))
    await asyncio.sleep(0)
    nest.resume()
    pid = await again

    def only_the_last() -> bool:
        return [log_of(child) for child in nest.children()] == ["a-3"]

    await eventually(only_the_last)
    assert pid == nest.children()[0].pid
    await eventually(lambda: made.ready == ["a", "a"])
