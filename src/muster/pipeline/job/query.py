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
from muster.pipeline.fleet import blocks, merged, node_columns, removal, state
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
ROWS = "rows"  # counter: reports
HISTORY_ROWS = 100_000  # of small shards, in one file
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

    keys = shard_keys.keys(job.partitions)
    folder = piece_files.folder(spark, job.checkpoint)
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
        "parts": ",".join(map(str, keys)),
        "shards": str(job.shards),
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
        parts = state_transfer.initial_state(spark, *job.transferred, job.plan, keys, job.shards)
        before = parts.groupBy("part")
    merging = job.merging(folder)
    frame = stream.groupBy("part").transformWithState(
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
        if merging.is_by_executors(shares):
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
    """Processes the shards of a partition of Spark in a micro-batch, one after the other: decode, run the
    user's steps, update the fleet state.  Reports of several small shards become one file of the history."""

    def __init__(self, clock_ms: int = 0) -> None:
        self.output = state.ShardOutput(clock_ms)
        self._activity: list[tuple[int, int]] = []
        self._removals: list[removal.MachineRemoval] = []
        self._written: list[blocks.ReportPiece] = []
        self._started = time.process_time()

    def receive(self, rows: Iterable[Any]) -> dict[int, list[Any]]:
        """The rows with reports and summaries, by shard, each in the order of its stream."""
        shares: dict[int, list[Any]] = {}
        for row in sorted(rows, key=lambda row: row["sequence"]):
            self.output.clock_ms = max(self.output.clock_ms, row["stored_ms"])
            if row["counts"]:
                for reason, count in msgspec.json.decode(row["counts"]).items():
                    self.output.count(reason, count)
            if row["activity"]:
                self._activity += msgspec.json.decode(row["activity"], type=list[tuple[int, int]])
            if row["removals"]:
                self._removals += msgspec.json.decode(row["removals"], type=list[removal.MachineRemoval])
            if row["sequence"]:
                shares.setdefault(row["shard"], []).append(row)
        return shares

    def open(self, rows: Iterable[Any]) -> tuple[list[blocks.ReportPiece], list[blocks.DecodedMessage]]:
        """Node reports and summaries of a shard."""
        pieces: list[blocks.ReportPiece] = []
        summaries: list[blocks.DecodedMessage] = []
        for row in rows:
            sequence = row["sequence"]
            if row["summaries"] is not None:
                batch, facts = columns.decode(row["summaries"])
                summaries.append(blocks.DecodedMessage(sequence, row["stored_ms"], batch, facts))
                self.output.summaries = max(self.output.summaries, sequence)
                continue
            data, file = row["reports"], row["reports_file"]
            pieces.append(
                blocks.ReportPiece.read(sequence, data) if file is None else piece_files.take(sequence, file)
            )
            self.output.reports = max(self.output.reports, sequence)
        pieces = blocks.concat_pieces(pieces)
        self._spent("open")
        return pieces, summaries

    def feed(
        self,
        known: state.FleetState,
        pieces: list[blocks.ReportPiece],
        summaries: list[blocks.DecodedMessage],
        codes: Sequence[steps.StepCode] = (),
    ) -> None:
        """``codes``: steps of the user, which add metrics to the reports."""
        if codes and pieces:
            pieces, faults = steps.extend_reports(codes, pieces, known.nodes)
            self.output.faults |= faults
            self._spent("steps")
        self._written += pieces
        known.feed(
            pieces,
            self.output.clock_ms,
            summaries=summaries,
            activity=self._activity,
            removals=self._removals,
            into=self.output,
        )
        self._spent("fleet")

    def write_history(self, root: str, stem: str, *, least: int = 1) -> None:
        """Write a file of the history if ``least`` reports wait for it; the driver commits it."""
        rows = sum(map(len, self._written))
        if rows < least:
            return
        self.output.count(ROWS, rows)
        try:
            table = pa.Table.from_batches([piece.rows() for piece in self._written])
            written = data_files.write(root, tables.NODES, table, stem)
            self.output.files += written.files
            self.output.count(HISTORY_LOST, written.rejected)
        except (errors.MusterError, OSError) as error:
            self.output.count(HISTORY_LOST, rows)
            self.output.count(window_rows.explain_failure(error), 1)
        self._written = []
        self._spent("history")

    def finish(self, top: int) -> list[state.ClosedWindow]:
        """The windows that all shards have closed, added up."""
        closed, self.output.closed = self.output.closed, []
        joined = merged.joined(closed, top)
        self._spent("fleet")
        return joined

    def _spent(self, stage: str) -> None:
        now = time.process_time()
        self.output.count(f"{CPU}{stage}", int((now - self._started) * 1e6))
        self._started = now

    def pack(self, known: state.FleetState) -> bytes:
        data = known.pack()
        self.output.state_bytes += len(data)
        self._spent("state")
        return data


#: Cache of the names of machines in each shard, by run, epoch and partition: most micro-batches do not change
#: them.
_NAMES: dict[tuple[str, int, int], list[node_columns.NodeNames]] = {}


def processor(job: query_plan.QueryPlan, merging: window_rows.MergePlan) -> Any:
    """The stateful step. A function, because its base class needs Spark."""
    files = state_files.folder_of(job.checkpoint)
    keys = shard_keys.keys(job.partitions)
    from pyspark import TaskContext
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

    class FleetProcessor(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._state = handle.getValueState(state_transfer.FLEET, state_transfer.FLEET_SCHEMA)
            self._names = handle.getValueState(state_transfer.NAMES, state_transfer.NAMES_SCHEMA)

        def handleInitialState(self, key: Any, part: Row, timerValues: Any) -> None:
            self._state.update((part["version"], *self._stored_as(key[0], [bytes(part["data"])])))
            self._names.update((bytes(part["names"]),))

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            part, batch = key[0], self._batch()
            work = ShardProcessor()
            shares = work.receive(rows)
            stem = job.stem(job.first + batch, part)
            names: list[node_columns.NodeNames] = []
            sizes: list[int] = []
            before = self._known_names(part)

            def processed() -> Iterator[bytes]:
                for place, known in enumerate(self._load(before)):
                    number = place * job.partitions + keys.index(part)
                    pieces, summaries = work.open(shares.pop(number, ()))
                    work.feed(known, pieces, summaries, job.steps)
                    work.write_history(job.history, stem, least=HISTORY_ROWS)
                    names.append(known.nodes.names)
                    data = work.pack(known)
                    sizes.append(len(data))
                    yield data

            data, file = self._stored_as(part, processed())
            versions = [known.version for known in names]
            self._state.update((state_transfer.versions_of(versions, sizes), data, file))
            if versions != [known.version for known in before]:
                self._names.update((state_transfer.pack_names(names),))
            _NAMES[job.run, job.epoch, part] = names
            work.write_history(job.history, stem)
            closed = work.finish(job.plan.top)
            output = work.output
            if files is None:
                output.state_bytes = 0  # it is in Spark's state
            yield Row(
                kind=window_rows.SHARD,
                part=merging.parts[0],
                shard=part,
                reports=output.counts.get(ROWS, 0),
                late=output.counts.get(state.LATE, 0),
                repeated=output.counts.get(state.DUPLICATED, 0),
                future=output.counts.get(state.FUTURE, 0),
                machines=output.machines,
                lag_ms=max(0, int(time.time() * 1000) - output.clock_ms),
                **window_rows.content(merging.folder, msgspec.msgpack.encode(output)),
            )
            for row in window_rows.of_windows(closed, part, merging):
                yield Row(**row)

        def _stored_as(self, part: int, shards: Iterable[bytes]) -> tuple[bytes | None, str | None]:
            """The states of shards, or the file that has them."""
            if files is None:
                return b"".join(shards), None
            return None, state_files.write(files, self._batch(), part, shards)

        def _known_names(self, part: int) -> list[node_columns.NodeNames]:
            """Of the shards of a partition; they are those of the state that `_load` reads."""
            self._stored = self._state.get()
            if not self._stored:
                return [node_columns.NodeNames() for _ in range(job.shards // job.partitions)]
            versions = state_transfer.versions(self._stored[0])
            cached = _NAMES.get((job.run, job.epoch, part), [])
            if [known.version for known in cached] == versions:
                return cached
            stored = self._names.get()
            return state_transfer.unpack_names(versions, bytes(stored[0]) if stored else None)

        def _load(self, names: list[node_columns.NodeNames]) -> Iterator[state.FleetState]:
            if not self._stored:
                for _ in names:
                    yield state.FleetState(job.plan)
                return
            version, data, file = self._stored
            packed = state_files.read(files, file) if file else bytes(data)
            for known, part in zip(names, state_transfer.parts(version, packed), strict=True):
                yield state.FleetState.unpack(part, job.plan, known)

        def _batch(self) -> int:
            """As Spark counts."""
            task = TaskContext.get()
            assert task is not None
            return int(task.getLocalProperty(BATCH_PROPERTY) or 0)

        def close(self) -> None:
            pass

    return FleetProcessor()
