"""Processes of an agent after crashes, cancellations and failures: never two, and none lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import psutil
import pytest

from muster.bus.memory import network
from muster.core import errors, health, messages
from muster.manage import protocol
from muster.manage.adapters import base, health_checks, memory, process, shim
from muster.manage.agent import agent, operation_log, resource_host
from muster.supervision import os_process
from muster.testing.eventually import eventually, throughout
from tests.manage import test_adapters

STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
UP, DOWN = health.HealthState.UP, health.HealthState.DOWN


class House:
    """An agent on a simulated bus; a second one in the same folder is the first one restarted."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.agent: agent.Agent
        self.number = 0

    async def start(self, **options: Any) -> agent.Agent:
        bus = await network.SimulatedNetwork(1).connect("host")
        self.agent = agent.Agent(bus, self.folder, beat_s=0.05, **options)
        await self.agent.start()
        return self.agent

    async def do(self, verb: str, name: str = "thing", **more: Any) -> protocol.OperationResult:
        self.number += 1
        arguments = {"id": f"op-{id(self)}-{self.number}", "type": "process", "epoch": 1, **more}
        return await self.agent.execute(
            protocol.Operation(verb=protocol.Verb(verb), resource=name, **arguments)
        )

    @property
    def hosted_thing(self) -> resource_host.HostedResource:
        return self.agent.hosted["thing"]

    @property
    def seen(self) -> protocol.ObservedState:
        return self.hosted_thing.observed

    @property
    def adapter(self) -> Any:
        return self.hosted_thing.adapter


@pytest.fixture
async def agent_host(tmp_path):
    made = House(tmp_path / "hosted")
    await made.start()
    yield made
    await made.agent.stop()
    for resource in made.agent.hosted.values():
        if resource.adapter is not None:
            await resource.adapter.delete()


def carriers(mark: str) -> list[int]:
    """The processes that run a command with ``mark``, without their shims.

    A shim records the pid of its command before the command is executed: wait for it.
    """
    pids = []
    for item in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = item.cmdline()
            if mark in words and words[0] != shim.SHELL and item.status() != psutil.STATUS_ZOMBIE:
                pids.append(item.pid)
    return pids


def is_alive(pid: int) -> bool:
    try:
        return test_adapters.runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def is_down(resource: resource_host.HostedResource) -> bool:
    return resource.observed.state is DOWN


def mark() -> str:
    """An argument of ``sleep`` that no other process has."""
    return f"{1000 + time.monotonic_ns() % 10**9}.5"


# Stopping


async def test_a_grace_period_may_be_longer_than_an_operation(agent_host):
    config = {"command": ["sh", "-c", STUBBORN], "stop_s": 0.4}
    await agent_host.do("create", config=config)
    pid = agent_host.seen.properties["pid"]
    await eventually(lambda: "ready" in agent_host.adapter._output.path.read_text())
    outcomes: list[messages.DecisionOutcome] = []
    while len(outcomes) < 50 and messages.DecisionOutcome.DONE not in outcomes:
        outcomes.append((await agent_host.do("execute", operation="stop", timeout_s=0.1)).outcome)
    assert outcomes[0] is messages.DecisionOutcome.IN_DOUBT
    assert outcomes[-1] is messages.DecisionOutcome.DONE
    assert not is_alive(pid)
    assert agent_host.seen.state is DOWN


async def test_a_configuration_is_applied_when_its_process_runs_and_not_before(agent_host):
    await agent_host.do("create", config={"command": ["sh", "-c", STUBBORN], "stop_s": 0.4})
    old = agent_host.seen.properties["pid"]
    await eventually(lambda: "ready" in agent_host.adapter._output.path.read_text())
    word = mark()
    new = {"command": ["sleep", word], "stop_s": 0.4}
    answers: list[protocol.OperationResult] = []
    while not answers or answers[-1].outcome is messages.DecisionOutcome.IN_DOUBT:
        answers.append(await agent_host.do("put", config=new, timeout_s=0.1))
        assert (
            answers[-1].outcome is messages.DecisionOutcome.DONE
            or agent_host.hosted_thing.record.digest == ""
        )
    assert len(answers) > 1
    assert answers[-1].outcome is messages.DecisionOutcome.DONE
    assert not is_alive(old)
    await eventually(lambda: carriers(word) == [agent_host.seen.properties["pid"]])


