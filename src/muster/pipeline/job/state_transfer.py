"""The state of the fleet from the checkpoint of an earlier driver, for the first batch of a new one.

Spark's state reader returns the states of the shards of each partition, or the name of their file
(`state_files`).  Executors divide them among the new shards, and join what each of these gets; the query
receives a row for each partition as its initial state.

The states of several shards follow one another, and the version tells their sizes: ``v1:2048,v2:1024``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from muster.pipeline.fleet import node_columns, shards, state
from muster.pipeline.job.driver import state_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FLEET, NAMES = "fleet", "names"  # names of the state variables
# ``data``, or the name of a file that has it; the first release had no files.
FLEET_SCHEMA, NAMES_SCHEMA = "version string, data binary, file string", "data binary"
_PARTS = pa.schema(
    [
        ("part", pa.int32()),
        ("shard", pa.int32()),
        ("version", pa.string()),
        ("data", pa.binary()),
        ("names", pa.binary()),
    ]
)


def versions_of(names: Sequence[str], sizes: Sequence[int]) -> str:
    """The version of the states of shards. ``names``: the versions of the names of their machines."""
    if len(names) == 1:  # as of the first release
        return names[0]
    return ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))


def versions(version: str) -> list[str]:
    """Those of the names of machines."""
    return [entry.partition(":")[0] for entry in version.split(",")]


def parts(version: str, data: bytes) -> Iterator[memoryview]:
    """The states of shards."""
    start = 0
    for entry in version.split(","):
        size = entry.partition(":")[2]
        end = start + int(size) if size else len(data)
        yield memoryview(data)[start:end]
        start = end


def pack_names(names: Sequence[node_columns.NodeNames]) -> bytes:
    packed = [known.pack() for known in names]
    return packed[0] if len(packed) == 1 else msgspec.msgpack.encode(packed)


def unpack_names(versions: Sequence[str], packed: bytes | None) -> list[node_columns.NodeNames]:
    if packed is None:
        return [node_columns.NodeNames(version) for version in versions]
    listed = [packed] if len(versions) == 1 else msgspec.msgpack.decode(packed, type=list[bytes])
    return [node_columns.NodeNames.unpack(*pair) for pair in zip(versions, listed, strict=True)]


def initial_state(
    spark: SparkSession,
    checkpoint: str,
    batch: int,
    plan: state.FleetStatePlan,
    keys: Sequence[int],
    count: int,
) -> DataFrame:
    """A row for each partition, as of a batch of Spark's checkpoint. ``keys``: of the new partitions;
    ``count``: of new shards."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(variable: str) -> DataFrame:
        reader = spark.read.format("statestore").option("stateVarName", variable)
        return reader.option("batchId", str(batch)).load(checkpoint)

    stored = read(FLEET)
    has_files = "file" in stored.select("value.*").columns
    key = stored.select("key.*").columns[0]  # it had another name
    fleet = stored.selectExpr(
        f"key.{key} AS part",
        "value.version AS version",
        "value.data AS data",
        "value.file AS file" if has_files else "CAST(NULL AS STRING) AS file",
    )
    names = read(NAMES).selectExpr(f"key.{key} AS part", "value.data AS names")

    folder = state_files.folder_of(checkpoint)

    def divide(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            for row in rows.to_pylist():
                data = state_files.read(folder, row["file"]) if row["file"] else row["data"]
                yield _divided({**row, "data": data}, plan, keys, count)

    def join(rows: pa.Table) -> pa.Table:
        return _joined(rows.to_pylist(), plan, keys, count)

    schema = from_arrow_schema(_PARTS)
    divided = fleet.join(names, "part", "left").mapInArrow(divide, schema)
    return divided.groupBy("part").applyInArrow(join, schema)


def _load(
    version: str, data: bytes, names: bytes | None, plan: state.FleetStatePlan
) -> Iterator[state.FleetState]:
    known = unpack_names(versions(version), names)
    for part, named in zip(parts(version, data), known, strict=True):
        yield state.FleetState.unpack(part, plan, named)


def _divided(
    row: dict[str, Any], plan: state.FleetStatePlan, keys: Sequence[int], count: int
) -> pa.RecordBatch:
    listed = [
        {
            "part": keys[number % len(keys)],
            "shard": number,
            "version": part.nodes.names.version,
            "data": part.pack(),
            "names": part.nodes.names.pack(),
        }
        for place, fleet in enumerate(_load(row["version"], row["data"], row["names"], plan), row["part"])
        for number, part in shards.split(fleet, count, cells_to=place % count).items()
    ]
    return pa.RecordBatch.from_pylist(listed, schema=_PARTS)


def _joined(
    rows: list[dict[str, Any]], plan: state.FleetStatePlan, keys: Sequence[int], count: int
) -> pa.Table:
    """The shards of one partition, in their order."""
    fleets: dict[int, state.FleetState] = {}
    for row in rows:
        (part,) = _load(row["version"], row["data"], row["names"], plan)
        number = row["shard"]
        fleets[number] = shards.merge(fleets[number], part) if number in fleets else part
    numbers = range(keys.index(rows[0]["part"]), count, len(keys))
    known = [fleets.get(number) or state.FleetState(plan) for number in numbers]
    packed = [fleet.pack() for fleet in known]
    names = [fleet.nodes.names for fleet in known]
    joined = {
        "part": rows[0]["part"],
        "version": versions_of([named.version for named in names], list(map(len, packed))),
        "data": b"".join(packed),
        "names": pack_names(names),
    }
    return pa.Table.from_pylist([joined], schema=_PARTS)
