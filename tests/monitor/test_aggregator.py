from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core import duplicates, errors, messages
from muster.core.reports import columns, packed, sketches
from muster.monitor.channel import aggregator, interpreters

NOW_MS = 1_700_000_000_000


def node(machine: str, sequence: int = 1, **more: Any) -> messages.NodeReport:
    fields = {"at_ms": NOW_MS, "period_s": 10.0, "metrics": {"cpu_percent": 5.0}, **more}
    return messages.NodeReport(machine=machine, sequence=sequence, **fields)


def make(
    name: str = "c", interpreter: str = "concat", where: str = "", boot: int = 1, **limits: Any
) -> aggregator.Aggregator:
    to = interpreters.ForwardTarget("up", ("root",), interpreter=interpreter, where=where)
    return aggregator.Aggregator(name, boot, [to], limits=aggregator.ChannelLimits(**limits))


def give(channel: aggregator.Aggregator, *rows: messages.NodeReport, now_ms: int = NOW_MS) -> None:
    for row in rows:
        add_report(channel, row.machine, packed.encode(row), now_ms)


def add_report(channel: aggregator.Aggregator, sender: str, data: bytes, now_ms: int) -> None:
    channel.add_reports([sender.encode()], [data], now_ms)


def rows_of(forwards: list[aggregator.ForwardBatch]) -> list[messages.NodeReport]:
    return [row for forward in forwards for row in columns.from_batch(forward.batch)]


def test_reports_are_held_until_the_time_is_over_and_go_on_in_full():
    channel = make()
    sent = [node("a"), node("b", services=(messages.ServiceReport(name="db", metrics={"queries_s": 3.0}),))]
    give(channel, *sent)
    assert channel.held == 2
    forwards = channel.flush(NOW_MS + 5)
    assert rows_of(forwards) == sent
    assert forwards[0].facts.machines == 2
    assert not forwards[0].facts.partial
    assert channel.flush(NOW_MS + 10) == []


def test_reports_of_every_form_go_on():
    """Standard metrics, others, and such whose sum is not finite are decoded in different ways."""
    sent = [node("a"), node("b", metrics={"own": 2.0}), node("c", metrics={"one": 1e308, "two": 1e308})]
    channel = make()
    give(channel, *sent)
    assert sorted(rows_of(channel.flush(NOW_MS)), key=lambda row: row.machine) == sent


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("encode", [packed.encode, messages.encode])
def test_a_report_is_its_senders_own_of_about_this_time_and_new(encode, together):
    channel = make(ahead_s=60.0, age_s=100.0)
    cases: list[tuple[str, messages.NodeReport, str]] = [
        ("a", node("a"), ""),
        ("a", node("a.b"), ""),
        ("a", node("ab"), "forged"),
        ("a", node("b"), "forged"),
        ("c", node("c", at_ms=NOW_MS + 60_000), ""),
        ("d", node("d", at_ms=NOW_MS + 60_001), "from-the-future"),
        ("e", node("e", at_ms=NOW_MS - 100_000), ""),
        ("f", node("f", at_ms=NOW_MS - 100_001), "too-old"),
        ("a", node("a"), "duplicate"),
        ("a", node("a", 2), ""),
        ("b", node("b"), ""),  # the forged one did not count
        ("d", node("d"), ""),
    ]
    for sender, row, _ in cases:
        add_report(channel, sender, encode(row), NOW_MS)
        if not together:
            channel.decode_pending(NOW_MS)
    forwards = channel.flush(NOW_MS)
    assert sorted(rows_of(forwards), key=lambda row: (row.machine, row.sequence)) == sorted(
        (row for _, row, reason in cases if not reason), key=lambda row: (row.machine, row.sequence)
    )
    reasons = [reason for _, _, reason in cases if reason]
    assert channel.dropped == {reason: reasons.count(reason) for reason in reasons}
    assert channel.received == len(cases)


def test_reports_in_all_forms_are_held_together():
    channel = make()
    rows = [node(name) for name in "abc"]
    encoded = (packed.encode(rows[0]), messages.encode(rows[1]), messages.encode(rows[2], "msgpack"))
    for row, data in zip(rows, encoded, strict=True):
        add_report(channel, row.machine, data, NOW_MS)
    for data in (encoded[0][:-8], encoded[0][:4], encoded[1][:-1], b"", b"\xc1nr3"):
        add_report(channel, "a", data, NOW_MS)
    assert rows_of(channel.flush(NOW_MS)) == rows
    assert channel.dropped == {"malformed": 5}


