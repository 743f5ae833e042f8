"""No resource runs twice on a machine: one process of an agent at a time uses its folder, and what runs
without a record is ended."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core import errors
from muster.manage import protocol
from muster.manage.agent import agent, resource_host
from muster.supervision import os_process
from muster.testing.eventually import eventually


async def test_a_second_process_of_an_agent_is_refused(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(resource_host, "LOCK_WAIT_S", 0.2)
    async with agent.Agent(await connect("host-a"), tmp_path / "a"):
        with pytest.raises(errors.Conflict, match=r"runs already, as process \d+"):
            await agent.Agent(await connect("host-a"), tmp_path / "a").start()
        async with agent.Agent(await connect("host-b"), tmp_path / "b"):
            pass
    async with agent.Agent(await connect("host-a"), tmp_path / "a"):
        pass


@pytest.mark.parametrize("is_empty", [True, False], ids=["emptied", "of an earlier day"])
async def test_a_run_of_which_the_folder_knows_nothing_is_ended(connect, tmp_path, is_empty):
    folder, bus = tmp_path / "a", await connect("host-a")

    def act(number: int, verb: protocol.Verb, **more: Any) -> protocol.Operation:
        return protocol.Operation(
            id=f"o{number}", verb=verb, resource="web", epoch=1, manager="m", type="process", **more
        )

    async with agent.Agent(bus, folder) as host:
        first = await host.execute(act(1, protocol.Verb.CREATE, config={"command": ["sleep", "1000"]}))
        before = (folder / "web.json").read_bytes()
        again = await host.execute(act(2, protocol.Verb.EXECUTE, operation="restart"))
        assert first.observed is not None
        assert again.observed is not None
    pid = again.observed.properties["pid"]
    (folder / "web.json").unlink() if is_empty else (folder / "web.json").write_bytes(before)
    assert os_process.start_time(pid)
    async with agent.Agent(bus, folder) as host:
        await eventually(lambda: not os_process.start_time(pid))
        assert ("web" in host.hosted) is not is_empty
        await host.execute(act(3, protocol.Verb.DELETE))
