"""SQL over the history: what it finds, what it refuses, and its limits."""

import csv
import datetime
import errno
import io
import json
import os
import random
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from muster.cli.monitoring import registry_tables
from muster.core import errors
from muster.manage import rows
from muster.pipeline.history import delta, export, search, sql, storage, tables
from muster.testing import child_process
from muster.web.data import sql_runner
from tests.cli import driver
from tests.pipeline import test_history, traffic
from tests.pipeline.test_history import root  # noqa: F401 (a fixture)

T0 = test_history.T0
BY_GROUP = (
    "SELECT \"group\", avg(cpu_percent) AS cpu FROM nodes WHERE day = '2023-11-15' GROUP BY ALL ORDER BY ALL"
)


def test_a_select_reads_every_table_and_the_view(root):  # noqa: F811
    assert sql.rows(sql.query(root, BY_GROUP).table) == [
        {"group": "db", "cpu": 70.0},
        {"group": "web", "cpu": 20.0},
    ]
    assert (
        sql.rows(sql.query(root, "SELECT metrics['queue'] AS q FROM nodes WHERE machine = 'm3'").table)
        == [{"q": 3.0}] * 3
    )
    for name in (*tables.definitions(), tables.ALERTS_CURRENT):
        assert sql.query(root, f"SELECT count(*) AS n FROM {name}").table.num_rows == 1
    assert sql.query(root, "EXPLAIN SELECT 1").table.num_rows


def test_tables_of_the_registry_are_joined_with_the_history(root):  # noqa: F811
    resource = rows.ResourceRow(
        name="web-1", type="process", agent="m3", desired="up", state="down", generation=1
    )
    agent = rows.AgentRow(name="m3", labels={"tier": "front"}, types=["process", "file"])
    more = {
        "resources": registry_tables.to_table(rows.ResourceRow, [resource]),
        "agents": registry_tables.to_table(rows.AgentRow, [agent]),
        "rollouts": registry_tables.to_table(rows.RolloutRow, []),
    }
    text = """SELECT r.name, r.manager, a.types[1] AS kind, a.labels->>'tier' AS tier, count(*) AS reports
        FROM RESOURCES r JOIN agents a ON a.name = r.agent JOIN nodes n ON n.machine = a.name GROUP BY ALL"""
    assert sql.table_names(text) == {"resources", "agents", "nodes"}
    (row,) = sql.rows(sql.query(root, text, more=more).table)
    assert row == {"name": "web-1", "manager": None, "kind": "process", "tier": "front", "reports": 3}
    without_history = sql.query(None, "SELECT count(*) AS n, max(at_ms) AS last FROM rollouts", more=more)
    assert sql.rows(without_history.table) == [{"n": 0, "last": None}]
    assert str(registry_tables.to_table(rows.JobRow, []).schema.field("next_ms").type) == "int64"
    with pytest.raises(errors.InvalidInput, match="nodes"):
        sql.query(None, "FROM nodes", more=more)
    answer = driver.quick("sql", "FROM resources", "--as-of", "1h", "--dir", root)
    assert "--as-of is for tables of the history, not for resources" in answer.err


def test_only_the_files_of_the_period_are_read(root, monkeypatch):  # noqa: F811
    """A condition on the day or the time reaches the files."""
    for file in delta.Snapshot(root, tables.NODES).files[:2]:
        (root / "nodes" / file.path).write_bytes(b"not a Parquet file")
    late = "SELECT count(*) AS n FROM nodes WHERE reported_at >= TIMESTAMPTZ '2023-11-15 02:00:00Z'"
    assert sql.rows(sql.query(root, late).table) == [{"n": 10}]
    assert sql.rows(
        sql.query(root, "SELECT count(machine) AS n FROM nodes WHERE day = '2023-11-16'").table
    ) == [{"n": 0}]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('/proc/self/environ')",
        "SELECT * FROM glob('/*')",
        "COPY nodes TO '/tmp/out.csv'",
        "ATTACH '/tmp/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET memory_limit = '100GB'",
        "CREATE TABLE x AS SELECT 1",
        "DELETE FROM nodes",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE nodes",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "SELECT * FROM root",
        "EXPLAIN ANALYZE COPY nodes TO '/tmp/out.csv'",
        "EXPLAIN ANALYZE SET memory_limit = '100GB'",
        "SELECT * FROM query('SELECT * FROM read_csv(''/etc/passwd'')')",
        "SELECT * FROM query_table('/etc/passwd')",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('FROM read_csv(''/etc/passwd'')'))",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM read_json('/etc/passwd')",
        "SELECT * FROM parquet_metadata('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM 'http://127.0.0.1:1/x.parquet'",
        "SELECT * FROM delta_scan('/tmp')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM pandas_scan(1::POINTER)",
        "SELECT * FROM enable_profiling()",
        "SELECT getenv('HOME')",
        "WITH gone AS (DELETE FROM nodes RETURNING *) SELECT * FROM gone",
        "CREATE VIEW x AS SELECT * FROM read_csv('/etc/passwd')",
        "CREATE SECRET (TYPE S3)",
        "EXPORT DATABASE '/tmp/out'",
        "PREPARE x AS SELECT 1",
        "SELECT * FROM enable_logging(storage='file', storage_config={'path': '/tmp/out'})",
        "SELECT * FROM read_duckdb('/tmp/x.db')",
        "SELECT 1\x00; DROP TABLE nodes",
        "SELECT '\ud800'",
        "SELECT $1",
        "SELECT colour FROM nodes",
        "SELEC 1",
        "",
    ],
)
def test_anything_but_a_select_over_the_tables_is_refused(root, text):  # noqa: F811
    with pytest.raises(errors.InvalidInput, match="SQL: "):
        sql.query(root, text)