def test_a_message_has_a_bounded_number_of_rows():
    channel = make(rows_per_message=100)
    give(channel, *(node(f"m{i}") for i in range(250)))
    forwards = channel.flush(NOW_MS)
    assert [forward.batch.num_rows for forward in forwards] == [100, 100, 50]
    assert [forward.facts.sequence for forward in forwards] == [1, 2, 3]


def test_many_names_of_metrics_count_for_the_size_of_a_message():
    channel = make(message_bytes=100_000)
    sent = [
        node(f"m{machine}", metrics={f"{machine}-{number:0200}": 1.0 for number in range(20)})
        for machine in range(100)
    ]
    give(channel, *sent)
    forwards = channel.flush(NOW_MS)
    assert rows_of(forwards) == sent
    assert max(len(forward.encode()) for forward in forwards) < 110_000


def test_a_message_has_a_bounded_size_for_any_rows():
    channel = make(message_bytes=100_000)
    many = tuple(
        messages.ServiceReport(name=f"service {i}", metrics={f"metric {j}": 1.0 for j in range(20)})
        for i in range(20)
    )
    sent = [node(f"m{i}", services=many if i % 10 == 0 else ()) for i in range(300)]
    give(channel, *sent)
    forwards = channel.flush(NOW_MS)
    assert max(len(forward.encode()) for forward in forwards) < 110_000
    assert sorted(rows_of(forwards), key=lambda row: row.machine) == sorted(sent, key=lambda row: row.machine)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_nothing_is_counted_twice_or_lost_when_children_move_about(seed):
    """Machines send through any of three channels, repeat themselves, and channels repeat batches."""
    chance = random.Random(seed)
    leaves = [make(f"c{i}") for i in range(3)]
    root = make("top")
    sent, seen = [], []
    for sequence in range(1, 13):
        for machine in ("a", "b", "c", "d"):
            row = node(machine, sequence)
            sent.append(row)
            for leaf in chance.choices(leaves, k=chance.choice([1, 1, 2, 3])):
                give(leaf, row)
        for leaf in chance.sample(leaves, chance.choice([0, 1, 3])):
            for forward in leaf.flush(NOW_MS):
                for _ in range(chance.choice([1, 1, 2])):
                    root.add_batch(f"c{leaves.index(leaf)}", forward.encode(), NOW_MS)
        if chance.random() < 0.4:
            seen += rows_of(root.flush(NOW_MS))
    for leaf in leaves:
        for forward in leaf.flush(NOW_MS):
            root.add_batch(f"c{leaves.index(leaf)}", forward.encode(), NOW_MS)
    seen += rows_of(root.flush(NOW_MS))
    assert sorted((r.machine, r.sequence) for r in seen) == sorted((r.machine, r.sequence) for r in sent)
    assert set(root.dropped) <= {"duplicate", "duplicate-batch"}


def test_a_restarted_sensor_begins_a_new_sequence():
    channel = make()
    give(channel, node("a", 5, boot=1), node("a", 1, boot=2), node("a", 6, boot=1), node("a", 1, boot=2))
    assert [(r.boot, r.sequence) for r in rows_of(channel.flush(NOW_MS))] == [(1, 5), (2, 1), (1, 6)]
    assert channel.dropped == {"duplicate": 1}


def test_a_sensor_that_restarts_after_its_clock_was_set_back_is_heartbeats():
    channel = make()
    give(channel, *(node("a", number, boot=7_200_000) for number in (1, 2, 3)))
    give(channel, *(node("a", number, boot=60_000) for number in range(1, 100)), node("a", 3, boot=7_200_000))
    assert len(rows_of(channel.flush(NOW_MS))) == 102
    assert channel.dropped == {"duplicate": 1}


def test_a_channel_that_restarts_after_its_clock_was_set_back_is_heartbeats():
    root = make()
    for boot in (7_200_000, 60_000):
        below = make("below", boot=boot)
        for number in range(1, 4):
            give(below, node(f"m{boot}-{number}", 1))
            for forward in below.flush(NOW_MS):
                root.add_batch("below", forward.encode(), NOW_MS)
    assert len(rows_of(root.flush(NOW_MS))) == 6
    assert not root.dropped


