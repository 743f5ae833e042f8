"""Tables of the history in SQL: `USING muster` needs neither a connector nor a registration."""

import asyncio
import re
import sys
import time
from pathlib import Path

import pyspark
import pytest

from muster.pipeline.history import tables
from muster.pipeline.source import java_runtime, spark_internals
from tests.gateways.amqp import java_project
from tests.pipeline import test_history, test_spark_guide, traffic
from tests.pipeline.test_history import root  # noqa: F401 (a fixture)
from tests.pipeline.test_readers import history_root  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]
OPTIONS = "(history '{root}', table '{name}')"


def test_a_view_shows_the_rows_of_every_table_at_the_time_of_the_query(spark, history_root):  # noqa: F811
    spark_internals.activate(spark)
    for name in tables.definitions():
        options = OPTIONS.format(name=name, root=history_root)
        spark.sql(f"CREATE TABLE all_{name} USING muster OPTIONS {options}")
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS SELECT * FROM all_{name} WITH {options}")
        shown = spark.sql(f"SELECT * FROM {name}").toArrow().to_pylist()
        stored = test_history.read(history_root, name)
        assert len(shown) == len(stored) > 0
        assert shown[0].keys() == stored[0].keys()
    count = "SELECT count(*) AS n, max(metrics['queue']) AS queue FROM nodes WHERE machine LIKE 'm%'"
    before = spark.sql(count).first()
    assert test_history.store(history_root, 9, [traffic.report("m77", 9, test_history.T0)])
    after = spark.sql(count).first()
    assert (after["n"], after["queue"]) == (before["n"] + 1, before["queue"])


def test_a_view_of_the_last_days_reads_their_files_only(spark, tmp_path):
    spark_internals.activate(spark)
    now_ms = int(time.time() * 1000)
    for batch, days in enumerate((9, 1)):
        reported_ms = now_ms - days * 24 * test_history.HOUR
        assert test_history.store(tmp_path, batch, [traffic.report(f"m{days}", 1, reported_ms)])
    source = spark.read.format("muster").options(history=str(tmp_path), last="7d")
    for path in tmp_path.glob("nodes/*/*.parquet"):
        if path.stat().st_mtime and "m9" in path.read_bytes().decode("latin-1"):
            path.unlink()
    assert [row["machine"] for row in source.schema("machine string").load().collect()] == ["m1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "rollups"}, "takes nodes or groups or alerts or hourly"),
        ({"last": "soon"}, "no.* duration"),
    ],
)
def test_wrong_options_are_refused_by_name(spark, root, options, message):  # noqa: F811
    spark_internals.activate(spark)
    with pytest.raises(Exception, match=message):
        spark.read.format("muster").options(history=str(root), **options).load().collect()
    stream = spark.readStream.format("muster").options(history=str(root)).load()
    query = stream.writeStream.format("noop").start()
    with pytest.raises(Exception, match="is no stream"):
        query.awaitTermination(60)


@pytest.mark.slow
async def test_spark_sql_reads_a_table_without_any_registration(root, tmp_path):  # noqa: F811
    """As the guide shows it."""
    shown = re.search(r'spark-sql -e "(.*?)"', test_spark_guide.GUIDE, re.DOTALL)
    assert shown is not None
    statements, days = shown[1], int(time.time() - test_history.T0 / 1000) // 86400 + 2
    java = await asyncio.to_thread(java_runtime.find, tmp_path)
    code, text = await java_project.output(
        *(str(Path(pyspark.__file__).parent / "bin" / "spark-sql"), "--master", "local[2]"),
        *("--conf", f"spark.sql.warehouse.dir={tmp_path}/warehouse", "--conf", "spark.driver.host=127.0.0.1"),
        *("-e", statements.replace("/var/lib/muster/history", str(root)).replace("7d", f"{days}d")),
        cwd=tmp_path,
        env={
            "JAVA_HOME": str(java.home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        },
    )
    assert code == 0, text[-3000:]
    assert re.search(r"^default\t45\.0$", text, re.MULTILINE), text
