"""Hooks: commands after each start and before each stop of a process. With real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from muster.core import errors, messages
from muster.manage import manifest, protocol
from muster.manage.adapters import plugins
from muster.testing.eventually import eventually
from tests.manage import test_processes
from tests.manage.test_processes import DOWN, UP, House

agent_host = test_processes.agent_host  # a fixture
DONE, FAILED = messages.DecisionOutcome.DONE, messages.DecisionOutcome.FAILED


def hooks(folder: Path, **commands: str) -> protocol.Hooks:
    """Shell commands, which write to a file."""

    def made(text: str) -> protocol.HookCommand:
        return protocol.HookCommand(command=("sh", "-c", text), timeout_s=2.0)

    return protocol.Hooks(**{name: made(text) for name, text in commands.items()})


async def create(host: House, declared: protocol.Hooks, *command: str) -> protocol.OperationResult:
    config: dict[str, Any] = {
        "command": command or ("sleep", "1000"),
        "environment": {"COLOR": "red"},
        "stop_s": 1,
    }
    return await host.do("create", config=config, hooks=declared, generation=1)


async def test_hooks_run_after_each_start_and_before_each_stop(agent_host, tmp_path):
    log = tmp_path / "log"
    declared = hooks(tmp_path, post_start=f"echo started $COLOR >> {log}", pre_stop=f"echo stops >> {log}")
    assert (await create(agent_host, declared)).outcome is DONE
    assert agent_host.seen.state is UP
    assert log.read_text() == "started red\n"
    await agent_host.do("execute", operation="restart")
    assert log.read_text() == "started red\nstops\nstarted red\n"
    await agent_host.agent.stop()
    again = House(agent_host.folder)
    await again.start()
    await again.do("delete")
    await again.agent.stop()
    agent_host.agent = again.agent
    assert log.read_text() == "started red\nstops\nstarted red\nstops\n"


async def test_changed_hooks_are_applied_without_a_restart(agent_host, tmp_path):
    await create(agent_host, hooks(tmp_path, pre_stop="true"))
    before, pid = agent_host.seen.digest, agent_host.seen.properties["pid"]
    log = tmp_path / "log"
    changed = hooks(tmp_path, pre_stop=f"echo other > {log}")
    config = agent_host.hosted_thing.record.config
    await agent_host.do("put", config=config, hooks=changed)
    assert agent_host.seen.properties["pid"] == pid
    assert agent_host.seen.digest == manifest.digest(config, changed) != before
    await agent_host.do("execute", operation="stop")
    assert log.read_text() == "other\n"


async def test_a_start_whose_hook_fails_has_failed(agent_host, tmp_path):
    answer = await create(agent_host, hooks(tmp_path, post_start="echo no such queue >&2; exit 7"))
    assert answer.outcome is FAILED
    assert answer.reason == "thing: its post_start hook failed with exit code 7: no such queue"
    assert agent_host.seen.state is DOWN
    assert agent_host.adapter._pid is None, "it was stopped"


async def test_it_starts_until_its_hook_has_ended(agent_host, tmp_path):
    gate = tmp_path / "gate"
    creation = asyncio.create_task(
        create(agent_host, hooks(tmp_path, post_start=f"until test -e {gate}; do sleep 0.02; done"))
    )
    hosted = agent_host.agent.hosted
    await eventually(lambda: hosted and agent_host.seen.reason == "its post_start hook runs")
    gate.touch()
    assert (await creation).outcome is DONE
    assert agent_host.seen.state is UP


async def test_a_hook_that_hangs_is_killed_and_the_stop_goes_on(agent_host, tmp_path):
    word = test_processes.mark()
    slow = protocol.HookCommand(command=("sleep", word), timeout_s=0.3)
    await create(agent_host, protocol.Hooks(pre_stop=slow))
    answer = await agent_host.do("execute", operation="stop")
    assert answer.outcome is DONE
    assert agent_host.seen.state is DOWN
    assert test_processes.carriers(word) == []
    answer = await agent_host.do(
        "put", config=agent_host.hosted_thing.record.config, hooks=protocol.Hooks(post_start=slow)
    )
    answer = await agent_host.do("execute", operation="start")
    assert answer.reason == "thing: its post_start hook took longer than 0.3 s"
    assert test_processes.carriers(word) == []


async def test_a_program_that_does_not_exist_is_named(agent_host):
    missing = protocol.Hooks(post_start=protocol.HookCommand(command=("no-such-program",)))
    answer = await create(agent_host, missing)
    assert "post_start hook failed" in answer.reason
    assert "no-such-program" in answer.reason


async def test_a_process_that_ends_before_its_hook_has_run_once(agent_host, tmp_path):
    log = tmp_path / "log"
    declared = hooks(tmp_path, post_start="sleep 0.3; exit 1")
    answer = await create(agent_host, declared, "sh", "-c", f"echo ran >> {log}")
    assert answer.outcome is DONE, "its end is reported, and decides"
    await eventually(lambda: agent_host.seen.properties.get("exit_code") == 0)
    assert log.read_text() == "ran\n"


def test_types_without_hooks_refuse_them():
    entry = "{name: a, type: memory, agent: b, hooks: {pre_stop: {command: [x]}}}"
    with pytest.raises(errors.InvalidInput, match=r"line 2, resources\[0\].hooks: .*'memory' have no hooks"):
        manifest.read(
            f"resources:\n  - {entry}", plugins.config_validators(), plugins.can_move, plugins.has_hooks
        )
