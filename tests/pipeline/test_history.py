"""The history: searched without Spark, compacted with it, every report once."""

import datetime
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from muster.cli.monitoring import report
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline.fleet import rollups
from muster.pipeline.history import compaction, rollup_rows, search, tables
from tests.pipeline import traffic

HOUR = 3_600_000
T0 = 1_700_006_400_000  # 2023-11-15T00:00:00Z


def store(root: Path, batch: int, rows: list[messages.NodeReport], *, run: str = "r") -> None:
    made = columns.to_batch(rows)
    sequence = pa.repeat(pa.scalar(batch, pa.int64()), made.num_rows)
    table = pa.Table.from_arrays([*made.columns, sequence], schema=tables.node_schema())
    tables.write(table, tables.batch_folder(root, tables.NODES, run, batch) / "part-0.parquet")


def found(root: Path, **more) -> list[dict[str, Any]]:
    return [row for batch in search.search(root, search.HistorySearch(**more)) for row in batch.to_pylist()]


@pytest.fixture
def root(tmp_path):
    for batch in range(3):
        rows = [
            traffic.report(
                f"m{n}",
                batch + 1,
                T0 + batch * HOUR,
                group="web" if n < 5 else "db",
                metrics={"cpu_percent": 10.0 * n},
            )
            for n in range(10)
        ]
        store(tmp_path, batch, rows)
    return tmp_path


def test_a_search_finds_what_the_predicate_says(root):
    rows = found(root, where="group = 'web' AND cpu_percent >= 30", columns=("machine", "cpu_percent"))
    assert (
        sorted((row["machine"], row["cpu_percent"]) for row in rows)
        == [("m3", 30.0)] * 3 + [("m4", 40.0)] * 3
    )
    assert len(found(root, from_ms=T0 + HOUR, to_ms=T0 + 2 * HOUR)) == 10
    assert len(found(root, limit=7)) == 7
    assert found(root, where="load_1m > 0") == []
    with pytest.raises(errors.ParseError, match="cpu_prcent"):
        found(root, where="cpu_prcent > 1")
    with pytest.raises(errors.InvalidInput, match="colour"):
        found(root, columns=("colour",))


def test_a_summary_counts_by_what_it_is_asked(root):
    table = search.summarise(root, search.HistorySearch(), of="cpu_percent", by=("group",)).to_pylist()
    assert table == [
        {"group": "db", "count": 15, "mean": 70.0, "min": 50.0, "max": 90.0},
        {"group": "web", "count": 15, "mean": 20.0, "min": 0.0, "max": 40.0},
    ]


def test_an_empty_history_has_nothing(tmp_path):
    assert found(tmp_path) == []
    assert tables.last_sequence(tmp_path) == 0
    assert search.summarise(tmp_path, search.HistorySearch(), of="cpu_percent", by=("group",)).num_rows == 0


def test_the_last_sequence_is_read_from_the_files(root):
    assert tables.last_sequence(root) == 2


def test_the_oldest_go_when_the_budget_is_used_up(root):
    paths = tables.files(root, tables.NODES)
    for number, path in enumerate(paths):
        os.utime(path, (1000 + number, 1000 + number))
    size = paths[0].stat().st_size
    assert tables.prune(root, max_bytes=0, max_age_s=0, now_s=5000) == 0
    assert tables.prune(root, max_bytes=2 * size + 10, max_age_s=0, now_s=5000) == 1
    assert tables.files(root, tables.NODES) == paths[1:]
    assert tables.prune(root, max_bytes=0, max_age_s=10, now_s=1011.5) == 1
    assert tables.files(root, tables.NODES) == paths[2:]
    assert tables.last_sequence(root) == 2


