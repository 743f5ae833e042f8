"""A domain is upgraded machine by machine, and returns if one does not work (without real machines)."""

from __future__ import annotations

import dataclasses
import os
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from muster.app import home
from muster.app.machines import membership, program, program_guard, upgrade
from muster.core import errors
from tests.cli import driver

OLD, NEW = "/opt/1/bin/muster", "/opt/2/bin/muster"


@dataclasses.dataclass
class Fleet:
    """Machines that change at once. ``refusing``: it runs its former program; ``silent``: it never replies
    after its change; ``late``: the domain is not whole, for so many questions; ``dies``: it replies for the
    last time after so many."""

    names: tuple[str, ...] = ("a", "b", "c")
    refusing: str = ""
    silent: str = ""
    late: int = 0
    dies: int = 10**9

    def __post_init__(self) -> None:
        self.programs = dict.fromkeys(self.names, OLD)
        self.refused: dict[str, program.ChosenProgram] = {}
        self.acts: list[tuple[str, str]] = []

    async def choose_program(self, machine: str, path: str) -> program.ChosenProgram:
        chosen = program.ChosenProgram(path, time.time())
        self.acts.append((machine, path))
        if machine == self.refusing and path == NEW:
            self.refused[machine] = chosen
        else:
            self.programs[machine] = path
        return chosen

    async def machines(self) -> list[membership.MachineRow]:
        self.late -= 1
        self.dies -= 1
        if self.dies < 0:
            raise errors.Unavailable("no reply")
        return [self._row(name) for name in self.names]

    def _row(self, name: str) -> membership.MachineRow:
        report = membership.MachineReport(
            version="1",
            program=self.programs[name],
            problem="streams: replicas are not current" if self.late > 0 else "",
            refused=self.refused.get(name),
            refused_reason="it ended at its start",
        )
        is_silent = name == self.silent and self.programs[name] == NEW
        return membership.MachineRow(
            name=name, roles=(), address="-", since_s=0, report=report, age_s=60.0 if is_silent else 0.0
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "SETTLE_S", 0.02)
    monkeypatch.setattr(upgrade, "LOOK_S", 0.005)


async def test_each_machine_changes_when_the_one_before_works():
    fleet = Fleet()
    rows = await upgrade.upgrade(fleet, NEW, timeout_s=5, say=lambda _: None)
    assert fleet.acts == [("a", NEW), ("b", NEW), ("c", NEW)]
    assert {row.report.program for row in rows if row.report} == {NEW}
    await upgrade.upgrade(fleet, NEW, timeout_s=5, say=lambda _: None)
    assert len(fleet.acts) == 3, "nothing is left to be done"


async def test_a_relative_path_is_refused_before_anything_changes():
    fleet = Fleet()
    with pytest.raises(errors.InvalidInput, match="not the absolute path"):
        await upgrade.upgrade(fleet, "muster-2", timeout_s=5, say=lambda _: None)
    assert fleet.acts == []


async def test_a_program_that_does_not_work_takes_all_machines_back():
    fleet = Fleet(refusing="b")
    with pytest.raises(errors.Refused, match="it ended at its start; all machines run their former programs"):
        await upgrade.upgrade(fleet, NEW, timeout_s=5, say=lambda _: None)
    assert fleet.programs == dict.fromkeys("abc", OLD)
    assert fleet.acts == [("a", NEW), ("b", NEW), ("b", OLD), ("a", OLD)]


async def test_a_machine_that_does_not_return_takes_all_machines_back():
    fleet = Fleet(silent="c")
    with pytest.raises(errors.Refused, match="c is silent"):
        await upgrade.upgrade(fleet, NEW, timeout_s=0.2, say=lambda _: None)
    assert fleet.programs == dict.fromkeys("abc", OLD)


async def test_nothing_changes_while_a_replica_is_not_current():
    fleet = Fleet(late=10**9)
    with pytest.raises(errors.TimedOut, match="a: streams: replicas are not current"):
        await upgrade.upgrade(fleet, NEW, timeout_s=0.2, say=lambda _: None)
    assert fleet.acts == []
    fleet.late = 20
    await upgrade.upgrade(fleet, NEW, timeout_s=5, say=lambda _: None)
    assert len(fleet.acts) == 3


async def test_a_program_that_serves_once_and_dies_does_not_work(monkeypatch: pytest.MonkeyPatch):
    fleet = Fleet(names=("a",))
    monkeypatch.setattr(fleet, "choose_program", died := DyingProgram(fleet))
    with pytest.raises(errors.Refused, match="the domain does not reply: no reply"):
        await upgrade.upgrade(fleet, NEW, timeout_s=0.2, say=lambda _: None)
    assert died.paths == [NEW, OLD]


