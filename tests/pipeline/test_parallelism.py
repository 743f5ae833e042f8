"""Settings of parallelism and windows change between two runs of the pipeline: state and alerts stay."""

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest

from muster.bus.client import client
from muster.core import errors
from muster.pipeline import client as pipeline_client
from muster.pipeline import cost_fit, protocol, settings
from muster.pipeline.history import tables
from muster.pipeline.job import service
from muster.pipeline.source import session
from muster.testing.eventually import eventually
from tests.pipeline import test_history, test_job, traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

RULES = """
rules:
  - {name: hot, scope: node, when: cpu_percent > 90}
  - {name: silent, scope: node, when: age_s > 3600}
"""
MACHINES = 40
CHANGES: list[dict[str, Any]] = [
    {"shards": 2, "partitions": 2, "splits": 1},
    {"shards": 6, "partitions": 3, "splits": 2},
    {"shards": 1, "partitions": 1, "splits": 4, "window_s": 2.0},
]


async def send(url: str, sequence: int) -> None:
    at_ms = traffic.now_ms()
    rows = [
        traffic.report(
            f"m{n}", sequence, at_ms, group=f"g{n % 4}", metrics={"cpu_percent": 91.0 if n < 5 else 10.0}
        )
        for n in range(MACHINES)
    ]
    body = traffic.body(rows)
    await traffic.store(url, body, body)  # and a repeated message


def counted(root: Path) -> int:
    rows = test_history.read(root, tables.GROUPS)
    return sum(row["cpu_percent_count"] or 0 for row in rows if row["scope"] == "system")


@pytest.mark.slow
async def test_shards_partitions_splits_and_windows_change_without_a_lost_or_repeated_report_or_alert(
    broker, spark, tmp_path
):
    root = tmp_path / "history"
    for number, change in enumerate(CHANGES, 1):
        await send(broker.url, number)
        async with test_job.running(broker, spark, tmp_path, rules=RULES, **change) as ask:

            async def read(number=number) -> bool:
                progress = await ask.progress()
                if progress.state == "failed":
                    pytest.fail(progress.reason)
                if progress.total_rows < 2 * MACHINES:
                    return False
                assert progress.machines == MACHINES
                assert progress.counts["duplicated"] == MACHINES  # also of what an earlier term received
                assert progress.epoch > number - 1
                return True

            await eventually(read, timeout_s=300)
            if number == len(CHANGES):
                await eventually(lambda: counted(root) == MACHINES * len(CHANGES), timeout_s=120)
            assert {(alert.rule, alert.about) for alert in await ask.alerts()} == {
                ("hot", f"node:m{n}") for n in range(5)
            }
    rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
    assert len(rows) == 2 * MACHINES * len(CHANGES)
    async with await client.connect([broker.url], identity="test") as bus:
        assert sorted(await test_job._alerts(bus, "hot")) == sorted(
            (f"node:m{n}", "firing") for n in range(5)
        )
    *earlier, term = sorted((tmp_path / "pipeline" / "checkpoint" / "drivers").iterdir())
    assert len(earlier) == len(CHANGES) - 1
    for former in earlier:  # an empty file, so that a driver that wakes up stores nothing
        assert [(path.name, path.is_file(), path.stat().st_size) for path in former.iterdir()] == [
            ("spark", True, 0)
        ]
    assert list(term.glob("spark/commits/*"))


@pytest.mark.slow
async def test_a_small_fleet_has_one_shard_until_it_grows(broker, spark, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "SMALL_REPORTS", MACHINES)
    root = tmp_path / "history"
    await send(broker.url, 1)

    async def term(ask: pipeline_client.PipelineClient, reports: int) -> Path | None:
        """The folder of the term that has read so many reports."""
        progress = await ask.progress()
        if progress.state == "failed":
            pytest.fail(progress.reason)
        drivers = tmp_path / "pipeline" / "checkpoint" / "drivers"
        *_, last = sorted(drivers.iterdir())
        is_current = progress.epoch == int(last.name) and list(last.glob("spark/commits/*"))
        return last if progress.total_rows >= reports and is_current else None

    async with test_job.running(broker, spark, tmp_path, shards=0, trigger_s=1.0) as ask:
        first = await eventually(lambda: term(ask, MACHINES), timeout_s=300)
        assert first is not None
        assert len(list(first.glob("spark/state/0/*[0-9]"))) == 1
        await asyncio.gather(*(send(broker.url, number) for number in (2, 3, 4)))

        async def grown() -> Path | None:
            last = await term(ask, 4 * MACHINES)
            return last if last != first else None

        second = await eventually(grown, timeout_s=300)
        assert second is not None
        assert len(list(second.glob("spark/state/0/*[0-9]"))) == 2
        await eventually(lambda: counted(root) == 4 * MACHINES, timeout_s=120)
    rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
    assert len(set(rows)) == 4 * MACHINES
    assert len(rows) == 2 * 4 * MACHINES, "each with its repeated message"


def test_a_fleet_fits_one_core_by_its_last_batches_or_because_it_is_new(tmp_path):
    def fits(*rows: int, is_new: bool = False) -> bool:
        folder = tmp_path / "-".join(map(str, (*rows, is_new)))
        for count in rows:
            folder.mkdir(exist_ok=True)
            cost_fit.append_sample(folder / cost_fit.PROGRESS_NAME, protocol.BatchProgress(rows=count))
        running = types.SimpleNamespace(_batches=[], _folder=folder)
        return service.PipelineService._fits_one_core(running, is_new=is_new)  # type: ignore[arg-type]

    assert fits(is_new=True)
    assert not fits(), "a driver that takes over on another machine does not know the fleet"
    assert fits(100, 20_000)
    assert not fits(20_001, 0), "the last batch before a stop may be small"


def test_defaults_follow_the_cores_of_the_cluster():
    assert settings.PipelineSettings().parallelism(2) == (2, 2, 2)
    assert settings.PipelineSettings().parallelism(64) == (64, 64, 64)
    assert settings.PipelineSettings(shards=6).parallelism(4) == (6, 3, 4)
    assert settings.PipelineSettings(shards=6, partitions=2, splits=5).parallelism(4) == (6, 2, 5)
    assert settings.PipelineSettings(partitions=3).parallelism(1) == (3, 3, 1)


@pytest.mark.parametrize("master", ["spark://10.0.0.1:7077", "local[2]"])
def test_dynamic_allocation_is_refused_on_a_cluster(master):
    named = {"spark.dynamicAllocation.enabled": "true"}
    spark = types.SimpleNamespace(sparkContext=types.SimpleNamespace(getConf=lambda: named, master=master))
    if session.is_local(master):
        session.refuse_dynamic_allocation(spark)  # type: ignore[arg-type]
        return
    with pytest.raises(errors.InvalidInput, match="fixed number of executors") as refused:
        session.refuse_dynamic_allocation(spark)  # type: ignore[arg-type]
    assert "spark.cores.max" in str(refused.value.hint)
    named.clear()
    session.refuse_dynamic_allocation(spark)  # type: ignore[arg-type]
