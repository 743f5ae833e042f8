"""Under which conditions a process runs: user, group, umask, directory, control group, signal to stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import pytest

from muster.core import errors, health, messages
from muster.manage.adapters import process
from muster.supervision import cgroups, os_process
from muster.testing.eventually import eventually
from tests.manage.test_processes import House, agent_host, carriers, mark

__all__ = ["agent_host"]

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes as another user")


async def run(house: House, words: str, **options: Any) -> None:
    made = await house.do("create", config={"command": ["sh", "-c", words], **options})
    assert made.outcome is messages.DecisionOutcome.DONE, made.reason


async def output(house: House, lines: int) -> list[str]:
    written: list[str] = []

    def look() -> bool:
        written[:] = house.adapter._output.path.read_text().splitlines()
        return len(written) == lines

    await eventually(look)
    return written


@as_root
async def test_user_group_umask_and_directory(agent_host, tmp_path):
    words = "id -u; id -g; id -G; echo $HOME $USER $MINE; umask; pwd; exec sleep 1000"
    folder = tmp_path / "it's here"
    folder.mkdir()
    for parent in [*folder.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(0o755)
    await run(
        agent_host,
        words,
        user="nobody",
        umask="027",
        directory=str(folder),
        environment={"MINE": "kept", "HOME": "/somewhere"},
    )
    uid, gid, groups, environment, umask, where = await output(agent_host, 6)
    assert (uid, gid, groups) == (str(NOBODY), str(NOBODY), str(NOBODY)), "no group of the agent"
    assert environment == "/somewhere nobody kept"
    assert (umask, where) == ("0027", str(folder))
    pid = agent_host.seen.properties["pid"]
    assert os.stat(f"/proc/{pid}").st_uid == NOBODY


@as_root
async def test_a_check_by_a_command_has_the_conditions_of_the_process(agent_host, tmp_path):
    words = f'test "$(id -u) $(pwd) $MINE" = "{NOBODY} / kept"'
    await run(
        agent_host,
        "exec sleep 1000",
        user="nobody",
        directory="/",
        environment={"MINE": "kept"},
        health={"kind": "command", "command": ["sh", "-c", words], "every_s": 0.05, "failures": 1},
    )
    await eventually(lambda: agent_host.seen.state is health.HealthState.UP)


@as_root
async def test_a_group_alone(agent_host):
    await run(agent_host, "id -u; id -g; id -G; exec sleep 1000", group=str(NOBODY))
    assert await output(agent_host, 3) == ["0", str(NOBODY), str(NOBODY)]


@as_root
async def test_the_exit_code_of_another_user_survives(agent_host):
    await run(agent_host, "exit 7", user="nobody")
    await eventually(lambda: agent_host.seen.properties.get("exit_code") == 7)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"user": "nobody-of-that-name"}, "no such user or group: .*nobody-of-that-name"),
        ({"group": "nobody-of-that-name"}, "no such user or group"),
        ({"user": "999999999999999999999"}, "no such user or group"),
        ({"umask": "8"}, r"umask"),
        ({"umask": "027; id"}, r"umask"),
        ({"stop_signal": "KILL"}, "stop_signal"),
        ({"cgroup": {"cpus": 0}}, "cgroup.cpus"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_reason(agent_host, options, reason):
    config = {"command": ["sleep", mark()], **options}
    refused = await agent_host.do("create", config=config)
    assert refused.outcome is not messages.DecisionOutcome.DONE
    assert re.search(reason, refused.reason), refused.reason
    assert not carriers(config["command"][1])


def test_an_agent_that_is_not_root_may_not_start_processes_as_another(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    monkeypatch.setattr(os, "getegid", lambda: NOBODY)
    assert os_process.account("nobody", "") == os_process.ProcessAccount()
    with pytest.raises(errors.Refused, match=f"runs as user {NOBODY}") as refused:
        os_process.account("root", "")
    assert "run the agent as root" in (refused.value.hint or "")


async def test_the_signal_that_stops_it(agent_host):
    words = "trap 'echo asked; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    await run(agent_host, words, stop_signal="INT", stop_s=60)
    await output(agent_host, 1)
    assert (await agent_host.do("execute", operation="stop")).outcome is messages.DecisionOutcome.DONE
    assert (await output(agent_host, 2))[-1] == "asked"
    assert agent_host.seen.properties["exit_code"] == 3


async def test_another_signal_is_adopted_without_a_restart(agent_host):
    words = "trap 'echo asked; exit 3' HUP; echo ready; while :; do sleep 0.05; done"
    await run(agent_host, words)
    await output(agent_host, 1)
    pid = agent_host.seen.properties["pid"]
    await agent_host.do("put", config={"command": ["sh", "-c", words], "stop_signal": "HUP"})
    assert agent_host.seen.properties["pid"] == pid
    await agent_host.do("execute", operation="stop")
    assert "asked" in agent_host.adapter._output.path.read_text().splitlines()


async def test_a_process_inherits_no_ignored_signal(agent_host):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; Python ignores SIGPIPE and SIGXFSZ
    try:
        await run(agent_host, "grep SigIgn /proc/self/status; exec sleep 60")
        ignored = int((await output(agent_host, 1))[0].split()[1], 16)
        assert ignored & 0x7FFFFFFF == 0  # beyond are those of the C library
    finally:
        signal.signal(signal.SIGHUP, before)


# Control groups. Which controllers a machine has, and where a process may make groups, differs.


def controllers() -> list[str]:
    try:
        parent = cgroups._parent()
        (parent / "muster-test").mkdir()
        (parent / "muster-test").rmdir()
        return (parent / "cgroup.controllers").read_text().split()
    except (OSError, errors.Refused):
        return []


OFFERED = controllers()
ANY = {"pids": {"pids.max": "100"}, "memory": {"memory.max": "max"}, "hugetlb": {"hugetlb.2MB.max": "0"}}
SOME = next((files for controller, files in ANY.items() if controller in OFFERED), {})


def test_limits_are_values_of_the_groups_files():
    limits = process.GroupLimits(memory_bytes=1 << 30, cpus=0.5, processes=10)
    assert limits.files() == {"memory.max": str(1 << 30), "cpu.max": "50000 100000", "pids.max": "10"}
    assert process.GroupLimits().files() == {}


async def test_limits_hold_or_are_refused(agent_host):
    word = mark()
    config = {"command": ["sleep", word], "cgroup": {"memory_bytes": 64 << 20, "cpus": 0.5}}
    made = await agent_host.do("create", config=config)
    if {"memory", "cpu"} <= {*OFFERED}:
        assert made.outcome is messages.DecisionOutcome.DONE, made.reason
        group = cgroups._parent() / process._group_name(agent_host.adapter.mark)
        assert (group / "memory.max").read_text().strip() == str(64 << 20)
        assert (group / "cpu.max").read_text().strip() == "50000 100000"
    else:
        assert made.outcome is messages.DecisionOutcome.FAILED
        assert "cgroup" in made.reason
        assert "Delegate=yes" in made.reason
        assert agent_host.seen.state is health.HealthState.DOWN
        assert not carriers(word)


@pytest.mark.skipif(not SOME, reason="this machine permits no control groups of version 2")
async def test_a_run_joins_its_group_and_ends_with_it_also_what_has_hidden(agent_host, monkeypatch):
    monkeypatch.setattr(process.GroupLimits, "files", lambda self: SOME)
    word = mark()
    words = f"env -i setsid sleep {word} & echo on; exec sleep 1000"
    await run(agent_host, words)
    await output(agent_host, 1)
    group = cgroups._parent() / process._group_name(agent_host.adapter.mark)
    (hidden,) = await eventually(lambda: carriers(word))
    pid = agent_host.seen.properties["pid"]
    members = (group / "cgroup.procs").read_text().split()
    assert {str(pid), str(hidden)} <= set(members)
    (file, value), *_ = SOME.items()
    assert (group / file).read_text().strip() == value
    assert hidden not in os_process.members(agent_host.adapter.mark), "it has no mark"
    await agent_host.do("execute", operation="restart")
    await eventually(lambda: hidden not in carriers(word))
    assert not await asyncio.to_thread(group.exists)
    again = cgroups._parent() / process._group_name(agent_host.adapter.mark)
    assert again != group
    await agent_host.do("delete")
    assert not await asyncio.to_thread(again.exists)


@pytest.mark.skipif(not SOME, reason="this machine permits no control groups of version 2")
@pytest.mark.may_block(reason="files of the kernel")
def test_a_value_that_the_kernel_refuses_leaves_no_group():
    (file, _), *_ = SOME.items()
    with pytest.raises(errors.Refused, match="cannot limit"):
        cgroups.create("muster-test-refused", {file: "nonsense"})
    assert not (cgroups._parent() / "muster-test-refused").exists()
