"""Decisions about a fleet, rule by rule and at their boundaries."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from muster.core import health, messages
from muster.core.reports import columns
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, node_columns, node_rules, rollups, shards, state
from tests.pipeline import traffic
from tests.pipeline.test_fleet import T0, again, arrival, closed, piece, summary


def keys(output: state.ShardOutput) -> list[tuple[str, str, int]]:
    return [
        (each.scope, each.name, (each.from_ms - T0) // 1000) for each in rollups.scope_totals(output.closed)
    ]


def report(machine: str = "a", sequence: int = 1, at_ms: int = T0, **more: Any) -> messages.NodeReport:
    return traffic.report(machine, sequence, at_ms, **more)


# Shards.


def test_any_fleet_is_divided_evenly():
    for pattern in ("web-{}", "10.0.{}.7", "ü{}", "{:08}", "{}"):
        names = pa.array([pattern.format(number) for number in range(8000)])
        counts = np.bincount(shards.shards_of(names, 8), minlength=8)
        assert counts.min() > 850, pattern
        assert counts.max() < 1150, pattern


def test_the_shard_of_a_machine_depends_on_its_name_only():
    names = pa.array(["a", "", "bc", "a", "ünter", "b" * 2000, ""])
    together = shards.shards_of(names, 1000)
    for place, name in enumerate(names.to_pylist()):
        assert shards.shards_of(pa.array([name]), 1000)[0] == together[place]
        assert shards.shards_of(names.slice(place), 1000)[0] == together[place]
    # Of a stored state: another value would count machines twice after an upgrade.
    assert shards.shards_of(pa.array(["web-1", "web-2", "db-1"]), 4096).tolist() == [266, 1948, 3114]


# Windows.


def test_a_window_is_never_shorter_than_a_millisecond():
    assert state.FleetStatePlan(window_s=0.000_1).window_ms == 1
    assert state.FleetStatePlan(window_s=2.5).window_ms == 2500


def test_a_report_belongs_to_the_window_of_its_time():
    known = state.FleetState(state.FleetStatePlan())
    rows = [report("a", n, T0 + ms) for n, ms in enumerate((-1, 0, 9_999, 10_000))]
    known.feed([arrival(rows, T0)], T0)
    result = closed(known.feed([], T0 + 100_000))
    assert [result["group", "default", second].cell.total for second in (-10, 0, 10)] == [1, 2, 1]


def test_the_first_windows_that_close_are_those_in_which_something_was_reported():
    known = state.FleetState(state.FleetStatePlan())
    output = known.feed([arrival([report()], T0)], T0 + 60_000)
    assert keys(output) == [("group", "default", 0), ("system", "", 0), ("zone", "default", 0)]
    assert keys(known.feed([], T0 + 69_999)) == [], "each window closes once"
    assert keys(known.feed([], T0 + 70_000)) == [
        ("group", "default", 50),
        ("system", "", 50),
        ("zone", "default", 50),
    ]


def test_the_clock_does_not_go_back():
    known = state.FleetState(state.FleetStatePlan())
    assert known.feed([], T0 + 5000).clock_ms == T0 + 5000
    assert known.feed([], T0).clock_ms == T0 + 5000
    assert state.FleetState(state.FleetStatePlan()).feed([], 0).clock_ms == 0


@pytest.mark.parametrize(("ahead_ms", "counts"), [(60_000, {}), (60_001, {"future": 1})])
def test_a_clock_may_be_a_minute_ahead_of_the_broker(ahead_ms, counts):
    known = state.FleetState(state.FleetStatePlan())
    rows = [report("a", 1, T0 + ahead_ms), report("b")]
    assert known.feed([arrival(rows, T0)], T0).counts == counts


@pytest.mark.parametrize(("at_ms", "counts"), [(T0 + 9_999, {"late": 1}), (T0 + 10_000, {})])
def test_a_report_is_late_when_its_window_is_closed(at_ms, counts):
    known = state.FleetState(state.FleetStatePlan())
    known.feed([arrival([report("x")], T0)], T0 + 20_000)
    output = known.feed([arrival([report("a", 1, at_ms), report("b", 1, T0 + 20_000)], T0 + 20_000)], T0)
    assert output.counts == counts


def test_another_length_of_windows_begins_after_those_that_may_have_reports():
    plan = state.FleetStatePlan(window_s=10.0, skew_s=60.0)
    known = state.FleetState(plan)
    known.feed([arrival([report("a", 1, T0 + 69_999)], T0 + 9_999)], T0 + 9_999)
    assert again(known, plan).grid == known.grid
    changed = again(known, dataclasses.replace(plan, window_s=5.0)).grid
    assert changed.sections[:-1] == known.grid.sections
    assert (changed.sections[-1].from_ms, changed.width_ms) == (T0 + 70_000, 5_000)


@pytest.mark.parametrize(("gap_ms", "shifted_ms"), [(15_000, 0), (15_001, 15_001)])
def test_more_than_fifteen_seconds_without_a_message_are_an_outage(gap_ms, shifted_ms):
    known = state.FleetState(state.FleetStatePlan())
    known.feed([arrival([report()], T0)], T0, activity=[(T0, T0)])
    known.feed([], T0 + gap_ms, activity=[(T0 + gap_ms, T0 + gap_ms)])
    assert known.nodes.data["received_ms"].tolist() == [T0 + shifted_ms]


def test_a_repeat_too_old_to_be_recognised_does_not_count_its_machine():
    """Else the machine's true report in that window would not count it."""
    known = state.FleetState(state.FleetStatePlan())
    rows = [report("a", 100), report("a", 1, T0 + 10_000), report("a", 101, T0 + 10_001)]
    for number, row in enumerate(rows, 1):
        known.feed([arrival([row], T0, number)], T0)
    cell = closed(known.feed([], T0 + 40_000))["group", "default", 10].cell
    assert (cell.total, cell.machines) == (1, 1)


