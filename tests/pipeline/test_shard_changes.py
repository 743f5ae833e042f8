"""The state of the fleet in another number of shards or with other windows: same reports, same alerts."""

import itertools
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies

from muster.core import duplicates, messages
from muster.core.reports import columns
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, merged, node_columns, rollups, shards, state, window_grid
from muster.pipeline.job import state_transfer
from muster.pipeline.source import shard_keys
from tests.pipeline import traffic

T0 = 1_700_000_000_000
RULES = (
    rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90"),
    rules.AlertRule(name="silent", scope="node", when="age_s > 3 * period_s"),
)


def plan(**more) -> state.FleetStatePlan:
    return state.FleetStatePlan(rules=RULES, delay_s=5.0, **more)


def reports(sequence: int, at_ms: int, names: range) -> list[messages.NodeReport]:
    return [
        traffic.report(
            f"m{n}",
            sequence,
            at_ms + n * 10,
            group=f"g{n % 5}",
            zone=f"z{n % 3}",
            metrics={"cpu_percent": float(n * 7 % 101), "memory_percent": n / 2, f"own_{n % 4}": float(n)},
        )
        for n in names
    ]


class ShardedFleet:
    """Shards as Spark runs them: the machines of a message are divided, and outputs are added up."""

    def __init__(self, count: int, plan_: state.FleetStatePlan) -> None:
        self.plan = plan_
        self.shards = [state.FleetState(plan_) for _ in range(count)]
        self.sequence = 0

    def feed(self, rows: list[messages.NodeReport], clock_ms: int, summary=None) -> list[state.ShardOutput]:
        self.sequence += 1
        outputs = []
        for number, shard in enumerate(self.shards):
            pieces = []
            if rows:
                batch = columns.to_batch(rows)
                mine = batch.filter(
                    pa.array(shards.shards_of(batch.column("machine"), len(self.shards)) == number)
                )
                if mine.num_rows:
                    facts = columns.BatchInfo(channel="c")
                    pieces = [blocks.ReportPiece.from_message(self.sequence, clock_ms, mine, facts)]
            outputs.append(shard.feed(pieces, clock_ms))
        return outputs

    def rescale(self, count: int, plan_: state.FleetStatePlan | None = None) -> None:
        self.plan = plan_ or self.plan
        joined: dict[int, state.FleetState] = {}
        for number, shard in enumerate(self.shards):
            names = node_columns.NodeNames.unpack(shard.nodes.names.version, shard.nodes.names.pack())
            stored = state.FleetState.unpack(shard.pack(), self.plan, names)
            for target, part in shards.split(stored, count, cells_to=number % count).items():
                joined[target] = shards.merge(joined[target], part) if target in joined else part
        self.shards = [joined.get(number, state.FleetState(self.plan)) for number in range(count)]


def results(outputs: list[state.ShardOutput]) -> tuple[Any, ...]:
    totals = rollups.scope_totals(window for output in outputs for window in output.closed)
    reported = [
        rollups.group_report(many) if many.scope != "system" else rollups.system_report(many, [])
        for many in totals
        if not many.gone
    ]
    changes = sorted(
        (change.rule, change.machine, change.on) for output in outputs for change in output.changes
    )
    counts: dict[str, int] = {}
    for output in outputs:
        for reason, count in output.counts.items():
            counts[reason] = counts.get(reason, 0) + count
    ranked = [{name: sorted(top) for name, top in many.top.items()} for many in totals]
    return reported, changes, counts, sum(output.machines for output in outputs), ranked


STEPS = [
    (reports(1, T0, range(30)), T0 + 1_000),
    (reports(2, T0 + 4_000, range(30)), T0 + 5_000),
    (reports(2, T0 + 4_000, range(10)), T0 + 6_000),  # repeated
    (reports(3, T0 + 12_000, range(5, 30)), T0 + 13_000),
    ([], T0 + 27_000),
    (reports(4, T0 + 30_000, range(20, 40)), T0 + 31_000),
    ([], T0 + 60_000),
    (reports(5, T0 + 61_000, range(40)), T0 + 62_000),
    ([], T0 + 90_000),
]


