"""The Spark query from the streams of reports to results.

    streams ──> messages by shard ──> shard of machines: ──> groups by name ──> the driver
                  in the source       history, fleet state      merged
                                       transformWithState    applyInArrow

Reports pass through Spark as Arrow inside one binary value, so a row of Spark is some thousand reports.
Single reports are processed in columns, in Spark's Python workers: the task that has the state of a shard
decodes its messages, writes them to the history, aggregates them and evaluates the node rules
(`muster.pipeline.fleet`).  Closed windows of groups and zones are rows again, which Spark groups by name and
executors merge (`window_rows`).  The driver commits what shards and executors have written, publishes the
reports and tracks the alerts (`batch_commit`).

An invalid message never fails the query: it is counted by reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import protocol, steps
from muster.pipeline.fleet import blocks, node_columns, removal, shards, state
from muster.pipeline.history import data_files, tables
from muster.pipeline.job import query_plan, state_transfer, window_rows
from muster.pipeline.job.driver import state_files
from muster.pipeline.source import piece_files, shard_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

QUERY_NAME = "fleet"
WORK = "read the streams, divide reports by shard; history, state and rules of {} shards"
BATCH_PROPERTY = "streaming.sql.batchId"  # the number of the micro-batch, a property of each task

HISTORY_LOST = "not-in-history"  # reports
CPU = "cpu-us "  # prefix of the counters of CPU time


CommitBatch = Callable[[int, window_rows.BatchRows], None]


def start(
    spark: SparkSession, job: query_plan.QueryPlan, commit: CommitBatch, *, trigger_s: float | None
) -> StreamingQuery:
    """Run until stopped, a batch every ``trigger_s``; None: process the available messages, then end.

    ``commit`` receives the number of the batch and what shards and executors did; when it returns, the batch
    is done.  It may receive the same batch again after a crash.
    """
    from pyspark.sql import functions
    from pyspark.sql.pandas.types import from_arrow_schema

    keys = shard_keys.keys(job.shards, job.partitions)
    folder = piece_files.folder(spark)
    if folder:
        piece_files.clear(folder)
    # A new checkpoint of Spark takes the number from the session.
    spark.conf.set("spark.sql.shuffle.partitions", str(job.partitions))
    options = {
        "servers": ",".join(job.servers),
        "streams": ",".join(job.streams),
        "maxMessages": str(job.max_messages),
        "splits": str(job.splits),
        "onLoss": "skip",
        "missing": "wait",
        "payload": "shards",
        "shards": ",".join(map(str, keys)),
        "removals": protocol.removal(job.pipeline),
        "folder": folder,
        "after": ",".join(map(str, job.after)),
        "until": ",".join(map(str, job.until)),
    }
    options |= {key: value for key in ("credentials", "ca") if (value := getattr(job, key))}
    files = state_files.folder_of(job.checkpoint)
    if files is not None:
        state_files.remove_uncommitted(files)
    stream = spark.readStream.format("muster").options(**options).load()
    before = None
    if job.transferred is not None:
        parts = state_transfer.initial_state(spark, *job.transferred, job.plan, keys)
        before = parts.groupBy("shard")
    merging = job.merging(folder)
    frame = stream.groupBy("shard").transformWithState(
        processor(job, merging),
        from_arrow_schema(window_rows.SCHEMA),
        outputMode="Append",
        timeMode="None",
        initialState=before,
    )

    summed = [functions.sum(name).alias(name) for name in window_rows.SUMMED]
    frame = frame.observe(QUERY_NAME, *summed, functions.max("lag_ms").alias("lag_ms"))
    work = WORK.format(job.shards)
    shares = 0  # of groups, in the last batch that closed windows

    def commit_batch(batch: DataFrame, number: int) -> None:
        nonlocal shares
        spark.sparkContext.setJobDescription(f"{QUERY_NAME}, batch {job.first + number}: {work}")
        if shares > window_rows.MERGED_BY_DRIVER:
            batch = window_rows.merge_parts(batch, merging, job.stem(job.first + number, "groups"))
        received = window_rows.read(batch.collect(), merging)
        shares = received.shares() or shares
        commit(job.first + number, received)
        if files is not None:
            state_files.remove_former(files)

    writer = (
        frame.writeStream.queryName(QUERY_NAME)
        .outputMode("append")
        .option("checkpointLocation", job.checkpoint)
        .foreachBatch(commit_batch)
    )
    chosen = (
        writer.trigger(availableNow=True)
        if trigger_s is None
        else writer.trigger(processingTime=f"{max(1, int(trigger_s * 1000))} milliseconds")
    )
    return chosen.start()


def stop(query: StreamingQuery) -> None:
    with contextlib.suppress(Exception):  # Spark reports a batch that was interrupted as an error
        query.stop()


def poll(query: StreamingQuery) -> tuple[bool, Any]:
    """Whether it runs; with the progress of its last batch, or the reason why it ended."""
    if not query.isActive:
        error = query.exception()
        return False, str(error) if error else ""
    return True, query.lastProgress


class ShardProcessor:
    """Processes one shard in a micro-batch: decode, run the user's steps, write to the history, update the
    fleet state."""

    def __init__(self, known: state.FleetState) -> None:
        self._known = known
        self._counts: dict[str, int] = {}
        self._clock_ms = 0
        self._activity: list[tuple[int, int]] = []
        self._summaries = 0
        self._reports = 0
        self._files: list[data_files.DataFile] = []
        self._faults: dict[str, str] = {}
        self._removals: list[removal.MachineRemoval] = []
        self._started = time.process_time()

    def open(self, rows: Iterable[Any]) -> tuple[list[blocks.ReportPiece], list[blocks.DecodedMessage]]:
        """Node reports and summaries, each in the order of its stream."""
        pieces: list[blocks.ReportPiece] = []
        summaries: list[blocks.DecodedMessage] = []
        for row in sorted(rows, key=lambda row: row["sequence"]):
            sequence, stored_ms = row["sequence"], row["stored_ms"]
            self._clock_ms = max(self._clock_ms, stored_ms)
            if row["counts"]:
                for reason, count in msgspec.json.decode(row["counts"]).items():
                    self._count(reason, count)
            if row["activity"]:
                self._activity += msgspec.json.decode(row["activity"], type=list[tuple[int, int]])
            if row["removals"]:
                self._removals += msgspec.json.decode(row["removals"], type=list[removal.MachineRemoval])
            if row["reports"] is not None:
                pieces.append(blocks.ReportPiece.read(sequence, row["reports"]))
                self._reports = max(self._reports, sequence)
            if row["reports_file"] is not None:
                pieces.append(piece_files.take(sequence, row["reports_file"]))
                self._reports = max(self._reports, sequence)
            if row["summaries"] is not None:
                batch, facts = columns.decode(row["summaries"])
                summaries.append(blocks.DecodedMessage(sequence, stored_ms, batch, facts))
                self._summaries = max(self._summaries, sequence)
        pieces = blocks.concat_pieces(pieces)
        self._spent("open")
        return pieces, summaries

    def run_steps(
        self, codes: Sequence[steps.StepCode], pieces: list[blocks.ReportPiece]
    ) -> list[blocks.ReportPiece]:
        """Add the metrics of a user's steps."""
        if not codes or not pieces:
            return pieces
        extended, self._faults = steps.extend_reports(codes, pieces, self._known.nodes)
        self._spent("steps")
        return extended

    def write_history(self, pieces: list[blocks.ReportPiece], root: str, stem: str) -> None:
        """Write files of the history; the driver commits them."""
        if not pieces:
            return
        table = pa.Table.from_batches([piece.rows() for piece in pieces])
        self._count("rows", table.num_rows)
        try:
            written = data_files.write(root, tables.NODES, table, stem)
            self._files = written.files
            self._count(HISTORY_LOST, written.rejected)
        except (errors.MusterError, OSError) as error:
            self._count(HISTORY_LOST, table.num_rows)
            self._count(window_rows.explain_failure(error), 1)
        self._spent("history")

    def feed(
        self, pieces: list[blocks.ReportPiece], summaries: list[blocks.DecodedMessage]
    ) -> state.ShardOutput:
        output = self._known.feed(
            pieces,
            self._clock_ms,
            summaries=summaries,
            activity=self._activity,
            removals=self._removals,
        )
        output.summaries = self._summaries
        output.reports = self._reports
        output.files = self._files
        output.faults = dict(self._faults)
        self._spent("fleet")
        for reason, count in self._counts.items():
            output.count(reason, count)
        return output

    def _count(self, reason: str, number: int) -> None:
        if number:
            self._counts[reason] = self._counts.get(reason, 0) + number

    def _spent(self, stage: str) -> None:
        now = time.process_time()
        self._count(f"{CPU}{stage}", int((now - self._started) * 1e6))
        self._started = now


