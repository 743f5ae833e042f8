"""Keeps Spark of a standby ready: it rehearses the query of the driver, on the last few messages.

A Java process that has only just started needs many seconds for the first batch of a query: classes are
loaded and compiled, Spark plans and generates code, RocksDB is opened, and Python workers start and import
their modules.  A standby has done all that before it gets the lease.  Its query writes to a folder of its own
beside the checkpoint, which is removed afterwards, and its results are dropped.  The first rehearsal also
transfers state from one checkpoint to another, as the first batch of a new driver does.

It is repeated, because Spark ends Python workers that were idle for a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline.history import storage
from muster.pipeline.job import query, query_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

events = log.EventLog("pipeline")

REPEAT_S = 45.0
MESSAGES = 8  # of each stream, at most


async def positions(bus: api.Bus, streams: Iterable[str]) -> tuple[int, ...]:
    """In each stream, the position before the last few messages."""
    return tuple([await _before_last(bus, name) for name in streams])


async def _before_last(bus: api.Bus, name: str) -> int:
    try:
        state = await (await bus.open_stream(name)).state()
    except errors.NotFound:
        return 0
    return max(state.first_sequence, state.last_sequence - MESSAGES + 1) - 1


class QueryRehearsal:
    """``checkpoint``: of the driver; the rehearsal writes beside it."""

    def __init__(self, checkpoint: str) -> None:
        self._root = f"{checkpoint}-standby"
        self._transferred = False  # whether a rehearsal has transferred state
        self._stopped = False
        self._query: StreamingQuery | None = None
        self._lock = threading.Lock()

    def run(self, spark: SparkSession, plan: query_plan.QueryPlan, after: tuple[int, ...]) -> bool:
        """Process the messages after these positions; whether that succeeded."""
        name = secrets.token_hex(8)
        plan = dataclasses.replace(plan, history=f"{self._root}/{name}/history", after=after)
        try:
            is_done = self._process(spark, plan, name, "first")
            if is_done and not self._transferred:
                transferred = storage.spark_url(self._root, name, "first"), 0
                plan = dataclasses.replace(plan, transferred=transferred)
                is_done = self._transferred = self._process(spark, plan, name, "second")
            return is_done
        finally:
            with contextlib.suppress(OSError):
                storage.filesystem(self._root).delete_dir(name)

    def stop(self) -> None:
        """End a rehearsal, and begin none any more."""
        with self._lock:
            self._stopped = True
            if self._query is not None:
                query.stop(self._query)

    def _process(self, spark: SparkSession, plan: query_plan.QueryPlan, *folder: str) -> bool:
        try:
            with self._lock:
                if self._stopped:
                    return False
                checkpoint = storage.spark_url(self._root, *folder)
                self._query = query.start(
                    spark, dataclasses.replace(plan, checkpoint=checkpoint), _drop, trigger_s=None
                )
            self._query.awaitTermination()
        except Exception as error:  # noqa: BLE001 (Spark raises exceptions of many types)
            if not self._stopped:
                events.warning("not-rehearsed", error=str(error)[:2000])
            return False
        return True


def _drop(*_: object) -> None:
    pass