def test_a_message_that_cannot_be_read_is_counted_and_the_others_are_taken():
    known = state.FleetState(state.FleetStatePlan())
    report_piece = arrival([report("x"), report("y")], T0)
    odd = dataclasses.replace(report_piece, batch=report_piece.batch.drop_columns(["state"]))
    output = known.feed([odd, arrival([report("a")], T0, 2)], T0 + 20_000)
    assert output.counts == {"unusable": 2}
    assert closed(output)["group", "default", 0].cell.total == 1


def test_machines_of_all_messages_are_searched_at_once(monkeypatch):
    """Arrow hashes all names of the shard for each search."""
    known = state.FleetState(state.FleetStatePlan())
    known.feed([arrival([report(name) for name in "abcdef"], T0)], T0)
    search = mock.Mock(wraps=pc.index_in)
    monkeypatch.setattr(pc, "index_in", search)
    monkeypatch.setattr(blocks, "ROWS", 2)
    orders = ("fa", "be", "dc")
    pieces = [
        arrival([report(name, 2) for name in order], T0, number) for number, order in enumerate(orders, 1)
    ]
    assert known.feed(pieces, T0).counts == {}
    assert (search.call_count, len(known.nodes)) == (1, 6)
    assert known.nodes.data["sequence"].tolist() == [2] * 6


def test_a_report_that_comes_again_is_counted_as_a_repeat():
    known = state.FleetState(state.FleetStatePlan())
    output = known.feed([arrival([report(), report("b"), report()], T0)], T0)
    assert output.counts == {"duplicated": 1}


def test_a_summary_that_cannot_be_read_is_counted():
    known = state.FleetState(state.FleetStatePlan())
    good = summary([report("a")])
    odd = blocks.DecodedMessage(1, T0, good.batch.drop_columns(["sketch"]), good.facts)
    assert known.feed([], T0, summaries=[odd]).counts == {"unusable": good.batch.num_rows}


def test_nothing_is_counted_under_a_reason_that_did_not_occur():
    output = state.ShardOutput(0)
    output.count("late", 0)
    assert output.counts == {}
    output.count("late", 2)
    output.count("late", 3)
    assert output.counts == {"late": 5}


def test_plans_and_results_are_values_and_travel_as_lists():
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.FleetStatePlan().top = 3  # type: ignore[misc]
    assert not hasattr(state.FleetStatePlan(), "__dict__")
    each = state.ClosedWindow(
        scope="group", from_ms=1, width_ms=10, names=["g"], known=[2], stale=[3], cells=[]
    )
    with pytest.raises(AttributeError):
        each.names = ["x"]  # type: ignore[misc]
    assert msgspec.to_builtins(each) == ["group", 1, 10, ["g"], [2], [3], [], False]
    assert msgspec.to_builtins(state.ShardOutput(7)) == [7, [], [], {}, 0, 0, 0, [], [], {}, 0]
    with pytest.raises(TypeError):
        state.ClosedWindow("group", 1, 10, ["g"], [2], [3], [])  # type: ignore[call-arg]
    change = node_rules.NodeRuleChange("r", "m", "g", True, 1, None)
    assert msgspec.to_builtins(change) == ["r", "m", "g", True, 1, None]
    with pytest.raises(AttributeError):
        change.on = False  # type: ignore[misc]