async def test_a_restart_that_outlasts_its_operation_is_not_a_fall(agent_host, monkeypatch):
    """A manager that observes it meanwhile must not treat it as a failure."""
    await agent_host.do("create", config={"command": ["sh", "-c", STUBBORN], "stop_s": 0.2})
    await eventually(lambda: "ready" in agent_host.adapter._output.path.read_text())
    states: list[health.HealthState] = []
    see = agent_host.hosted_thing.record_observation

    def spy(observed: protocol.ObservedState) -> None:
        states.append(observed.state)
        see(observed)

    monkeypatch.setattr(agent_host.hosted_thing, "record_observation", spy)
    answer = await agent_host.do("execute", operation="restart", timeout_s=0.05)
    assert answer.outcome is messages.DecisionOutcome.IN_DOUBT
    await eventually(lambda: UP in states)
    assert DOWN not in states


async def test_a_command_that_left_its_session_is_stopped_as_well(agent_host):
    words = "import os, time; os.setsid(); print('left', flush=True); time.sleep(1000)"
    await agent_host.do("create", config={"command": [sys.executable, "-c", words], "stop_s": 5})
    pid = agent_host.seen.properties["pid"]
    await eventually(lambda: "left" in agent_host.adapter._output.path.read_text())
    await agent_host.do("execute", operation="stop")
    assert not is_alive(pid)
    assert agent_host.seen.properties["exit_code"] == -signal.SIGTERM


# Starting


async def test_a_start_that_is_cancelled_while_it_spawns_is_seen_through(agent_host, monkeypatch):
    spawn, go_on = process.ProcessAdapter._spawn, threading.Event()

    def slow(self: Any, *arguments: Any) -> int:
        assert go_on.wait(30)
        return spawn(self, *arguments)

    monkeypatch.setattr(process.ProcessAdapter, "_spawn", slow)
    config = {"command": ["sleep", mark()]}
    first = await agent_host.do("create", config=config, timeout_s=0.05)
    go_on.set()
    assert first.outcome is messages.DecisionOutcome.IN_DOUBT
    await agent_host.do("create", config=config)
    await agent_host.do("execute", operation="start")
    await eventually(lambda: carriers(config["command"][1]) == [agent_host.seen.properties["pid"]])


async def test_a_start_is_completed_before_its_agent_stops(agent_host, monkeypatch):
    """Otherwise the next agent finds nothing, and its manager starts a second process."""
    spawn, go_on = process.ProcessAdapter._spawn, threading.Event()

    def slow(self: Any, *arguments: Any) -> int:
        assert go_on.wait(30)
        return spawn(self, *arguments)

    monkeypatch.setattr(process.ProcessAdapter, "_spawn", slow)
    config = {"command": ["sleep", mark()]}
    await agent_host.do("create", config=config, timeout_s=0.05)
    stopping = asyncio.create_task(agent_host.agent.stop())
    done, _ = await asyncio.wait([stopping], timeout=0.3)
    go_on.set()
    assert not done
    await stopping
    await agent_host.start()
    assert agent_host.seen.state is UP
    await eventually(lambda: carriers(config["command"][1]) == [agent_host.seen.properties["pid"]])


async def test_a_new_configuration_is_not_taken_for_that_of_a_process_found_late(agent_host, monkeypatch):
    await agent_host.do("create", config={"command": ["sleep", "1000"]})
    old = agent_host.seen.properties["pid"]
    await agent_host.agent.stop()

    async def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(process.ProcessAdapter, "resume", fail)
        await agent_host.start()
        assert agent_host.seen.state is health.HealthState.UNKNOWN
        hosted, word = agent_host.hosted_thing, mark()
        await hosted.lock.acquire()  # no other attempt comes before the operation
    operation = asyncio.create_task(agent_host.do("put", config={"command": ["sleep", word]}))
    await asyncio.sleep(0)
    hosted.lock.release()
    assert (await operation).outcome is messages.DecisionOutcome.DONE
    assert not is_alive(old)
    await eventually(lambda: carriers(word) == [agent_host.seen.properties["pid"]])


