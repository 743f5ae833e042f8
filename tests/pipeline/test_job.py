"""The whole way: from the stream of reports through Spark to results on the bus and in the history."""

import asyncio
import contextlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from muster.bus import client
from muster.core import errors, messages
from muster.pipeline import client as pipeline_client
from muster.pipeline import history, service, settings
from muster.testing.eventually import eventually
from tests.pipeline import traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

RULES = """
rules:
  - {name: hot, level: node, when: cpu_percent > 90, severity: critical}
  - {name: crowd, level: group, when: reports >= 3}
"""


@contextlib.asynccontextmanager
async def running(broker, spark, folder: Path, **more):
    rules = folder / "rules.yaml"
    rules.write_text(more.pop("rules", RULES))
    wanted = settings.Pipeline(
        **{
            "trigger_s": 0.5,
            "window_s": 1.0,
            "delay_s": 1.0,
            "shards": 2,
            "rules": str(rules),
            "operators": ("*",),
            **more,
        }
    )
    async with await client.connect([broker.url], identity="pipeline") as bus:
        places = service.Places(folder, (broker.url,))
        one = await asyncio.to_thread(service.Service, bus, wanted, places, spark=spark)
        task = asyncio.create_task(one.run())
        try:
            async with await client.connect([broker.url], identity="ann") as user:
                ask = pipeline_client.Client(user)
                await eventually(lambda: _answers(ask), timeout_s=60)
                yield ask
        finally:
            one.stop()
            await task


async def _answers(ask: pipeline_client.Client) -> bool:
    try:
        return bool(await ask.progress())
    except errors.Unavailable:
        return False


async def test_reports_become_system_reports_alerts_and_history(broker, spark, tmp_path):
    at_ms = traffic.now_ms()
    web = [
        traffic.report(f"web-{n}", 1, at_ms, group="web", zone="z1", metrics={"cpu_percent": 30.0 * n})
        for n in range(5)
    ]
    mixed = [
        traffic.report("db-1", 1, at_ms, group="db", zone="z2"),
        traffic.report("web-9", 1, at_ms, group="web", zone="z2"),
    ]
    repeated = traffic.body(mixed)
    await traffic.store(
        broker.url, traffic.body(web), repeated, b"rubbish", traffic.body(web)[:200], repeated
    )
    async with running(broker, spark, tmp_path) as ask:

        async def rolled_up():
            progress = await ask.progress()
            if progress.state == "failed":
                pytest.fail(progress.reason)
            found = await ask.system()
            return found is not None and await ask.top()

        await eventually(rolled_up, timeout_s=300)
        group = await ask.group("web")
        assert group is not None
        assert (await ask.zone("z2")) is not None
        assert {(one.rule, one.about) for one in await ask.alerts()} >= {("hot", "node:web-4")}
        progress = await eventually(lambda: _counted(ask), timeout_s=60)
        assert progress.total_rows == 9
        assert progress.counts["duplicated"] == 2
        assert progress.counts["malformed"] == 2
        assert progress.machines == 7
    rows = [pq.read_table(path) for path in history.files(tmp_path / "history", history.NODES)]
    assert sum(table.num_rows for table in rows) == 9
    levels = [pq.read_table(path).to_pylist() for path in history.files(tmp_path / "history", history.LEVELS)]
    cpu = {
        (row["level"], row["name"]): row
        for table in levels
        for row in table
        if row["metric"] == "cpu_percent"
    }
    assert cpu["system", ""]["count"] == 7
    assert cpu["group", "web"]["max"] == 120.0
    assert cpu["zone", "z2"]["machines"] == 2
    async with await client.connect([broker.url], identity="test") as bus:
        stored = [
            messages.decode(one.data, messages.Alert)
            async for one in (await bus.open_stream("alerts")).read(1)
        ]
    hot = [(one.about, one.state.value) for one in stored if one.rule == "hot"]
    assert hot == [("node:web-4", "firing")]
    assert ("group:web", "firing") in [(one.about, one.state.value) for one in stored]


async def _counted(ask: pipeline_client.Client):
    progress = await ask.progress()
    return progress if progress.total_rows >= 9 else None
