"""Whether Spark's Java process responds: one that is paused, or busy with garbage only, must not keep the
lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.pipeline.source import spark_internals
from muster.supervision import tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROBE_S = 1.0  # between calls of Java
RESPONSE_S = 10.0  # a longer pause of Java is a failure


async def until_unresponsive(spark: Callable[[], SparkSession | None], calls: tasks.TaskSupervisor) -> None:
    """Call Java again and again; returns when it does not respond."""
    while True:
        await asyncio.sleep(PROBE_S)
        current = spark()
        if current is None:
            continue
        call = calls.spawn("probe", asyncio.to_thread(spark_internals.probe, current))
        done, _ = await asyncio.wait((call,), timeout=RESPONSE_S)
        if not done:
            return
