"""The job: one Spark query from the stream of reports to results.

    stream ``reports`` ──> open each message ──> shard of groups ──> fleet (state) ──> the driver
                              │ (mapInArrow)                          (transformWithState)
                              └──> history, node reports

Messages travel through Spark as they are, Arrow inside one binary value, so a row of Spark is a thousand
reports; what happens to single reports happens in columns, in Spark's Python workers: the first step checks
each message and writes the history, the second rolls up, watches and judges (`fleet`).  The driver gets a few
rows for each group and batch, and hands them on (`results`).

What a message lacks is never an error of the query: it is counted by reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors, reports
from muster.pipeline import fleet, history, protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

QUERY_NAME = "fleet"
OPENED = "shard int, sequence bigint, stored_ms bigint, grp string, data binary, counts string, rows bigint"
OUTPUT = "shard int, data binary"
BATCH_PROPERTY = "streaming.sql.batchId"  # Spark tells each task which micro-batch it works for

HISTORY_LOST = "not-in-history"
CPU = "cpu-us "  # begins the names of counters that say where time goes


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a query needs: plain data, since it travels to the executors."""

    plan: fleet.Plan
    servers: tuple[str, ...]
    checkpoint: str
    history: str
    run: str
    credentials: str | None = None
    ca: str | None = None
    streams: tuple[str, ...] = (reports.REPORTS_STREAM,)
    shards: int = 16
    splits: int = 2
    max_messages: int = 4000
    after: int = 0  # where a new checkpoint starts: behind what the history holds already


Take = Callable[[int, list[fleet.Output], dict[str, int]], None]


def start(spark: SparkSession, job: Job, take: Take, *, trigger_s: float | None) -> StreamingQuery:
    """Run until stopped, a batch every ``trigger_s``; None: what is there now, and then end.

    ``take`` gets the number of the batch, what the shards said and what was counted; when it returns, the
    batch is done.  It may get the same batch again after a crash.
    """
    options = {
        "servers": ",".join(job.servers),
        "streams": ",".join(job.streams),
        "maxMessages": str(job.max_messages),
        "splits": str(job.splits),
        "onLoss": "skip",
        "after": str(job.after),
    }
    options |= {key: value for key in ("credentials", "ca") if (value := getattr(job, key))}
    stream = spark.readStream.format("muster").options(**options).load()
    opened = stream.select("sequence", "subject", "data", "stored_at").mapInArrow(Opener(job), OPENED)
    frame = opened.groupBy("shard").transformWithState(
        processor(job), OUTPUT, outputMode="Append", timeMode="None"
    )
    writer = (
        frame.writeStream.queryName(QUERY_NAME)
        .outputMode("append")
        .option("checkpointLocation", job.checkpoint)
        .foreachBatch(lambda batch, number: _hand_over(batch, number, take))
    )
    chosen = (
        writer.trigger(availableNow=True)
        if trigger_s is None
        else writer.trigger(processingTime=f"{max(1, int(trigger_s * 1000))} milliseconds")
    )
    return chosen.start()


def _hand_over(frame: DataFrame, number: int, take: Take) -> None:
    found = [msgspec.msgpack.decode(row["data"], type=fleet.Output) for row in frame.collect()]
    counts: dict[str, int] = {}
    for output in found:
        for reason, count in output.counts.items():
            counts[reason] = counts.get(reason, 0) + count
    take(number, found, counts)


