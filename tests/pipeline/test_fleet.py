"""The state of a fleet: windows, staleness, repetitions, rules about machines."""

import math

import numpy as np
import pyarrow as pa
import pytest

from muster.core import health, messages
from muster.core.reports import columns
from muster.monitor.channel import interpreters
from muster.pipeline.alerts import rules, tracker
from muster.pipeline.fleet import blocks, cells, node_columns, rollups
from muster.pipeline.fleet import state as fleet_state
from tests.pipeline import traffic

T0 = 1_700_000_000_000  # the start of a window of ten seconds

piece = blocks.ReportPiece.from_message


def arrival(rows, stored_ms: int, sequence: int = 1, **facts) -> blocks.ReportPiece:
    return piece(sequence, stored_ms, columns.to_batch(rows), columns.BatchInfo(**facts))


def closed(output: fleet_state.ShardOutput) -> dict[tuple[str, str, int], rollups.ScopeTotals]:
    return {
        (scope_total.scope, scope_total.name, (scope_total.from_ms - T0) // 1000): scope_total
        for scope_total in rollups.scope_totals(output.closed)
    }


def again(known: fleet_state.FleetState, plan: fleet_state.FleetStatePlan) -> fleet_state.FleetState:
    """As it comes back from Spark's state."""
    names = known.nodes.names
    return fleet_state.FleetState.unpack(
        known.pack(), plan, node_columns.NodeNames.unpack(names.version, names.pack())
    )


def figures(cell: cells.WindowCell) -> dict[str, columns.MetricRollup]:
    return cell.rollups()


def test_a_window_closes_when_the_brokers_clock_has_passed_it_by_the_delay():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    rows = [traffic.report(f"m{n}", 1, T0 + 10 * n, metrics={"cpu_percent": float(n)}) for n in range(100)]
    assert closed(known.feed([arrival(rows, T0 + 3000)], T0 + 3000)) == {}
    known = again(known, plan)
    assert ("group", "default", 0) not in closed(known.feed([], T0 + 19_999))
    actual = closed(known.feed([], T0 + 20_000))
    assert list(actual) == [("group", "default", 0), ("system", "", 0), ("zone", "default", 0)]
    for many in actual.values():
        assert (many.cell.total, many.cell.machines, many.cell.states) == (100, 100, {"up": 100})
    cpu = many.cell.rollups()["cpu_percent"]
    assert (cpu.count, cpu.sum, cpu.min, cpu.max) == (100, 4950.0, 0.0, 99.0)
    assert cpu.p50 == pytest.approx(49.5, rel=0.04)
    assert cpu.p99 == pytest.approx(98, rel=0.04)


def test_quantiles_are_within_the_stated_error_and_cells_add_up_in_any_order():
    random = np.random.default_rng(7)
    values = random.lognormal(3, 2, (len(cells.METRICS), 3000))
    values[3, :100] = np.nan
    cell, sums = cells.WindowCell(), cells.CellTable(2)
    traffic.fold(cell, values)
    for part in np.array_split(values, 7, axis=1):
        table = cells.CellTable(2)
        traffic.fold(cells.WindowCell(table, 1), part)
        sums.add(cells.CellTable.unpack(table.pack()), np.array([1, 0]))
    parts = cells.WindowCell(sums, 0)
    assert figures(cell)["load_1m"].p95 == figures(parts)["load_1m"].p95
    for row, name in enumerate(cells.METRICS):
        figure, exact = figures(cell)[name], values[row][~np.isnan(values[row])]
        assert figure.count == len(exact)
        for share, output in ((50, figure.p50), (95, figure.p95), (99, figure.p99)):
            assert output == pytest.approx(
                np.percentile(exact, share, method="lower"), rel=1.01 * cells.RELATIVE_ERROR
            )


def test_a_report_counts_once_even_if_reports_overtake_each_other():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    first = [traffic.report("a", n, T0 + n) for n in (1, 2, 4)]
    assert known.feed([arrival(first, T0 + 10)], T0 + 10).counts == {}
    known = again(known, plan)
    rest = [traffic.report("a", n, T0 + n) for n in (1, 2, 3, 4, 3)]
    assert known.feed([arrival(rest, T0 + 20, 2)], T0 + 20).counts == {"duplicated": 4}
    restarted = [traffic.report("a", n, T0 + n, boot=9) for n in (1, 2)]
    assert known.feed([arrival(restarted, T0 + 30, 3)], T0 + 30).counts == {}
    cell = closed(known.feed([], T0 + 20_000))["group", "default", 0].cell
    assert (cell.total, cell.machines) == (6, 1)


def test_reports_of_the_boot_before_a_reboot_count_once():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    before = [traffic.report("a", n, T0 + n, boot=8) for n in (1, 2, 3)]
    after = [traffic.report("a", n, T0 + 10 + n, boot=9) for n in (1, 2)]
    assert known.feed([arrival([*before, *after], T0 + 20)], T0 + 20).counts == {}
    known = again(known, plan)
    last = traffic.report("a", 4, T0 + 4, boot=8)
    repeated = arrival([*before, last, *after, last], T0 + 30, 2)
    assert known.feed([repeated], T0 + 30).counts == {"duplicated": 6}
    cell = closed(known.feed([], T0 + 20_000))["group", "default", 0].cell
    assert (cell.total, cell.machines) == (6, 1)


def test_a_boot_with_a_lower_number_counts():
    """After a correction of the machine's clock: boots are distinguished, but not ordered."""
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    before = [traffic.report("a", n, T0 + n, boot=9) for n in (1, 2, 3)]
    after = [traffic.report("a", n, T0 + 10 + n, boot=5) for n in (1, 2)]
    assert known.feed([arrival([*before, *after], T0 + 20)], T0 + 20).counts == {}
    later = traffic.report("a", 3, T0 + 15, boot=5)
    assert known.feed([arrival([later, *after], T0 + 30, 2)], T0 + 30).counts == {"duplicated": 2}
    cell = closed(known.feed([], T0 + 20_000))["group", "default", 0].cell
    assert (cell.total, cell.machines) == (6, 1)


def test_metrics_beyond_the_limit_are_counted():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    names = [f"extra_{n}" for n in range(blocks.EXTRA_MAX + 3)]
    rows = [
        traffic.report("a", n, T0 + n, metrics=dict.fromkeys(part, 1.0))
        for n, part in enumerate((names[:1000], names[1000:]))
    ]
    assert known.feed([arrival(rows, T0)], T0).counts == {"metrics-truncated": 3}
    cell = closed(known.feed([], T0 + 20_000))["group", "default", 0].cell
    assert len(cell.extra) == blocks.EXTRA_MAX


def test_late_and_future_reports_are_counted_and_change_nothing_else():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    known.feed([arrival([traffic.report("a", 1, T0)], T0)], T0 + 30_000)
    rows = [traffic.report("a", 2, T0 + 1), traffic.report("b", 1, T0 + 30_000 + 61_000)]
    output = known.feed([arrival(rows, T0 + 30_000, 2)], T0 + 40_000)
    assert output.counts == {"late": 1, "future": 1}
    assert sum(many.cell.total for many in closed(output).values()) == 0


def test_groups_and_zones_have_cells_of_their_own_and_new_metrics_appear_by_themselves():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(top=2))
    rows = [
        traffic.report(
            f"m{n}", 1, T0 + n, zone=f"z{n % 2}", metrics={"cpu_percent": float(n), "gpu": 2.0 * n}
        )
        for n in range(10)
    ]
    known.feed([arrival(rows, T0, dropped={"overflow": 3}, partial=True)], T0)
    actual = closed(known.feed([], T0 + 20_000))
    assert set(actual) == {("group", "default", 0), ("zone", "z0", 0), ("zone", "z1", 0), ("system", "", 0)}
    odd = actual["zone", "z1", 0]
    assert odd.cell.rollups()["gpu"] == columns.MetricRollup(count=5, sum=50.0, min=2.0, max=18.0)
    assert odd.cell.partial
    for scope in (actual["group", "default", 0], actual["system", "", 0]):
        assert scope.top["cpu_percent"] == [(9.0, "m9"), (8.0, "m8")]
        assert scope.cell.dropped == {"overflow": 3}