def test_reports_of_too_many_groups_are_counted_and_the_others_are_taken(monkeypatch):
    monkeypatch.setattr(node_columns, "GROUPS_MAX", 2)
    known = state.FleetState(state.FleetStatePlan())
    rows = [report(f"m{n}", group=f"g{n % 3}") for n in range(6)]
    far = summary([report("far", group="g9")])
    output = known.feed([arrival(rows, T0)], T0, summaries=[far])
    assert output.counts == {"too-many-groups": 2 + far.batch.num_rows}
    result = closed(known.feed([], T0 + 20_000))
    assert {name for scope, name, _ in result if scope == "group"} == {"g0", "g1"}


# Sums.


def test_cells_are_the_sums_over_their_reports_in_whatever_order_these_come():
    """Against a sum in plain Python; several messages, groups, zones, windows and states, all mixed."""
    dice = random.Random(3)
    known = state.FleetState(state.FleetStatePlan(top=3, delay_s=100.0))
    states = [health.HealthState.UP, health.HealthState.DOWN, health.HealthState.UP]
    sent: list[messages.NodeReport] = []
    arrivals = []
    for message in range(4):
        rows = []
        for number in range(25):
            metrics: dict[str, float] = {"cpu_percent": float(dice.randrange(1000))}
            if dice.random() < 0.5:
                metrics["queue"] = float(dice.randrange(10))
            if dice.random() < 0.3:
                metrics["depth"] = float(dice.randrange(10))
            rows.append(
                report(
                    f"m{dice.randrange(12)}",
                    25 * message + number,
                    T0 + dice.randrange(30_000),
                    group=dice.choice("xyz"),
                    zone=dice.choice(["north", "south"]),
                    metrics=metrics,
                    services=(messages.ServiceReport(name="s", state=dice.choice(states)),),
                )
            )
        sent += rows
        arrivals.append(
            arrival(rows, T0 + message, message, dropped={"lost": message}, partial=message == 2)
            if message
            else arrival(rows, T0, 0)
        )
    known.feed(arrivals[:2], T0 + 1)
    known.feed(arrivals[2:], T0 + 3)
    result = closed(known.feed([], T0 + 200_000))
    lost: dict[str, int] = {}
    partial = 0
    for scope, name in (("group", "x"), ("group", "z"), ("zone", "south"), ("system", "")):
        for second in (0, 10, 20):
            rows = [
                row
                for row in sent
                if (row.at_ms - T0) // 10_000 * 10 == second
                and (scope == "system" or getattr(row, scope) == name)
            ]
            many = result[scope, name, second]
            cell = many.cell
            assert cell.total == len(rows) > 0
            # A machine counts in each window once, in the group and zone of its first report there.
            assert cell.machines <= len({row.machine for row in rows})
            if scope == "system":
                assert cell.machines == len({row.machine for row in rows})
            assert cell.oldest_ms == min(row.at_ms for row in rows)
            assert sum(cell.states.values()) == len(rows)
            up = sum(row.services[0].state is health.HealthState.UP for row in rows)
            assert cell.states.get("up", 0) == up
            figures = many.cell.rollups()
            values = [row.metrics["cpu_percent"] for row in rows]
            cpu = figures["cpu_percent"]
            assert (cpu.count, cpu.sum, cpu.min, cpu.max) == (
                len(values),
                sum(values),
                min(values),
                max(values),
            )
            for own in ("queue", "depth"):
                values = [row.metrics[own] for row in rows if own in row.metrics]
                if values:
                    assert figures[own] == columns.MetricRollup(
                        count=len(values), sum=sum(values), min=min(values), max=max(values)
                    )
                else:
                    assert own not in figures
            highest: dict[str, float] = {}
            for row in rows:
                highest[row.machine] = max(row.metrics["cpu_percent"], highest.get(row.machine, -1.0))
            ranked = sorted(((value, name) for name, value in highest.items()), reverse=True)[:3]
            if scope == "group":
                assert [value for value, _ in many.top["cpu_percent"]] == [value for value, _ in ranked]
                assert all(highest[name] == value for value, name in many.top["cpu_percent"])
            elif scope == "zone":
                assert many.top == {}
            if scope == "system":
                cells_ranked = many.top["cpu_percent"]
                assert cells_ranked == sorted(cells_ranked, reverse=True)
                assert cells_ranked[0][0] == ranked[0][0]
                assert len(cells_ranked) >= 3
                for reason, count in cell.dropped.items():
                    lost[reason] = lost.get(reason, 0) + count
                partial += cell.partial
    assert lost == {"lost": 1 + 2 + 3}, "each message's losses count once"
    assert partial == 3, "that message has reports in each window"