CRASH = """
import asyncio, os, pathlib, sys
from muster.manage.adapters import process
from tests.manage import test_processes

def crash(self, *arguments, spawn=process.ProcessAdapter._spawn):
    {before}
    spawn(self, *arguments)
    os._exit(0)

async def main():
    agent_host = test_processes.House(pathlib.Path(sys.argv[1]))
    await agent_host.start()
    process.ProcessAdapter._spawn = crash
    await agent_host.do("create", config={{"command": ["sleep", sys.argv[2]]}}, generation=3)

asyncio.run(main())
"""


def crash_in_spawn(folder: pathlib.Path, word: str, before: str = "") -> None:
    code = CRASH.format(before=before or "pass")
    subprocess.run([sys.executable, "-c", code, str(folder), word], check=True, timeout=30)


@pytest.mark.may_block(reason="an agent is run until it crashes")
async def test_an_agent_that_dies_between_the_start_and_its_record_finds_the_process_again(agent_host):
    word = mark()
    await agent_host.agent.stop()
    crash_in_spawn(agent_host.folder, word)
    await eventually(lambda: carriers(word))
    await agent_host.start()
    assert agent_host.seen.state is UP
    assert agent_host.seen.ran == 3
    await agent_host.do("execute", operation="start")
    await eventually(lambda: carriers(word) == [agent_host.seen.properties["pid"]])
    await agent_host.do("delete")
    assert carriers(word) == []


@pytest.mark.may_block(reason="an agent is run until it crashes")
async def test_an_agent_killed_before_the_start_reports_that_it_never_ran(agent_host):
    word = mark()
    await agent_host.agent.stop()
    crash_in_spawn(agent_host.folder, word, before="os._exit(0)")
    await agent_host.start()
    assert (agent_host.seen.exists, agent_host.seen.state, agent_host.seen.ran) == (True, DOWN, 0)
    assert agent_host.seen.reason == "never started"


async def test_a_manager_learns_at_once_what_ended_without_an_agent(tmp_path):
    """Not with the first heartbeat, which has a time of its own."""
    net = network.SimulatedNetwork(1)
    manager = await net.connect("m1")
    seen: list[protocol.ResourceEvent] = []

    def read(message: Any) -> None:
        seen.append(messages.decode(message.data, protocol.ResourceEvent))

    await manager.subscribe(protocol.events_to("m1"), handler=read)
    bus = await net.connect("host")
    create = protocol.Operation(
        id="1",
        verb=protocol.Verb.CREATE,
        resource="thing",
        epoch=1,
        manager="m1",
        type="process",
        config={"command": ["sleep", mark()]},
    )
    async with agent.Agent(bus, tmp_path / "hosted", beat_s=600.0) as host:
        await host.execute(create)
        leader = host.hosted["thing"].record.runtime["leader"]
        await eventually(lambda: seen)
    seen.clear()
    os.killpg(leader, signal.SIGKILL)
    await eventually(lambda: not is_alive(leader))
    async with agent.Agent(bus, tmp_path / "hosted", beat_s=600.0) as host:
        await eventually(lambda: [event.observed.state for event in seen if event.observed] == [DOWN])
        adapter: Any = host.hosted["thing"].adapter
        await adapter.delete()


async def test_the_exit_code_outlives_the_agent(agent_host, tmp_path, monkeypatch):
    """Whether the process ends while there is no agent, or when there is another."""
    wait_for_exit = os_process.wait_for_exit

    async def without_code(pid: int, started: str = "") -> None:
        await wait_for_exit(pid, started)  # only the agent that started a process learns its code

    for name, when in (("a", "without"), ("b", "with")):
        gate = tmp_path / f"gate-{name}"
        os.mkfifo(gate)
        command = ["sh", "-c", f"read line < {gate}; exit 7"]
        await agent_host.do("create", name, config={"command": command}, generation=5)
        await agent_host.agent.stop()
        leader = agent_host.agent.hosted[name].record.runtime["leader"]
        if when == "without":
            await asyncio.to_thread(gate.write_text, "go\n")
            await os_process.wait_for_exit(leader)
        monkeypatch.setattr(os_process, "wait_for_exit", without_code)
        await agent_host.start()
        if when == "with":
            assert agent_host.agent.hosted[name].observed.state is UP
            await asyncio.to_thread(gate.write_text, "go\n")
        resource = agent_host.agent.hosted[name]
        await eventually(functools.partial(is_down, resource))
        seen = resource.observed
        assert seen.properties["exit_code"] == 7
        assert seen.ran == 5
        assert "exit code 7" in seen.reason


