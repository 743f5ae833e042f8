"""The history: committed exactly once, searched without Spark, maintained, every report once."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from muster.cli.monitoring import report
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline.fleet import blocks, cell_arrays, rollups
from muster.pipeline.history import data_files, delta, maintenance, rollup_rows, search, storage, tables
from muster.pipeline.job import batch_commit
from tests.pipeline import traffic

HOUR = 3_600_000
REPORTS, SUMMARIES = batch_commit.POSITIONS.values()
T0 = 1_700_006_400_000  # 2023-11-15T00:00:00Z


def node_rows(rows: list[messages.NodeReport], sequence: int = 0) -> pa.Table:
    piece = blocks.ReportPiece.from_message(sequence, 0, columns.to_batch(rows), columns.BatchInfo())
    return pa.Table.from_batches([piece.rows()])


def store(root: Path, batch: int, rows: list[messages.NodeReport], *, run: str = "r") -> bool:
    """Commit a batch of reports as the pipeline does. Whether the table did not have it yet."""
    written = data_files.write(root, tables.NODES, node_rows(rows, batch), f"{run}-{batch}-0")
    positions = {REPORTS: batch + 1}
    return delta.HistoryTable(root, tables.NODES).commit(written.files, (run, batch), positions)


def store_groups(root: Path, batch: int, totals: list[rollups.ScopeTotals]) -> None:
    rows = rollup_rows.rows(totals)
    written = data_files.write(root, tables.GROUPS, rows, f"r-{batch}")
    delta.HistoryTable(root, tables.GROUPS).commit(written.files, ("r", batch))


def store_alerts(root: Path, batch: int, alerts: list[messages.Alert]) -> None:
    written = data_files.write(root, tables.ALERTS, rollup_rows.alert_rows(alerts), f"r-{batch}")
    delta.HistoryTable(root, tables.ALERTS).commit(written.files, ("r", batch))


def read(root: Path, table: str = tables.NODES) -> list[dict[str, Any]]:
    """All rows, without a search; none if there is no table."""
    if not delta.exists(root, table):
        return []
    rows: list[dict[str, Any]] = delta.Snapshot(root, table).dataset().to_table().to_pylist()
    return rows


def search_rows(root: Path, **more) -> list[dict[str, Any]]:
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
                metrics={"cpu_percent": 10.0 * n, "queue": float(n)},
            )
            for n in range(10)
        ]
        assert store(tmp_path, batch, rows)
    return tmp_path


def test_a_search_returns_the_rows_that_match_the_predicate(root):
    rows = search_rows(root, where="group = 'web' AND cpu_percent >= 30", columns=("machine", "cpu_percent"))
    assert (
        sorted((row["machine"], row["cpu_percent"]) for row in rows)
        == [("m3", 30.0)] * 3 + [("m4", 40.0)] * 3
    )
    assert len(search_rows(root, from_ms=T0 + HOUR, to_ms=T0 + 2 * HOUR)) == 10
    assert len(search_rows(root, limit=7)) == 7
    assert search_rows(root, where="load_1m > 0") == []
    with pytest.raises(errors.ParseError, match="cpu_prcent"):
        search_rows(root, where="cpu_prcent > 1")
    with pytest.raises(errors.InvalidInput, match="colour"):
        search_rows(root, columns=("colour",))
    with pytest.raises(errors.InvalidInput, match="no table 'rollups'"):
        search_rows(root, kind="rollups")


def test_a_summary_counts_by_what_it_is_asked(root):
    table = search.summarise(root, search.HistorySearch(), of="cpu_percent", by=("group",)).to_pylist()
    assert table == [
        {"group": "db", "count": 15, "mean": 70.0, "min": 50.0, "max": 90.0},
        {"group": "web", "count": 15, "mean": 20.0, "min": 0.0, "max": 40.0},
    ]


def test_an_empty_history_has_nothing(tmp_path):
    assert search_rows(tmp_path) == []
    assert delta.position(tmp_path, tables.NODES, REPORTS) is None
    assert search.summarise(tmp_path, search.HistorySearch(), of="cpu_percent", by=("group",)).num_rows == 0
    assert maintenance.run(tmp_path, T0 / 1000) == {"hours": 0, "compacted": 0, "deleted": 0, "removed": 0}


def test_a_repeated_batch_commits_nothing_and_its_files_are_never_read(root):
    """After a crash between the commit and Spark's own, the batch is written and committed again."""
    before = read(root)
    assert not store(root, 2, [traffic.report("again", 9, T0)])
    assert not store(root, 0, [traffic.report("again", 9, T0)])
    assert read(root) == before
    assert len(list((root / "nodes").rglob("*.parquet"))) == 5  # two of them are not in the table
    assert store(root, 0, [traffic.report("new", 1, T0)], run="another-checkpoint")
    assert len(read(root)) == 31


