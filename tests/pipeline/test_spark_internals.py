"""What `muster.pipeline` uses of PySpark and delta-rs beyond their public names.

pyproject.toml excludes the next major versions.  Before one is admitted, this test shows which names have
moved.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from muster.pipeline.source import spark_internals

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "muster"
SESSION = {"_jsparkSession"}
CONTEXT = {"_gateway", "_jsc", "_jvm"}
DELTA = {"DeltaFileSystemHandler"}


def _in_source(pattern: str) -> dict[str, set[str]]:
    """By file: the names."""
    folders = ("pipeline", "analyses")
    files = [file for folder in folders for file in (SOURCE / folder).rglob("*.py")]
    found = {file.name: set(re.findall(pattern, file.read_text())) for file in files}
    return {file: names for file, names in found.items() if names}


def test_all_uses_are_in_one_file():
    private = r"\b(?:session|spark|sparkContext|context)\.(_[a-z]\w*)"
    assert _in_source(private) == {"spark_internals.py": SESSION | CONTEXT}
    assert _in_source(r"from deltalake\._internal import (\w+)") == {"storage.py": DELTA}


def test_spark_has_these_names(spark: Any):
    assert [name for name in SESSION if getattr(spark, name, None) is None] == []
    assert [name for name in CONTEXT if getattr(spark.sparkContext, name, None) is None] == []
    # `muster.pipeline.source.session.kill` ends this process, if Python started it.
    process = getattr(spark.sparkContext._gateway, "proc", None)
    assert process is None or process.poll() is None


def test_java_has_these_methods(spark: Any):
    spark_internals.activate(spark)
    spark_internals.probe(spark)
    assert not spark_internals.has_executors(spark)  # the driver is all there is
    assert spark_internals.is_select(spark, "SELECT 1")
    assert not spark_internals.is_select(spark, "INSERT OVERWRITE DIRECTORY 'x' USING csv SELECT 1")
    before = spark.conf.get(spark_internals.FILE_MANAGER, None)
    spark.conf.unset(spark_internals.FILE_MANAGER)
    spark_internals.avoid_processes(spark)
    assert spark.conf.get(spark_internals.FILE_MANAGER, None) == before is not None


@pytest.mark.parametrize("partitions", [2, 7, 64])
def test_the_partition_of_a_key_is_sparks_own(spark: Any, partitions: int):
    rows = spark.sql(f"SELECT id, pmod(hash(CAST(id AS INT)), {partitions}) AS p FROM range(100)").collect()
    assert [spark_internals.partition_of(row["id"], partitions) for row in rows] == [row["p"] for row in rows]


def test_delta_writes_an_object_from_bytes(tmp_path: Path):
    internal = pytest.importorskip("deltalake._internal", reason="deltalake is not installed")
    stream = internal.DeltaFileSystemHandler(tmp_path.as_uri()).open_output_stream("object")
    stream.write(b"content")
    stream.close()
    assert (tmp_path / "object").read_bytes() == b"content"