def test_a_silent_machine_is_stale_until_it_reports_again_and_is_forgotten_in_the_end():
    silent = rules.AlertRule(name="silent", scope="node", when="age_s > 3 * period_s")
    plan = fleet_state.FleetStatePlan(rules=(silent,), forget_s=600)
    known = fleet_state.FleetState(plan)
    both = [traffic.report("a", 1, T0), traffic.report("b", 1, T0)]
    assert not known.feed([arrival(both, T0)], T0).changes
    only_a = known.feed([arrival([traffic.report("a", 2, T0 + 30_000)], T0 + 30_000, 2)], T0 + 31_000)
    assert [(change.machine, change.on) for change in only_a.changes] == [("b", True)]
    assert only_a.changes[0].value == 31.0
    assert {
        (scope_total.scope, scope_total.known, scope_total.stale)
        for scope_total in rollups.scope_totals(only_a.closed)
    } == {
        ("group", 2, 1),
        ("zone", 2, 1),
        ("system", 2, 1),
    }
    known = again(known, plan)
    back = known.feed([arrival([traffic.report("b", 2, T0 + 40_000)], T0 + 40_000, 3)], T0 + 41_000)
    assert [(change.machine, change.on) for change in back.changes] == [("b", False)]
    gone = known.feed([], T0 + 900_000)
    assert gone.machines == 0
    assert not known.feed([], T0 + 2_000_000).closed


