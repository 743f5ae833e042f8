"""Pieces of reports in files, from the tasks that read the stream to those that have the shards.

With a local master both run on one machine, so reports need not pass through Java: a row of Spark has the name
of a file.  The file is removed when it is opened; the mapped memory remains.  If a task fails, the query is
restarted, and the source writes the pieces of the batch again.  The folder is Spark's own, which it removes.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa

from muster.pipeline.fleet import blocks
from muster.pipeline.source import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def folder(spark: SparkSession) -> str:
    """Where pieces are exchanged; empty on a cluster, whose tasks run on several machines."""
    context = spark.sparkContext
    if not session.is_local(str(context.master)):
        return ""
    folders = context._jsc.sc().env().blockManager().diskBlockManager().localDirsString()
    return str(folders[0])


def write(place: str, piece: blocks.ReportPiece) -> str:
    """The path of a new file."""
    path = os.path.join(place, f"reports-{uuid.uuid4().hex}.arrow")
    with pa.OSFile(path, "wb") as file:
        piece.write(file)
    return path


def take(sequence: int, path: str) -> blocks.ReportPiece:
    """Read a file, and remove it."""
    with pa.memory_map(path) as file:
        os.unlink(path)
        return blocks.ReportPiece.read(sequence, file)