def test_two_processes_with_the_same_batch_commit_it_once(tmp_path):
    item, other = (delta.HistoryTable(tmp_path, tables.NODES) for _ in range(2))
    rows = node_rows([traffic.report("m", 1, T0)])
    first = data_files.write(tmp_path, tables.NODES, rows, "a").files
    second = data_files.write(tmp_path, tables.NODES, rows, "b").files
    assert item.commit(first, ("r", 0))
    other.delta.load_as_version(0)  # as if the other process committed after this one looked
    refreshing, other.refresh = other.refresh, lambda: None  # type: ignore[method-assign]
    with pytest.raises(storage.ConcurrentChange, match=r"(?i)transaction"):
        other.commit(second, ("r", 0))
    refreshing()
    assert len(read(tmp_path)) == 1


def test_the_position_in_the_stream_is_stored_with_the_rows(root):
    assert delta.position(root, tables.NODES, REPORTS) == 3
    assert delta.position(root, tables.NODES, SUMMARIES) is None
    delta.HistoryTable(root, tables.NODES).commit([], ("r", 3), {SUMMARIES: 7})
    assert delta.position(root, tables.NODES, SUMMARIES) == 7
    assert delta.position(root, tables.NODES, REPORTS) == 3


def test_rows_are_in_the_partition_of_their_own_day(tmp_path):
    """A batch around midnight, and one with clocks that are wrong by years."""
    midnight = T0 + 24 * HOUR
    rows = [traffic.report(f"m{n}", 1, midnight - 2 + n) for n in range(4)]
    rows.append(traffic.report("odd", 1, 0))
    assert store(tmp_path, 0, rows)
    days = {path.parent.name for path in (tmp_path / "nodes").rglob("*.parquet")}
    assert days == {"day=2023-11-15", "day=2023-11-16", "day=1970-01-01"}
    assert len(search_rows(tmp_path, from_ms=midnight)) == 2
    assert {(row["machine"], str(row["day"])) for row in read(tmp_path)} >= {
        ("m1", "2023-11-15"),
        ("m2", "2023-11-16"),
    }


def test_rows_of_too_many_days_or_of_no_date_are_counted(tmp_path):
    day = 24 * HOUR
    rows = [traffic.report(f"m{n}", 1, T0 + n * day) for n in range(data_files.DAYS_MAX + 5)]
    written = data_files.write(tmp_path, tables.NODES, node_rows(rows), "x")
    assert (len(written.files), written.rejected) == (data_files.DAYS_MAX, 5)
    impossible = [traffic.report("m", 1, T0), traffic.report("n", 1, (1 << 53) - 1)]
    written = data_files.write(tmp_path, tables.NODES, node_rows(impossible), "x")
    assert (len(written.files), written.rejected) == (1, 1)
    table = node_rows(impossible)
    place = table.schema.get_field_index("reported_at")
    for early_us in (-1, -(1 << 62)):
        times = pa.array([T0 * 1000, early_us], tables.TIME)
        written = data_files.write(
            tmp_path, tables.NODES, table.set_column(place, table.schema.field(place), times), "x"
        )
        assert (len(written.files), written.rejected) == (1, 1)