def test_the_time_of_an_outage_is_no_silence_of_the_machines():
    silent = rules.AlertRule(name="silent", scope="node", when="age_s > 3 * period_s")
    plan = fleet_state.FleetStatePlan(rules=(silent,), forget_s=600)
    known = fleet_state.FleetState(plan)
    known.feed([arrival([traffic.report("dead", 1, T0)], T0)], T0, activity=[(T0, T0)])
    down, up = T0 + 40_000, T0 + 40_000 + 86_400_000  # the domain is down for a day
    late = [arrival([traffic.report("a", 1, down - 1000)], down - 1000, 2)]
    before = known.feed(late, down - 500, activity=[(T0, down - 500)])
    assert [(change.machine, change.on) for change in before.changes] == [("dead", True)]
    known = again(known, plan)
    # The last message before the outage and the first one after it are in the same batch.
    rest = [arrival([traffic.report("b", 1, down)], down, 3)]
    after = known.feed(rest, up + 20_000, activity=[(up, up + 20_000), (down, down)])
    assert (after.machines, after.changes) == (3, [])
    assert all(total.cell.machines for total in rollups.scope_totals(after.closed)), "none without reports"
    known = again(known, plan)
    later = known.feed([], up + 42_000, activity=[(up + 20_000, up + 42_000)])
    assert {(change.machine, change.on) for change in later.changes} == {("a", True), ("b", True)}
    totals = rollups.scope_totals(later.closed)
    assert {(total.known, total.cell.machines) for total in totals} == {(3, 0)}


def test_a_rule_about_machines_has_hysteresis_and_reports_changes_only():
    hot = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90", until="cpu_percent < 70")
    plan = fleet_state.FleetStatePlan(rules=(hot,))
    known = fleet_state.FleetState(plan)
    reported = []
    for number, cpu in enumerate([50, 95, 99, 80, 69, 80, 91]):
        row = traffic.report("a", number, T0 + number, metrics={"cpu_percent": float(cpu)})
        known = again(known, plan)
        output = known.feed([arrival([row], T0 + number, number)], T0 + number)
        reported += [(change.on, change.value, change.at_ms - T0) for change in output.changes]
    assert reported == [(True, 95.0, 1), (False, 69.0, 4), (True, 91.0, 6)]


def test_rules_see_metrics_of_the_fleets_own():
    full = rules.AlertRule(name="full", scope="node", when="own.queue > 100")
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(rules=(full,)))
    rows = [
        traffic.report("a", 1, T0, metrics={"queue": 101.0}),
        traffic.report("b", 1, T0, metrics={"queue": 3.0}),
        traffic.report("c", 1, T0),
    ]
    output = known.feed([arrival(rows, T0)], T0)
    assert [(change.machine, change.on, change.value) for change in output.changes] == [("a", True, 101.0)]
    facts = rollups.facts(closed(known.feed([], T0 + 60_000))["group", "default", 0])
    assert facts["own.queue_mean"] == 52.0
    assert (facts["own.queue_min"], facts["own.queue_max"]) == (3.0, 101.0)


