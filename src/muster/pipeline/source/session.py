"""Starts Spark, with the same settings and the same Java for every job.

With a local master Spark is tuned for one machine.  On a cluster its own defaults apply, and the job brings
what executors need: Muster's code as an archive (`send_code`).  The executors' Python needs Muster's
dependencies (``muster-fabric[spark]``): installed on the workers, in an image, or in an archive that
``pipeline.spark`` names (``spark.archives``).  Credentials travel with the tasks (`reader.StreamAccess`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import muster
from muster.core import errors, files
from muster.pipeline.history import storage
from muster.pipeline.source import java_runtime, spark_internals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CODE_NAME = "muster-code.zip"
CORES_WAIT_S = 30.0
CORES_POLL_S = 0.5
CORES_STABLE = 4  # equal numbers in succession

DYNAMIC = ("spark.dynamicAllocation.enabled", "spark.streaming.dynamicAllocation.enabled")
# Where the environment has options for the Java of a driver.
JAVA_OPTIONS = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
_with_code: set[str] = set()  # applications that were sent it
_SMALL_HEAP = "-Xms64m -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=20"
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


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
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # readable for every reader
        # A row is a message of a thousand reports: the default of 10,000 rows would need too much memory.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.python.authenticate.socketTimeout": "120s",  # Python starts slowly on a busy machine
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
        **(_local_settings(work_dir) if is_local(master) else _cluster_settings(master)),
        **(extra or {}),
    }
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # Spark's pages listen there
    if python := settings.get("spark.pyspark.python"):
        os.environ["PYSPARK_PYTHON"] = python  # which wins over the setting
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
    if is_local(master):
        if spark_internals.FILE_MANAGER not in (extra or {}):
            spark_internals.avoid_processes(session)
    else:
        send_code(session)
    data_source.register(session)
    return session


def send_code(session: SparkSession) -> None:
    """Send Muster to the executors, once for each application."""
    from pyspark import SparkFiles

    context = session.sparkContext
    if context.applicationId not in _with_code:
        package = Path(muster.__file__).parent
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(package.rglob("*")):
                if path.is_file() and path.suffix != ".pyc":
                    archive.write(path, path.relative_to(package.parent))
        folder = Path(SparkFiles.getRootDirectory(), "muster")
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / CODE_NAME, content.getvalue())
        context.addPyFile(str(folder / CODE_NAME))
        _with_code.add(context.applicationId)


def is_local(master: str) -> bool:
    """Whether executors are threads of the driver's Java process."""
    return master.startswith("local") and not master.startswith("local-cluster")


def ui_settings(port: int) -> dict[str, str]:
    """Spark's pages on a port, with its metrics for Prometheus; 0: as is the default for the master."""
    if not port:
        return {}
    return {
        "spark.ui.enabled": "true",
        "spark.ui.port": str(port),
        "spark.ui.killEnabled": "false",
        "spark.ui.prometheus.enabled": "true",  # of executors: /metrics/executors/prometheus
        "spark.sql.streaming.metricsEnabled": "true",
        "spark.metrics.conf.*.sink.prometheusServlet.class": (
            "org.apache.spark.metrics.sink.PrometheusServlet"
        ),
        "spark.metrics.conf.*.sink.prometheusServlet.path": "/metrics/prometheus",  # of the driver
    }


def java_settings(master: str) -> dict[str, str]:
    """Of a query whose reports do not pass through Java (`piece_files`): optimized code and a parallel or
    concurrent collector would cost more CPU and memory than they save, and a heap that has grown while Spark
    started shrinks again. Java does not start with two collectors: that of the environment stays."""
    if not is_local(master):
        return {}
    given = " ".join(os.environ.get(name, "") for name in JAVA_OPTIONS)
    collector = "" if _COLLECTOR.search(given) else " -XX:+UseSerialGC"
    return {"spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1{collector} {_SMALL_HEAP}"}


def _local_settings(work_dir: Path) -> dict[str, str]:
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(work_dir / "scratch"),
        "spark.shuffle.compress": "false",  # Arrow data hardly compresses, and the shuffle is local
        "spark.sql.shuffle.partitions": "2",  # of batch jobs; the query sets its own
        "spark.ui.enabled": "false",
    }


def _cluster_settings(master: str) -> dict[str, str]:
    # On Kubernetes they would be in the description of the pods: `secretKeyRef` is the way there.
    passed = () if master.startswith("k8s:") else storage.ENVIRONMENT
    return {
        "spark.pyspark.python": sys.executable,
        "spark.ui.killEnabled": "false",
        # The environment page shows properties: not those with credentials of the storage.
        "spark.redaction.regex": r"(?i)secret|password|passwd|token|access[._]?key|credential|executorEnv",
        **{
            f"spark.executorEnv.{name}": value
            for name, value in os.environ.items()
            if passed and name.startswith(passed)
        },
    }


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
    master: str = "local[*]",
    *,
    memory: str = "1g",
    extra: dict[str, str] | None = None,
    verbose: bool = False,
) -> Iterator[SparkSession]:
    """A session for one job. ``verbose``: what Spark prints goes to stderr; otherwise only its errors are
    raised.
    """
    sizes = {"spark.driver.memory": memory, "spark.executor.memory": memory}
    quiet = contextlib.nullcontext() if verbose else _quiet_interrupts()
    with tempfile.TemporaryDirectory() as folder, quiet:
        with _same_interrupt_handler():
            started = start(
                master=master,
                name="muster batch",
                work_dir=Path(folder),
                extra=sizes | (extra or {}),
                output=None if verbose else Path(folder) / "spark.log",
            )
        try:
            yield started
        except Exception as error:
            if _is_interrupted(error):
                raise KeyboardInterrupt from None
            raise
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ctrl-C at a terminal ends Java as well
                started.stop()


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether the error followed from Ctrl-C: calls of Java that clean up fail after it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def _same_interrupt_handler() -> Iterator[None]:
    """Spark's own handler of Ctrl-C calls Java, which fails while another call waits for a reply."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Leave out the tracebacks that py4j logs when Ctrl-C ends a call of Java."""

    def is_foreign(record: logging.LogRecord) -> bool:
        return f"{os.sep}py4j{os.sep}" not in record.pathname

    loggers = [logging.getLogger(name) for name in ("", "py4j.clientserver", "py4j.java_gateway")]
    for logger in loggers:
        logger.addFilter(is_foreign)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_foreign)


def refuse_dynamic_allocation(session: SparkSession) -> None:
    """For a query whose shards are divided among the executors that are there when it starts. Also what
    Spark's own files of settings say counts."""
    known = session.sparkContext.getConf()
    for setting in DYNAMIC if not is_local(str(session.sparkContext.master)) else ():
        if str(known.get(setting, "false")).lower() == "true":
            raise errors.InvalidInput(
                f"{setting} = true: the pipeline needs a fixed number of executors, because the fleet is "
                "divided among them when it starts, and idle ones would end between batches",
                hint="leave it out, and set the number: spark.cores.max on a standalone cluster, "
                "spark.executor.instances on YARN and Kubernetes",
            )


def cores(session: SparkSession) -> int:
    """The cores of Spark. Executors of a cluster register one by one: wait until their number is stable."""
    context = session.sparkContext
    count = context.defaultParallelism
    if not is_local(str(context.master)):
        deadline_s = time.monotonic() + CORES_WAIT_S
        stable = 0
        while stable < CORES_STABLE and time.monotonic() < deadline_s:
            time.sleep(CORES_POLL_S)
            now = context.defaultParallelism
            stable = stable + 1 if now == count and spark_internals.has_executors(session) else 0
            count = now
    return int(count)