def test_time_memory_and_rows_are_limited(root):  # noqa: F811
    values = sql.query(root, "SELECT * FROM nodes", sql.SqlLimits(rows=7))
    assert (values.table.num_rows, values.truncated) == (7, True)
    complete = sql.query(root, "SELECT * FROM nodes", sql.SqlLimits(rows=30))
    assert (complete.table.num_rows, complete.truncated) == (30, False)
    with pytest.raises(errors.TimedOut, match="longer than 200 ms"):
        sql.query(root, "SELECT count(*) FROM range(1000000000000)", sql.SqlLimits(seconds=0.2))
    with pytest.raises(errors.LimitExceeded, match="100MiB"):
        sql.query(root, "SELECT list(range) FROM range(100000000)", sql.SqlLimits(memory_bytes=100 << 20))


def test_columns_of_the_same_name_are_both_in_the_result(root):  # noqa: F811
    joined = "SELECT a.machine, b.machine, 7 AS machine_1 FROM nodes a JOIN nodes b ON a.machine < b.machine"
    result = sql.query(root, joined, sql.SqlLimits(rows=1))
    assert result.table.column_names == ["machine", "machine_1", "machine_1_1"]
    row = sql.rows(result.table)[0]
    assert row["machine"] < row["machine_1"]


@pytest.mark.parametrize("value", ["DATE 'infinity'", "TIMESTAMPTZ '290000-01-01 00:00:00Z'"])
def test_a_date_that_python_does_not_have_is_an_error_with_a_remedy(root, value):  # noqa: F811
    with pytest.raises(errors.InvalidInput, match="SQL: ") as error:
        sql.rows(sql.query(root, f"SELECT {value} AS moment").table)
    assert "VARCHAR" in (error.value.hint or "")


def test_maps_are_objects_unless_their_keys_cannot_be(root, tmp_path):  # noqa: F811
    table = sql.query(root, "SELECT map(['a'], [1]) AS named, map([[1]], [2]) AS odd").table
    assert sql.rows(table) == [{"named": [["a", 1]], "odd": [[[1], 2]]}]
    assert sql.rows(table.select(["named"])) == [{"named": {"a": 1}}]
    with_maps = driver.quick("history", "machine = 'm3'", "--dir", root, "-n", "1", "-o", "json").json()
    assert with_maps[0]["metrics"] == {"queue": 3.0}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sql", "SELECT 1", "--as-of", "999999999d"), errors.InvalidInput),
        (("sql", "SELECT 1", "--as-of", "0001-01-01"), errors.InvalidInput),
        (("sql", "SELECT 1", "--as-of", "9999-12-31T23:59:59-12:00"), errors.InvalidInput),
        (("sql", "SELECT 1", "--memory", "99999999TB"), errors.InvalidInput),
        (("sql", "SELECT 1 AS number", "--timeout", "99999999999d"), None),
        (("sql", "SELECT union_value(a := 1) AS u", "-o", "parquet", "--to", "OUT"), errors.InvalidInput),
        (("sql", "SELECT INTERVAL 1 DAY AS days", "-o", "csv", "--to", "OUT"), errors.InvalidInput),
        (("sql", "SELECT map([[1]], [2]) AS odd", "-o", "csv", "--to", "OUT"), None),
        (("history", "TRUE", "--of", "group", "--by", "machine"), errors.InvalidInput),
        (("history", "TRUE", "--of", "reported_at", "--by", "machine"), errors.InvalidInput),
        (("history", "TRUE", "--of", "cpu_percent", "--by", "metrics"), errors.InvalidInput),
        (("history", "TRUE", "--of", "cpu_percent", "--by", "machine,machine"), None),
        (("history", "TRUE", "--last", "999999999d"), None),
        (("history", "TRUE", "-n", "99999999999999999999"), None),
        (("history", "export", "nodes", "--to", "no/such/folder.csv"), errors.NotFound),
        (("report", "node", "m1", "--at", "999999999d"), errors.InvalidInput),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_extreme_arguments_are_used_or_refused(root, tmp_path, words, code):  # noqa: F811
    given = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    answer = driver.quick(*given, *(() if words[0] == "report" else ("--dir", root)))
    assert answer.code == (0 if code is None else code.exit_code), answer.err
    assert "bug in Muster" not in answer.err
    assert "Traceback" not in answer.err