@hypothesis.given(strategies.lists(strategies.integers(1, 9), min_size=len(STEPS), max_size=len(STEPS)))
@hypothesis.settings(max_examples=10, deadline=None)
def test_any_number_of_shards_at_any_time_gives_the_same_results(numbers):
    steady, moving = ShardedFleet(4, plan()), ShardedFleet(4, plan())
    for (rows, clock_ms), number in zip(STEPS, numbers, strict=True):
        moving.rescale(number)
        expected, actual = results(steady.feed(rows, clock_ms)), results(moving.feed(rows, clock_ms))
        assert actual == expected


def test_shards_are_divided_by_machine_and_rankings_follow_their_machines():
    fleet = ShardedFleet(1, plan())
    fleet.feed(reports(1, T0, range(200)), T0)
    fleet.rescale(4)
    assert all(30 < len(shard.nodes) < 70 for shard in fleet.shards)
    for number, shard in enumerate(fleet.shards):
        assert (shards.shards_of(shard.nodes.names.array, 4) == number).all()
    outputs = fleet.feed([], T0 + 30_000)
    system = next(
        many for many in rollups.scope_totals(w for o in outputs for w in o.closed) if many.scope == "system"
    )
    assert system.cell.machine_count() == 200
    values = sorted(((n * 7 % 101, f"m{n}") for n in range(200)), reverse=True)[:10]
    assert [value for value, _ in system.top["cpu_percent"]] == [float(value) for value, _ in values]


@pytest.mark.parametrize("width_s", [1.0, 7.0, 9.999, 60.0])
def test_after_a_change_of_length_each_report_is_in_one_window_and_no_alert_changes(width_s):
    fleet = ShardedFleet(2, plan())
    clock_ms = T0
    totals: list[rollups.ScopeTotals] = []
    changes: list[tuple[str, str, bool]] = []
    sent = 0
    for step in range(100):
        if step == 10:
            fleet.rescale(3, plan(window_s=width_s))
        clock_ms += 4_000
        rows = reports(step + 1, clock_ms, range(30)) if step < 90 else []
        sent += len(rows)
        outputs = fleet.feed(rows, clock_ms + 500)
        totals += rollups.scope_totals(window for output in outputs for window in output.closed)
        changes += [(c.rule, c.machine, c.on) for output in outputs for c in output.changes]
        assert not any(output.counts.get("late") for output in outputs)
    outputs = fleet.feed([], clock_ms + 600_000)
    totals += rollups.scope_totals(window for output in outputs for window in output.closed)
    system = [many for many in totals if many.scope == "system"]
    assert sum(many.cell.total for many in system) == sent
    widths = [many.width_ms for many in system]
    assert widths[0] == 10_000
    assert widths[-1] == int(width_s * 1000)
    assert len(set(widths)) == 2  # none is shorter or longer
    for before, after in itertools.pairwise(system):
        assert before.to_ms <= after.from_ms
    assert all(many.cell.machine_count() <= 30 for many in system)
    assert changes.count(("hot", "m13", True)) == 1  # 13 * 7 = 91
    assert not [change for change in changes if change[0] == "hot" and not change[2]]


def test_a_grid_that_changes_twice_drops_a_change_that_has_not_begun():
    grid = window_grid.WindowGrid.of_width(10_000).changed(60_000, T0)
    first = grid.sections[-1].from_ms
    assert first > T0
    assert first % 60_000 == 0
    back = grid.changed(10_000, first - 20_000)
    assert [section.width_ms for section in back.sections] == [10_000, 10_000]
    again = grid.changed(10_000, first + 1)
    assert [section.width_ms for section in again.sections] == [10_000, 60_000, 10_000]
    assert again.pruned(again.sections[-1].from_ms).sections == again.sections[-1:]
    assert window_grid.WindowGrid.unpack(again.pack()) == again


