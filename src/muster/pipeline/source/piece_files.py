"""Pieces of reports in files, from the tasks that read the stream to those that have the shards; and what
these send to the driver.

With a local master both run on one machine, so reports need not pass through Java: a row of Spark has the
name of a file.  The file is removed when it is opened; the mapped memory remains.  If a task fails, the query
is restarted, and the source writes the pieces of the batch again.  What is left of the former attempt, or of
a killed process, is removed when a query starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from muster.pipeline.fleet import blocks
from muster.pipeline.source import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUFFIX = ".exchange"
ABANDONED_S = 3600.0  # far longer than a batch


def folder(spark: SparkSession, checkpoint: str) -> str:
    """Where the pieces of a query with this checkpoint are exchanged; empty on a cluster, whose tasks run on
    several machines."""
    context = spark.sparkContext
    if not session.is_local(str(context.master)):
        return ""
    scratch = context.getConf().get("spark.local.dir", tempfile.gettempdir()) or ""
    name = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
    return str(Path(scratch.split(",")[0]).absolute() / "reports" / name)


def clear(place: str) -> None:
    """Remove files that no task will read: of the same query before it ended, and of others long ago."""
    shutil.rmtree(place, ignore_errors=True)
    for other in Path(place).parent.glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(other, ignore_errors=True)


def write(place: str, piece: blocks.ReportPiece) -> str:
    """The path of a new file."""
    path = _new(place)
    with pa.OSFile(path, "wb") as file:
        piece.write(file)
    return path


def take(sequence: int, path: str) -> blocks.ReportPiece:
    """Read a file, and remove it."""
    with pa.memory_map(path) as file:
        Path(path).unlink()
        return blocks.ReportPiece.read(sequence, file)


def write_bytes(place: str, data: bytes) -> str:
    path = _new(place)
    Path(path).write_bytes(data)
    return path


def take_bytes(path: str) -> bytes:
    """Read a file, and remove it."""
    data = Path(path).read_bytes()
    Path(path).unlink()
    return data


def _new(place: str) -> str:
    folder_ = Path(place)
    folder_.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(folder_ / f"{uuid.uuid4().hex}{SUFFIX}")
