"""The whole way: from the stream of reports through Spark to results on the bus and in the history."""

import asyncio
import contextlib
import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from muster.bus import api
from muster.bus.client import client
from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import protocol as monitor_protocol
from muster.monitor.channel import channel as monitor_service
from muster.monitor.channel import interpreters
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol, settings
from muster.pipeline.history import delta, tables
from muster.pipeline.job import query, service, window_rows
from muster.pipeline.job.driver import continuation
from muster.testing.eventually import eventually
from tests import disks
from tests.pipeline import test_history, traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

RULES = """
rules:
  - {name: hot, scope: node, when: cpu_percent > 90, severity: critical}
  - {name: crowd, scope: group, when: reports >= 3}
"""

STEPS = {
    "twice": "from muster.pipeline import steps\n"
    "def reports(rows): return {'twice': 2 * steps.metric(rows, 'cpu_percent')}\n",
    "broken": "def reports(rows): return rows['nothing']\n",
}
STEP_RULES = """
  - {name: doubled, scope: node, when: own.twice > 200}
  - {name: peak, scope: group, when: own.twice_max > 200}
"""


@contextlib.asynccontextmanager
async def running(broker, spark, folder: Path, **more):
    rules = folder / "rules.yaml"
    rules.write_text(more.pop("rules", RULES))
    pipeline_settings = settings.PipelineSettings(
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
        places = service.PipelinePaths(folder, (broker.url,))
        pipeline_service = await asyncio.to_thread(
            service.PipelineService, bus, pipeline_settings, places, spark=spark
        )
        task = asyncio.create_task(pipeline_service.run())
        try:
            async with await client.connect([broker.url], identity="ann") as user:
                ask = pipeline_client.PipelineClient(user)
                await eventually(lambda: _answers(ask), timeout_s=60)
                yield ask
        finally:
            pipeline_service.stop()
            await task


async def _answers(ask: pipeline_client.PipelineClient) -> bool:
    try:
        return bool(await ask.progress())
    except errors.Unavailable:
        return False


@pytest.mark.parametrize("merged_by", ["driver", "executors"])
async def test_reports_become_system_reports_alerts_and_history(
    broker, spark, tmp_path, monkeypatch, merged_by
):
    if merged_by == "executors":
        monkeypatch.setattr(window_rows, "MERGED_BY_DRIVER", -1)
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
    for name, text in STEPS.items():
        (tmp_path / f"{name}.py").write_text(text)
    named = tuple(str(tmp_path / f"{name}.py") for name in STEPS)
    async with running(broker, spark, tmp_path, rules=RULES + STEP_RULES, steps=named) as ask:

        async def rolled_up():
            progress = await ask.progress()
            if progress.state == "failed":
                pytest.fail(progress.reason)
            actual = await ask.system()
            return actual is not None and await ask.top()

        await eventually(rolled_up, timeout_s=300)
        group = await ask.group("web")
        assert group is not None
        assert (await ask.zone("z2")) is not None
        assert {(alert.rule, alert.about) for alert in await ask.alerts()} >= {("hot", "node:web-4")}
        progress = await eventually(lambda: _counted(ask), timeout_s=60)
        assert progress.total_rows == 9
        assert progress.counts["duplicated"] == 2
        assert progress.counts["malformed"] == 2
        assert progress.counts["step-failed broken"] >= 1
        assert progress.machines == 7
        await asyncio.to_thread(check_what_spark_shows, spark, progress)
    stored = test_history.read(tmp_path / "history")
    assert len(stored) == 9
    assert {row["machine"]: dict(row["metrics"])["twice"] for row in stored}["web-4"] == 240.0
    cpu = {(row["scope"], row["name"]): row for row in _levels(tmp_path / "history")}
    assert cpu["system", ""]["cpu_percent_count"] == 7
    assert cpu["group", "web"]["cpu_percent_max"] == 120.0
    assert cpu["zone", "z2"]["machines"] == 2
    alerts = test_history.read(tmp_path / "history", tables.ALERTS)
    assert [(row["about"], row["state"]) for row in alerts if row["rule"] == "hot"] == [
        ("node:web-4", "firing")
    ]
    async with await client.connect([broker.url], identity="test") as bus:
        assert await _alerts(bus, "hot") == [("node:web-4", "firing")]
        assert await _alerts(bus, "doubled") == [("node:web-4", "firing")]
        assert ("group:web", "firing") in await _alerts(bus, "peak")
        assert ("pipeline", "firing") in await _alerts(bus, "step-failing")
        assert ("group:web", "firing") in await _alerts(bus, "crowd")


async def test_brokers_that_are_away_when_a_query_starts_do_not_end_the_pipeline(
    broker, spark, tmp_path, monkeypatch
):
    follow, calls = continuation.Continuation.follow_shorter_streams, list[object]()

    async def away_at_first(self: continuation.Continuation, *where: Any) -> bool:
        calls.append(self)
        if len(calls) == 1:
            raise errors.TimedOut("the stream has no leader")
        return await follow(self, *where)

    monkeypatch.setattr(continuation.Continuation, "follow_shorter_streams", away_at_first)
    await traffic.store(broker.url, traffic.body([traffic.report("web-1", 1, traffic.now_ms())]))
    async with running(broker, spark, tmp_path) as ask:

        async def counted() -> Any:
            progress = await ask.progress()
            return progress.total_rows == 1 and progress.counts["query-failed"]

        await eventually(counted, timeout_s=300)


def check_what_spark_shows(spark: Any, progress: protocol.BatchProgress) -> None:
    """Listeners get the figures of each batch, and pages descriptions that say what a job does."""
    (running_query,) = spark.streams.active
    observed = [report.observedMetrics[query.QUERY_NAME] for report in running_query.recentProgress]
    assert sum(figures["reports"] for figures in observed) == progress.total_rows
    assert sum(figures["repeated"] for figures in observed) == progress.counts["duplicated"]
    assert {figures["machines"] for figures in observed} == {progress.machines}
    assert all(figures["lag_ms"] >= 0 for figures in observed)
    jobs = spark._jsc.sc().statusStore().jobsList(None)
    described = [str(jobs.apply(n).description()) for n in range(jobs.size())]  # an Option
    assert f"Some(fleet, batch 0: {query.WORK.format(2)})" in described


async def _alerts(bus: client.NatsBus, rule: str) -> list[tuple[str, str]]:
    """The alerts of a rule: subject and state."""
    stored = [
        messages.decode(message.data, messages.Alert)
        async for message in (await bus.open_stream("alerts")).read(1)
        if message.data
    ]
    return [(alert.about, alert.state.value) for alert in stored if alert.rule == rule]


async def test_what_a_merging_channel_sums_up_counts_beside_reports_with_all_detail(broker, spark, tmp_path):
    """Through a real channel, the other stream and the query. Stored before it starts: nothing is late."""
    at_ms = traffic.now_ms()
    far = [
        traffic.report(f"edge.{n}", 1, at_ms, group="far", zone="z3", metrics={"cpu_percent": 10.0 * n})
        for n in range(10)
    ]
    near = [traffic.report(f"m{n}", 1, at_ms, group="near", zone="z1") for n in range(5)]
    await traffic.store(broker.url, traffic.body(near))
    async with (
        await client.connect([broker.url], identity="c9") as up,
        await client.connect([broker.url], identity="edge") as sensor,
    ):
        to_root = interpreters.ForwardTarget("up", (monitor_protocol.ROOT,), interpreter="merge")
        options = monitor_service.ChannelOptions(hold_s=0.1, beat_s=0.1, subscriptions=(to_root,))
        async with monitor_service.Channel(up, options) as channel:
            for row in far:
                await sensor.publish(monitor_protocol.report("edge", "c9"), messages.encode(row))
            await eventually(lambda: channel.aggregator.received == len(far))
    async with (
        running(broker, spark, tmp_path) as ask,
        await client.connect([broker.url], identity="test") as bus,
    ):

        async def rolled_up():
            progress = await ask.progress()
            if progress.state == "failed":
                pytest.fail(progress.reason)
            # Alerts that fired, not those that fire: the next window may have ended one already.
            fired = {about for about, state in await _alerts(bus, "crowd") if state == "firing"}
            both = {"group:far", "group:near"} <= fired
            return progress if both and progress.counts.get("summaries") else None

        progress = await eventually(rolled_up, timeout_s=300)
        assert progress.machines == 5  # single machines behind the channel are not known
        assert "late" not in progress.counts
        assert await ask.group("far") is not None
    cpu = _levels(tmp_path / "history")
    far_cpu = [row for row in cpu if (row["scope"], row["name"]) == ("group", "far")]
    assert sum(row["cpu_percent_count"] for row in far_cpu) == 10
    total = sum(row["cpu_percent_count"] * row["cpu_percent_mean"] for row in far_cpu)
    assert total == pytest.approx(450.0)
    assert min(row["cpu_percent_min"] for row in far_cpu) == 0.0
    assert max(row["cpu_percent_max"] for row in far_cpu) == 90.0
    assert sum(row["machines"] for row in far_cpu) == 10
    assert sum(row["cpu_percent_count"] for row in cpu if row["scope"] == "system") == 15
    in_zone = [row for row in cpu if (row["scope"], row["name"]) == ("zone", "z3")]
    assert sum(row["cpu_percent_count"] for row in in_zone) == 10


def _levels(root: Path) -> list[dict[str, Any]]:
    """Windows of groups, zones and the system in which something was reported."""
    return [row for row in test_history.read(root, tables.GROUPS) if row["cpu_percent_count"]]


SILENCE = """
rules:
  - {name: silent, scope: node, when: age_s > 3 * period_s, severity: critical}
  - {name: no-data, scope: group, only: [web, never-seen], when: reports = 0, for: 1s}
"""


async def test_silence_is_noticed_bad_input_counted_and_a_full_disk_survived(broker, spark, tmp_path):
    at_ms = traffic.now_ms()
    good = [traffic.report(f"web-{n}", 1, at_ms, group="web", period_s=1.0) for n in range(3)]
    future = [traffic.report("web-0", 2, at_ms + 3_600_000, group="web")]
    late = [traffic.report("web-0", 3, at_ms - 3_600_000, group="web")]
    newer = traffic.body(good, schema="node-reports/9")
    table = pa.table({"machine": ["x"]}).to_batches()[0]
    other = columns.encode(table, columns.BatchInfo())
    huge = b"x" * (columns.MAX_BATCH_BYTES // 16)
    await traffic.store(broker.url, traffic.body(good), b"lost", traffic.body(future), newer, other, huge)
    async with await client.connect([broker.url], identity="c1") as bus:
        await (await bus.open_stream(columns.REPORTS_STREAM)).delete(2)  # as retention does
    for table in (tables.NODES, tables.GROUPS):  # no folder can be made below a file, as none on a full disk
        delta.HistoryTable(tmp_path / "history", table)
        for days in (-1, 0, 1):
            day = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=days)
            (tmp_path / "history" / table / f"day={day}").write_text("")
    async with running(broker, spark, tmp_path, rules=SILENCE) as ask:

        async def noticed():
            progress = await ask.progress()
            if progress.state == "failed":
                pytest.fail(progress.reason)
            return {
                (alert.rule, alert.about) for alert in await ask.alerts() if alert.state.value == "firing"
            } >= {
                ("silent", "node:web-0"),
                ("silent", "node:web-2"),
                ("no-data", "group:web"),
                ("no-data", "group:never-seen"),
                ("reports-lost", "pipeline"),
            }

        await eventually(noticed, timeout_s=300)
        await ask.acknowledge("no-data", "group:web")
        silence = await ask.silence("rule = 'silent' AND about = 'node:web-2'", for_s=3600, reason="replaced")
        actual = {(alert.rule, alert.about): alert.state.value for alert in await ask.alerts()}
        assert actual["no-data", "group:web"] == "acknowledged"
        assert actual["silent", "node:web-2"] == "silenced"
        assert actual["silent", "node:web-1"] == "firing"
        assert [active.id for active in await ask.silences()] == [silence.id]
        await ask.unsilence(silence.id)
        with pytest.raises(errors.NotFound):
            await ask.acknowledge("silent", "node:nobody")
        with pytest.raises(errors.InvalidInput, match="colour"):
            await ask.silence("colour = 'red'", for_s=1)
        back = traffic.report("web-0", 4, traffic.now_ms(), group="web", period_s=1000.0)
        await traffic.store(broker.url, traffic.body([back]), traffic.body(late))

        async def resolved():
            return ("silent", "node:web-0") not in {(alert.rule, alert.about) for alert in await ask.alerts()}

        await eventually(resolved, timeout_s=120)
        progress = await eventually(lambda: _late(ask), timeout_s=60)
        assert progress.state == "running"
        assert {
            name: progress.counts[name] for name in ("future", "late", "wrong-version", "wrong-schema")
        } == {
            "future": 1,
            "late": 1,
            "wrong-version": 1,
            "wrong-schema": 1,
        }
        assert progress.counts["malformed"] == 1
        assert progress.counts["lost-messages"] == 1
        assert progress.counts["not-in-history"] == 6
        assert progress.counts["rollups-not-in-history"] > 0


async def _late(ask: pipeline_client.PipelineClient):
    progress = await ask.progress()
    return progress if progress.counts.get("late") else None


async def _counted(ask: pipeline_client.PipelineClient):
    progress = await ask.progress()
    return progress if progress.total_rows >= 9 else None


@pytest.mark.slow
async def test_a_full_disk_raises_an_alert_and_the_history_continues_when_there_is_space(
    broker, spark, tmp_path, small_disk
):
    filler = disks.fill(small_disk)
    at_ms = traffic.now_ms()
    await traffic.store(broker.url, traffic.body([traffic.report(f"m{n}", 1, at_ms) for n in range(50)]))
    root = small_disk / "history"
    async with running(broker, spark, tmp_path, history_dir=str(root)) as ask:

        async def rings(*, on: bool) -> bool:
            reported = {alert.rule: alert.state.value for alert in await ask.alerts()}
            return ("history-full" in reported) is on

        await eventually(lambda: rings(on=True), timeout_s=300)
        progress = await eventually(lambda: _counts(ask, "history-full"), timeout_s=60)
        assert progress.counts["not-in-history"] == 50
        filler.unlink()
        late_ms = traffic.now_ms()
        await traffic.store(broker.url, traffic.body([traffic.report("m1", 2, late_ms)]))
        await eventually(lambda: rings(on=False), timeout_s=120)
        await eventually(lambda: _read(ask, 51), timeout_s=120)
        progress = await ask.progress()
        assert progress.counts["not-in-history"] == 50
    rows = test_history.read(root)
    assert [(row["machine"], row["sequence"]) for row in rows] == [("m1", 2)]


@pytest.mark.slow
async def test_a_broker_killed_under_load_costs_the_pipeline_no_report(broker, spark, tmp_path):
    sent = 0

    async def tell(number: int) -> None:
        nonlocal sent
        at_ms = traffic.now_ms()
        rows = [traffic.report(f"m{n}", number, at_ms, group=f"g{n % 3}") for n in range(30)]
        await traffic.store(broker.url, traffic.body(rows))
        sent += len(rows)

    await tell(1)
    async with running(broker, spark, tmp_path) as ask:
        await eventually(lambda: _read(ask, 30), timeout_s=300)
        for number in range(2, 5):
            await tell(number)
        await broker.kill()
        await eventually(lambda: ask._bus.state is not api.ConnectionState.CONNECTED)
        await broker.start()
        for number in range(5, 8):
            await tell(number)
        await eventually(lambda: _there(tmp_path / "history", sent), timeout_s=300)
    rows = [(row["machine"], row["sequence"]) for row in test_history.read(tmp_path / "history")]
    assert len(rows) == len(set(rows)) == sent


async def _there(root: Path, expected: int) -> bool:
    return len(test_history.read(root)) >= expected


async def _batch(ask: pipeline_client.PipelineClient, number: int) -> bool:
    progress = await ask.progress()
    return progress.batch >= number


async def _read(ask: pipeline_client.PipelineClient, rows: int) -> bool:
    progress = await ask.progress()
    return progress.total_rows >= rows


async def _counts(ask: pipeline_client.PipelineClient, reason: str):
    progress = await ask.progress()
    return progress if progress.counts.get(reason) else None