async def test_what_is_left_of_a_run_ends_when_the_agent_finds_its_leader_gone(agent_host, tmp_path):
    word = mark()
    await agent_host.do("create", config={"command": ["sh", "-c", f"sleep {word} & wait"]})
    await eventually(lambda: carriers(word))
    await agent_host.agent.stop()
    killed = agent_host.hosted_thing.record.runtime["leader"], agent_host.seen.properties["pid"]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not any(map(is_alive, killed)))
    assert carriers(word)
    await agent_host.start()
    assert agent_host.seen.state is DOWN
    await eventually(lambda: not carriers(word))


@pytest.mark.parametrize("operation", ["signal", "stop"])
async def test_the_pid_of_a_process_that_has_ended_is_not_signalled(agent_host, monkeypatch, operation):
    """While its exit code cannot be read, another process may get the pid."""
    await agent_host.do("create", config={"command": ["sleep", "1000"], "stop_s": 0.1})
    session, read, failed = agent_host.adapter._pid, shim.read, asyncio.Event()

    def fail(*_: Any) -> shim.ShimRecord:
        loop.call_soon_threadsafe(failed.set)
        raise OSError(errno.EIO, "the disk is lost")

    loop, signalled = asyncio.get_running_loop(), list[int]()
    monkeypatch.setattr(shim, "read", fail)
    monkeypatch.setattr(process, "RECORD_RETRY_S", 0.05)
    os.killpg(session, signal.SIGKILL)
    await failed.wait()
    monkeypatch.setattr(os_process, "signal_session", lambda pid, number: signalled.append(pid))
    answer = asyncio.create_task(agent_host.do("execute", operation=operation))
    if operation == "signal":
        assert (await answer).outcome is not messages.DecisionOutcome.DONE
    else:
        await asyncio.wait([answer], timeout=0.5)
    monkeypatch.setattr(shim, "read", read)
    await answer
    await eventually(lambda: agent_host.seen.state is DOWN)
    assert signalled == []


@pytest.mark.parametrize(
    "arguments", [{"number": "1.10"}, {"number": 999}, {"number": True}, {"number": 1, "other": 2}]
)
async def test_arguments_of_another_type_are_refused(agent_host, arguments):
    await agent_host.do("create", config={"command": ["sleep", "1000"], "stop_s": 0.1})
    answer = await agent_host.do("execute", operation="signal", arguments=arguments)
    assert answer.code == errors.InvalidInput.code
    assert "signal" in answer.reason
    assert agent_host.seen.state is UP
    await agent_host.do("delete")


async def test_what_left_the_session_ends_with_its_run(agent_host):
    """Otherwise each start would add one."""
    word = mark()
    await agent_host.do("create", config={"command": ["sh", "-c", f"setsid sleep {word} & exit 0"]})
    await eventually(lambda: agent_host.seen.state is DOWN)
    assert carriers(word) == []


@pytest.mark.parametrize("operation", ["stop", "delete"])
async def test_what_left_the_session_ends_with_a_stop(agent_host, operation):
    word = mark()
    await agent_host.do("create", config={"command": ["sh", "-c", f"setsid sleep {word} & sleep 1000"]})
    await eventually(lambda: carriers(word))
    verb = {"verb": "delete"} if operation == "delete" else {"verb": "execute", "operation": "stop"}
    await agent_host.do(**verb)
    assert carriers(word) == []


async def test_what_left_the_session_may_finish_during_a_stop(agent_host, tmp_path):
    said = tmp_path / "said"
    daemon = f"trap 'echo bye > {said}; exit' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"
    command = ["sh", "-c", 'setsid sh -c "$0" & sleep 1000', daemon]
    await agent_host.do("create", config={"command": command, "stop_s": 20})
    await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    await agent_host.do("execute", operation="stop")
    assert said.read_text() == "bye\n"


