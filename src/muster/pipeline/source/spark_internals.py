"""All that is used of Spark beyond its public names: what there is, why, and what would replace it.

pyproject.toml excludes the next major versions.  `tests/pipeline/test_spark_internals.py` checks each part,
before another version is admitted.

| what | why no public name does |
|---|---|
| `activate` | the active session belongs to a thread of Java; Python's session sets only its own |
| `avoid_processes` | the manager of checkpoint files is a setting, the name of the class is not documented |
| `has_executors` | PySpark counts cores, not whether executors have registered |
| `probe`, `kill`, `end_planners` | PySpark has no name for its processes, of Java and of Python |
| `is_select` | a session executes what it parses |
| `partition_of` | keys of shards must be spread evenly; Spark says where one is only after a shuffle |
| `offsets_of`, `with_folder` | files of a checkpoint: Spark reads them only to run the same query |
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"  # a setting
_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_PLANNER = b"pyspark.daemon\0pyspark.sql.worker."  # in the command line of a process that plans queries
_PLANS = "org.apache.spark.sql.catalyst.plans.logical"
_STATEMENTS = ("Command", "ParsedStatement", "InsertIntoDir")
_SCHEMA_PATH = re.compile(r'"file:[^"]*?/(state/\d+/_stateSchema/[^"]*)"')


def _java(session: SparkSession) -> Any:
    jvm = session.sparkContext._jvm
    assert jvm is not None
    return jvm


def activate(session: SparkSession) -> None:
    """Set the active session of the calling thread, where Spark looks up data sources."""
    _java(session).org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)


def avoid_processes(session: SparkSession) -> None:
    """By default Spark runs a program (``readlink``) for each file of a checkpoint on a file system, dozens
    of times in each batch. Another of its classes renames files without that."""
    with contextlib.suppress(Exception):  # a version of Spark that has it in another package
        _java(session).org.apache.spark.util.Utils.classForName(_FILE_MANAGER, True, True)
        session.conf.set(FILE_MANAGER, _FILE_MANAGER)


def has_executors(session: SparkSession) -> bool:
    """Whether an executor of a cluster has registered: the driver itself is counted, too."""
    return int(session.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) > 1


def probe(session: SparkSession) -> None:
    """Call Java; returns when it has responded."""
    _java(session).java.lang.System.nanoTime()


def end_planners(session: SparkSession) -> None:
    """End the Python processes with which Spark planned a query: it keeps them, some 40 MB each, and starts
    them again when it needs them. Only those whose workers Spark has ended, a minute after their last use:
    a worker that is gone would be an error of the next query. Only on Linux."""
    process = getattr(session.sparkContext._gateway, "proc", None)
    if process is None:
        return
    for thread in Path(f"/proc/{process.pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for pid in (thread / "children").read_text().split():
                known = Path(f"/proc/{pid}")
                is_idle = not (known / "task" / pid / "children").read_text()
                if is_idle and _PLANNER in (known / "cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGTERM)


def kill(session: SparkSession) -> None:
    """End Java at once, without letting it finish what it does."""
    context = session.sparkContext
    process = getattr(context._gateway, "proc", None)
    if process is not None:
        process.kill()
    elif context._jvm is not None:  # started by spark-submit
        with contextlib.suppress(Exception):  # the connection ends before the reply
            context._jvm.java.lang.Runtime.getRuntime().halt(1)


def is_select(session: SparkSession, text: str) -> bool:
    """Whether a text of SQL only reads. Raises Spark's own errors of the parser."""
    plan = session._jsparkSession.sessionState().sqlParser().parsePlan(text)
    classes = _java(session).java.lang.Class
    return not any(classes.forName(f"{_PLANS}.{name}").isInstance(plan) for name in _STATEMENTS)


def partition_of(number: int, partitions: int) -> int:
    """Of a key that is a 32-bit integer: Murmur3 with the seed 42."""
    mask = 0xFFFFFFFF
    mixed = number * 0xCC9E2D51 & mask
    mixed = (mixed << 15 | mixed >> 17) & mask
    state = 42 ^ (mixed * 0x1B873593 & mask)
    state = (state << 13 | state >> 19) & mask
    state = (state * 5 + 0xE6546B64 & mask) ^ 4
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    state ^= state >> 16
    return (state - (1 << 32) if state >> 31 else state) % partitions  # signed


def offsets_of(content: bytes) -> dict[str, int]:
    """The offset in a file of Spark's log: version, metadata, and the offset of each source, in lines.

    Raises `LookupError`, `ValueError`, `RecursionError` or an error of msgspec if it is none.
    """
    return msgspec.json.decode(content.splitlines()[2], type=dict[str, int])


def with_folder(content: str, folder: Path) -> str:
    """A file with metadata of an operator, which has absolute paths: those of another folder corrected."""
    root = f"file:{folder}"  # as Spark writes it, without escapes
    return _SCHEMA_PATH.sub(lambda match: f'"{root}/{match[1]}"', content)