def test_a_file_that_cannot_be_written_is_removed(root, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    before = sorted(root.rglob("*.parquet"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(storage.HistoryFull):
        store(root, 9, [traffic.report("x", 1, T0)])
    assert sorted(root.rglob("*.parquet")) == before


def test_statistics_never_exclude_a_row(tmp_path):
    """Times in the log have milliseconds, those of rows microseconds."""
    rows = node_rows([traffic.report("m", 1, T0)])
    late = pa.array([T0 * 1000 + 999], pa.int64()).cast(tables.TIME)
    rows = rows.set_column(rows.schema.get_field_index("reported_at"), rows.schema.field("reported_at"), late)
    (file,) = data_files.write(tmp_path, tables.NODES, rows, "x").files
    bounds = json.loads(file.statistics)
    assert bounds["minValues"]["reported_at"] == "2023-11-15T00:00:00.000Z"
    assert bounds["maxValues"]["reported_at"] == "2023-11-15T00:00:00.001Z"
    delta.HistoryTable(tmp_path, tables.NODES).commit([file], ("r", 0))
    DeltaTable(str(tmp_path / "nodes")).optimize.compact()  # its statistics are truncated
    assert len(search_rows(tmp_path, from_ms=T0, to_ms=T0 + 1)) == 1


def test_columns_may_be_added_at_any_time_and_older_rows_have_none(tmp_path, monkeypatch):
    current = tables.definitions()
    older = dict(current)
    nodes = current[tables.NODES]
    kept = tuple(column for column in nodes.columns if column.name not in ("uptime_s", "services"))
    older[tables.NODES] = tables.TableDefinition(
        nodes.name, nodes.description, nodes.time, nodes.keys, kept, nodes.indexed
    )
    with monkeypatch.context() as patched:
        patched.setattr(tables, "definitions", lambda: older)
        store(tmp_path, 0, [traffic.report("old", 1, T0, metrics={"uptime_s": 5.0})])
    store(tmp_path, 1, [traffic.report("new", 1, T0 + 1, metrics={"uptime_s": 5.0})])
    rows = {row["machine"]: row["uptime_s"] for row in search_rows(tmp_path, columns=("machine", "uptime_s"))}
    assert rows == {"old": None, "new": 5.0}
    maintenance.compact(tmp_path, tables.NODES, T0 / 1000 + 200_000)  # merges files of both schemas
    rows = {row["machine"]: row["uptime_s"] for row in search_rows(tmp_path, columns=("machine", "uptime_s"))}
    assert rows == {"old": None, "new": 5.0}
    assert len(delta.Snapshot(tmp_path, tables.NODES).files) == 1


def test_metrics_that_appear_within_an_hour_survive_compaction_and_are_in_its_row(tmp_path):
    """Compaction once took the columns of the first file, and deleted the others with theirs."""
    store(tmp_path, 0, [traffic.report("m", 1, T0, metrics={"cpu_percent": 10.0, "queue": 1.0})])
    store(tmp_path, 1, [traffic.report("m", 2, T0 + 1000, metrics={"load_1m": 2.0, "gpu": 7.0})])
    for batch, (metric, value) in enumerate((("queue", 5.0), ("gpu", 7.0))):
        many = rollups.ScopeTotals("group", "web", T0 + 10_000 * batch)
        traffic.fold(many.cell, _column(1.0))
        zero = np.zeros(1, np.int64)
        many.cell.table.add_figures(*cell_arrays.extra_figures(zero, zero, np.array([value])), [metric])
        store_groups(tmp_path, batch, [many])
    for day in (2, 3):  # a second time, too
        maintenance.run(tmp_path, T0 / 1000 + day * 86400)
        rows = {row["sequence"]: row for row in search_rows(tmp_path)}
        assert (dict(rows[1]["metrics"]), rows[1]["load_1m"]) == ({"queue": 1.0}, None)
        assert (dict(rows[2]["metrics"]), rows[2]["load_1m"]) == ({"gpu": 7.0}, 2.0)
        (hour,) = search_rows(tmp_path, kind="hourly")
        assert dict(hour["metrics"]) == {"queue": 1.0, "gpu": 7.0}
        assert (hour["cpu_percent_mean"], hour["load_1m_mean"]) == (10.0, 2.0)
        groups = sorted(search_rows(tmp_path, kind="groups"), key=lambda row: row["window_start"])
        assert [dict(row["metrics"]).get("queue_max") for row in groups] == [5.0, None]
        assert [dict(row["metrics"]).get("gpu_max") for row in groups] == [None, 7.0]
    for table in (tables.NODES, tables.GROUPS):
        assert len(delta.Snapshot(tmp_path, table).files) == 1


def test_a_column_of_another_type_is_refused(tmp_path):
    schema = tables.definition(tables.NODES).schema
    place = schema.get_field_index("cpu_percent")
    DeltaTable.create(
        str(tmp_path / "nodes"), schema.set(place, pa.field("cpu_percent", pa.string())), partition_by=["day"]
    )
    with pytest.raises(delta.SchemaConflict, match="cpu_percent"):
        delta.HistoryTable(tmp_path, tables.NODES)


def test_baselines_are_computed_from_the_history(tmp_path):
    window_ms = 10_000
    for number in range(30):
        many = rollups.ScopeTotals("group", "web", T0 + number * window_ms)
        traffic.fold(many.cell, _column(50.0 + number % 3))
        store_groups(tmp_path, number, [many])
    baselines = rollups.Baselines()
    rollup_rows.load_baselines(baselines, tmp_path, {"group"}, window_ms=window_ms)
    odd = rollups.ScopeTotals("group", "web", T0 + 400_000)
    traffic.fold(odd.cell, _column(90.0))
    usual = rollups.ScopeTotals("group", "web", T0 + 410_000)
    traffic.fold(usual.cell, _column(51.0))
    assert baselines.scores("group", "web", odd.from_ms, rollups.means(odd.cell))[0] > 10
    assert abs(baselines.scores("group", "web", usual.from_ms, rollups.means(usual.cell))[0]) < 3


def _column(value: float):
    return np.full((len(columns.STANDARD_METRICS), 5), value)


def test_hourly_rows_are_computed_once_and_again_for_late_reports(root):
    now_s = T0 / 1000 + 2 * 3600 + 600  # the third hour is not over
    assert maintenance.update_hourly(root, now_s) == 2
    rows = search_rows(root, kind="hourly", where="machine = 'm7'")
    assert sorted((row["hour"].hour, row["reports"], row["cpu_percent_mean"]) for row in rows) == [
        (0, 1, 70.0),
        (1, 1, 70.0),
    ]
    assert dict(rows[0]["metrics"]) == {"queue": 7.0}
    assert rows[0]["group"] == "db"
    assert rows[0]["load_1m_mean"] is None
    assert maintenance.update_hourly(root, now_s + 60) == 0
    late = [traffic.report("m7", 9, T0 + 5000, group="db", metrics={"cpu_percent": 30.0})]
    store(root, 3, late)
    assert maintenance.update_hourly(root, now_s + 3600) == 2  # the hour with the late row, and the third
    rows = search_rows(root, kind="hourly", where="machine = 'm7'")
    first = next(row for row in rows if row["hour"].hour == 0)
    assert (first["reports"], first["cpu_percent_mean"], first["cpu_percent_min"]) == (2, 50.0, 30.0)
    assert len(search_rows(root, kind="hourly")) == 30
    assert sum(row["reports"] for row in search_rows(root, kind="hourly")) == len(read(root)) == 31
    maintenance.compact(root, tables.HOURLY, now_s + 86400)  # one file has several hours then
    store(root, 4, [traffic.report("m8", 9, T0 + 6000, group="db")])
    assert maintenance.update_hourly(root, now_s + 86400) == 1
    assert sum(row["reports"] for row in search_rows(root, kind="hourly")) == 32


def test_an_hour_with_no_later_commit_is_computed_when_it_is_over(root):
    """The fleet falls silent in the middle of an hour."""
    assert maintenance.update_hourly(root, T0 / 1000 + 2 * 3600 + 600) == 2
    assert maintenance.update_hourly(root, T0 / 1000 + 9 * 3600) == 1
    assert maintenance.update_hourly(root, T0 / 1000 + 20 * 3600) == 0
    assert len(search_rows(root, kind="hourly")) == 30


def test_hours_are_computed_although_the_clock_was_ahead(root):
    assert maintenance.update_hourly(root, T0 / 1000 + 30 * 86400) == 3
    store(root, 3, [traffic.report("m1", 9, T0 + 3 * HOUR)])
    assert maintenance.update_hourly(root, T0 / 1000 + 4 * 3600 + 600) == 1
    assert maintenance.update_hourly(root, T0 / 1000 + 4 * 3600 + 900) == 0
    assert {row["hour"].hour for row in read(root, tables.HOURLY)} == {0, 1, 2, 3}
    store(root, 4, [traffic.report("m1", 10, T0 + 4 * HOUR)])
    assert maintenance.update_hourly(root, T0 / 1000 + 5 * 3600 + 600) == 1


def test_every_report_is_in_an_hour_whenever_it_arrives(tmp_path):
    """A batch around midnight and a backlog that is read a day later: the daily roll-up lost both."""
    midnight = T0 + 24 * HOUR
    store(tmp_path, 0, [traffic.report(f"m{n}", 1, midnight - 4 + n) for n in range(8)])
    maintenance.run(tmp_path, midnight / 1000 + 7200)
    store(tmp_path, 1, [traffic.report(f"m{n}", 2, midnight - 20 * HOUR + n) for n in range(5)])
    maintenance.run(tmp_path, midnight / 1000 + 30 * 3600)
    assert sum(row["reports"] for row in search_rows(tmp_path, kind="hourly")) == 13


def test_compaction_and_maintenance_keep_every_report(root):
    before = sorted((row["machine"], row["sequence"]) for row in read(root))
    assert len(delta.Snapshot(root, tables.NODES).files) == 3
    assert maintenance.compact(root, tables.NODES, T0 / 1000) == 0  # the day is not over
    assert maintenance.compact(root, tables.NODES, T0 / 1000 + 2 * 86400) == 3
    assert len(delta.Snapshot(root, tables.NODES).files) == 1
    assert sorted((row["machine"], row["sequence"]) for row in read(root)) == before
    assert maintenance.compact(root, tables.NODES, T0 / 1000 + 2 * 86400) == 0
    assert not store(root, 2, [traffic.report("again", 9, T0)])  # transactions survive compaction
    assert maintenance.update_hourly(root, T0 / 1000 + 86400) == 3
    node = report.past(str(root), "node", "m7", T0 + 1000, 60.0)
    assert (node.sequence, node.metrics["cpu_percent"], node.metrics["queue"]) == (1, 70.0, 7.0)


def test_compaction_merges_some_files_at_a_time_and_tells_followers_of_no_change(root, monkeypatch):
    sizes = [file.size for file in delta.Snapshot(root, tables.NODES).files]
    assert store(root, 3, [traffic.report("m", 9, T0 + 3 * HOUR)])
    monkeypatch.setattr(maintenance, "MERGED_BYTES", sum(sizes[:2]))
    before = sorted((row["machine"], row["sequence"], row["metrics"]) for row in read(root))
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise errors.StaleEpoch("superseded", epoch=1, current=2)

    later_s = T0 / 1000 + 2 * 86400
    with pytest.raises(errors.StaleEpoch):
        maintenance.compact(root, tables.NODES, later_s, check)
    assert len(delta.Snapshot(root, tables.NODES).files) == 3, "the first two are one"
    assert maintenance.compact(root, tables.NODES, later_s) > 0
    assert sorted((row["machine"], row["sequence"], row["metrics"]) for row in read(root)) == before
    newest = max((root / "nodes" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    changes = [part["dataChange"] for action in actions for part in action.values() if "dataChange" in part]
    assert changes
    assert not any(changes)
    assert maintenance._changed_hours(delta.Snapshot(root, tables.NODES), 4) == set()


def test_small_files_of_the_current_day_are_merged_when_there_are_many(root, monkeypatch):
    monkeypatch.setattr(maintenance, "FILES_OPEN_DAY", 3)
    assert maintenance.compact(root, tables.NODES, T0 / 1000) == 3


def test_rows_beyond_the_age_limit_are_deleted(root):
    store(root, 3, [traffic.report("m", 9, T0 + 24 * HOUR)])
    limits = maintenance.MaintenanceLimits(max_age_s=86400)
    assert maintenance.enforce_retention(root, T0 / 1000 + 86400 + 7200, limits) == 0  # a day at a time
    assert maintenance.enforce_retention(root, T0 / 1000 + 2 * 86400, limits) == 30
    assert [row["machine"] for row in read(root)] == ["m"]


def test_the_oldest_rows_go_when_the_budget_is_used_up(root):
    files = delta.Snapshot(root, tables.NODES).files
    unlimited = maintenance.MaintenanceLimits(max_bytes=10**9)
    assert maintenance.enforce_retention(root, T0 / 1000, unlimited) == 0
    size = sum(file.size for file in files)
    limits = maintenance.MaintenanceLimits(max_bytes=size - 10)
    assert maintenance.enforce_retention(root, T0 / 1000, limits) == 10
    assert {row["reported_at"].hour for row in read(root)} == {1, 2}


def test_vacuum_removes_files_that_no_table_refers_to_and_the_past_is_read_until_then(root):
    version = delta.Snapshot(root, tables.NODES).delta.version()
    store(root, 2, [traffic.report("again", 9, T0)])  # a repeated batch leaves a file behind
    maintenance.compact(root, tables.NODES, T0 / 1000 + 2 * 86400)
    assert maintenance.delete_rows(root, tables.NODES, "machine", "m1") == 3
    assert len(search_rows(root)) == 27
    assert len(search_rows(root, as_of=version)) == 30
    for path in (root / "nodes").rglob("*.parquet"):
        os.utime(path, (1, 1))
    log = DeltaTable(str(root / "nodes"))
    removed = log.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(removed) == 5
    assert len(search_rows(root)) == 27
    assert len(list((root / "nodes").rglob("*.parquet"))) == 1


def test_a_file_that_is_about_to_be_committed_survives_vacuum(root):
    data_files.write(root, tables.NODES, node_rows([traffic.report("x", 1, T0)]), "r-9-0")
    assert maintenance.vacuum(root, tables.NODES, 0.0) == 0


def test_alerts_current_is_the_newest_row_of_each_alert_that_has_not_ended(tmp_path):
    def alert(about: str, state: str, at_ms: int) -> messages.Alert:
        return messages.Alert(
            rule="hot",
            about=about,
            severity=messages.Severity.INFO,
            state=messages.AlertState(state),
            since_ms=at_ms,
            at_ms=at_ms,
        )

    store_alerts(tmp_path, 0, [alert("node:a", "firing", T0), alert("node:b", "firing", T0)])
    store_alerts(
        tmp_path, 1, [alert("node:a", "resolved", T0 + 1000), alert("node:b", "silenced", T0 + 1000)]
    )
    import duckdb

    with duckdb.connect() as database:
        database.register("alerts", delta.Snapshot(tmp_path, tables.ALERTS).dataset())
        sql = tables.CURRENT_SQL.format(columns="about, state", alerts="alerts")
        assert database.sql(sql).fetchall() == [("node:b", "silenced")]


def test_readers_of_other_projects_understand_the_tables(root):
    maintenance.run(root, T0 / 1000 + 2 * 86400)
    table = DeltaTable(str(root / "nodes"))
    assert table.to_pyarrow_dataset().count_rows() == 30
    frame = table.to_pandas(
        columns=["machine", "cpu_percent"], filters=[("day", "=", datetime.date(2023, 11, 15))]
    )
    assert frame["cpu_percent"].max() == 90.0
    assert table.metadata().partition_columns == ["day"]
    hourly = DeltaTable(str(root / "hourly")).to_pyarrow_dataset().to_table().to_pylist()
    assert {row["hour"] for row in hourly} == {
        datetime.datetime.fromtimestamp(T0 / 1000 + 3600 * n, datetime.UTC) for n in range(3)
    }


def test_names_of_metrics_are_stored_as_codes_and_read_as_names(tmp_path):
    """Messages have different codes for the same name, and a file has rows of several days."""
    parts = [
        node_rows([traffic.report(f"m{number}", number, T0 + at_ms, metrics=metrics)])
        for number, (at_ms, metrics) in enumerate(
            [(0, {"queue": 1.0, "gpu": 2.0}), (1000, {"gpu": 3.0}), (24 * HOUR, {"cpu_percent": 1.0})], 1
        )
    ]
    assert parts[0].schema.field("metrics").type == tables.CODED
    written = data_files.write(tmp_path, tables.NODES, pa.concat_tables(parts), "r-0")
    read_files = [
        pq.read_table(tmp_path / tables.NODES / file.path, partitioning=None) for file in written.files
    ]
    assert {table.schema.field("metrics").type.key_type for table in read_files} == {pa.string()}
    metrics = {row["machine"]: row["metrics"] for table in read_files for row in table.to_pylist()}
    assert metrics == {"m1": [("queue", 1.0), ("gpu", 2.0)], "m2": [("gpu", 3.0)], "m3": None}
