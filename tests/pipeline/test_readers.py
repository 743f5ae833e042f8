"""Programs of others read the tables as the page shows, and a Spark session gets them as views."""

import json
import re
from pathlib import Path

import pytest
from deltalake import DeltaTable

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.pipeline import spark as spark_
from muster.pipeline.fleet import rollups
from muster.pipeline.history import delta, maintenance, maintenance_process, spark_maintenance, tables
from muster.pipeline.job import history_upkeep
from muster.pipeline.source import spark_internals
from tests.pipeline import test_history, test_history_upkeep, traffic
from tests.pipeline.test_history import root  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "history.md").read_text()
BLOCKS = [match[1] for match in re.finditer(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def text_blocks() -> list[str]:
    """Blocks of the page that need a connector or a catalog."""
    return [match[1] for match in re.finditer(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]


@pytest.fixture
def history_root(root):  # noqa: F811
    """All tables, after maintenance and a deletion: files of every origin."""
    test_history.store_groups(root, 0, [_total()])
    test_history.store_alerts(root, 0, [_alert()])
    maintenance.run(root, test_history.T0 / 1000 + 2 * 86400)
    maintenance.delete_rows(root, tables.NODES, "machine", "m9")
    test_history.store(root, 3, [traffic.report("m1", 9, test_history.T0 + 24 * test_history.HOUR)])
    return root


def _total() -> rollups.ScopeTotals:
    many = rollups.ScopeTotals("system", "", test_history.T0)
    traffic.fold(many.cell, test_history._column(50.0))
    return many


def _alert() -> messages.Alert:
    return messages.Alert(
        rule="hot",
        about="node:m1",
        severity=messages.Severity.INFO,
        state=messages.AlertState.FIRING,
        since_ms=test_history.T0,
        at_ms=test_history.T0,
    )


def test_what_the_page_shows_runs(history_root, spark):
    assert len(BLOCKS) == 6
    for block in BLOCKS:
        exec(compile(block, "history.md", "exec"), {"history": str(history_root), "spark": spark})


def test_the_notebook_runs(history_root, spark, monkeypatch):
    monkeypatch.setenv("MUSTER_HISTORY", str(history_root))
    cells = json.loads((ROOT / "examples" / "history.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "history.ipynb", "exec"), names)


def test_readers_agree_on_every_row(history_root, spark):
    """Files of the pipeline, of compaction and of a deletion, read by four engines."""
    import duckdb
    import polars

    url = str(history_root / "nodes")
    expected = [("m3", 3), ("m1", 4)]
    count = "SELECT count(*) FROM nodes WHERE machine = '{}'"
    with duckdb.connect() as database:
        database.register("nodes", DeltaTable(url).to_pyarrow_dataset())
        for machine, rows in expected:
            assert database.sql(count.format(machine)).fetchall() == [(rows,)]
    spark_.register(spark, history_root)
    frame = polars.scan_delta(url)
    for machine, rows in expected:
        assert spark.sql(count.format(machine)).first()[0] == rows
        assert len(frame.filter(polars.col("machine") == machine).collect()) == rows
        assert len(test_history.search_rows(history_root, where=f"machine = '{machine}'")) == rows


def test_views_are_registered_for_every_table(history_root, spark, tmp_path_factory):
    # Polars cannot read such a folder, so the other tests have a plain one.
    history_root = history_root.rename(tmp_path_factory.mktemp("renamed") / "history of März")
    assert spark_.register(spark, history_root) == [*tables.definitions(), tables.ALERTS_CURRENT]
    current = spark.sql("SELECT about, state FROM alerts_current").collect()
    assert [tuple(row) for row in current] == [("node:m1", "firing")]
    assert spark_.query(spark, "SELECT machine FROM nodes", 5).num_rows == 6  # one more: there are more
    with pytest.raises(errors.InvalidInput, match="SQL: "):
        spark_.query(spark, "SELECT colour FROM nodes", 5)
    for text in (
        "CREATE TABLE x AS SELECT 1",
        f"INSERT OVERWRITE DIRECTORY '{history_root}/x' SELECT 1",
        "SET a=b",
    ):
        with pytest.raises(errors.InvalidInput, match="only one SELECT"):
            spark_.query(spark, text, 5)
    joined = "WITH x AS (SELECT 1 AS n) SELECT a.n, b.n FROM x a, x b"
    assert spark_.query(spark, joined, 5).to_pylist() == [{"n": 1, "n_1": 1}]
    with pytest.raises(errors.NotFound, match="no history"):
        spark_.register(spark, tmp_path_factory.mktemp("empty"))


def test_a_period_reads_only_the_partitions_of_its_days(history_root, spark):
    day_ms = 24 * test_history.HOUR
    frame = spark_.read(spark, history_root, tables.NODES, from_ms=test_history.T0 + day_ms)
    assert [row["machine"] for row in frame.select("machine").collect()] == ["m1"]
    assert len(frame.inputFiles()) == 1
    plan = frame._jdf.queryExecution().toString()
    assert re.search(r"PartitionFilters: \[[^\]]*day#\d+ >= 2023-11-16", plan), plan
    assert re.search(r"PushedFilters: \[[^\]]*GreaterThanOrEqual\(reported_at", plan), plan
    spark_.register(spark, history_root)
    plan = spark.sql("SELECT * FROM nodes WHERE day = DATE '2023-11-16'")._jdf.queryExecution().toString()
    assert "PartitionFilters: [isnotnull(day" in plan


async def test_executors_maintain_a_large_history_as_the_small_process_does(root, spark, monkeypatch):  # noqa: F811
    ask = history_upkeep.HistoryUpkeep(
        str(root),
        maintenance.UNLIMITED,
        test_history_upkeep.ExpiringLease(100),
        log.EventLog("pipeline"),
        lambda: test_history_upkeep.LATER_MS,
        spark,
    )
    spark_internals.activate(spark)
    files = delta.Snapshot(root, tables.NODES).files
    assert (await ask.maintain(with_vacuum=False))["compacted"] == len(files)
    expected = test_history.read(root, tables.HOURLY)
    assert len(expected) == 30
    test_history.store(root, 7, [traffic.report("m1", 70, test_history.T0, metrics={"a": 1.0, "queue": 3.0})])
    monkeypatch.setattr(spark_maintenance, "LARGE_ROWS", 0)
    monkeypatch.setattr(maintenance_process, "run", None)
    later_s = test_history_upkeep.LATER_MS / 1000 + 86400
    done = spark_maintenance.run(spark, root, later_s, 86400.0, lambda: None)
    assert done == {"hours": 1, "compacted": 5}  # three files of hours, two of reports
    rows = {(row["hour"], row["machine"]): row for row in test_history.read(root, tables.HOURLY)}
    assert len(rows) == 30
    changed = {key: row for key, row in rows.items() if row not in expected}
    assert [key[1] for key in changed] == ["m1"]
    (row,) = changed.values()
    assert (row["reports"], row["metrics"]) == (2, [("a", 1.0), ("queue", 2.0)])
    assert len(test_history.read(root)) == 31
    assert len(delta.Snapshot(root, tables.NODES).files) == 1