async def test_a_check_that_takes_too_long_ends_with_what_it_started():
    word = mark()
    command = ("sh", "-c", f"setsid sleep {word} & sleep {word} | cat")
    check = health_checks.HealthCheck(kind="command", command=command, timeout_s=0.2)
    assert await health_checks.find_problem(check) == "no reply within 0.2 s"
    assert carriers(word) == []


async def test_a_check_ends_with_what_it_left_in_the_background():
    word = mark()
    check = health_checks.HealthCheck(kind="command", command=("sh", "-c", f"sleep {word} & exit 0"))
    assert await health_checks.find_problem(check) is None
    await eventually(lambda: not carriers(word))


async def test_signals_and_exit_codes_are_distinguished(agent_host):
    for words, code in (("exit 3", 3), ("exit 255", 255), ("kill -TERM $$", -15), ("kill -KILL $$", -9)):
        await agent_host.do("create", config={"command": ["sh", "-c", "read line < /dev/zero"]})
        await agent_host.do("put", config={"command": ["sh", "-c", words]})
        await eventually(lambda: agent_host.seen.state is DOWN)
        assert agent_host.seen.properties["exit_code"] == code
        await agent_host.do("delete")


async def test_what_cannot_be_executed_is_refused(agent_host, tmp_path):
    (tmp_path / "data").write_text("no program")
    for config in (
        {"command": ["no-such-program"]},
        {"command": [str(tmp_path / "data")]},
        {"command": ["sleep", "1"], "directory": str(tmp_path / "nowhere")},
        {"command": ["sleep", "1"], "environment": {"PATH": "/nowhere"}, "user_environment": False},
    ):
        answer = await agent_host.do("create", config=config)
        assert answer.outcome is messages.DecisionOutcome.FAILED, config
        assert "cannot start" in answer.reason
        await agent_host.do("delete")
    (tmp_path / "tool").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "tool").chmod(0o755)
    answer = await agent_host.do("create", config={"command": ["./tool"], "directory": str(tmp_path)})
    assert answer.outcome is messages.DecisionOutcome.DONE


# Shortages


async def test_a_process_is_not_taken_for_ended_for_want_of_descriptors(agent_host, monkeypatch):
    opened = os.pidfd_open
    short = True

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if short:
            raise OSError(errno.EMFILE, "too many open files")
        return opened(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(os_process, "POLL_S", 0.01)
    await agent_host.do("create", config={"command": ["sleep", "1000"]})
    await throughout(lambda: agent_host.seen.state is UP, for_s=0.1)
    os.kill(agent_host.seen.properties["pid"], signal.SIGTERM)
    await eventually(lambda: agent_host.seen.state is DOWN)
    assert agent_host.seen.properties["exit_code"] == -15, "polled for"
    await agent_host.do("execute", operation="start")
    short = False
    await asyncio.sleep(0)
    os.kill(agent_host.seen.properties["pid"], signal.SIGTERM)
    await eventually(lambda: agent_host.seen.state is DOWN)


async def test_the_end_of_another_process_is_polled_for(monkeypatch, start_process):
    child = await start_process("sh", "-c", "sleep 1000 & wait")
    await eventually(lambda: psutil.Process(child.pid).children())
    (grandchild,) = (item.pid for item in psutil.Process(child.pid).children())

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os_process, "POLL_S", 0.01)
    end = asyncio.ensure_future(os_process.wait_for_exit(grandchild))
    await throughout(lambda: not end.done(), for_s=0.05)
    os.kill(grandchild, signal.SIGKILL)
    assert await end is None


async def test_a_number_that_another_process_has_is_not_waited_for(start_process):
    child = await start_process("sleep", "1000")
    assert await os_process.wait_for_exit(child.pid, "another:1") is None