class Opener:
    """The first step: check messages, write them to the history, and send each group to its shard."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        started = time.process_time()
        counts: dict[str, int] = {}
        kept: list[pa.RecordBatch] = []
        clock_ms = rows = 0
        for batch in batches:
            out: list[tuple[Any, ...]] = []
            subjects, bodies = batch.column("subject"), batch.column("data")
            stored = batch.column("stored_at").cast(pa.int64()).to_numpy() // 1000
            for row, sequence in enumerate(batch.column("sequence").to_pylist()):
                clock_ms = max(clock_ms, int(stored[row]))
                if protocol.is_tick(subjects[row].as_py()):
                    continue
                try:
                    body = bodies[row].as_py()
                    found, facts = reports.decode(body)
                    if facts.schema != reports.NODE_SCHEMA:
                        raise reports.WrongSchema("summaries in the stream of reports")
                    _refuse_names(found)
                except errors.MusterError as error:
                    counts[error.code] = counts.get(error.code, 0) + 1
                    continue
                rows += found.num_rows
                kept.append(_with_sequence(found, sequence))
                for group, data in _by_group(found, facts, body):
                    shard = fleet.shard_of(group, self._job.shards)
                    out.append((shard, sequence, int(stored[row]), group, data, None, 0))
            if out:
                yield _rows(out)
        if clock_ms:
            opened = time.process_time()
            self._keep(kept, counts)
            counts[f"{CPU}open"] = int((opened - started) * 1e6)
            counts[f"{CPU}history"] = int((time.process_time() - opened) * 1e6)
            # Every shard learns what time it is, and one what was counted.
            yield _rows(
                [
                    (shard, 0, clock_ms, None, None, msgspec.json.encode(counts).decode(), rows)
                    if shard == 0
                    else (shard, 0, clock_ms, None, None, None, 0)
                    for shard in range(self._job.shards)
                ]
            )

    def _keep(self, kept: list[pa.RecordBatch], counts: dict[str, int]) -> None:
        from pyspark import TaskContext

        if not kept:
            return
        task = TaskContext.get()
        assert task is not None
        number = int(task.getLocalProperty(BATCH_PROPERTY) or 0)
        folder = history.batch_folder(Path(self._job.history), history.NODES, self._job.run, number)
        table = pa.Table.from_batches(kept, schema=history.node_schema())
        try:
            history.write(table, folder / f"part-{task.partitionId()}.parquet")
        except (errors.MusterError, OSError):
            counts[HISTORY_LOST] = counts.get(HISTORY_LOST, 0) + table.num_rows


def _refuse_names(batch: pa.RecordBatch) -> None:
    """Names become subjects and keys: as those of `messages.Name`, from 1 to 256 characters."""
    for column in ("machine", "group", "zone"):
        found = pc.min_max(pc.utf8_length(batch.column(column))).as_py()
        if found["min"] < 1 or found["max"] > 256:
            raise reports.WrongSchema(f"a name of no or too many characters in the column {column}")


def _with_sequence(batch: pa.RecordBatch, sequence: int) -> pa.RecordBatch:
    column = pa.repeat(pa.scalar(sequence, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, column], schema=history.node_schema())


def _by_group(batch: pa.RecordBatch, facts: reports.Facts, body: bytes) -> Iterator[tuple[str, bytes]]:
    """Mostly all rows are of one group, and the message goes on as it came."""
    groups = batch.column("group").dictionary_encode()
    if len(groups.dictionary) == 1:
        yield groups.dictionary[0].as_py(), body
        return
    codes = groups.indices
    for code, group in enumerate(groups.dictionary.to_pylist()):
        first = facts if code == 0 else msgspec.structs.replace(facts, dropped={})
        yield group, reports.encode(batch.filter(pc.equal(codes, code)), first)


_OPENED_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("sequence", pa.int64()),
        ("stored_ms", pa.int64()),
        ("grp", pa.string()),
        ("data", pa.binary()),
        ("counts", pa.string()),
        ("rows", pa.int64()),
    ]
)


def _rows(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    arrays = [
        pa.array(column, kind.type)
        for column, kind in zip(zip(*rows, strict=True), _OPENED_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_OPENED_SCHEMA)


def processor(job: Job) -> Any:
    """The second step. A function, since its base class needs Spark."""
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

    class Watcher(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._state = handle.getValueState("fleet", "data binary")

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            stored = self._state.get()
            known = fleet.Fleet.unpack(bytes(stored[0]), job.plan) if stored else fleet.Fleet(job.plan)
            output = feed(known, rows)
            self._state.update((known.pack(),))
            yield Row(shard=key[0], data=msgspec.msgpack.encode(output))

        def close(self) -> None:
            pass

    return Watcher()


def feed(known: fleet.Fleet, rows: Iterator[Any]) -> fleet.Output:
    """What one micro-batch brings to one shard."""
    started = time.process_time()
    arrivals: list[fleet.Arrival] = []
    counts: dict[str, int] = {}
    clock_ms = total = 0
    for row in rows:
        clock_ms = max(clock_ms, row["stored_ms"])
        total += row["rows"]
        if row["counts"]:
            for reason, count in msgspec.json.decode(row["counts"]).items():
                counts[reason] = counts.get(reason, 0) + count
        if row["data"] is None:
            continue
        with pa.ipc.open_stream(row["data"]) as reader:
            facts = reports.facts_of(reader.schema.metadata)
            for batch in reader:
                fitted = reports.fit(batch, reports.node_schema())
                arrivals.append(fleet.Arrival(row["sequence"], row["stored_ms"], row["grp"], fitted, facts))
    output = known.feed(arrivals, clock_ms)
    for reason, count in counts.items():
        output.count(reason, count)
    output.count("rows", total)
    output.count(f"{CPU}fleet", int((time.process_time() - started) * 1e6))
    return output