#: Cache of the names of machines, by run, epoch and shard: most micro-batches do not change them.
_NAMES: dict[tuple[str, int, int], node_columns.NodeNames] = {}


def processor(job: query_plan.QueryPlan, merging: window_rows.MergePlan) -> Any:
    """The stateful step. A function, because its base class needs Spark."""
    files = state_files.folder_of(job.checkpoint)
    from pyspark import TaskContext
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

    class FleetProcessor(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._state = handle.getValueState(state_transfer.FLEET, state_transfer.FLEET_SCHEMA)
            self._names = handle.getValueState(state_transfer.NAMES, state_transfer.NAMES_SCHEMA)

        def handleInitialState(self, key: Any, part: Row, timerValues: Any) -> None:
            known = state_transfer.load(part["version"], bytes(part["data"]), bytes(part["names"]), job.plan)
            if self._state.exists():
                known = shards.merge(self._load((job.run, job.epoch, key[0])), known)
            self._store(key[0], known)
            self._names.update((known.nodes.names.pack(),))

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            shard = (job.run, job.epoch, key[0])
            known = self._load(shard)
            before = known.nodes.names.version
            processor_ = ShardProcessor(known)
            pieces, summaries = processor_.open(rows)
            pieces = processor_.run_steps(job.steps, pieces)
            processor_.write_history(pieces, job.history, job.stem(job.first + self._batch(), key[0]))
            output = processor_.feed(pieces, summaries)
            started = time.process_time()
            names = known.nodes.names
            output.state_bytes = self._store(key[0], known)
            if names.version != before:
                self._names.update((names.pack(),))
            _NAMES[shard] = names
            output.count(f"{CPU}state", int((time.process_time() - started) * 1e6))
            closed, output.closed = output.closed, []
            yield Row(
                kind=window_rows.SHARD,
                part=merging.parts[0],
                shard=key[0],
                reports=output.counts.get("rows", 0),
                late=output.counts.get(state.LATE, 0),
                repeated=output.counts.get(state.DUPLICATED, 0),
                future=output.counts.get(state.FUTURE, 0),
                machines=output.machines,
                lag_ms=max(0, int(time.time() * 1000) - output.clock_ms),
                **window_rows.content(merging.folder, msgspec.msgpack.encode(output)),
            )
            for row in window_rows.of_windows(closed, key[0], merging):
                yield Row(**row)

        def _store(self, shard: int, known: state.FleetState) -> int:
            """Store the state; how many bytes of it are not in Spark's state."""
            data = known.pack()
            version = known.nodes.names.version
            if files is None:
                self._state.update((version, data, None))
                return 0
            self._state.update((version, None, state_files.write(files, self._batch(), shard, data)))
            return len(data)

        def _load(self, shard: tuple[str, int, int]) -> state.FleetState:
            stored = self._state.get()
            if not stored:
                return state.FleetState(job.plan)
            version, data, file = stored
            packed = state_files.read(files, file) if file else bytes(data)
            names = _NAMES.get(shard)
            if names is None or names.version != version:
                stored_names = self._names.get()
                return state_transfer.load(
                    version, packed, bytes(stored_names[0]) if stored_names else None, job.plan
                )
            return state.FleetState.unpack(packed, job.plan, names)

        def _batch(self) -> int:
            """As Spark counts."""
            task = TaskContext.get()
            assert task is not None
            return int(task.getLocalProperty(BATCH_PROPERTY) or 0)

        def close(self) -> None:
            pass

    return FleetProcessor()
