"""Delta's own connector reads the tables, in the newest version of Spark that it supports."""

import asyncio
import json
import venv
from pathlib import Path

import pytest

from muster.pipeline.history import tables
from muster.pipeline.source import java_runtime
from muster.testing import child_process
from tests.gateways.amqp import java_project
from tests.pipeline import jars, test_history, test_readers
from tests.pipeline.test_history import root  # noqa: F401 (a fixture)
from tests.pipeline.test_readers import history_root  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: The newest that the connector supports.
SPARK = "pyspark==4.2.0"
CACHE = Path.home() / ".cache" / "muster" / "spark-4.2.0"
GROUPS = ("io.delta", "io.unitycatalog", "org.roaringbitmap")

PROGRAM = """
import json, sys
from pyspark.sql import SparkSession

history, warehouse, jars = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.jars", jars)
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .config("spark.sql.warehouse.dir", warehouse)
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
BLOCK
answer = {
    "counts": {name: spark.read.format("delta").load(f"{history}/{name}").count() for name in TABLES},
    "commits": spark.sql(f"DESCRIBE HISTORY delta.`{history}/nodes`").count(),
    "registered": spark.sql("SELECT count(*) AS n FROM muster_nodes").first()["n"],
    "one_day": spark.sql("SELECT count(*) AS n FROM muster_nodes WHERE day = DATE '2023-11-16'").first()["n"],
    "first": spark.read.format("delta").option("versionAsOf", 1).load(f"{history}/nodes").count(),
    "queue": spark.sql("SELECT max(metrics['queue']) AS q FROM muster_nodes").first()["q"],
}
print("ANSWER", json.dumps(answer))
"""


async def other_spark() -> Path:
    """The Python of an environment with the older Spark; made once."""
    python = CACHE / "bin" / "python"
    if not (CACHE / "done").exists():
        await asyncio.to_thread(venv.create, CACHE, with_pip=True)
        code, text = await java_project.output(
            str(python), "-m", "pip", "install", "-q", SPARK, "setuptools", cwd=CACHE
        )
        if code and ("No matching distribution" in text or "connection" in text.lower()):
            pytest.skip(f"{SPARK} cannot be installed: {text[-300:]}")
        assert code == 0, text
        (CACHE / "done").touch()
    return python


async def test_the_connector_of_delta_reads_the_tables(history_root, tmp_path):  # noqa: F811
    """Also as registered in a catalog, with the commits of the pipeline, of compaction and of a deletion."""
    connector = await jars.fetch("delta", tmp_path, *GROUPS)
    python = await other_spark()
    java = await asyncio.to_thread(java_runtime.find, tmp_path)
    (reading,) = [block for block in test_readers.text_blocks() if "DESCRIBE HISTORY" in block]
    (register,) = [block for block in test_readers.text_blocks() if "USING DELTA LOCATION 's3a" in block]
    statement = register.strip().replace("s3a://bucket/history", str(history_root))
    program = PROGRAM.replace("BLOCK", f"{reading}\nspark.sql({statement!r})").replace(
        "TABLES", repr(list(tables.definitions()))
    )
    path = tmp_path / "read.py"
    path.write_text(program)
    async with await child_process.start(
        *(python, path, history_root, tmp_path / "warehouse", ",".join(map(str, connector))),
        env={"JAVA_HOME": str(java.home), "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""},
        cwd=tmp_path,
    ) as child:
        assert await child.wait(timeout_s=300) == 0, child.tail()
        (line,) = [line for line in child.lines if line.startswith("ANSWER")]
    answer = json.loads(line.removeprefix("ANSWER"))
    expected = {name: len(test_history.read(history_root, name)) for name in tables.definitions()}
    assert answer["counts"] == expected
    assert answer["registered"] == expected["nodes"]
    assert answer["one_day"] == 1
    assert answer["first"] == 10
    assert answer["queue"] == 8.0  # the rows of m9 were deleted
    assert answer["commits"] > 4
