"""The fork server: exactly one process for each request."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster.app import settings as app_settings
from muster.app.supervisor import fork_server, worker_config
from muster.core import errors
from muster.core.settings import loader
from muster.testing.eventually import eventually

# A child of the fork server that waits for its lifeline: it needs no domain.
IDLE = """
import asyncio, os, sys, time
from muster.app.supervisor import fork_server, worker

async def idle(task, lifeline, ready):
    if task.name == "noisy":
        print("printed", flush=True)
        os.system("echo printed by a child")
    ready()
    await asyncio.to_thread(os.read, lifeline, 1)

def send(*message):
    while os.path.exists("delay"):
        time.sleep(0.01)
    send_now(*message)

send_now, fork_server._send = fork_server._send, send
worker.run_worker = idle
sys.argv[0] = "fork_server"
fork_server.main()
"""


def task(tmp_path: Path, name: str) -> worker_config.WorkerConfig:
    made = loader.load(app_settings.Settings, flags={"domain.data_dir": str(tmp_path)})
    task = worker_config.WorkerConfig(component="agent", settings=made, process=name)
    task.log_file.parent.mkdir(parents=True, exist_ok=True)
    return task


def log_of(process: psutil.Process, folder: Path) -> str:
    """The name of the log in this folder that the process writes."""
    try:
        log = Path(f"/proc/{process.pid}/fd/2").readlink()
    except OSError:
        return ""
    return log.stem if log.parent == folder else ""


@pytest.fixture
def ready() -> list[str]:
    return []


@pytest.fixture
async def made(monkeypatch, tmp_path):
    create = asyncio.create_subprocess_exec

    async def idle(*words: Any, **options: Any) -> Any:
        program, _, _, lifeline = words
        return await create(program, "-c", IDLE, lifeline, cwd=tmp_path, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", idle)
    server = fork_server.ForkServer()
    yield server
    if server.pid is not None and psutil.pid_exists(server.pid):
        await server.close()


async def test_what_a_process_prints_is_in_its_log_and_no_message(made, tmp_path, ready):
    for name in ("noisy", "quiet"):
        await made.spawn(name, task(tmp_path, name), ready.append)
    await eventually(lambda: sorted(ready) == ["noisy", "quiet"])
    printed = await asyncio.to_thread(task(tmp_path, "noisy").log_file.read_text)
    assert printed == "printed\nprinted by a child\n"


@pytest.mark.may_block(reason="the test looks at processes")
async def test_a_frozen_fork_server_is_replaced(made, monkeypatch, tmp_path, ready):
    first = await made.spawn("a", task(tmp_path, "a"), ready.append)
    frozen = psutil.Process(made.pid)
    frozen.suspend()
    monkeypatch.setattr(fork_server, "START_S", 0.05)
    with pytest.raises(errors.TimedOut):
        await made.spawn("b", task(tmp_path, "b-1"), ready.append)
    monkeypatch.setattr(fork_server, "START_S", 20.0)
    pid = await made.spawn("b", task(tmp_path, "b-2"), ready.append)
    assert made.pid != frozen.pid
    assert [child.pid for child in psutil.Process(made.pid).children()] == [pid]
    assert psutil.pid_exists(first)  # not affected


@pytest.mark.may_block(reason="the test looks at processes")
async def test_a_frozen_fork_server_does_not_delay_the_end(made, tmp_path, ready):
    await made.spawn("a", task(tmp_path, "a"), ready.append)
    nest = psutil.Process(made.pid)
    nest.suspend()
    await asyncio.wait_for(made.close(), 20)
    assert not nest.is_running()


@pytest.mark.may_block(reason="the test looks at processes")
async def test_a_process_that_starts_too_late_is_ended(made, monkeypatch, tmp_path, ready):
    first = await made.spawn("a", task(tmp_path, "a-1"), ready.append)
    await eventually(lambda: ready == ["a"])
    os.kill(first, signal.SIGKILL)
    (tmp_path / "delay").touch()
    monkeypatch.setattr(fork_server, "START_S", 0.05)
    with pytest.raises(errors.TimedOut):
        await made.spawn("a", task(tmp_path, "a-2"), ready.append)
    monkeypatch.setattr(fork_server, "START_S", 20.0)
    again = asyncio.create_task(made.spawn("a", task(tmp_path, "a-3"), ready.append))
    await asyncio.sleep(0)
    (tmp_path / "delay").unlink()
    pid = await again

    def logs() -> list[str]:
        running = (process for process in psutil.process_iter() if process.is_running())
        return [name for process in running if (name := log_of(process, tmp_path / "local" / "logs"))]

    await eventually(lambda: logs() == ["a-3"])
    assert psutil.pid_exists(pid)
    await eventually(lambda: ready == ["a", "a"])
