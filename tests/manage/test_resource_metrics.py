"""Metrics of resources on the page of their agent: those of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from muster.core.telemetry import metrics
from muster.manage.agent import agent, resource_metrics
from muster.supervision import os_process
from muster.testing.eventually import eventually
from tests.manage.test_processes import House, agent_host

__all__ = ["agent_host"]

BUSY = "while :; do :; done"
FAMILY = "sleep 1000 & sleep 1000 & wait"


@pytest.fixture
async def measured(agent_host: House) -> Any:
    """An agent with metrics, and what they say."""
    await agent_host.agent.stop()
    measure = metrics.Metrics()
    running = await agent_host.start(measure=measure)
    return agent_host, running, measure


async def value(
    running: agent.Agent, measure: metrics.Metrics, what: str, name: str = "thing"
) -> float | None:
    assert running._metrics is not None
    await running._metrics.sample()
    read: float | None = measure._registry.get_sample_value(
        f"muster_resource_{what}", {"resource": name, "type": "process"}
    )
    return read


async def test_what_a_resource_uses_with_all_its_processes(measured):
    house, running, measure = measured
    await house.do("create", config={"command": ["sh", "-c", FAMILY]}, generation=3)
    await house.do("create", "busy", config={"command": ["sh", "-c", BUSY]})

    async def counted():
        return (await value(running, measure, "processes") or 0) >= 4

    await eventually(counted)
    assert await value(running, measure, "up") == 1
    assert await value(running, measure, "generation") == 3
    assert await value(running, measure, "starts_total") == 1
    assert (await value(running, measure, "memory_bytes") or 0) > 1 << 20

    async def one_second():
        return (await value(running, measure, "cpu_seconds_total", "busy") or 0) >= 1

    await eventually(one_second)
    assert (await value(running, measure, "cpu_seconds_total") or 0) < 1, "each its own"


async def test_an_end_a_start_and_a_deletion(measured):
    house, running, measure = measured
    await house.do("create", config={"command": ["sleep", "1000"]})
    os.kill(house.seen.properties["pid"], signal.SIGKILL)

    async def is_down():
        return await value(running, measure, "up") == 0

    await eventually(is_down)
    assert await value(running, measure, "processes") is None
    await house.do("execute", operation="start")
    assert await value(running, measure, "starts_total") == 2
    assert (await value(running, measure, "processes") or 0) >= 1
    await house.do("delete")
    assert await value(running, measure, "up") is None
    assert measure.value("muster_resources") == 0


async def test_a_restarted_agent_finds_what_it_measures(measured):
    house, running, _ = measured
    await house.do("create", config={"command": ["sleep", "1000"]})
    await running.stop()
    again = metrics.Metrics()
    second = await house.start(measure=again)
    assert (await value(second, again, "processes") or 0) >= 1
    assert await value(second, again, "up") == 1


async def test_time_of_an_orphan_that_has_ended_does_not_make_the_total_decrease(measured):
    house, running, measure = measured
    hog = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    words = f"(setsid python3 -c '{hog}' &) ; exec sleep 1000"
    await house.do("create", config={"command": ["sh", "-c", words]})
    highest = 0.0

    async def is_over():
        nonlocal highest
        total = await value(running, measure, "cpu_seconds_total") or 0
        assert total >= highest
        highest = total
        return highest >= 0.2 and await value(running, measure, "processes") == 2  # the shim and sleep

    await eventually(is_over)
    assert (await value(running, measure, "cpu_seconds_total") or 0) >= highest


async def test_series_are_bounded_and_all_are_counted(measured, monkeypatch):
    house, _, measure = measured
    monkeypatch.setattr(resource_metrics, "SERIES_MAX", 2)
    for name in ("c", "a", "b"):
        await house.do("create", name, type="memory")
    assert measure.value("muster_resources") == 3
    text = measure.exposition()[1].decode()
    assert [name for name in "abc" if f'muster_resource_up{{resource="{name}"' in text] == ["a", "b"]


@pytest.mark.may_block(reason="processes of the test")
def test_usage_of_a_process_by_its_pid_and_of_none():
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            used = os_process.usage({"it": process.pid, "none": 2**22 + 1, "other": "no such mark"})
        finally:
            process.kill()
    assert used.keys() == {"it"}
    assert used["it"].processes == 1
    assert used["it"].memory_bytes > 0
