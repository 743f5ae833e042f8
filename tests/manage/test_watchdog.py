"""The watchdog kills what a frozen or killed agent cannot stop. With real processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.manage.adapters import shim
from muster.manage.agent import deadlines, watchdog
from muster.supervision import os_process
from muster.testing.eventually import eventually, throughout


@pytest.fixture
def guard(tmp_path: pathlib.Path) -> Iterator[deadlines.WatchdogProcess]:
    made = deadlines.WatchdogProcess(tmp_path)
    yield made
    with contextlib.suppress(ProcessLookupError):
        if (pid := made._running()) is not None:
            os.kill(pid, signal.SIGKILL)
    if made._child is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(made._child, 0)


@contextlib.contextmanager
def run_of(folder: pathlib.Path, name: str, after_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a resource, as an agent records it."""
    mark = f"mark-{name}-{os.getpid()}"
    record = {"name": name, "stop_after_s": after_s, "mark": mark}
    (folder / f"{name}.json").write_text(json.dumps(record))
    environment = {**os.environ, os_process.MARK: mark}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_mark_is_that_of_processes():
    assert f"{os_process.MARK}=".encode() == watchdog.MARK


async def test_what_has_not_been_renewed_is_killed_and_nothing_else(guard, tmp_path):
    with (
        run_of(tmp_path, "moves", 5.0) as moving,
        run_of(tmp_path, "later", 500.0) as later,
        run_of(tmp_path, "bound", 0.0) as bound,
    ):
        now = watchdog.elapsed_s()
        await asyncio.to_thread(guard.keep, now, 5.0)
        await throughout(lambda: moving.poll() is None, for_s=1.0)
        await asyncio.to_thread(guard.keep, now - 5.0, 5.0)
        await eventually(lambda: moving.poll() == -signal.SIGKILL)
        assert (later.poll(), bound.poll()) == (None, None)


@pytest.mark.parametrize(
    "command", [["env", "-i", "sleep", "600"], ["sh", "-c", "setsid env -i sleep 600; true"]]
)
async def test_what_clears_its_environment_is_killed_too(guard, tmp_path, command):
    token = f"cleared-{os.getpid()}"
    record = {"name": "moves", "stop_after_s": 5.0, "mark": token}
    (tmp_path / "moves.json").write_text(json.dumps(record))
    leader = shim.spawn(
        command, os.environ, token=token, options=shim.RunOptions(), output=2, record=tmp_path / "exit"
    )

    def without_mark() -> set[int]:
        return watchdog.processes_of({watchdog.MARK + token.encode()}, set()) - set(os_process.members(token))

    cleared = await eventually(without_mark)
    await asyncio.to_thread(guard.keep, watchdog.elapsed_s() - 5.0, 5.0)
    await asyncio.to_thread(os.waitpid, leader, 0)
    await eventually(lambda: not any(map(os_process.start_time, cleared)))


@pytest.fixture
def engine_of(tmp_path):
    """The process that an engine keeps for a container; what runs in that has no mark."""
    id = f"{os.getpid():064x}"
    words = "env -i setsid sleep 600 & wait; echo; exec sleep 600"
    engine = subprocess.Popen(["sh", "-c", words, "conmon", "-c", id], stdout=subprocess.PIPE)
    yield id, engine
    engine.kill()
    engine.communicate()


async def test_what_runs_in_a_container_is_killed_and_its_engine_is_not(guard, tmp_path, engine_of):
    id, engine = engine_of
    record = {"name": "moves", "stop_after_s": 5.0, "runtime": {"container": id}}
    (tmp_path / "moves.json").write_text(json.dumps(record))
    (tmp_path / "odd.json").write_text(json.dumps({"stop_after_s": 5.0, "runtime": 1}))
    await eventually(lambda: watchdog.processes_of({id.encode()}, set()))
    await asyncio.to_thread(guard.keep, watchdog.elapsed_s() - 5.0, 5.0)
    assert await asyncio.to_thread(engine.stdout.read, 1), "its child has ended"
    assert engine.poll() is None