def test_what_was_dropped_belongs_to_the_cell_of_a_report_of_that_message():
    known = state.FleetState(state.FleetStatePlan())
    known.feed(
        [
            arrival([report("a", group="z"), report("b", group="x")], T0, 1),
            arrival([report("c", group="y"), report("d", group="x")], T0, 2, dropped={"lost": 3}),
        ],
        T0,
    )
    result = closed(known.feed([], T0 + 20_000))
    assert {name: many.cell.dropped for (scope, name, _), many in result.items() if scope == "group"} == {
        "x": {},
        "y": {"lost": 3},
        "z": {},
    }


def test_the_oldest_report_of_a_cell_is_known_whichever_came_first():
    known = state.FleetState(state.FleetStatePlan())
    for number, at_ms in enumerate((T0 + 500, T0 + 100, T0 + 300), 1):
        known.feed([arrival([report("a", number, at_ms)], T0, number)], T0)
    assert closed(known.feed([], T0 + 20_000))["group", "default", 0].cell.oldest_ms == T0 + 100


def test_a_state_that_is_not_known_counts_as_other():
    known = state.FleetState(state.FleetStatePlan())
    rows = [report("a", group="x"), report("b", group="x"), report("c", group="y")]
    batch = columns.to_batch(rows)
    at = batch.schema.get_field_index("state")

    batch = batch.set_column(at, batch.schema.field(at), pa.array(["up", "strange", "down"]))
    known.feed([piece(1, T0, batch, columns.BatchInfo())], T0)
    result = closed(known.feed([], T0 + 20_000))
    assert result["group", "x", 0].cell.states == {"up": 1, "other": 1}
    assert result["group", "y", 0].cell.states == {"down": 1}


def test_ranks_hold_the_highest_of_all_reports_of_a_window():
    known = state.FleetState(state.FleetStatePlan(top=2, top_metrics=("cpu_percent",)))
    for number, values in enumerate(([5.0], [1.0, 9.0, 7.0], [8.0, 8.5], [2.0, 3.0]), 1):
        rows = [
            report(f"m{number}-{place}", 1, metrics={"cpu_percent": value})
            for place, value in enumerate(values)
        ]
        known.feed([arrival(rows, T0, number)], T0)
    many = closed(known.feed([], T0 + 20_000))["group", "default", 0]
    assert many.top == {"cpu_percent": [(9.0, "m2-1"), (8.5, "m3-1")]}


def test_by_default_ten_machines_are_ranked_and_a_thousand_begin_in_a_batch():
    hot = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 0")
    known = state.FleetState(state.FleetStatePlan(rules=(hot,)))
    output = known.feed([arrival([report(f"m{number}") for number in range(1001)], T0)], T0)
    assert (len(output.changes), output.counts) == (1000, {"deferred hot": 1})
    many = closed(known.feed([], T0 + 20_000))["group", "default", 0]
    assert {name: len(ranked) for name, ranked in many.top.items()} == {
        "cpu_percent": 10,
        "memory_percent": 10,
    }


def test_without_ranks_nothing_is_ranked():
    known = state.FleetState(state.FleetStatePlan(top=0))
    known.feed([arrival([report()], T0)], T0)
    assert {str(many.top) for many in closed(known.feed([], T0 + 20_000)).values()} == {"{}"}


# Stale and forgotten machines.


@pytest.mark.parametrize(("clock_ms", "stale"), [(T0 + 30_000, 0), (T0 + 30_001, 1)])
def test_a_machine_is_stale_after_more_than_three_periods(clock_ms, stale):
    known = state.FleetState(state.FleetStatePlan())
    known.feed([arrival([report("a"), report("b", period_s=100.0)], T0)], T0)
    output = known.feed([], clock_ms)
    assert {(each.scope, each.known, each.stale) for each in rollups.scope_totals(output.closed)} == {
        (scope, 2, stale) for scope in ("group", "zone", "system")
    }


def test_the_last_window_of_a_catch_up_is_about_all_machines_and_earlier_ones_about_who_reported():
    known = state.FleetState(state.FleetStatePlan())
    first, second = [report("a", group="x")], [report("b", 1, T0 + 10_000, group="y")]
    output = known.feed([arrival(first, T0), arrival(second, T0 + 10_000, 2)], T0 + 35_000)
    counts = {
        (each.scope, each.name, each.from_ms - T0): (each.known, each.stale)
        for each in rollups.scope_totals(output.closed)
        if each.scope != "zone"
    }
    assert counts == {
        ("group", "x", 0): (1, 1),
        ("system", "", 0): (1, 1),
        ("group", "x", 10_000): (1, 1),
        ("group", "y", 10_000): (1, 0),
        ("system", "", 10_000): (2, 1),
    }


