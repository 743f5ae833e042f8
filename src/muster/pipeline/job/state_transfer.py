"""The state of the fleet from the checkpoint of an earlier driver, for the first batch of a new one.

Spark's state reader returns the state of each shard, or the name of its file (`state_files`).  Executors
divide it among the new shards; the query receives the parts as its initial state and joins those of each
shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from muster.pipeline.fleet import node_columns, shards, state
from muster.pipeline.job.driver import state_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FLEET, NAMES = "fleet", "names"  # names of the state variables
# ``data``, or the name of a file that has it; the first release had no files.
FLEET_SCHEMA, NAMES_SCHEMA = "version string, data binary, file string", "data binary"
PARTS = "shard int, version string, data binary, names binary"
_ARROW = pa.schema(
    [("shard", pa.int32()), ("version", pa.string()), ("data", pa.binary()), ("names", pa.binary())]
)


def initial_state(
    spark: SparkSession, checkpoint: str, batch: int, plan: state.FleetStatePlan, keys: Sequence[int]
) -> DataFrame:
    """A row for each part of a new shard, as of a batch of Spark's checkpoint. ``keys``: of new shards."""

    def read(variable: str) -> DataFrame:
        reader = spark.read.format("statestore").option("stateVarName", variable)
        return reader.option("batchId", str(batch)).load(checkpoint)

    stored = read(FLEET)
    has_files = "file" in stored.select("value.*").columns
    fleet = stored.selectExpr(
        "key.shard AS shard",
        "value.version AS version",
        "value.data AS data",
        "value.file AS file" if has_files else "CAST(NULL AS STRING) AS file",
    )
    names = read(NAMES).selectExpr("key.shard AS shard", "value.data AS names")

    folder = state_files.folder_of(checkpoint)

    def divide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            for row in rows.to_pylist():
                data = state_files.read(folder, row["file"]) if row["file"] else row["data"]
                yield _divided({**row, "data": data}, plan, keys)

    return fleet.join(names, "shard", "left").mapInArrow(divide, PARTS)


def load(version: str, data: bytes, names: bytes | None, plan: state.FleetStatePlan) -> state.FleetState:
    known = (
        node_columns.NodeNames(version) if names is None else node_columns.NodeNames.unpack(version, names)
    )
    return state.FleetState.unpack(data, plan, known)


def _divided(row: dict[str, Any], plan: state.FleetStatePlan, keys: Sequence[int]) -> pa.RecordBatch:
    fleet = load(row["version"], row["data"], row["names"], plan)
    parts = [
        {
            "shard": keys[number],
            "version": part.nodes.names.version,
            "data": part.pack(),
            "names": part.nodes.names.pack(),
        }
        for number, part in shards.split(fleet, len(keys), cells_to=row["shard"] % len(keys)).items()
    ]
    return pa.RecordBatch.from_pylist(parts, schema=_ARROW)
