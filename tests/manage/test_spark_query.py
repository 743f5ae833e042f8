"""A real streaming query under its adapter and a manager: after a crash it continues where it stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from muster.pipeline.source import java_runtime
from muster.testing.eventually import eventually
from tests.manage import test_adapters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 180.0
QUERY = """
import os, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(os.environ["SPARK_MASTER"])
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
lines = spark.readStream.text(sys.argv[1])
(
    lines.writeStream.format("parquet")
    .option("checkpointLocation", sys.argv[3])
    .trigger(processingTime="1 second")
    .start(sys.argv[2])
    .awaitTermination()
)
"""


async def test_a_query_is_up_late_or_restarted_by_its_commits(fleet, tmp_path):
    matches = await asyncio.to_thread(java_runtime.find, tmp_path / "java")
    source, sink, checkpoint = (tmp_path / name for name in ("source", "sink", "checkpoint"))
    source.mkdir()
    script = tmp_path / "query.py"
    script.write_text(QUERY)
    lines = 0

    def more() -> None:
        """Another file, which appears at once."""
        nonlocal lines
        lines += 1
        beside = tmp_path / f"line-{lines}"
        beside.write_text(f"line {lines}\n")
        beside.rename(source / beside.name)

    await fleet.registry()
    await fleet.manager()
    await fleet.agent()
    more()
    await fleet.client.create(
        {
            "name": "query",
            "type": "spark-query",
            "agent": "host-a",
            "restart": {"delay_s": 0.1},
            "config": {
                "script": str(script),
                "arguments": [str(source), str(sink), str(checkpoint)],
                "master": "local[1]",
                "checkpoint": str(checkpoint),
                "progress_s": 12,
                "stop_s": 60,
                "environment": {
                    "JAVA_HOME": str(matches.home),
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "SPARK_LOCAL_DIRS": str(tmp_path / "scratch"),
                },
            },
        }
    )
    row = await fleet.client.wait("query", "up", timeout_s=PATIENCE_S)
    first = await fleet.client.execute("query", "progress")
    assert first["batch"] == 0, "it was not called up before its first batch"

    # Nothing arrives: it runs and is reported late; then it continues.
    row = await fleet.client.wait("query", "late", timeout_s=PATIENCE_S)
    assert "no batch committed" in row.reason
    more()
    await fleet.client.wait("query", "up", timeout_s=PATIENCE_S)

    # Its driver is killed: it is started anew and goes on from its checkpoint.
    pid = (await fleet.client.observe("query")).properties["pid"]
    family = psutil.Process(pid).children(recursive=True)
    assert any("java" in child.name() for child in family)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not any(map(test_adapters.runs, family)), timeout_s=60)
    more()

    async def went_on() -> bool:
        seen = (await fleet.client.observe("query")).properties["pid"]
        return bool(seen and seen != pid and (await fleet.client.execute("query", "progress"))["batch"] >= 2)

    await eventually(went_on, timeout_s=PATIENCE_S)
    await fleet.client.wait("query", "up", timeout_s=PATIENCE_S)
    assert await asyncio.to_thread(_lines_in, sink) == [f"line {number}" for number in range(1, lines + 1)]

    # Deleted: nothing of it runs on.
    pid = (await fleet.client.observe("query")).properties["pid"]
    family = psutil.Process(pid).children(recursive=True)
    await fleet.client.delete("query")
    await fleet.client.wait_gone("query", timeout_s=PATIENCE_S)
    assert not [child for child in family if test_adapters.runs(child)]


def _lines_in(sink: Path) -> list[str]:
    import pyarrow.dataset as ds

    paths = [str(path) for path in sink.glob("*.parquet")]
    table: Any = ds.dataset(paths, format="parquet").to_table()
    return sorted(table.column("value").to_pylist())