@pytest.mark.parametrize(("after_ms", "left"), [(60_000, 2), (60_001, 1)])
def test_a_machine_is_forgotten_after_more_than_its_time(after_ms, left):
    silent = rules.AlertRule(name="silent", scope="node", when="age_s > 25")
    never = rules.AlertRule(name="never", scope="node", when="age_s > 100000")
    known = state.FleetState(state.FleetStatePlan(forget_s=60.0, rules=(silent, never)))
    known.feed([arrival([report("a", group="x"), report("b", group="y")], T0)], T0)
    known.feed([arrival([report("b", 2, T0 + 30_000, group="y")], T0 + 30_000, 2)], T0 + 30_000)
    output = known.feed([], T0 + after_ms)
    assert output.machines == left
    changes = [
        (each.rule, each.machine, each.group, each.on, each.at_ms, each.value) for each in output.changes
    ]
    ended = [("silent", "a", "x", False, T0 + after_ms, None)] if left == 1 else []
    assert [change for change in changes if not change[3]] == ended, "what was not true does not end"
    gone = [
        (each.scope, each.name, each.known, each.stale)
        for each in rollups.scope_totals(output.closed)
        if each.gone
    ]
    assert gone == ([("group", "x", 0, 0)] if left == 1 else [])


def test_an_empty_system_is_reported_once():
    known = state.FleetState(state.FleetStatePlan(forget_s=60.0))
    known.feed([arrival([report()], T0)], T0)
    known.feed([], T0 + 20_000)
    output = known.feed([], T0 + 70_000)
    assert [
        (each.scope, each.name, each.known, each.stale, each.gone)
        for each in rollups.scope_totals(output.closed)
    ] == [
        ("group", "default", 0, 0, True),
        ("system", "", 0, 0, False),
        ("zone", "default", 0, 0, True),
    ]
    assert known.feed([], T0 + 80_000).closed == []


def test_a_zone_that_is_gone_makes_no_second_report_of_the_system():
    known = state.FleetState(state.FleetStatePlan(forget_s=60.0))
    known.feed([arrival([report("a", zone="old"), report("b")], T0)], T0)
    known.feed([arrival([report("b", 2, T0 + 50_000)], T0 + 50_000, 2)], T0 + 50_000)
    output = known.feed([], T0 + 70_000)
    assert [(each.scope, each.name, each.gone) for each in rollups.scope_totals(output.closed)] == [
        ("group", "default", False),
        ("system", "", False),
        ("zone", "default", False),
        ("zone", "old", True),
    ]


def test_windows_that_are_open_survive_that_machines_before_them_are_forgotten():
    """Places in the roll and the codes of groups and zones change, also in what was stored of them."""
    plan = state.FleetStatePlan(forget_s=60.0)
    known = state.FleetState(plan)
    known.feed([arrival([report("old", group="a", zone="za")], T0)], T0)
    known.feed([], T0 + 20_000)
    at_ms = T0 + 65_000
    rows = [
        report("b", 1, at_ms, group="g", zone="zg", metrics={"cpu_percent": 50.0}),
        report("c", 1, at_ms, group="h", zone="zh", metrics={"cpu_percent": 60.0}),
        report("d", 1, at_ms, group="h", zone="zg", metrics={"cpu_percent": 70.0}),
    ]
    output = known.feed([arrival(rows, at_ms, 2)], at_ms)
    assert output.machines == 3
    assert list(known.nodes.groups) == ["g", "h"]
    assert list(known.nodes.zones) == ["zg", "zh"]
    result = closed(again(known, plan).feed([], at_ms + 20_000))
    totals = {key[:2]: many.cell.total for key, many in result.items() if many.cell.total}
    assert totals == {
        ("group", "g"): 1,
        ("group", "h"): 2,
        ("zone", "zg"): 2,
        ("zone", "zh"): 1,
        ("system", ""): 3,
    }
    tops = {key[1]: many.top["cpu_percent"] for key, many in result.items() if key[0] == "group" and many.top}
    assert tops == {"g": [(50.0, "b")], "h": [(70.0, "d"), (60.0, "c")]}