def test_batches_of_a_channel_may_overtake_each_other():
    root, below = make(), make("below")
    sent = []
    for number in range(duplicates.KEPT + 2):
        give(below, node(f"m{number}", 1))
        sent += [forward.encode() for forward in below.flush(NOW_MS)]
    for data in (*reversed(sent), sent[5]):
        root.add_batch("below", data, NOW_MS)
    assert len(rows_of(root.flush(NOW_MS))) == duplicates.KEPT  # so far back is remembered
    assert root.dropped == {"late-batch": 2, "duplicate-batch": 1}


def test_what_was_dropped_is_reported_to_a_parent_once_however_many_messages_it_gets():
    channel, below = make(), make("below", "merge")
    give(below, node("x", 1))
    give(channel, node("a", 1))
    add_report(channel, "a", b"rubbish", NOW_MS)
    for forward in below.flush(NOW_MS):
        channel.add_batch("below", forward.encode(), NOW_MS)
    forwards = channel.flush(NOW_MS)
    assert len(forwards) == 2  # rows and summaries
    assert [item.facts.dropped for item in forwards if item.facts.dropped] == [{"malformed": 1}]


def test_reordered_reports_count_and_too_old_ones_do_not():
    channel = make()
    give(channel, node("a", 100), node("a", 98), node("a", 99), node("a", 98), node("a", 30))
    assert sorted(r.sequence for r in rows_of(channel.flush(NOW_MS))) == [98, 99, 100]
    assert channel.dropped == {"duplicate": 1, "late": 1}


def test_reports_that_never_came_are_counted_until_they_do():
    channel = make()
    give(channel, node("a", 1), node("a", 5), node("a", 3))
    channel.flush(NOW_MS)
    assert channel.gaps == 2


def test_a_silent_machine_makes_the_aggregate_partial_until_it_is_forgotten():
    channel = make()
    give(channel, node("a"), node("b"))
    assert not channel.flush(NOW_MS)[0].facts.partial
    later = NOW_MS + 21_000
    give(channel, node("a", 2, at_ms=later), now_ms=later)
    forward = channel.flush(later)[0]
    assert (forward.facts.partial, forward.facts.missing) == (True, 1)
    assert forward.batch.column("partial").to_pylist() == [True]
    much_later = NOW_MS + 100_000
    give(channel, node("a", 3, at_ms=much_later), now_ms=much_later)
    assert channel.flush(much_later)[0].facts.missing == 0
    assert channel.machines == 1


def test_dropped_reports_are_counted_once_and_passed_up():
    leaf, root = make("c"), make("top")
    add_report(leaf, "a", b"{", NOW_MS)
    give(leaf, node("a"))
    for forward in leaf.flush(NOW_MS):
        assert forward.facts.dropped == {"malformed": 1}
        root.add_batch("c", forward.encode(), NOW_MS)
    above = root.flush(NOW_MS)[0].facts
    assert (above.dropped, above.partial, above.level) == ({"malformed": 1}, True, 2)
    give(leaf, node("a", 2))
    assert leaf.flush(NOW_MS)[0].facts.dropped == {}


def test_memory_is_bounded():
    channel = make(rows_max=50, machines_max=20)
    give(channel, *(node(f"m{i}") for i in range(80)))
    assert channel.held == 50
    assert channel.dropped["overload"] == 30
    channel.flush(NOW_MS)
    assert channel.machines <= 20


