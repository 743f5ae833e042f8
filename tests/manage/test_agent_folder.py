"""One process of an agent at a time uses its folder: two of them would start each resource twice."""

from __future__ import annotations

import pytest

from muster.core import errors
from muster.manage.agent import agent, resource_host


async def test_a_second_process_of_an_agent_is_refused(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(resource_host, "LOCK_WAIT_S", 0.2)
    async with agent.Agent(await connect("host-a"), tmp_path / "a"):
        with pytest.raises(errors.Conflict, match=r"runs already, as process \d+"):
            await agent.Agent(await connect("host-a"), tmp_path / "a").start()
        async with agent.Agent(await connect("host-b"), tmp_path / "b"):
            pass
    async with agent.Agent(await connect("host-a"), tmp_path / "a"):
        pass