def test_a_forgotten_machine_leaves_the_ranks_of_open_windows():
    """Its report came late: of a window that is open still."""
    known = state.FleetState(state.FleetStatePlan(forget_s=5.0, delay_s=30.0, window_s=10.0))
    first = [report("a", 1, T0 + 15_000, metrics={"cpu_percent": 90.0})]
    known.feed([arrival(first, T0 + 15_000)], T0 + 15_000)
    second = [report("b", 1, T0 + 19_000, metrics={"cpu_percent": 40.0})]
    known.feed([arrival(second, T0 + 40_000, 2)], T0 + 40_000)
    result = closed(known.feed([arrival([report("b", 2, T0 + 60_000)], T0 + 60_000, 3)], T0 + 60_000))
    assert result["group", "default", 10].cell.total == 2
    assert result["group", "default", 10].top["cpu_percent"] == [(40.0, "b")]


# Summaries.


def test_each_row_of_a_summary_is_counted_and_its_losses_once():
    known = state.FleetState(state.FleetStatePlan())
    each = summary([report("a", metrics={"cpu_percent": 1.0})])
    facts = msgspec.structs.replace(each.facts, dropped={"lost": 4}, partial=True)
    output = known.feed([], T0, summaries=[blocks.DecodedMessage(1, T0, each.batch, facts)])
    assert output.counts == {"summaries": each.batch.num_rows}
    for many in closed(known.feed([], T0 + 20_000)).values():
        assert many.cell.dropped == {"lost": 4}
        assert many.cell.partial
        assert many.cell.total == 1


def test_a_whole_summary_makes_no_cell_partial():
    known = state.FleetState(state.FleetStatePlan())
    known.feed([], T0, summaries=[summary([report("a")])])
    assert not any(many.cell.partial for many in closed(known.feed([], T0 + 20_000)).values())


@pytest.mark.parametrize(("behind_ms", "reason"), [(60_000, "summaries"), (60_001, "future")])
def test_a_summary_may_be_a_minute_ahead_of_the_broker(behind_ms, reason):
    known = state.FleetState(state.FleetStatePlan())
    each = summary([report("a")], stored_ms=T0 - behind_ms)
    assert known.feed([], T0, summaries=[each]).counts == {reason: each.batch.num_rows}


@pytest.mark.parametrize(("clock_ms", "reason"), [(T0 + 19_999, "summaries"), (T0 + 20_000, "late")])
def test_a_summary_is_late_when_its_window_is_closed(clock_ms, reason):
    known = state.FleetState(state.FleetStatePlan())
    known.feed([], clock_ms)
    each = summary([report("a")])
    assert known.feed([], clock_ms, summaries=[each]).counts == {reason: each.batch.num_rows}


def test_a_summary_that_is_too_old_to_be_distinguished_from_a_repeat_is_late():
    known = state.FleetState(state.FleetStatePlan())
    known.feed([], T0, summaries=[summary([report("a")], sequence=100)])
    each = summary([report("b")], sequence=1)
    assert known.feed([], T0, summaries=[each]).counts == {"late": each.batch.num_rows}


# State.


def test_state_of_another_layout_is_refused_with_both_numbers():
    packed = msgspec.msgpack.encode((99, 0, 0, {}, [], []))
    with pytest.raises(state.StateUnreadable, match=f"layout is 99, expected {state.LAYOUT}"):
        state.FleetState.unpack(packed, state.FleetStatePlan(), node_columns.NodeNames())
    with pytest.raises(state.StateUnreadable):
        state.FleetState.unpack(b"rubbish", state.FleetStatePlan(), node_columns.NodeNames())


def test_received_summaries_are_in_the_state():
    plan = state.FleetStatePlan()
    known = state.FleetState(plan)
    known.feed([], T0, summaries=[summary([report("a")])])
    output = again(known, plan).feed([], T0, summaries=[summary([report("a")])])
    assert list(output.counts) == ["duplicated"]


# Rules about machines.