HOSTILE = {
    "malformed": messages.encode(node("a"))[:-9],
    "too-large": b"x" * (10 << 20),
    "unknown-kind": messages.encode(node("a")).replace(b"node-report/1", b"node-report/9"),
    "from-the-future": messages.encode(node("a", at_ms=NOW_MS + 3_600_000)),
    "too-old": messages.encode(node("a", at_ms=0)),
    "forged": messages.encode(node("b")),
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_hostile_report_is_counted_and_nothing_else(reason):
    channel = make()
    add_report(channel, "a", HOSTILE[reason], NOW_MS)
    give(channel, node("a", 2))
    assert [r.sequence for r in rows_of(channel.flush(NOW_MS))] == [2]
    assert channel.dropped == {reason: 1}


def arrow(*rows: messages.NodeReport, channel: str = "x", batch: Any = None, sequence: int = 1) -> bytes:
    facts = columns.BatchInfo(channel=channel, sequence=sequence)
    return columns.encode(columns.to_batch(rows) if batch is None else batch, facts)


def test_hostile_batches_are_counted_and_nothing_else():
    channel = make()
    good = arrow(node("a"))
    odd = columns.to_batch([node("a")])
    place = odd.schema.get_field_index("cpu_percent")
    infinite = odd.set_column(place, "cpu_percent", pa.array([float("inf")]))
    channel.add_batch("x", good[:100], NOW_MS)
    channel.add_batch("x", b"z" * (10 << 20), NOW_MS)
    channel.add_batch("y", good, NOW_MS)
    channel.add_batch("x", arrow(batch=infinite, sequence=2), NOW_MS)
    channel.add_batch("x", arrow(node("a", at_ms=NOW_MS * 2), node("b", at_ms=1), sequence=3), NOW_MS)
    channel.add_batch("x", good, NOW_MS)
    channel.add_batch("x", good, NOW_MS)
    assert rows_of(channel.flush(NOW_MS)) == [node("a")]
    assert channel.dropped == {
        "malformed": 2,
        "too-large": 1,
        "forged": 1,
        "from-the-future": 1,
        "too-old": 1,
        "duplicate-batch": 1,
    }


def test_a_channel_below_cannot_make_ours_unreadable_by_what_it_claims():
    channel = make("top")
    for sequence in range(1, 4):
        claims = {f"reason {i}": (1 << 63) - 1 for i in range(100 * sequence, 100 * sequence + 90)}
        facts = columns.BatchInfo(
            channel="x", sequence=sequence, level=64, dropped=claims, missing=(1 << 63) - 1
        )
        data = columns.encode(columns.to_batch([node("a", sequence)]), facts)
        channel.add_batch("x", data, NOW_MS)
    (forward,) = channel.flush(NOW_MS)
    _, read = columns.decode(forward.encode())
    assert read == forward.facts
    assert read.partial


good = arrow(node("a"), node("b", services=(messages.ServiceReport(name="s", metrics={"x": 1.0}),)))


@given(st.lists(st.tuples(st.integers(0, len(good) - 1), st.binary(min_size=1, max_size=8)), max_size=3))
def test_no_bytes_at_all_stop_a_channel(changes):
    channel = make("top")
    data = bytearray(good)
    for place, put in changes:
        data[place : place + len(put)] = put
    row = bytearray(messages.encode(node("a")))
    for place, put in changes:
        row[place % len(row) : place % len(row) + len(put)] = put
    channel.add_batch("x", bytes(data), NOW_MS)
    add_report(channel, "a", bytes(row), NOW_MS)
    for forward in channel.flush(NOW_MS):
        columns.decode(forward.encode())
    give(channel, node("c", 7))
    assert [report.machine for report in rows_of(channel.flush(NOW_MS))] == ["c"]


def test_a_subscription_picks_rows_by_a_predicate():
    channel = make(where="group = 'web' AND cpu_percent > 50")
    give(
        channel,
        node("a", group="web", metrics={"cpu_percent": 90.0}),
        node("b", group="web", metrics={"cpu_percent": 10.0}),
        node("c", group="db", metrics={"cpu_percent": 90.0}),
        node("d", group="web", metrics={}),
    )
    assert [r.machine for r in rows_of(channel.flush(NOW_MS))] == ["a"]


class OddMetric:
    def interpret(self, held, subscriptions):
        raise ValueError("no")


def test_an_interpreter_that_fails_costs_what_was_held_and_is_counted():
    to = interpreters.ForwardTarget("up", ("root",), interpreter="tests.monitor.test_aggregator:odd")
    channel = aggregator.Aggregator("c", 1, [to, interpreters.ForwardTarget("also", ("root",))])
    give(channel, node("a"))
    assert [forward.subscription.name for forward in channel.flush(NOW_MS)] == ["also"]
    assert channel.dropped == {"interpreter-failed": 1}


odd = OddMetric()


def merged(forwards: list[aggregator.ForwardBatch]) -> dict[tuple[str, str], interpreters.MetricSummary]:
    return {
        (row["group"], row["metric"]): interpreters.MetricSummary.from_row(row)
        for forward in forwards
        for row in forward.batch.to_pylist()
    }


def test_merge_gives_the_same_in_a_tree_as_at_once():
    chance = random.Random(5)
    rows = [
        node(f"m{i % 40}", i, group=chance.choice(["web", "db"]), metrics={"cpu_percent": i / 3, "own": 1.0})
        for i in range(1, 301)
    ]
    flat = make("flat", "merge")
    give(flat, *rows)
    leaves, top = [make(f"c{i}", "merge") for i in range(3)], make("top", "merge")
    for number, row in enumerate(rows):
        give(leaves[number % 3], row)
    for number, leaf in enumerate(leaves):
        for forward in leaf.flush(NOW_MS):
            for _ in range(2):  # a repeat changes nothing
                top.add_batch(f"c{number}", forward.encode(), NOW_MS)
    first, tree = merged(flat.flush(NOW_MS)), merged(top.flush(NOW_MS))
    assert first.keys() == tree.keys()
    for key, summary in first.items():
        other = tree[key]
        assert (other.count, other.min, other.max) == (summary.count, summary.min, summary.max)
        assert other.sum == pytest.approx(summary.sum)
        assert other.sketch.quantile(0.95) == summary.sketch.quantile(0.95)
        assert other.machines.count() == summary.machines.count()
    assert sum(first[group, interpreters.ALL_REPORTS].count for group in ("web", "db")) == 300
    assert tree["web", "own"].rollup().p99 == 1.0  # never outside of what was seen


@pytest.mark.parametrize(
    "odd",
    [
        {"sketch": b"?"},
        {"machines": b"?"},
        {"sum": float("nan")},
        {"count": -1},
        {"count": 2**63 - 1},
        {"from": 2**63 - 1},
    ],
)
def test_a_broken_summary_is_counted(odd):
    channel = make("top", "merge")
    row = {"group": "g", "zone": "z", "metric": "m", "from": 1, "to": 2, "count": 1, "sum": 1.0, "min": 1.0}
    row |= {"max": 1.0, "sketch": bytes(sketches.QuantileSketch()), "machines": b"", "partial": False}
    batch = pa.RecordBatch.from_pylist([row | odd], schema=columns.summary_schema())
    facts = columns.BatchInfo(channel="x", schema=columns.SUMMARY_SCHEMA)
    channel.add_batch("x", columns.encode(batch, facts), NOW_MS)
    assert channel.flush(NOW_MS) == []
    assert channel.dropped == {"malformed": 1}


def test_a_merged_summary_is_readable_whatever_its_values_are():
    merged = interpreters.MetricSummary.from_values([1e308, 1e308, -1e308, 2.0])
    assert (merged.count, merged.sum, merged.max) == (1, 2.0, 2.0)
    merged.count, merged.sum = columns.COUNT_MAX, columns.SUM_MAX
    merged.merge(interpreters.MetricSummary.from_row(merged.row()))
    again = interpreters.MetricSummary.from_row(merged.row())
    assert (again.count, again.sum) == (columns.COUNT_MAX, columns.SUM_MAX)


def test_an_unknown_interpreter_is_refused_with_the_known_ones():
    with pytest.raises(Exception, match="concat, merge"):
        interpreters.load("average")


@pytest.mark.parametrize("where", ["extra IS NULL", "services IS NULL", "cpu_precent > 5", "sender.x = 1"])
def test_a_condition_that_no_report_can_meet_is_refused_at_the_start(where):
    """At each holding time it would fail, or select nothing."""
    with pytest.raises(errors.ParseError, match="there is no attribute"):
        interpreters.ForwardTarget("up", ("root",), where=where)


def test_all_columns_of_one_value_can_be_used_in_a_condition():
    others = "machine <> zone AND boot >= 0 AND reported_at > 5 AND NOT partial AND load_1m IS NULL"
    channel = make(where=f"state = 'up' AND {others}")
    give(channel, node("m"))
    assert [row.machine for row in rows_of(channel.flush(NOW_MS))] == ["m"]


@pytest.mark.parametrize("name", [":x", "..a:b", "no.such:thing"])
def test_a_name_that_is_no_interpreter_is_refused(name):
    with pytest.raises(errors.MusterError, match="interpreter"):
        interpreters.load(name)


@pytest.mark.parametrize("name", ["", "cpu_percent"])
def test_no_other_metric_takes_the_place_of_a_summary(name):
    batch = columns.to_batch([node("a", metrics={"cpu_percent": 1.0, "other": 5.0})])
    place = batch.schema.get_field_index("extra")
    extra = pa.array([[(name, 1e30)]], pa.map_(pa.string(), pa.float64())).cast(
        batch.schema.field(place).type
    )
    hostile = pa.Table.from_batches([batch.set_column(place, batch.schema.field(place), extra)])
    summaries = {metric: summary for (_, _, metric), summary in interpreters.summarise(hostile).items()}
    assert summaries[""].machines.count() == 1
    assert summaries["cpu_percent"].sum == 1.0