class DyingProgram:
    """The machine replies twice with the new program, then never again."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.paths: list[str] = []

    async def __call__(self, machine: str, path: str) -> program.ChosenProgram:
        self.paths.append(path)
        self.fleet.programs[machine] = path
        self.fleet.dies = 2
        return program.ChosenProgram(path, time.time())


def script(path: Path, text: str) -> program.ChosenProgram:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return program.ChosenProgram(str(path), time.time())


def test_a_program_that_prints_no_version_is_refused_before_anything_stops(tmp_path: Path):
    choice = program.ProgramChoice(home.Home(tmp_path))
    broken = script(tmp_path / "broken", "echo no such library >&2; exit 1")
    assert not choice.check(broken)
    assert choice.load().refused == broken
    assert "no such library" in choice.load().reason
    works = script(tmp_path / "works", """echo '{"muster": "9"}'""")
    assert choice.check(works)
    assert not choice.check(msgspec.structs.replace(works, path=program.current()))


def test_up_hands_over_to_the_chosen_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = script(tmp_path / "works", "true")
    choice = program.ProgramChoice(home.Home(tmp_path), ["up", "--detach"])
    choice.store(program.ProgramRecord(path=chosen.path))
    became: list[tuple[str, list[str], str]] = []

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        became.append((path, words, environment[program.VARIABLE]))

    monkeypatch.setattr("os.execve", execve)
    choice.hand_over()
    assert became == [(chosen.path, [chosen.path, "up", "--detach"], chosen.path)]
    Path(chosen.path).unlink()
    with pytest.raises(errors.NotFound, match="this home is run by"):
        choice.hand_over()


def guard_task(folder: home.DomainFolder, pid: int) -> program.GuardTask:
    return program.GuardTask(
        home=str(folder.root.parent),
        folder=str(folder.root),
        pid=pid,
        former_s=1.0,
        former=OLD,
        chosen=program.ChosenProgram(NEW, 7.0),
        arguments=["up"],
        supervised=True,
    )


def test_a_home_has_another_program_only_when_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a machine that lost its guard, as in a power cut, could begin the new one for ever."""
    choice, folder = program.ProgramChoice(home.Home(tmp_path), ["up"]), home.DomainFolder(tmp_path / "fleet")
    folder.create()
    choice.store(program.ProgramRecord(path=OLD))
    task = guard_task(folder, os.getpid())
    became: list[str] = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: None)
    monkeypatch.setattr("os.execve", lambda path, *_: became.append(path))
    choice.change(task.chosen, folder, task.former_s)
    assert became == [NEW]
    assert choice.load().path == OLD
    monkeypatch.setattr(program, "_HANDED_OVER", NEW)
    choice.hand_over()  # of the new program: not back
    assert became == [NEW]
    with folder.hold():
        folder.announce(
            home.RunningDomain(domain="fleet", pid=task.pid, started_at_s=2.0, version="2", servers=())
        )
        program_guard.watch(task)
    assert choice.load() == program.ProgramRecord(path=NEW)


def test_a_guard_refuses_a_program_that_ended(tmp_path: Path):
    folder = home.DomainFolder(tmp_path / "fleet")
    folder.create()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    program_guard.watch(task := guard_task(folder, ended.pid))
    record = program.ProgramChoice(home.Home(tmp_path)).load()
    assert (record.path, record.refused) == (OLD, task.chosen)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.may_block(reason="it types commands")
def test_a_detached_machine_continues_as_another_program_and_returns(tmp_path: Path):
    """Without a service manager: the guard starts the former program again."""
    place, address = tmp_path / "a", f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.1"
    python = f"{shlex.quote(sys.executable)} -m muster"
    second = script(tmp_path / "second", f'exec {python} "$@"').path
    broken = script(tmp_path / "broken", f'[ "$1" = version ] && exec {python} "$@"; exit 3').path

    def muster(*words: str) -> driver.Answer:
        return driver.run(*words, home=place, timeout_s=300)

    def row() -> dict[str, str]:
        listed = muster("machine", "list", "-o", "json")
        assert listed.code == 0, listed.err
        return dict(listed.json()[0])

    options = "--set", "web.enabled=false", "--set", "bus.tls=on"
    assert muster("init", "--name", "fleet", "--host", address, *options).code == 0
    up = muster("up", "--detach", "--timeout", "120s")
    assert up.code == 0, up.err
    try:
        first = row()["program"]
        failed = muster("machine", "upgrade", broken)
        assert failed.code != 0
        assert "all machines run their former programs" in failed.err
        assert row()["program"] == first
        done = muster("machine", "upgrade", second)
        assert done.code == 0, done.err
        assert (row()["program"], row()["state"]) == (second, "up")
        assert muster("down").code == 0
        again = muster("up", "--detach", "--timeout", "120s")  # of the first program, after a reboot
        assert again.code == 0, again.err
        driver.wait_until(lambda: row()["program"] == second, timeout_s=60)
        back = muster("machine", "upgrade", first)
        assert back.code == 0, back.err
        assert row()["program"] == first
    finally:
        muster("down", "--force")