def judged(
    rule: rules.AlertRule, *rows: messages.NodeReport, stored_ms: int = T0, clock_ms: int | None = None
) -> dict[str, float | None]:
    known = state.FleetState(state.FleetStatePlan(rules=(rule,)))
    output = known.feed([arrival(rows, stored_ms)], stored_ms if clock_ms is None else clock_ms)
    assert all(each.on for each in output.changes)
    return {each.machine: each.value for each in output.changes}


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("machine = 'b'", {"b": None}),
        ("group = 'web' AND cpu_percent >= 0", {"a": 10.0, "c": 30.0}),
        ("zone = 'z2' AND cpu_percent >= 0", {"b": 20.0}),
        ("state = 'down'", {"c": None}),
        ("state = 'up' AND cpu_percent > 0", {"a": 10.0, "b": 20.0}),
        ("cpu_percent >= 20", {"b": 20.0, "c": 30.0}),
        ("memory_percent > 20 AND cpu_percent > 0", {"b": 21.0}),
        ("period_s > 10 AND cpu_percent > 0", {"c": 10.001}),
        ("age_s >= 2 AND cpu_percent > 0", {"b": 2.0, "c": 2.5}),
        ("age_s > 2 AND state = 'up'", {}),
        ("own.queue >= 7", {"a": 7.0}),
        ("own.other_z > 1", {"b": 2.0}),
        ("own.nobody > 1", {}),
        ("own.queue IS NULL AND cpu_percent > 0", {"b": None, "c": None}),
    ],
)
def test_a_rule_sees_all_fields_of_a_report(when, expected):
    down = (messages.ServiceReport(name="s", state=health.HealthState.DOWN),)
    rows = [
        report("a", at_ms=T0 - 1999, group="web", metrics={"cpu_percent": 10.0, "queue": 7.0}),
        report(
            "b",
            at_ms=T0 - 2000,
            group="db",
            zone="z2",
            metrics={"cpu_percent": 20.0, "memory_percent": 21.0, "other_z": 2.0},
        ),
        report(
            "c", at_ms=T0 - 2500, group="web", period_s=10.001, metrics={"cpu_percent": 30.0}, services=down
        ),
    ]
    rule = rules.AlertRule(name="r", scope="node", when=when)
    result = judged(rule, *rows)
    assert set(result) == set(expected)
    for machine, value in expected.items():
        if value is not None:
            assert result[machine] == pytest.approx(value)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("age_s > 3 * period_s", {"a"}),
        ("age_s >= 3 * period_s", {"a", "b"}),
        ("age_s > 0 AND group = 'web'", {"a"}),
        ("age_s > 0 AND zone = 'z2'", {"b"}),
        ("age_s > 0 AND machine = 'c'", {"c"}),
        (
            "age_s > 0 AND period_s > 0 AND group = 'db' AND zone = 'z2' AND machine <> 'a'",
            {"b"},
        ),
    ],
)
def test_a_rule_about_silence_is_judged_of_machines_that_do_not_report(when, expected):
    # They come five seconds after they were made: that is no silence.
    rows = [
        report("a", at_ms=T0 - 5000, group="web", period_s=9.999),
        report("b", at_ms=T0 - 5000, group="db", zone="z2", period_s=10.0),
        report("c", at_ms=T0 - 5000, group="other", period_s=100.0),
    ]
    rule = rules.AlertRule(name="r", scope="node", when=when)
    plan = state.FleetStatePlan(
        rules=(rule, rules.AlertRule(name="other", scope="node", when="age_s > 100000"))
    )
    known = state.FleetState(plan)
    assert known.feed([arrival(rows, T0)], T0).changes == []
    changes = known.feed([], T0 + 30_000).changes
    assert {each.machine for each in changes} == expected
    assert {(each.at_ms, each.on) for each in changes} == {(T0 + 30_000, True)}
    groups = {"a": "web", "b": "db", "c": "other"}
    assert all(each.group == groups[each.machine] for each in changes)
    assert all(each.value == 30.0 for each in changes), "the first number it asks about"


def test_a_rule_of_another_scope_does_not_apply_to_machines():
    rule = rules.AlertRule(name="r", scope="group", when="reports > 0")
    assert judged(rule, report("a")) == {}


def test_a_rule_for_some_machines_does_not_apply_to_others():
    rule = rules.AlertRule(name="r", scope="node", when="cpu_percent > 0", only=("b", "c"))
    assert set(judged(rule, *(report(name) for name in "abc"))) == {"b", "c"}


def test_a_rule_ends_for_a_machine_that_it_no_longer_names():
    rule = rules.AlertRule(name="r", scope="node", when="age_s >= 0", only=("a", "b"))
    known = state.FleetState(state.FleetStatePlan(rules=(rule,)))
    known.feed([arrival([report("a"), report("b")], T0)], T0)
    edited = state.FleetStatePlan(rules=(msgspec.structs.replace(rule, only=("b",)),))
    changes = again(known, edited).feed([], T0 + 1000).changes
    assert [(change.machine, change.on) for change in changes] == [("a", False)]


def test_a_value_that_is_no_number_is_not_shown():
    rule = rules.AlertRule(name="r", scope="node", when="own.queue IS NULL")
    assert judged(rule, report("a")) == {"a": None}


def test_only_so_many_begin_in_a_batch_and_each_rule_has_its_own_number():
    changes = node_rules.Changes(3)
    admitted = [
        changes.admit(rule, np.arange(number)).tolist()
        for rule, number in (("r", 2), ("r", 2), ("r", 2), ("s", 3), ("r", 0))
    ]
    assert admitted == [[0, 1], [0], [], [0, 1, 2], []]
    assert changes.deferred == {"r": 3}