def test_a_file_appears_whole_or_not_at_all(root, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(tables.HistoryFull):
        store(root, 9, [traffic.report("x", 1, T0)])
    assert not list(root.rglob("*batch=9*/*"))


def test_baselines_are_taught_by_the_history(tmp_path):
    window_ms = 10_000
    for number in range(30):
        many = rollups.ScopeTotals("group", "web", T0 + number * window_ms)
        many.cell.fold(_column(50.0 + number % 3))
        rollup_rows.write([many], window_ms, tmp_path, "r", number)
    baselines = rollups.Baselines()
    rollup_rows.load_baselines(baselines, tmp_path, {"group"})
    odd = rollups.ScopeTotals("group", "web", T0 + 400_000)
    odd.cell.fold(_column(90.0))
    usual = rollups.ScopeTotals("group", "web", T0 + 410_000)
    usual.cell.fold(_column(51.0))
    assert baselines.scores("group", "web", odd.from_ms, rollups.means(odd.cell))[0] > 10
    assert abs(baselines.scores("group", "web", usual.from_ms, rollups.means(usual.cell))[0]) < 3


def _column(value: float):
    import numpy as np

    return np.full((len(columns.STANDARD_METRICS), 5), value)


@pytest.mark.timeout(600)
@pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests")
def test_compaction_keeps_every_report_once(root, spark):
    again = [traffic.report(f"m{n}", 2, T0 + HOUR, metrics={"cpu_percent": 10.0 * n}) for n in range(3)]
    store(root, 3, again)  # they arrived twice
    before = {(row["machine"], row["sequence"]) for row in found(root)}
    assert len(found(root)) == 33
    told = compaction.run(spark, root, T0 + 2 * HOUR + 600_000)
    assert told["batches"] == 3  # the last one's hour is not over
    rows = found(root)
    assert len(rows) == 30
    assert {(row["machine"], row["sequence"]) for row in rows} == before
    assert len(list((root / "nodes").rglob("*.parquet"))) == 1
    assert tables.last_sequence(root) == 3
    node = report.past(root, "node", "m7", T0 + 1000, 60.0)  # as an hour's file has it
    assert (node.sequence, node.metrics["cpu_percent"]) == (1, 70.0)
    assert compaction.run(spark, root, T0 + 30 * HOUR)["days"] == 1
    daily = found(root, kind="days", where="machine = 'm7' AND metric = 'cpu_percent'")
    assert [(row["count"], row["mean"]) for row in daily] == [(1, 70.0)] * 3
    assert daily[0]["hour"].tzinfo is not None
    assert min(row["hour"] for row in daily) == datetime.datetime.fromtimestamp(T0 / 1000, datetime.UTC)
    assert compaction.run(spark, root, T0 + 30 * HOUR) == {"batches": 0, "days": 0, "joined": 0}


def test_levels_and_alerts_are_joined_by_the_hour_and_by_the_day_and_stand_once(tmp_path):
    for batch in range(9):  # three an hour
        at_ms = T0 + batch * HOUR // 3
        many = rollups.ScopeTotals("group", "web", at_ms)
        many.cell.fold(_column(batch))
        rollup_rows.write([many], 10_000, tmp_path, "r", batch)
        alert = messages.Alert(
            rule="x",
            about=f"group:{batch}",
            severity=messages.Severity.INFO,
            state=messages.AlertState.FIRING,
            since_ms=at_ms,
            at_ms=at_ms,
        )
        rollup_rows.write_alerts([alert], tmp_path, "r", batch)

    def there() -> tuple[list[float], list[str]]:
        rows = found(tmp_path, kind="rollups", where="metric = 'cpu_percent'")
        return sorted(row["max"] for row in rows), sorted(
            row["about"] for row in found(tmp_path, kind="alerts")
        )

    before = there()
    assert len(before[0]) == len(before[1]) == 9
    for kind in (tables.ROLLUPS, tables.ALERTS):
        assert compaction.join(tmp_path, kind, T0 + 2 * HOUR + 60_000) == 6
        assert len(tables.files(tmp_path, kind)) == 5  # two hours, and three batches of the one that goes on
    assert there() == before
    for kind in (tables.ROLLUPS, tables.ALERTS):
        assert compaction.join(tmp_path, kind, T0 + 25 * HOUR) == 3 + 3
        assert len(list((tmp_path / kind).rglob("*.parquet"))) == 1
        assert compaction.join(tmp_path, kind, T0 + 25 * HOUR) == 0
    assert there() == before
    assert tables.prune(tmp_path, max_bytes=1, max_age_s=0, now_s=1e12) == 2
    assert there() == ([], [])


def test_what_a_killed_turn_left_behind_is_taken_away(tmp_path):
    many = rollups.ScopeTotals("group", "web", T0)
    many.cell.fold(_column(1.0))
    rollup_rows.write([many], 10_000, tmp_path, "r", 0)
    told = tables.compacted(tmp_path)
    told.rollups.batches.append("run=r/batch=0")  # taken in, and killed before it could be removed
    tables.save_compacted(tmp_path, told)
    assert found(tmp_path, kind="rollups") == []
    assert compaction.join(tmp_path, tables.ROLLUPS, T0 + 9 * HOUR) == 0
    assert not list((tmp_path / "rollups").rglob("*.parquet"))
    assert tables.compacted(tmp_path).rollups.batches == []


def test_a_batch_that_may_be_written_again_is_not_compacted_nor_counted_on(root):
    for path in (root / "nodes" / "run=r").iterdir():
        assert path.name in {"batch=0", "batch=1", "batch=2"}
    tables.mark_done(root, "r", tables.BatchMarker(1, 7))
    names = [name for name, _ in tables.complete_batches(root, tables.NODES)]
    assert names == ["run=r/batch=0"]  # Spark may not have noted that the next one is done
    store(root, 3, [traffic.report("x", 1, T0)], run="s")
    tables.mark_done(root, "s", tables.BatchMarker(-1, 7))
    names = [name for name, _ in tables.complete_batches(root, tables.NODES)]
    assert names == ["run=r/batch=0", "run=r/batch=1"]
    assert tables.settle(root, first=3) == (2, 7)  # the stream has no longer what is in the torn batch 2
    assert tables.settle(root, first=0) == (1, 7)
    assert sorted(path.name for path in (root / "nodes").glob("run=*/batch=*")) == ["batch=0", "batch=1"]


def test_a_history_that_nobody_marked_is_gone_on_lag_messages(root, tmp_path_factory):
    assert tables.settle(root, first=0) == (2, -1)
    assert tables.settle(tmp_path_factory.mktemp("empty"), first=1) == (0, 0)