def test_rules_and_roll_ups_see_what_services_report():
    slow = rules.AlertRule(name="slow", scope="node", when="own.shop_took_ms > 100")
    down = rules.AlertRule(name="down", scope="node", when="own.db_up < 1")
    plan = fleet_state.FleetStatePlan(rules=(slow, down))
    known = fleet_state.FleetState(plan)

    def services(took: float, state: health.HealthState) -> tuple[messages.ServiceReport, ...]:
        return (
            messages.ServiceReport(name="db", state=state),
            messages.ServiceReport(name="shop", metrics={"took ms": took, "depth": 2.0}),
        )

    rows = [
        traffic.report("none", 1, T0, metrics={"queue": 1.0}),
        traffic.report("a", 1, T0, services=services(120.0, health.HealthState.UP)),
        traffic.report("b", 1, T0, services=services(20.0, health.HealthState.DOWN), metrics={"queue": 7.0}),
        traffic.report("c", 1, T0, services=services(30.0, health.HealthState.UP)[:1]),
    ]
    batch = columns.to_batch(rows)
    arrivals = [
        piece(1, T0, batch.slice(0, 2), columns.BatchInfo()),
        piece(2, T0, batch.slice(2), columns.BatchInfo()),  # Arrow's children do not know of slices
    ]
    output = known.feed(arrivals, T0)
    assert sorted((change.rule, change.machine, change.value) for change in output.changes) == [
        ("down", "b", 0.0),
        ("slow", "a", 120.0),
    ]
    facts = rollups.facts(closed(known.feed([], T0 + 60_000))["group", "default", 0])
    assert facts["own.db_up_mean"] == pytest.approx(2 / 3)
    assert (facts["own.shop_took_ms_min"], facts["own.shop_depth_mean"]) == (20.0, 2.0)
    assert facts["own.queue_max"] == 7.0


def test_beginnings_of_a_rule_are_deferred_beyond_a_bound_and_ends_never():
    hot = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90")
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(rules=(hot,), changes_max=10))
    rows = [traffic.report(f"m{n}", 1, T0, metrics={"cpu_percent": 99.0}) for n in range(50)]
    output = known.feed([arrival(rows, T0)], T0)
    assert len(output.changes) == 10
    assert output.counts == {"deferred hot": 40}
    for number in range(2, 6):
        rows = [
            traffic.report(f"m{n}", number, T0 + number, metrics={"cpu_percent": 99.0}) for n in range(50)
        ]
        output = known.feed([arrival(rows, T0 + number, number)], T0 + number)
    assert len(output.changes) == 10
    assert output.counts == {}
    rows = [traffic.report(f"m{n}", 6, T0 + 6, metrics={"cpu_percent": 1.0}) for n in range(50)]
    output = known.feed([arrival(rows, T0 + 6, 6)], T0 + 6)
    assert [change.on for change in output.changes] == [False] * 50


def test_rules_about_machines_are_judged_by_the_brokers_clock():
    hot = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90")
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(rules=(hot,)))

    def judged(sequence: int, machine_ms: int, stored_ms: int, cpu: float) -> list[tuple[bool, int]]:
        row = traffic.report("m", sequence, machine_ms, metrics={"cpu_percent": cpu})
        output = known.feed([arrival([row], stored_ms, sequence)], stored_ms)
        return [(change.on, change.at_ms) for change in output.changes]

    assert judged(1, T0 + 45_000, T0, 99.0) == [(True, T0)]
    assert judged(2, T0 + 10_000, T0 + 10_000, 1.0) == [(False, T0 + 10_000)]
    assert judged(3, T0 + 20_000, T0 + 9_000, 99.0) == [(True, T0 + 10_000)]  # another leader's clock


def test_a_report_that_was_overtaken_does_not_count_its_machine_twice():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    for order, (sequence, at_s) in enumerate([(1, 1), (3, 11), (2, 6), (4, 4)]):
        stored_ms = T0 + 1000 * (10 + order)
        known.feed([arrival([traffic.report("a", sequence, T0 + at_s * 1000)], stored_ms, order)], stored_ms)
    actual = closed(known.feed([], T0 + 40_000))
    assert [actual["group", "default", second].cell.machine_count() for second in (0, 10)] == [1, 1]
    assert actual["group", "default", 0].cell.total == 3