def test_the_tables_as_they_were(root):  # noqa: F811
    before = delta.Snapshot(root, tables.NODES).delta.version()
    test_history.store(root, 9, [traffic.report("later", 1, T0)])
    count = "SELECT count(*) AS n FROM nodes"
    assert sql.rows(sql.query(root, count).table) == [{"n": 31}]
    assert sql.rows(sql.query(root, count, as_of=before).table) == [{"n": 30}]
    now = datetime.datetime.now(datetime.UTC)
    assert sql.rows(sql.query(root, count, as_of=now).table) == [{"n": 31}]


class _SlowStore(DeltaStorageHandler):
    """Opens files as for an object store, each after a time of its own."""

    def open_input_file(self, path: str) -> object:
        time.sleep(random.uniform(0, 0.002))  # pace of the store
        return super().open_input_file(path)


def _query_removed_files(folder: str) -> None:
    storage.filesystem = lambda *names: fs.PyFileSystem(_SlowStore(f"file://{storage.delta_url(*names)}"))
    for _ in range(40):
        with pytest.raises(storage.FilesRemoved):
            sql.query(folder, "SELECT max(cpu_percent) FROM nodes")


async def test_a_file_that_cannot_be_opened_is_an_error_of_the_query(root):  # noqa: F811
    """It was a deadlock of Python's global lock and one of Arrow, where no limit of the same process works:
    the process of the queries hung within the first ten or so.
    """
    (root / "nodes" / delta.Snapshot(root, tables.NODES).files[1].path).unlink()
    code = f"from tests.pipeline import test_sql; test_sql._query_removed_files({str(root)!r})"
    async with await child_process.start(sys.executable, "-c", code) as querying:
        assert await querying.wait(timeout_s=60) == 0, "\n".join(querying.lines)


def test_a_missing_history_is_reported(tmp_path):
    with pytest.raises(errors.NotFound, match="no history"):
        sql.query(tmp_path, "SELECT 1")


async def test_a_query_of_the_web_has_a_process_of_its_own(root):  # noqa: F811
    runner = sql_runner.SqlRunner(str(root))
    result = await runner.run(BY_GROUP)
    assert result.columns == ["group", "cpu"]
    assert result.rows[0] == {"group": "db", "cpu": 70.0}
    assert (await runner.run("SELECT * FROM nodes", rows=5)).truncated
    with pytest.raises(errors.InvalidInput, match="SQL: "):
        await runner.run("SELECT * FROM read_csv('/etc/passwd')")
    with pytest.raises(errors.InvalidInput, match="cannot be shown"):
        await runner.run("SELECT DATE 'infinity' AS day")
    with pytest.raises(errors.InvalidInput, match="not a time"):
        await runner.run("SELECT 1", as_of_ms=(1 << 53) - 1)
    with pytest.raises(errors.LimitExceeded):  # ten gigabytes that DuckDB does not count
        await runner.run("SELECT repeat('x', 100000000) FROM range(100)")
    assert (await runner.run("SELECT 1 AS one")).rows == [{"one": 1}]