def test_a_look_follows_each_deadline_at_once():
    assert watchdog.wait_s([4.5], 0.0) == watchdog.TICK_S
    assert watchdog.wait_s([4.5], 4.2) == pytest.approx(0.3)
    assert watchdog.wait_s([4.5], 4.4999) == watchdog.WAIT_S_MIN
    assert watchdog.wait_s([4.5, 4.6], 4.5) == pytest.approx(0.1), "the next one, after the first has passed"
    assert watchdog.wait_s([4.5], 4.5) == watchdog.wait_s([], 1.0) == watchdog.TICK_S


async def test_what_is_overdue_is_killed_before_it_starts_elsewhere(guard, tmp_path):
    """The shortest time, 5 s, leaves half a second between the kill and the start elsewhere."""
    with run_of(tmp_path, "moves", 5.0) as moving, run_of(tmp_path, "next", 5.2) as later:
        renewed_at = watchdog.elapsed_s() - 3.5
        await asyncio.to_thread(guard.keep, renewed_at, 5.0)
        for process, after_s in ((moving, 5.0), (later, 5.2)):
            await eventually(process.poll)
            assert after_s * 0.9 <= watchdog.elapsed_s() - renewed_at < after_s


async def test_another_watchdog_takes_the_place_of_one_that_is_killed_or_frozen(guard, tmp_path):
    await asyncio.to_thread(guard.keep, watchdog.elapsed_s(), 500.0)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        first = await eventually(guard._running)
        os.kill(first, number)
        if number == signal.SIGKILL:
            await eventually(lambda: guard._running() is None)
        else:
            await eventually(functools.partial(deadlines._is_stopped, first))
        await asyncio.to_thread(guard.keep, watchdog.elapsed_s(), 500.0)

        def is_replaced(former: int = first) -> bool:
            return guard._running() not in (None, former)

        await eventually(is_replaced)


async def test_it_outlives_its_agent_and_ends_when_nothing_may_move(guard, tmp_path):
    at = watchdog.elapsed_s()
    await asyncio.to_thread(guard.keep, at, 500.0)
    first = await eventually(guard._running)
    again = deadlines.WatchdogProcess(tmp_path)
    assert again.renewed_at() == at
    await asyncio.to_thread(again.keep, at, 500.0)  # of the agent's next process
    second = await eventually(lambda: (pid := again._running()) != first and pid)
    assert second == again._child
    await asyncio.to_thread(again.keep, at, 0.0)
    assert again.renewed_at() is None
    await eventually(lambda: again._running() is None)
    await asyncio.to_thread(os.waitpid, again._child or 0, 0)


async def test_a_time_of_another_boot_does_not_count(guard, tmp_path):
    content = {"boot": "another", "renewed_at": 1.0, "first_s": 5.0}
    (tmp_path / watchdog.FILE).write_text(json.dumps(content))
    assert guard.renewed_at() is None
    for text in ("", "[]", "{}", '{"boot": 7}'):
        (tmp_path / watchdog.FILE).write_text(text)
        assert guard.renewed_at() is None


async def test_a_frozen_agent_ends_with_what_may_move(tmp_path):
    """The agent process is stopped; the watchdog is not."""
    script = f"""
import asyncio, pathlib, time
from muster.manage import protocol
from muster.manage.agent import agent, deadlines
from muster.bus.memory import network

async def main():
    bus = await network.SimulatedNetwork(1).connect("host-a")
    folder = pathlib.Path({str(tmp_path / "frozen")!r})
    folder.mkdir()
    host = agent.Agent(bus, folder, guard=deadlines.WatchdogProcess(folder))
    await host.start()
    await host.deadlines.renewed(host.deadlines.now())
    create = protocol.Operation(
        id="1", verb=protocol.Verb.CREATE, resource="web", epoch=1, manager="m", type="process",
        config={{"command": ["sleep", "1000"]}}, stop_after_s=5.0,
    )
    result = await host.execute(create)
    print(result.observed.properties["pid"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        pid = int(await host.stdout.readline())
        os.kill(host.pid, signal.SIGSTOP)
        assert os_process.start_time(pid)
        await eventually(lambda: not os_process.start_time(pid), timeout_s=20)
    finally:
        host.kill()
        await host.wait()
        (tmp_path / "frozen" / watchdog.FILE).unlink()  # its watchdog ends
        left = deadlines.WatchdogProcess(tmp_path / "frozen")
        await eventually(lambda: left._running() is None)