def test_a_group_whose_last_machine_is_forgotten_is_reported_gone_once():
    plan = fleet_state.FleetStatePlan(forget_s=60)
    known = fleet_state.FleetState(plan)
    rows = [traffic.report("a", 1, T0, group="web"), traffic.report("b", 1, T0, group="db", zone="z2")]
    known.feed([arrival(rows, T0)], T0)
    gone = []
    for second in range(10, 130, 10):
        now_ms = T0 + second * 1000
        row = traffic.report("a", 1 + second, now_ms, group="web")
        known = again(known, plan)
        output = known.feed([arrival([row], now_ms, second)] if second < 50 else [], now_ms)
        gone += [(many.scope, many.name) for many in rollups.scope_totals(output.closed) if many.gone]
    assert gone == [("group", "db"), ("zone", "z2"), ("group", "web"), ("zone", "default")]


@pytest.mark.parametrize("only", [(), ("db",)])
def test_an_alert_about_a_group_ends_when_its_last_machine_is_forgotten(only):
    """Unless the rule names the group: then that it is gone is what the rule is about."""
    empty = rules.AlertRule(name="empty", scope="group", when="reports = 0", only=only)
    evaluator = rollups.ScopeRuleEvaluator((empty,), rollups.Baselines())
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(forget_s=60))
    known.feed([arrival([traffic.report("b", 1, T0, group="db")], T0)], T0)
    on: dict[tuple[str, str], bool] = {}
    for second in range(10, 130, 10):
        output = known.feed([], T0 + second * 1000)
        before = {key for key, is_on in on.items() if is_on}
        verdicts = evaluator.evaluate(rollups.scope_totals(output.closed), before)
        on |= {(verdict.rule, verdict.about): verdict.on for verdict in verdicts}
    assert on == {("empty", "group:db"): bool(only)}


def test_a_machine_that_moves_is_counted_once_and_raises_no_alert():
    silent = rules.AlertRule(name="silent", scope="node", when="age_s > 3 * period_s")
    plan = fleet_state.FleetStatePlan(rules=(silent,))
    known = fleet_state.FleetState(plan)
    gone, changes = [], []
    for second in range(0, 100, 10):
        now_ms = T0 + second * 1000
        place = ("web", "z1") if second < 50 else ("db", "z2")
        rows = [
            traffic.report("a", 1 + second, now_ms, group=place[0], zone=place[1]),
            traffic.report("b", 1 + second, now_ms, group="db", zone="z2"),
        ]
        known = again(known, plan)
        output = known.feed([arrival(rows, now_ms, second)], now_ms)
        totals = rollups.scope_totals(output.closed)
        gone += [(many.from_ms - T0, many.scope, many.name) for many in totals if many.gone]
        changes += output.changes
        for many in totals:
            if many.scope == "system" and many.from_ms >= T0:
                assert (many.known, many.cell.machines) == (2, 2)
    assert changes == []
    assert gone == [(50_000, "group", "web"), (50_000, "zone", "z1")]
    assert set(known.nodes.groups) == {"db"}


def test_summaries_that_overtake_each_other_are_all_taken_once():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    first, second = (summary([traffic.report(name, 1, T0)], sequence=n) for n, name in ((1, "a"), (2, "b")))
    counts = [
        known.feed([], T0 + 1000 + number, summaries=[stored_as(item, number)]).counts
        for number, item in enumerate((second, first, second))
    ]
    assert [list(count) for count in counts] == [["summaries"], ["summaries"], ["duplicated"]]


def stored_as(message: blocks.DecodedMessage, sequence: int) -> blocks.DecodedMessage:
    return blocks.DecodedMessage(sequence, message.stored_ms, message.batch, message.facts)


def test_odd_numbers_stop_nothing():
    hot = rules.AlertRule(name="hot", scope="node", when="cpu_percent > 90")
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(rules=(hot,)))
    odd = columns.to_batch([traffic.report("a", 2**62, T0), traffic.report("b", 1, T0)])
    names = odd.schema.names
    odd = odd.set_column(names.index("cpu_percent"), "cpu_percent", pa.array([math.inf, -math.inf]))
    odd = odd.set_column(names.index("period_s"), "period_s", pa.array([math.nan, -1.0]))
    only_future = columns.to_batch([traffic.report("c", 1, T0 + 10**9)])
    output = known.feed(
        [
            piece(1, T0, odd, columns.BatchInfo()),
            piece(2, T0, only_future, columns.BatchInfo()),
        ],
        T0,
    )
    assert output.counts == {"future": 1}
    assert [(change.machine, change.value) for change in output.changes] == [("a", None)]
    many = closed(known.feed([], T0 + 20_000))["group", "default", 0]
    assert (many.cell.total, "cpu_percent" in many.cell.rollups()) == (2, False)