def test_a_machine_that_reports_several_times_in_a_batch_is_judged_in_order():
    rule = rules.AlertRule(name="r", scope="node", when="cpu_percent > 50")
    known = state.FleetState(state.FleetStatePlan(rules=(rule,)))

    def each(sequence: int, cpu: float) -> messages.NodeReport:
        return report("a", sequence, metrics={"cpu_percent": cpu})

    arrivals = [
        arrival([each(1, 90.0), report("b", 1)], T0 + 50, 1),
        arrival([each(2, 10.0)], T0 + 20, 2),  # another leader's clock
        arrival([each(3, 90.0), report("b", 2, metrics={"cpu_percent": 90.0})], T0 + 30, 3),
    ]
    twice = state.FleetState(state.FleetStatePlan(rules=(rule,))).feed(arrivals[:2], T0 + 60).changes
    assert [(change.machine, change.on, change.at_ms - T0) for change in twice] == [
        ("a", True, 50),
        ("a", False, 50),
    ]
    changes = known.feed(arrivals, T0 + 60).changes
    of_a = [(change.on, change.at_ms - T0) for change in changes if change.machine == "a"]
    assert of_a == [(True, 50), (False, 50), (True, 50)]
    assert [change.at_ms - T0 for change in changes if change.machine == "b"] == [50]


def test_blocks_are_judged_no_earlier_than_those_before_them(monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 1)
    rule = rules.AlertRule(name="r", scope="node", when="cpu_percent > 0")
    known = state.FleetState(state.FleetStatePlan(rules=(rule,)))
    arrivals = [arrival([report("a")], T0 + 50, 1), arrival([report("b")], T0 + 20, 2)]
    assert [each.at_ms - T0 for each in known.feed(arrivals, T0 + 60).changes] == [50, 50]
    assert [each.at_ms - T0 for each in known.feed([arrival([report("c")], T0, 3)], T0).changes] == [60]


def decoded(rows: list[messages.NodeReport], known: node_columns.NodeColumns) -> blocks.ReportBlock:
    piece = arrival(rows, T0)
    (place,) = known.places([piece.batch.column("machine")])
    return blocks.ReportBlock.from_piece(piece, place, known, blocks.MetricCodes())


def test_what_is_usual_is_learned_as_described():
    """The running figures in plain Python: mean and spread, at first by more, then by a 120th."""
    rule = rules.AlertRule(name="r", scope="node", when="cpu_percent_z > 1000000")
    judge = node_rules.NodeRuleEvaluator((rule,))
    known = node_columns.NodeColumns(judge.column_schema)
    dice = random.Random(2)
    mean = spread = 0.0
    for number in range(200):
        value = 50.0 + dice.gauss(0, 4) + (500.0 if number in (10, 60, 61, 150) else 0.0)
        rows = [report("a", number, metrics={"cpu_percent": value})]
        (score,) = judge._scores(known, "cpu_percent", decoded(rows, known), [slice(None)])
        away = value - mean
        sigma = max(spread * 1.2533, abs(mean) * 0.01, 1e-6)
        if number >= 20:
            assert score == pytest.approx(away / sigma, rel=1e-3)
            away = max(-3 * sigma, min(3 * sigma, away))
        else:
            assert math.isnan(score)
        pull = max(1 / (number + 1), 1 / 120)
        mean += pull * away
        if number:
            spread += pull * (abs(away) - spread)
        assert known.data["mean cpu_percent"][0] == pytest.approx(mean, rel=1e-4)
        assert known.data["spread cpu_percent"][0] == pytest.approx(spread, rel=1e-3)
    assert known.data["samples cpu_percent"][0] == 120


def test_a_report_without_the_metric_teaches_nothing():
    rule = rules.AlertRule(name="r", scope="node", when="load_1m_z > 3")
    judge = node_rules.NodeRuleEvaluator((rule,))
    known = node_columns.NodeColumns(judge.column_schema)
    rows = [report("a", metrics={"load_1m": 4.0}), report("b")]
    scores = judge._scores(known, "load_1m", decoded(rows, known), [slice(None)])
    assert np.isnan(scores).all()
    assert known.data["samples load_1m"].tolist() == [1, 0]
    assert known.data["mean load_1m"].tolist() == [4.0, 0.0]
    assert set(judge.column_schema) - set(node_columns.COLUMNS) == {
        "mean load_1m",
        "spread load_1m",
        "samples load_1m",
        "on r",
    }
