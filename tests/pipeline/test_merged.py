"""Closed windows that are divided by name and merged in parts are the same as those of one process."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from muster.core import messages
from muster.core.reports import columns
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import merged, rollups, state
from muster.pipeline.history import data_files
from muster.pipeline.job import query_plan, window_rows
from tests.pipeline import test_fleet, test_shard_changes, traffic

T0 = test_shard_changes.T0
PEAK = rules.AlertRule(name="peak", scope="group", when="cpu_percent_p95 > 50 AND own.own_1_max > 1")


def batches(shards: int) -> list[list[state.ShardOutput]]:
    """Some groups of which no machine reports any more are gone at the end."""
    plan = state.FleetStatePlan(forget_s=60.0)
    fleet = test_shard_changes.ShardedFleet(shards, plan)
    fed = [fleet.feed(rows, clock_ms) for rows, clock_ms in test_shard_changes.STEPS]
    only = test_shard_changes.reports(9, T0 + 80_000, range(0, 30, 5))
    return [*fed, fleet.feed(only, T0 + 81_000), fleet.feed([], T0 + 120_000)]


def in_parts(outputs: list[state.ShardOutput], parts: int) -> list[merged.MergedPart]:
    plan = window_rows.MergePlan(tuple(range(parts)))
    received: dict[int, list[state.ClosedWindow]] = {}
    for shard, output in enumerate(outputs):
        for row in window_rows.of_windows(output.closed, shard, plan):
            received.setdefault(row["part"], []).append(window_rows.read_window({"file": None, **row}))
    made = [window_rows.merge(windows, plan)[0] for windows in received.values()]
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=merged.MergedPart) for part in made]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_have_the_reports_facts_and_rows_of_the_whole(parts):
    evaluator = rollups.ScopeRuleEvaluator([PEAK], rollups.Baselines())
    for outputs in batches(3):
        whole = rollups.scope_totals(window for output in outputs for window in output.closed)
        made = in_parts(outputs, parts)
        system = rollups.scope_totals(share for part in made for share in part.system)
        totals = [*(many for part in made for many in part.totals()), *system]
        totals.sort(key=lambda many: (many.from_ms, many.scope, many.name))
        assert [rollups.facts(many) for many in totals] == [rollups.facts(many) for many in whole]
        assert evaluator.evaluate(totals, set()) == evaluator.evaluate(whole, set())
        reports = {report[:3]: report[3] for part in made for report in part.reports()}
        groups = [many for many in whole if many.scope != "system" and not many.gone]
        assert {key: messages.decode(data, columns.GroupReport) for key, data in reports.items()} == {
            (many.scope, many.name, many.to_ms): rollups.group_report(many) for many in groups
        }
        assert [rollups.system_report(many, totals) for many in system] == [
            rollups.system_report(many, whole) for many in whole if many.scope == "system"
        ]
        assert [rollups.top_nodes(many) for many in system] == [
            rollups.top_nodes(many) for many in whole if many.scope == "system"
        ]


def test_what_the_driver_gets_does_not_grow_with_the_machines_or_shards():
    """Rankings included: of the machines in those of the shards only the highest remain."""

    def size(machines: int, shards: int) -> int:
        outputs = []
        for shard in range(shards):
            numbers = range(shard, machines, shards)
            rows = [traffic.report(f"m{n:05}", 1, T0, group=f"g{n % 5}") for n in numbers]
            fleet = state.FleetState(state.FleetStatePlan())
            fleet.feed([test_fleet.arrival(rows, T0)], T0)
            outputs.append(fleet.feed([], T0 + 20_000))
        (part,) = in_parts(outputs, 1)
        return len(msgspec.msgpack.encode(part))

    assert size(5000, 16) < 1.1 * size(500, 1)


def test_shares_that_name_groups_in_different_orders_are_merged():
    """Their histograms are joined unsorted, and sorted once."""
    one, other = (state.FleetState(state.FleetStatePlan()) for _ in range(2))
    rows = [
        traffic.report(f"m{n}", 1, T0, metrics={"cpu_percent": float(n)}, group=f"g{n % 3}")
        for n in range(60)
    ]
    one.feed([test_fleet.arrival(rows[:30], T0)], T0)
    other.feed([test_fleet.arrival(rows[:29:-1], T0)], T0)
    whole = state.FleetState(state.FleetStatePlan())
    whole.feed([test_fleet.arrival(rows, T0)], T0)
    outputs = [fleet.feed([], T0 + 20_000) for fleet in (one, other, whole)]
    assert outputs[0].closed[0].names != outputs[1].closed[0].names
    halves = rollups.scope_totals([*outputs[0].closed, *outputs[1].closed])
    assert [many.cell.rollups() for many in halves] == [
        many.cell.rollups() for many in rollups.scope_totals(outputs[2].closed)
    ]


def test_rows_of_executors_are_files_that_only_the_driver_commits(tmp_path):
    plan = window_rows.MergePlan((7,), history=str(tmp_path / "history"), folder=str(tmp_path / "exchange"))
    (outputs, *_) = [outputs for outputs in batches(2) if any(output.closed for output in outputs)]
    rows = [row for output in outputs for row in window_rows.of_windows(output.closed, 0, plan)]
    table = pa.Table.from_pylist(rows, schema=window_rows.SCHEMA)
    (row,) = window_rows.merger(plan, "r-1-0-groups")((pa.scalar(7),), table).to_pylist()
    received = window_rows.read([row], plan)
    (file,) = received.parts[0].files
    assert file.rows == sum(len(window.names) for window in received.parts[0].windows)
    assert (tmp_path / "history" / "groups" / file.path).exists()
    assert received.rows is None
    assert not (tmp_path / "history" / "groups" / "_delta_log").exists()
    assert list((tmp_path / "exchange").iterdir()) == []


def test_rows_that_executors_cannot_write_are_counted(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(data_files, "write", fail)
    plan = window_rows.MergePlan((7,), history=str(tmp_path))
    (outputs, *_) = [outputs for outputs in batches(2) if any(output.closed for output in outputs)]
    rows = [row for output in outputs for row in window_rows.of_windows(output.closed, 0, plan)]
    table = pa.Table.from_pylist(rows, schema=window_rows.SCHEMA)
    made = window_rows.merger(plan, "r")((pa.scalar(7),), table).to_pylist()
    received = window_rows.read(made, plan)
    lost = sum(len(window.names) for window in received.parts[0].windows)
    assert received.counts() == {window_rows.NOT_STORED: lost, window_rows.HISTORY_FAILED: 1}
    assert list(received.parts[0].reports()), "reports are published all the same"


def test_a_large_cluster_has_fewer_parts_than_partitions():
    plan = query_plan.QueryPlan(state.FleetStatePlan(), ("nats://localhost",), "/h", partitions=64)
    assert len(plan.merging("").parts) == 4
    plan = query_plan.QueryPlan(state.FleetStatePlan(), (), "/h", partitions=2)
    assert len(plan.merging("").parts) == 1


def test_the_first_batch_of_a_cluster_is_merged_by_its_executors():
    """How much it closes is not known before: it could be too much for the driver in every attempt."""
    on_a_cluster, on_one_machine = window_rows.MergePlan(), window_rows.MergePlan(folder="/exchange")
    assert on_a_cluster.is_by_executors(0)
    assert not on_one_machine.is_by_executors(window_rows.MERGED_BY_DRIVER)
    assert on_one_machine.is_by_executors(window_rows.MERGED_BY_DRIVER + 1)
