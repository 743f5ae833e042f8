"""Starts Spark, with the same settings and the same Java for every job."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from muster.core import errors
from muster.pipeline.history import storage
from muster.pipeline.source import java_runtime

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CORES_WAIT_S = 30.0
CORES_POLL_S = 0.5
CORES_STABLE = 4  # equal numbers in succession


def start(
    *,
    master: str,
    name: str,
    work_dir: Path,
    extra: dict[str, str] | None = None,
    output: Path | None = None,
) -> SparkSession:
    """A session on ``master`` with the bus registered as a data source.

    ``output``: the file for what Java and Spark print; None: stderr.
    """
    java_runtime.export_java_home(work_dir)
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise errors.MissingDependency(
            "the pipeline needs Spark; the rest of Muster does not",
            hint="install muster-fabric[spark], or run `make .venv/.spark` in a checkout",
        ) from error
    from muster.pipeline.source import data_source

    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # readable for every reader
        # A row is a message of a thousand reports: the default of 10,000 rows would need too much memory.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
        "spark.shuffle.compress": "false",  # Arrow data hardly compresses, and the shuffle is local
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.python.authenticate.socketTimeout": "120s",  # Python starts slowly on a busy machine
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
        "spark.local.dir": str(work_dir / "scratch"),
    }
    if master.startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    else:
        # Executors need the same Python with Muster installed.
        settings |= {
            "spark.pyspark.python": sys.executable,
            "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **{
                f"spark.executorEnv.{name}": value
                for name, value in os.environ.items()
                if name.startswith(storage.ENVIRONMENT)
            },
        }
    settings |= extra or {}
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with _output_to(output):
            session = builder.getOrCreate()
    except Exception as error:
        printed = output.read_text(errors="replace")[-2000:] if output and output.exists() else ""
        raise errors.Unavailable(f"Spark does not start: {error}\n{printed}".rstrip()) from error
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(data_source.MusterDataSource)
    return session


@contextlib.contextmanager
def _output_to(file: Path | None) -> Iterator[None]:
    """Redirect the output of Java and Spark's workers, started inside: stdout is for results only."""
    kept = {number: os.dup(number) for number in ((1, 2) if file else (1,))}
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if file else os.dup(2)
    for number in kept:
        os.dup2(target, number)
    os.close(target)
    try:
        yield
    finally:
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)


@contextlib.contextmanager
def temporary_session(
    master: str = "local[*]", *, memory: str = "1g", verbose: bool = False
) -> Iterator[SparkSession]:
    """A session for one job. ``verbose``: what Spark prints goes to stderr; otherwise only its errors are
    raised.
    """
    extra = {"spark.driver.memory": memory, "spark.executor.memory": memory}
    with tempfile.TemporaryDirectory() as folder:
        started = start(
            master=master,
            name="muster batch",
            work_dir=Path(folder),
            extra=extra,
            output=None if verbose else Path(folder) / "spark.log",
        )
        try:
            yield started
        finally:
            started.stop()


def activate(session: SparkSession) -> None:
    """Set the active session of the calling thread, where Spark looks up data sources."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)


def cores(session: SparkSession) -> int:
    """The cores of Spark. Executors of a cluster register one by one: wait until their number is stable."""
    context = session.sparkContext
    count = context.defaultParallelism
    if not str(context.master).startswith("local"):
        deadline_s = time.monotonic() + CORES_WAIT_S
        stable = 0
        while stable < CORES_STABLE and time.monotonic() < deadline_s:
            time.sleep(CORES_POLL_S)
            now = context.defaultParallelism
            has_executors = context._jsc.sc().getExecutorMemoryStatus().size() > 1
            stable = stable + 1 if now == count and has_executors else 0
            count = now
    return int(count)


def kill(session: SparkSession) -> None:
    """End Java at once, without letting it finish what it does."""
    process = getattr(session.sparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
