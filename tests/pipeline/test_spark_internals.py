"""The private names of PySpark and delta-rs that `muster.pipeline` relies on.

pyproject.toml excludes the next major versions.  Before one is admitted, this test shows which names have
moved.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "muster" / "pipeline"
SESSION = {"_jsparkSession", "_jvm"}
CONTEXT = {"_gateway", "_jsc", "_jvm"}
DELTA = {"DeltaFileSystemHandler"}


def _in_source(pattern: str) -> set[str]:
    return {name for file in SOURCE.rglob("*.py") for name in re.findall(pattern, file.read_text())}


def test_all_uses_are_listed():
    assert _in_source(r"\b(?:session|spark|sparkContext|context)\.(_[a-z]\w*)") == SESSION | CONTEXT
    assert _in_source(r"from deltalake\._internal import (\w+)") == DELTA


def test_spark_has_these_names(spark: Any):
    assert [name for name in SESSION if getattr(spark, name, None) is None] == []
    assert [name for name in CONTEXT if getattr(spark.sparkContext, name, None) is None] == []
    # `muster.pipeline.source.session.kill` ends this process, if Python started it.
    process = getattr(spark.sparkContext._gateway, "proc", None)
    assert process is None or process.poll() is None


def test_java_has_these_methods(spark: Any):
    jvm = spark.sparkContext._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    assert jvm.java.lang.System.nanoTime() > 0
    assert spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() >= 1
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan("SELECT 1")
    assert not jvm.java.lang.Class.forName("java.lang.String").isInstance(plan)


def test_delta_writes_an_object_from_bytes(tmp_path: Path):
    internal = pytest.importorskip("deltalake._internal", reason="deltalake is not installed")
    stream = internal.DeltaFileSystemHandler(tmp_path.as_uri()).open_output_stream("object")
    stream.write(b"content")
    stream.close()
    assert (tmp_path / "object").read_bytes() == b"content"