@hypothesis.given(
    strategies.lists(
        strategies.tuples(strategies.integers(1, 5_000), strategies.integers(0, 20_000)), max_size=4
    )
)
def test_windows_of_a_grid_follow_each_other_without_gaps(steps):
    grid, at = window_grid.WindowGrid.of_width(700), 0
    for width, wait in steps:
        at += wait
        grid = grid.changed(width, at)
    times = np.arange(0, grid.sections[-1].from_ms + 20_000, 997)
    numbers = grid.numbers(times)
    assert (np.diff(numbers) >= 0).all()
    for time, number in zip(times.tolist(), numbers.tolist(), strict=True):
        assert grid.number(time) == number
        assert grid.start_ms(number) <= time < grid.start_ms(number + 1)
        assert grid.floor_ms(time) == grid.start_ms(number)


def test_the_union_of_seen_messages_knows_what_either_saw():
    first, other = duplicates.DuplicateWindows(10), duplicates.DuplicateWindows(10)
    for sequence in (1, 2, 5):
        first.observe("c", 7, sequence)
    for sequence in (3, 9):
        other.observe("c", 7, sequence)
    other.observe("d", 8, 4)
    joined = duplicates.DuplicateWindows.union(10, first, other)
    verdicts = {sequence: joined.observe("c", 7, sequence).value for sequence in range(1, 11)}
    assert [sequence for sequence, verdict in verdicts.items() if verdict == "duplicate"] == [1, 2, 3, 5, 9]
    assert joined.observe("d", 8, 4) is duplicates.DuplicateVerdict.DUPLICATE
    assert list(duplicates.DuplicateWindows.union(1, first, other).remembered()) == ["d"]


def test_the_windows_of_several_shards_are_those_of_one():
    apart, together = ShardedFleet(6, plan()), ShardedFleet(6, plan())
    joined = 0
    for rows, clock_ms in STEPS:
        expected = results(apart.feed(rows, clock_ms))
        outputs = together.feed(rows, clock_ms)
        for half in (outputs[:3], outputs[3:]):
            closed = merged.joined([window for output in half for window in output.closed], 10)
            joined += sum(len(output.closed) for output in half) - len(closed)
            for output in half:
                output.closed = []
            half[0].closed = closed
        assert results(outputs) == expected
    assert joined > 10


@pytest.mark.parametrize(("before", "after"), [((6, 2), (4, 1)), ((1, 1), (6, 3)), ((4, 4), (4, 2))])
def test_the_states_of_partitions_are_divided_among_others(before, after):
    plan_ = plan()
    fleet = ShardedFleet(before[0], plan_)
    for rows, clock_ms in STEPS[:4]:
        fleet.feed(rows, clock_ms)
    keys, new_keys = shard_keys.keys(before[1]), shard_keys.keys(after[1])
    partitions: list[dict[str, Any]] = []
    for place, key in enumerate(keys):
        held = fleet.shards[place :: before[1]]
        packed = [shard.pack() for shard in held]
        names = [shard.nodes.names for shard in held]
        version = state_transfer.versions_of([known.version for known in names], list(map(len, packed)))
        stored = {"part": key, "version": version, "data": b"".join(packed)}
        partitions.append({**stored, "names": state_transfer.pack_names(names)})
    parts = [
        part
        for row in partitions
        for part in state_transfer._divided(row, plan_, new_keys, after[0]).to_pylist()
    ]
    machines: list[str] = []
    open_cells = 0
    for place, key in enumerate(new_keys):
        (joined,) = state_transfer._joined(
            [part for part in parts if part["part"] == key], plan_, new_keys, after[0]
        ).to_pylist()
        known = list(state_transfer._load(joined["version"], joined["data"], joined["names"], plan_))
        assert len(known) == after[0] // after[1]
        for turn, shard in enumerate(known):
            numbers = shards.shards_of(shard.nodes.names.array, after[0])
            assert (numbers == turn * after[1] + place).all()
            machines += shard.nodes.names.array.to_pylist()
            open_cells += sum(int(table.total.sum()) for table in shard.open_cells.values())
    assert sorted(machines) == sorted(f"m{n}" for n in range(30))
    expected = sum(int(table.total.sum()) for shard in fleet.shards for table in shard.open_cells.values())
    assert open_cells == expected > 0
