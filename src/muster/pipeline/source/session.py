"""One place that starts Spark, so that every job has the same settings and the same Java."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from muster.core import errors
from muster.pipeline.source import java_runtime

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start(*, master: str, name: str, work_dir: Path, extra: dict[str, str] | None = None) -> SparkSession:
    """A session on ``master`` with the sources and sinks of the bus registered."""
    java_runtime.export_java_home(work_dir)
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise errors.MissingDependency(
            "the pipeline needs Spark (everything else works without it)",
            hint="install muster-fabric[spark], or run `make .venv/.spark` in a checkout",
        ) from error
    from muster.pipeline.source import data_source

    settings = {
        "spark.sql.session.timeZone": "UTC",
        # State is kept by group, so few partitions do; and the number is fixed for a checkpoint's life.
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # what every reader understands
        # A row of ours is a message of a thousand reports: a thousand such rows at a time would be too much.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
        "spark.shuffle.compress": "false",  # numbers of Arrow hardly compress, and the shuffle is local
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.python.authenticate.socketTimeout": "120s",  # a busy machine takes long to start Python
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
        "spark.local.dir": str(work_dir / "scratch"),
    }
    if master.startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    else:
        # Executors need this same Python, and Muster in it.
        settings |= {
            "spark.pyspark.python": sys.executable,
            "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
    settings |= extra or {}
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _output_to_stderr():
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(data_source.MusterDataSource)
    return session


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Java inherits our standard output, and Spark's workers talk to it; ours is for answers only."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def temporary_session(master: str = "local[*]") -> Iterator[SparkSession]:
    """A session for one question."""
    with tempfile.TemporaryDirectory() as folder:
        started = start(master=master, name="muster batch", work_dir=Path(folder))
        try:
            yield started
        finally:
            started.stop()


def activate(session: SparkSession) -> None:
    """Make ``session`` the calling thread's own: Spark looks formats up there, and a new thread has none."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)