def test_the_command_prints_tables_csv_json_and_parquet(root, tmp_path):  # noqa: F811
    def run(*words: str | Path) -> driver.Answer:
        answer = driver.quick("sql", BY_GROUP, "--dir", root, *words)
        assert answer.code == 0, answer.err
        return answer

    assert "GROUP" in run().out
    assert run("-o", "json").json() == [{"group": "db", "cpu": 70.0}, {"group": "web", "cpu": 20.0}]
    path = tmp_path / "out.parquet"
    run("-o", "parquet", "--to", path)
    assert pq.read_table(path).to_pylist() == [{"group": "db", "cpu": 70.0}, {"group": "web", "cpu": 20.0}]
    run("-o", "csv", "--to", path.with_suffix(".csv"))
    assert list(csv.DictReader(io.StringIO(path.with_suffix(".csv").read_text()))) == [
        {"group": "db", "cpu": "70"},
        {"group": "web", "cpu": "20"},
    ]
    few = driver.quick("sql", "FROM nodes", "--dir", root, "-n", "3", "-o", "json")
    assert len(few.json()) == 3
    assert "only the first 3 rows" in few.err
    wrong = driver.quick("sql", "DROP TABLE nodes", "--dir", root)
    assert wrong.code == errors.InvalidInput.exit_code


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_table_is_exported(root, tmp_path, suffix):  # noqa: F811
    path = tmp_path / f"out{suffix}"
    words = ["history", "export", "nodes", "--where", "group = 'web'", "--to", path, "--dir", root]
    assert driver.quick(*words, "-o", "json").json()["rows"] == 15
    if suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 15
    assert {row["group"] for row in rows} == {"web"}
    until = driver.quick(*words, "--until", "2023-11-15T00:30:00+00:00", "-o", "json")
    assert until.json()["rows"] == 5
    assert not [other for other in tmp_path.iterdir() if other.name.startswith(".")]


@pytest.mark.parametrize("suffix", export.FORMATS)
def test_an_export_replaces_a_file_only_when_it_is_on_disk(root, tmp_path, suffix, monkeypatch):  # noqa: F811
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        export.write(root, search.HistorySearch(), path)
    assert path.read_bytes() == b"old"
    assert [other.name for other in tmp_path.iterdir() if other.is_file()] == [path.name]


@pytest.mark.parametrize("form", ["parquet", "csv", "json"])
def test_the_result_of_a_query_replaces_a_file_only_when_it_is_on_disk(root, tmp_path, form, monkeypatch):  # noqa: F811
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("sql", BY_GROUP, "--dir", root, "-o", form, "--to", path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        assert driver.quick(*words).code != 0
    assert path.read_bytes() == b"old"
    assert driver.quick(*words).code == 0
    assert path.read_bytes() != b"old"
    assert [other.name for other in tmp_path.iterdir() if other.is_file()] == [path.name]


def test_files_that_a_user_requests_follow_the_umask(root, tmp_path):  # noqa: F811
    before = os.umask(0o027)
    try:
        assert driver.quick("sql", BY_GROUP, "--dir", root, "-o", "csv", "--to", tmp_path / "a.csv").code == 0
        export.write(root, search.HistorySearch(), tmp_path / "b.csv")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    for name in ("a.csv", "b.csv"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def test_an_export_in_an_unknown_format_is_refused(root, tmp_path):  # noqa: F811
    answer = driver.quick("history", "export", "nodes", "--to", tmp_path / "out.xml", "--dir", root)
    assert answer.code == errors.InvalidInput.exit_code
    assert ".parquet" in answer.err


def test_the_rows_of_a_machine_are_deleted_and_with_purge_from_the_disk(root):  # noqa: F811
    from muster.pipeline.history import maintenance

    maintenance.update_hourly(root, T0 / 1000 + 86400)
    version = delta.Snapshot(root, tables.NODES).delta.version()
    answer = driver.quick("history", "forget", "m3", "--dir", root, "-o", "json")
    assert answer.json()["deleted"] == {"nodes": 3, "hourly": 3}
    for table in ("nodes", "hourly"):
        count = f"SELECT count(*) AS n FROM {table} WHERE machine = 'm3'"
        assert sql.rows(sql.query(root, count).table) == [{"n": 0}]
        assert sql.rows(sql.query(root, f"SELECT count(*) AS n FROM {table}").table) == [{"n": 27}]
    assert len(test_history.search_rows(root, where="machine = 'm3'", as_of=version)) == 3
    again = driver.quick("history", "forget", "m3", "--dir", root)
    assert again.code == errors.NotFound.exit_code
    assert driver.quick("history", "forget", "m4", "--purge", "--dir", root).code == 0
    on_disk = [
        name
        for path in (root / "nodes").rglob("*.parquet")
        for name in pq.read_table(path, columns=["machine"], partitioning=None).column("machine").to_pylist()
    ]
    assert len(on_disk) == 24
    assert not {"m3", "m4"} & set(on_disk)


def test_a_search_reads_the_tables_as_they_were(root):  # noqa: F811
    answer = driver.quick("history", "TRUE", "--as-of", "0s", "--dir", root, "-n", "0", "-o", "json")
    assert len(answer.json()) == 30
    assert driver.quick("history", "search", "machine = 'm1'", "--dir", root, "-o", "json").json()
    assert "export" in driver.quick("history", "--help").out
