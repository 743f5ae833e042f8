"""Several processes on one port."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from muster.app.supervisor import port_workers
from muster.core import errors
from muster.testing import child_process
from muster.testing.eventually import eventually

HOST = "127.0.0.1"
WORKER = """
import os, socket, sys, threading
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), reuse_port=True)
def serve():
    while True:
        client, _ = listener.accept()
        with client:
            client.sendall(str(os.getpid()).encode())
threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
PARENT = f"""
import asyncio, sys
from muster.app.supervisor import port_workers
async def main():
    async with port_workers.PortWorkers([sys.executable, "-c", {WORKER!r}], "127.0.0.1", 0, 2) as workers:
        print(*workers.pids, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


# The same with a health page, whose address it publishes in a folder under a name of its own.
PROBED_WORKER = """
import asyncio, os, pathlib, sys
from muster.bus.http import health
from muster.core.settings import domain
from muster.core.telemetry import metrics
async def main():
    pages = health.serve_process(
        domain.HealthSettings(), process=f"worker-{os.getpid()}", conditions=dict,
        metrics=metrics.Metrics(), folder=pathlib.Path(sys.argv[1]),
    )
    async with pages:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def workers(count: int, port: int = 0, *, share_port: bool = False) -> port_workers.PortWorkers:
    return port_workers.PortWorkers([sys.executable, "-c", WORKER], HOST, port, count, share_port=share_port)


def runs(pid: int) -> bool:
    """Whether a process runs. It may have ended without a parent that takes note."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def served_by(port: int) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    pid = int(await reader.read())
    writer.close()
    await writer.wait_closed()
    return pid


async def test_connections_are_distributed_and_a_killed_worker_is_replaced():
    async with workers(2) as serving:
        first = serving.pids

        async def served_by_all() -> bool:
            return {await served_by(serving.port) for _ in range(20)} == set(serving.pids)

        await eventually(served_by_all)
        os.kill(first[0], signal.SIGKILL)
        await eventually(lambda: serving.running == 2 and first[0] not in serving.pids)
        assert first[1] in serving.pids
        await eventually(served_by_all)
        pids = serving.pids
    assert not any(runs(pid) for pid in pids)


async def test_a_frozen_worker_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even one that is frozen before the first probe."""
    quick = dataclasses.replace(port_workers.PROBE_POLICY, period_s=0.05, timeout_s=1.0)
    monkeypatch.setattr(port_workers, "PROBE_POLICY", quick)
    command = [sys.executable, "-c", PROBED_WORKER, str(tmp_path)]
    async with port_workers.PortWorkers(command, HOST, 0, 2, pages=tmp_path) as serving:
        frozen, other = serving.pids
        os.kill(frozen, signal.SIGSTOP)
        await eventually(lambda: serving.running == 2 and frozen not in serving.pids)
        assert other in serving.pids
        assert not runs(frozen)


async def test_a_worker_that_is_frozen_at_its_start_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(port_workers, "START_S", 0.2)
    hangs = port_workers.PortWorkers([sys.executable, "-c", "input()"], HOST, 0, 1)
    with pytest.raises(errors.TimedOut, match="not ready"):
        async with hangs:
            pass


async def test_a_worker_that_fails_at_the_start_ends_the_others(tmp_path: Path):
    """The first one fails when the second one has begun, which never becomes ready."""
    program = (
        "import os, pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "try:\n"
        "    (folder / 'first').touch(exist_ok=False)\n"
        "except FileExistsError:\n"
        "    (folder / 'writing').write_text(str(os.getpid()))\n"
        "    (folder / 'writing').rename(folder / 'second')\n"
        "    sys.stdin.read()\n"
        "while not (folder / 'second').exists():\n"
        "    time.sleep(0.01)\n"
    )
    with pytest.raises(errors.Unavailable, match="ended with code 0"):
        async with port_workers.PortWorkers([sys.executable, "-c", program], HOST, 0, 2):
            pass
    assert not runs(int((tmp_path / "second").read_text()))


async def test_a_port_is_shared_with_other_gateways_only_on_request():
    async with workers(1, share_port=True) as serving:
        with pytest.raises(errors.Unavailable, match=f"port {serving.port} of {HOST} is in use"):
            async with workers(1, serving.port):
                pass
        async with workers(1, serving.port, share_port=True) as other:
            assert other.port == serving.port


async def test_a_worker_that_cannot_start_is_reported():
    failing = port_workers.PortWorkers([sys.executable, "-c", "raise SystemExit(3)"], HOST, 0, 2)
    with pytest.raises(errors.Unavailable, match="ended with code 3"):
        async with failing:
            pass


async def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    async with await child_process.start(sys.executable, "-c", PARENT, cwd=tmp_path) as parent:
        pids = [int(pid) for pid in (await parent.line(r"^(\d+) (\d+)$")).groups()]
        assert len(pids) == 2
        await parent.kill()
    await eventually(lambda: not any(runs(pid) for pid in pids))