def test_a_metric_without_values_has_no_roll_up():
    cell = cells.WindowCell()
    traffic.fold(cell, np.full((len(cells.METRICS), 3), math.nan))
    assert figures(cell) == {}


def test_a_machine_is_odd_by_its_own_history_and_a_new_level_becomes_usual():
    odd = rules.AlertRule(name="odd", scope="node", when="cpu_percent_z > 6", until="cpu_percent_z < 2")
    plan = fleet_state.FleetStatePlan(rules=(odd,), window_s=1e6)
    known = fleet_state.FleetState(plan)
    chance = np.random.default_rng(1)

    def tell(number: int, busy: float, idle: float) -> list[tuple[str, bool]]:
        nonlocal known
        rows = [
            traffic.report(name, number, T0 + number, metrics={"cpu_percent": base + chance.normal()})
            for name, base in (("busy", busy), ("idle", idle))
        ]
        known = again(known, plan)
        return [
            (change.machine, change.on)
            for change in known.feed([arrival(rows, T0 + number, number)], T0 + number).changes
        ]

    for number in range(1, 41):
        assert tell(number, 90.0, 5.0) == []
    assert tell(41, 90.0, 30.0) == [("idle", True)]  # far less than what is usual for the other
    assert tell(42, 90.0, 5.0) == [("idle", False)]
    reported = [change for number in range(43, 400) for change in tell(number, 90.0, 30.0)]
    assert reported == [("idle", True), ("idle", False)]


def summary(rows, *, channel: str = "edge", sequence: int = 1, stored_ms: int = T0) -> blocks.DecodedMessage:
    table = pa.Table.from_batches([columns.to_batch(rows)])
    held = interpreters.HeldReports(table, columns.summary_schema().empty_table(), T0, T0 + 1, False)
    (item,) = interpreters.MergeInterpreter().interpret(
        held, [interpreters.ForwardTarget("up", ("root",), "merge")]
    )
    facts = columns.BatchInfo(schema=columns.SUMMARY_SCHEMA, channel=channel, sequence=sequence)
    return blocks.DecodedMessage(sequence, stored_ms, item.table.combine_chunks().to_batches()[0], facts)


def test_metrics_of_summaries_beyond_the_limit_are_counted():
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    names = [f"extra_{n}" for n in range(blocks.EXTRA_MAX + 3)]
    rows = [
        traffic.report("a", n, T0 + n, metrics=dict.fromkeys(part, 1.0))
        for n, part in enumerate((names[:1000], names[1000:]))
    ]
    assert known.feed([], T0, summaries=[summary(rows)]).counts["metrics-truncated"] == 3


def test_summaries_of_merging_channels_add_up_with_node_reports():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    cpu = np.random.default_rng(3).uniform(1, 100, 2000)
    rows = [
        traffic.report(f"m{n}", 1, T0, zone=f"z{n % 2}", metrics={"cpu_percent": value, "gpu": 1.0})
        for n, value in enumerate(cpu.tolist())
    ]
    once = summary(rows[500:])
    output = known.feed([arrival(rows[:500], T0)], T0, summaries=[once])
    assert output.counts["summaries"] > 0
    known = again(known, plan)
    repeated = known.feed([], T0 + 1, summaries=[once, summary(rows, sequence=2, stored_ms=T0 - 10**8)])
    assert repeated.counts.keys() == {"duplicated", "future"}
    actual = closed(known.feed([], T0 + 20_000))
    for many in (actual["group", "default", 0], actual["system", "", 0]):
        rollup = many.cell.rollups()["cpu_percent"]
        assert (many.cell.total, rollup.count) == (2000, 2000)
        assert many.cell.machine_count() == pytest.approx(2000, rel=0.05)
        assert rollup.sum == pytest.approx(cpu.sum())
        assert (rollup.min, rollup.max) == (cpu.min(), cpu.max())
        assert rollup.p50 == pytest.approx(np.percentile(cpu, 50), rel=0.04)
        assert rollup.p99 == pytest.approx(np.percentile(cpu, 99), rel=0.04)
        assert many.cell.rollups()["gpu"].count == 2000
    assert actual["zone", "z1", 0].cell.total == 1000
    late = known.feed([], T0 + 20_001, summaries=[summary(rows, sequence=3)])
    assert late.counts.keys() == {"late"}


