"""CPU of the pipeline's own code in one process, without Spark, brokers and channels.

    python -m benchmarks.pipeline_state realistic 100000 6 [--profile]

Plays a fleet for some periods through the steps of the query: messages by shard (the source), shards of
machines (decode, history, fleet state, packing), the merge of their windows, and the results at the driver.
Prints CPU time for each report, by step; the first two periods do not count.  ``--groups N`` sets the number
of groups, for the merge of many of them, ``--shards N`` that of shards; ``--profile`` prints where the time
goes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import gc
import pathlib
import pstats
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from benchmarks import monitor_rows
from muster.app.components import pipeline as driver
from muster.bus import api
from muster.core import messages
from muster.core.reports import columns
from muster.pipeline.fleet import node_columns, rollups, state
from muster.pipeline.history import tables
from muster.pipeline.job import query, query_plan, window_rows
from muster.pipeline.source import shard_keys
from muster.simulate import fleet

WARM = 2
START_MS = 1_700_000_000_000
SPLITS = 2  # as with two cores


@dataclass
class Stages:
    """CPU seconds by step."""

    spent_s: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    rows: int = 0

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.spent_s[name] += time.process_time() - started

    def lines(self) -> Iterator[str]:
        for name, spent_s in {**self.spent_s, "all": sum(self.spent_s.values())}.items():
            yield f"{name:28} {1e6 * spent_s / max(1, self.rows):8.2f} µs"


class OneProcess:
    """The query's steps, called directly."""

    def __init__(self, folder: pathlib.Path, plan: state.FleetStatePlan, shards: int) -> None:
        self.stages = Stages()
        self._folder = folder
        self._plan = plan
        partitions = min(SPLITS, shards)
        self._keys = shard_keys.keys(partitions)
        self._shards = shards
        job = query_plan.QueryPlan(plan, (), str(folder), shards=shards, partitions=partitions)
        self._merging = job.merging("")
        self.received_bytes = 0
        self._states: dict[int, tuple[str, bytes]] = {}
        self._names: dict[int, node_columns.NodeNames] = {}
        self._batch = 0

    def feed(self, stored: list[api.StoredMessage]) -> int:
        """Process a micro-batch; the number of groups, zones and systems that were reported."""
        self._batch += 1
        by_part: dict[int, list[dict[str, object]]] = {key: [] for key in self._keys}
        share = -(-len(stored) // SPLITS)
        for start in range(0, len(stored), share):
            with self.stages.step("source: by shard"):
                messages_ = stored[start : start + share]
                for batch in shard_keys.with_shard_key(messages_, self._keys, self._shards):
                    for row in batch.to_pylist():
                        by_part[row["part"]].append(row)
        shares = [row for key, rows in by_part.items() for row in self._partition(key, rows)]
        with self.stages.step("executors: merge"):
            received = []
            for part in self._merging.parts:
                chosen = [row for row in shares if row["part"] == part]
                table = pa.Table.from_pylist(chosen, schema=window_rows.SCHEMA)
                merge = window_rows.merger(self._merging, f"{self._batch}")
                received += merge((pa.scalar(part),), table).to_pylist()
        with self.stages.step("driver: results"):
            parts = window_rows.read(received, self._merging).parts
            system = rollups.scope_totals(share for part in parts for share in part.system)
            totals = [*(many for part in parts for many in part.totals()), *system]
            for _ in (report for part in parts for report in part.reports()):
                pass
            for many in system:
                messages.encode(rollups.system_report(many, totals))
        self.received_bytes = sum(len(row["data"]) for row in received)
        return len(totals)

    def state_bytes(self) -> int:
        """Of all shards, with the names of machines."""
        names = sum(len(names.pack()) for names in self._names.values())
        return names + sum(len(data) for _, data in self._states.values())

    def _partition(self, key: int, rows: list[dict[str, object]]) -> list[dict[str, object]]:
        work = query.ShardProcessor()
        share = work.receive(rows)
        for number in range(self._keys.index(key), self._shards, len(self._keys)):
            with self.stages.step("shard: state unpacked"):
                if number in self._states:
                    packed, names = self._states[number][1], self._names[number]
                    known = state.FleetState.unpack(packed, self._plan, names)
                else:
                    known = state.FleetState(self._plan)
            with self.stages.step("shard: open"):
                pieces, summaries = work.open(share.get(number, ()))
            with self.stages.step("shard: fleet"):
                work.feed(known, pieces, summaries)
            with self.stages.step("shard: state packed"):
                self._names[number] = known.nodes.names
                self._states[number] = known.nodes.names.version, work.pack(known)
            with self.stages.step("shard: history"):
                work.write_history(str(self._folder), f"{self._batch}-{key}", least=query.HISTORY_ROWS)
        with self.stages.step("shard: history"):
            work.write_history(str(self._folder), f"{self._batch}-{key}")
        with self.stages.step("partition: windows"):
            closed = work.finish(self._plan.top)
            return window_rows.of_windows(closed, key, self._merging)


def play(plan: fleet.FleetPlan, periods: int, *, shards: int, profile: bool) -> None:
    gc.set_threshold(driver.GC_OBJECTS, 20, 20)  # as in the driver
    made = fleet.VirtualFleet(plan, boot=1)
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        process = OneProcess(pathlib.Path(folder), state.FleetStatePlan(), shards)
        totals = stream_bytes = 0
        for tick in range(WARM + periods):
            if tick == WARM:
                process.stages = Stages()
            stored = _stored(made, tick)
            stream_bytes += sum(len(message.data) for message in stored)
            if profile and tick >= WARM:
                profiler.enable()
            totals = process.feed(stored)
            profiler.disable()
            process.stages.rows += plan.machines
        files = [path.stat().st_size for path in (pathlib.Path(folder) / tables.NODES).rglob("*.parquet")]
    print(f"{plan.describe()}; {periods} periods, {totals:,} results a period")
    print("\n".join(process.stages.lines()))
    driver_s = sum(spent_s for name, spent_s in process.stages.spent_s.items() if name.startswith("driver"))
    print(f"{'results to the driver':28} {process.received_bytes:8,} bytes")
    print(f"{'driver, for each result':28} {1e6 * driver_s / periods / max(1, totals):8.2f} µs")
    rows = plan.machines * (WARM + periods)
    print(f"{'a report in the stream':28} {stream_bytes / rows:8.0f} bytes")
    print(f"{'a report in the history':28} {sum(files) / rows:8.0f} bytes")
    print(f"{'a machine in the state':28} {process.state_bytes() / plan.machines:8.0f} bytes")
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def _stored(made: fleet.VirtualFleet, tick: int) -> list[api.StoredMessage]:
    """What channels store in one period."""
    at_ms = START_MS + int(tick * made.plan.period_s * 1000)
    stored = []
    for number, slot in enumerate(made.slots):
        info = columns.BatchInfo(
            schema=columns.NODE_SCHEMA, channel="c1", boot=1, sequence=tick * len(made.slots) + number
        )
        stored.append(
            api.StoredMessage(
                subject="muster.monitor.from.c1.batch.root.nodes",
                data=columns.encode(made.batch(slot, tick, at_ms), info, compression="lz4"),
                headers={},
                sequence=tick * len(made.slots) + number + 1,
                stored_at_ns=(at_ms + 5000) * 1_000_000,
            )
        )
    return stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("plain", "realistic"))
    parser.add_argument("machines", type=int)
    parser.add_argument("periods", type=int)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    plan = monitor_rows.plan(given.machines, given.kind)
    if given.groups:
        plan = replace(plan, groups=given.groups)
    play(plan, given.periods, shards=given.shards, profile=given.profile)


if __name__ == "__main__":
    main()
