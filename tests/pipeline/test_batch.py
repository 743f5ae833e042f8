"""Analyses of the history: replay of a policy, demand by zone."""

import pytest

from muster.analyses import rule_replay
from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline.fleet import rollups
from tests.pipeline import test_history, traffic

T0 = test_history.T0


@pytest.fixture
def root(tmp_path):
    rows = [
        traffic.report(
            f"m{n}",
            number + 1,
            T0 + number * 10_000,
            zone=f"z{n % 3}",
            group="web" if n % 2 else "db",
            metrics={"cpu_percent": 10.0 * n if number else 0.0, "reads.users": float(n), "reads.x": 1.0},
            services=(messages.ServiceReport(name="shop", metrics={"reads.orders_s": 0.5}),)
            if n == 4
            else (),
        )
        for number in range(2)
        for n in range(10)
    ]
    test_history.store(tmp_path, 0, rows)
    alerts = [
        messages.Alert(
            rule="fire",
            about=f"group:{number}",
            severity=severity,
            state=AlertState.FIRING,
            since_ms=at_ms,
            at_ms=at_ms,
            labels={"group": "web"},
        )
        for number, (severity, at_ms) in enumerate(
            [
                (messages.Severity.CRITICAL, T0 + 5000),
                (messages.Severity.CRITICAL, T0 + 15_000),
                (messages.Severity.INFO, T0 + 15_000),
                (messages.Severity.CRITICAL, T0 + 500_000),  # by then nothing is known of anyone
            ]
        )
    ]
    test_history.store_alerts(tmp_path, 0, alerts)
    group = rollups.ScopeTotals("group", "web", T0)
    traffic.fold(group.cell, test_history._column(40.0))
    group.cell.table.machines[0] = 7
    totals = [group]
    for number in range(3):
        many = rollups.ScopeTotals("system", "", T0 + number * 3_600_000)
        traffic.fold(many.cell, test_history._column(50.0 + number))
        many.cell.table.machines[0] = 10 + number
        totals.append(many)
    test_history.store_groups(tmp_path, 0, totals)
    return tmp_path


@pytest.mark.timeout(600)
@pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests")
def test_a_policy_is_replayed_over_past_states_and_demand_is_found(root, spark):
    actual = rule_replay.replay(
        spark,
        root,
        "severity = 'critical' AND receiver.cpu_percent >= 50",
        address="zone = 'z2' OR machine = 'm9'",
    )
    # At the first event no machine was busy yet; at the second m5, m8 (zone z2) and m9 were.
    assert [item.receivers for item in actual.reached] == [0, 3, 0, 0]
    assert (actual.events, actual.deliveries, actual.receivers) == (4, 3, 3)
    with pytest.raises(errors.ParseError, match="colour"):
        rule_replay.replay(spark, root, "colour = 'red'")
    expected = {entry.key: entry for entry in rule_replay.demand(spark, root)}
    assert expected["users"].total == 90.0
    assert expected["users"].by_zone == {"z0": 36.0, "z1": 24.0, "z2": 30.0}
    assert expected["users"].place_in == ["z0", "z2", "z1"]
    first = {entry.key: entry.total for entry in rule_replay.demand(spark, root, from_ms=T0, to_ms=T0 + 5000)}
    assert first == {"users": 45.0, "x": 10.0, "orders": 5.0}
    assert expected["orders"].by_zone == {"z1": 10.0}  # one every two seconds, in two periods of ten


def test_copies_go_where_most_of_the_demand_is():
    assert rule_replay.replica_zones({"a": 90.0, "b": 5.0, "c": 5.0}, 0.8, 3) == ["a"]
    assert rule_replay.replica_zones({"a": 50.0, "b": 30.0, "c": 20.0}, 0.8, 3) == ["a", "b"]
    assert rule_replay.replica_zones({}, 0.8, 3) == []


@pytest.mark.timeout(600)
@pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests")
def test_a_replay_reads_the_period_of_its_events_and_joins_by_equality(root, spark):
    """Not the whole history, and no comparison of every event with every report."""
    test_history.store(root, 1, [traffic.report("old", 1, T0 - 40 * 24 * test_history.HOUR)])
    events, deliveries = rule_replay.replay_frames(spark, root, "severity = 'critical'", from_ms=T0 + 10_000)
    plan = deliveries._jdf.queryExecution().toString()
    assert "NestedLoopJoin" not in plan
    assert "CartesianProduct" not in plan
    assert "PartitionFilters: [isnotnull(day" in plan
    assert not [path for path in deliveries.inputFiles() if "day=2023-11-15" not in path]
    assert events.count() == 3


@pytest.mark.timeout(600)
@pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests")
def test_the_demand_of_a_period_reads_the_partitions_of_its_days(root, spark):
    test_history.store(root, 1, [traffic.report("old", 1, T0 - 40 * 24 * test_history.HOUR)])
    frame = rule_replay.demand_frame(spark, root, from_ms=T0, to_ms=T0 + test_history.HOUR)
    plan = frame._jdf.queryExecution().toString()
    assert plan.count("PartitionFilters: [isnotnull(day") == 2, plan  # of machines, and of their services
    assert not [path for path in frame.inputFiles() if "day=2023-11-15" not in path]