def test_a_shard_of_summaries_alone_keeps_its_groups_over_a_micro_batch():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    known.feed([], T0, summaries=[summary([traffic.report("a", 1, T0, group="far", zone="z3")])])
    actual = closed(again(known, plan).feed([], T0 + 20_000))
    assert actual["group", "far", 0].cell.total == actual["zone", "z3", 0].cell.total == 1


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [("sketch", b"rubbish", pa.binary()), ("from", 2**63 - 1, pa.timestamp("us", tz="UTC"))],
)
def test_a_summary_that_does_not_hold_together_is_counted_and_harms_nothing(
    column: str, value: object, kind: pa.DataType
):
    known = fleet_state.FleetState(fleet_state.FleetStatePlan())
    good = summary([traffic.report("a", 1, T0)])
    at = good.batch.schema.get_field_index(column)
    bad = good.batch.set_column(at, column, pa.array([value] * good.batch.num_rows, kind))
    output = known.feed([], T0, summaries=[blocks.DecodedMessage(1, T0, bad, good.facts)])
    assert output.counts == {"unusable": good.batch.num_rows}


def test_state_goes_through_a_catch_up_of_many_periods_in_one_batch():
    plan = fleet_state.FleetStatePlan()
    known = fleet_state.FleetState(plan)
    arrivals = [
        arrival(
            [traffic.report(f"m{n}", period + 1, T0 + 10_000 * period) for n in range(50)],
            T0 + 10_000 * period,
            period,
        )
        for period in range(6)
    ]
    actual = closed(known.feed(arrivals, T0 + 70_000))
    system = [many.cell for (scope, _, _), many in actual.items() if scope == "system"]
    assert [(cell.total, cell.machines) for cell in system] == [(50, 50)] * 6


@pytest.mark.parametrize("values", [(1e308, 1e308), (1e308, 1e308, -1e308, -1e308), (1e300, -1e308, 2.0)])
def test_numbers_without_a_finite_sum_harm_no_report_and_no_alert(values: tuple[float, ...]):
    """The sum was infinite: the report of the whole fleet could not be read, and an alert ended the query."""
    hot = rules.AlertRule(name="hot", scope="group", when="cpu_percent_max > 1 OR own.queue_mean > 1 OR TRUE")
    known = fleet_state.FleetState(fleet_state.FleetStatePlan(rules=(hot,)))
    rows = [
        traffic.report(f"m{number}", 1, T0, metrics={"cpu_percent": value, "queue": value})
        for number, value in enumerate((*values, 1.0))
    ]
    known.feed([arrival(rows, T0)], T0, summaries=[summary(rows)])
    output = known.feed([], T0 + 20_000)
    totals = rollups.scope_totals(output.closed)
    groups = [many for many in totals if many.scope == "group"]
    (system,) = [many for many in totals if many.scope == "system"]
    report = messages.decode(messages.encode(rollups.system_report(system, groups)), columns.SystemReport)
    assert math.isfinite(report.metrics["cpu_percent"].sum)
    for data in rollups.encoded_reports(groups):
        metrics = messages.decode(data, columns.GroupReport).metrics
        assert all(math.isfinite(metric.sum) for metric in metrics.values())
    verdicts = rollups.ScopeRuleEvaluator((hot,), rollups.Baselines()).evaluate(totals, frozenset())
    (alert,) = tracker.AlertTracker((hot,)).apply(verdicts, T0 + 30_000).alerts
    assert alert.value is not None


def test_a_repeated_batch_has_the_scores_of_its_first_attempt():
    """Otherwise an alert that was published may never be tracked, if the process ended in between."""
    baselines = rollups.Baselines()
    values = [
        np.full(len(cells.METRICS), float(level)) for level in np.random.default_rng(3).integers(0, 9, 200)
    ]
    for number, means in enumerate(values):
        first = baselines.scores("group", "web", number * 1000, means)
        repeated = baselines.scores("group", "web", number * 1000, means)
        np.testing.assert_array_equal(first, repeated)
    assert np.isfinite(baselines.scores("group", "web", 10**9, values[0])).all()