async def test_a_check_that_cannot_be_made_is_no_failure(agent_host, monkeypatch):
    made = 0

    async def fail(*_: Any, **__: Any) -> Any:
        nonlocal made
        made += 1
        raise OSError(errno.EMFILE, "too many open files")

    check = {"kind": "port", "port": 1, "every_s": 0.01, "failures": 1, "start_s": 0}
    config = {"command": ["sleep", "1000"], "health": check}
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "open_connection", fail)
        await agent_host.do("create", config=config)
        pid = agent_host.seen.properties["pid"]
        await eventually(lambda: made > 5)
        assert is_alive(pid)
    await eventually(lambda: agent_host.seen.state is DOWN)
    assert "health check failed" in agent_host.seen.reason
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(health_checks.InconclusiveCheck):
        await health_checks.find_problem(health_checks.HealthCheck(kind="command", command=("true",)))


async def test_an_operation_whose_beginning_cannot_be_stored_is_not_begun(agent_host, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    await agent_host.do("create", config={"command": ["sleep", "1000"]})
    pid = agent_host.seen.properties["pid"]
    with monkeypatch.context() as patched:
        patched.setattr(resource_host, "_store", full)
        answer = await agent_host.do("execute", operation="stop", id="stop-1")
        assert (answer.outcome, answer.code) == (messages.DecisionOutcome.FAILED, "not-stored")
        assert is_alive(pid)
    answer = await agent_host.do("execute", operation="stop", id="stop-1")
    assert answer.outcome is messages.DecisionOutcome.DONE, "it was never begun, so it may be asked for again"


# Adoption


async def test_a_stale_pid_file_adopts_no_other_process(agent_host, tmp_path, start_process):
    stranger = await start_process("sleep", "1000")
    file = tmp_path / "pid"
    file.write_text(str(stranger.pid))
    hour_ago = time.time() - 3600
    os.utime(file, (hour_ago, hour_ago))
    config = {"command": ["sleep", "2000"], "pid_file": str(file)}
    answer = await agent_host.do("create", config=config)
    assert answer.observed is not None
    assert answer.observed.properties["pid"] not in (None, stranger.pid)
    await agent_host.do("delete")
    same = {"command": ["sleep", "1000"], "pid_file": str(file)}
    answer = await agent_host.do("create", config=same)
    assert answer.observed is not None
    assert answer.observed.properties["pid"] == stranger.pid, "the clock may have been set: the command is it"
    for text in (str(os.getpid()), "1", "0", "-1", "none", "99999999"):
        file.write_text(text)
        assert os_process.running_by_file(file, ("sleep",)) is None


async def test_a_process_of_another_boot_is_another_process(agent_host):
    await agent_host.do("create", config={"command": ["sleep", "1000"]})
    await agent_host.agent.stop()
    path = agent_host.folder / "thing.json"
    record = msgspec.json.decode(path.read_bytes(), type=operation_log.OperationRecord)
    boot, _, ticks = record.runtime["birth"].partition(":")
    assert boot
    record.runtime["birth"] = f"another:{ticks}"
    path.write_bytes(msgspec.json.encode(record))
    old = agent_host.agent
    await agent_host.start()
    assert agent_host.seen.state is DOWN
    await eventually(lambda: not test_adapters.runs(psutil.Process(old.hosted["thing"].adapter._pid)))


# Adapters that fail


class Broken(memory.MemoryAdapter):
    type_name = "broken"
    faults: list[BaseException] = []  # noqa: RUF012  (a test's)

    async def resume(self, config: Any) -> None:
        if self.faults:
            raise self.faults[0]
        await super().resume(config)


def find(name: str) -> type[base.Adapter]:
    return {"broken": Broken, "memory": memory.MemoryAdapter}[name]


@pytest.fixture
def broken(monkeypatch, tmp_path):
    folder = tmp_path / "hosted"
    for name, kind in (("bad", "broken"), ("good", "memory")):
        record = operation_log.OperationRecord(
            name=name, type=kind, config={}, digest="d", epoch=1, manager="m1", runtime={"state": "up"}
        )
        resource_host._store(folder / f"{name}.json", operation_log.OperationHistory(record).to_store())
    monkeypatch.setattr(Broken, "faults", [KeyError("its own fault")])
    return Broken


@pytest.mark.may_block(reason="records are written as a former agent did")
async def test_an_adapter_that_cannot_resume_costs_its_own_resource_only(broken, tmp_path):
    agent_host = House(tmp_path / "hosted")
    await agent_host.start(adapters=find, types=("broken", "memory"))
    bad, good = agent_host.agent.hosted["bad"], agent_host.agent.hosted["good"]
    assert good.observed.state is UP
    assert (bad.observed.exists, bad.observed.state) == (True, health.HealthState.UNKNOWN)
    assert "its own fault" in bad.observed.reason
    answer = await agent_host.do("execute", "bad", operation="echo")
    assert answer.outcome is messages.DecisionOutcome.FAILED
    broken.faults.clear()
    await eventually(lambda: bad.observed.state is UP)  # with a later heartbeat
    assert (await agent_host.do("execute", "bad", operation="echo")).outcome is messages.DecisionOutcome.DONE
    await agent_host.agent.stop()


@pytest.mark.may_block(reason="records are written as a former agent did")
async def test_an_operation_finds_again_what_could_not_be_found_at_the_start(broken, tmp_path, monkeypatch):
    agent_host = House(tmp_path / "hosted")

    async def never(_: Any) -> None: ...

    monkeypatch.setattr(agent.Agent, "_resume_forever", never)
    await agent_host.start(adapters=find, types=("broken", "memory"))
    broken.faults.clear()
    answer = await agent_host.do("put", "bad", type="broken", config={"value": 2})
    assert answer.outcome is messages.DecisionOutcome.DONE
    adapter: Any = agent_host.agent.hosted["bad"].adapter
    assert adapter.done == ["put"], "what is there is not created"
    await agent_host.agent.stop()


@pytest.mark.virtual_time
@pytest.mark.may_block(reason="records are written as a former agent did")
async def test_an_adapter_that_hangs_while_it_resumes_does_not_delay_the_heartbeats(
    broken, monkeypatch, tmp_path
):
    async def hang(self: Broken, config: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Broken, "resume", hang)
    loop, net = asyncio.get_running_loop(), network.SimulatedNetwork(1)
    beats: list[float] = []
    manager = await net.connect("m1")
    await manager.subscribe(protocol.heartbeats_to("m1"), handler=lambda _: beats.append(loop.time()))
    host = agent.Agent(
        await net.connect("host"), tmp_path / "hosted", beat_s=1.0, adapters=find, types=("broken", "memory")
    )
    async with host:
        assert host.hosted["bad"].observed.state is health.HealthState.UNKNOWN
        assert host.hosted["good"].observed.state is UP
        await asyncio.sleep(60)
        assert len(beats) >= 59


async def test_no_text_of_an_adapter_ends_the_heartbeats(agent_host):
    net = network.SimulatedNetwork(1)
    other = agent.Agent(
        await net.connect("talker"), None, beat_s=0.01, adapters=lambda _: memory.MemoryAdapter
    )
    received: list[Any] = []
    manager = await net.connect("m1")
    await manager.subscribe(protocol.heartbeats_to("m1"), handler=received.append)
    async with other:
        for name in ("a", "b"):
            operation = protocol.Operation(
                id=name, verb=protocol.Verb.CREATE, resource=name, epoch=1, manager="m1", type="memory"
            )
            await other.execute(operation)
        adapter: Any = other.hosted["a"].adapter
        adapter.die("file \udcff is missing")  # as os.fsdecode makes of a name
        await eventually(lambda: len(received) > 3)
        other.hosted["a"].observed = msgspec.structs.replace(other.hosted["a"].observed, reason="\udcff")
        await throughout(lambda: True, for_s=0.05)
        other.hosted["a"].observed = msgspec.structs.replace(other.hosted["a"].observed, reason="")
        before = len(received)
        await eventually(lambda: len(received) > before + 3)


# The order of observations


async def test_a_look_that_a_change_overtook_is_not_taken(agent_host):
    await agent_host.do("create", "m", type="memory")
    resource = agent_host.agent.hosted["m"]
    adapter: Any = resource.adapter
    look = asyncio.Event()

    async def observe() -> protocol.ObservedState:
        seen = protocol.ObservedState(True, adapter.state)
        adapter.die("meanwhile")
        look.set()
        return seen

    adapter.observe = observe
    await agent_host.do("get", "m")
    assert look.is_set()
    assert (resource.observed.state, resource.observed.reason) == (DOWN, "meanwhile")
    assert resource.observed.sequence == resource.sequence
    assert resource.observed.boot
