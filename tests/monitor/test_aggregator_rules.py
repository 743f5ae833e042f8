"""A channel's decisions, rule by rule and at their boundaries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest

from muster.core import duplicates, messages
from muster.core.reports import columns as reports_columns
from muster.core.reports import packed
from muster.monitor import protocol
from muster.monitor.channel import aggregator, interpreters
from muster.monitor.channel import channel as channel_channel
from tests.monitor.test_aggregator import NOW_MS, add_report, arrow, give, make, node, rows_of

WEEK_MS = 7 * 86_400_000


def sequences(forwards: list[aggregator.ForwardBatch]) -> list[int]:
    return [row.sequence for row in rows_of(forwards)]


def batch(channel: aggregator.Aggregator, number: int, *rows: messages.NodeReport, **facts: Any) -> None:
    """One message of the channel ``x`` below."""
    facts_ = reports_columns.BatchInfo(channel="x", sequence=number, **facts)
    channel.add_batch(
        "x", reports_columns.encode(reports_columns.to_batch(rows), facts_), facts.get("now_ms", NOW_MS)
    )


def summaries(of: str, machine: str, *, now_ms: int = NOW_MS, missing: int = 0, sequence: int = 1) -> bytes:
    """What the merging channel ``of`` sends of one machine."""
    merger = make(of, "merge")
    give(merger, node(machine))
    (forward,) = merger.flush(now_ms)
    facts = reports_columns.BatchInfo(
        schema=reports_columns.SUMMARY_SCHEMA,
        channel=of,
        sequence=sequence,
        missing=missing,
        partial=missing > 0,
    )
    return reports_columns.encode(forward.batch, facts)


# What is counted.


def test_a_new_channel_has_counted_nothing():
    channel = make()
    assert (channel.received, channel.gaps, channel.held, channel.machines, channel.missing) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert (channel.level, channel.groups, channel.dropped) == (1, set(), {})


def test_all_that_comes_is_counted_as_received_good_or_bad():
    channel = make()
    give(channel, node("a"), node("a"))
    add_report(channel, "a", b"x" * (64 << 10), NOW_MS)
    channel.add_batch("x", b"rubbish", NOW_MS)
    batch(channel, 1, node("b"), node("c"), node("d"))
    channel.add_batch("x", summaries("y", "e"), NOW_MS)  # forged
    channel.add_batch("y", summaries("y", "e"), NOW_MS)
    rows = len(interpreters.BUILT_IN) and reports_columns.decode(summaries("y", "e"))[0].num_rows
    assert channel.received == 3 + 1 + 3 + 2 * rows
    assert channel.dropped == {"forged": rows, "malformed": 1}
    assert channel.held == 3 + 3 + rows, "what is put aside is not looked into yet"
    channel.flush(NOW_MS)
    assert channel.dropped == {"forged": rows, "malformed": 2, "duplicate": 1}
    assert channel.held == 0


def test_a_report_of_the_largest_size_is_read_and_a_larger_one_is_not():
    channel = make()
    good = messages.encode(node("a"))
    add_report(channel, "a", good + b" " * (protocol.MAX_REPORT_BYTES - len(good)), NOW_MS)
    add_report(channel, "a", good + b" " * (protocol.MAX_REPORT_BYTES - len(good) + 1), NOW_MS)
    assert sequences(channel.flush(NOW_MS)) == [1]
    assert channel.dropped == {"too-large": 1}


def test_reports_are_decoded_when_thousands_or_many_bytes_have_come():
    channel = make()
    for _ in range(2):
        channel.add_reports([b"a"] * 4999, [b"rubbish"] * 4999, NOW_MS)
        assert channel.held == 4999
        add_report(channel, "a", b"rubbish", NOW_MS)
        assert channel.held == 0
    assert channel.dropped == {"malformed": 10_000}
    data = bytes(50 << 10)
    channel.add_reports([b"a"] * 31, [data] * 31, NOW_MS)
    assert channel.held == 31
    add_report(channel, "a", data, NOW_MS)
    assert (channel.held, channel.dropped) == (0, {"malformed": 10_032})


def test_of_reports_that_come_together_those_beyond_a_limit_are_dropped():
    channel = make(rows_max=3)
    good = [(name.encode(), packed.encode(node(name))) for name in "abcde"]
    large = (b"x", bytes(protocol.MAX_REPORT_BYTES + 1))
    senders, reports = zip(good[0], large, *good[1:], strict=True)
    channel.add_reports(senders, reports, NOW_MS)
    assert channel.received == 6
    assert channel.dropped == {"too-large": 1, "overload": 2}
    assert [row.machine for row in rows_of(channel.flush(NOW_MS))] == ["a", "b", "c"]
    channel.add_reports([], [], NOW_MS)
    assert channel.received == 6


def test_a_message_is_divided_and_what_was_dropped_is_reported_once():
    channel = make()
    add_report(channel, "a", b"rubbish", NOW_MS)
    give(channel, *(node(name) for name in "abc"))
    [forward] = channel.flush(NOW_MS)
    halves = channel.halves(forward)
    assert [row.machine for half in halves for row in rows_of([half])] == ["a", "b", "c"]
    assert [half.facts.sequence for half in halves] == [1, 2]
    assert [half.facts.dropped for half in halves] == [{"malformed": 1}, {}]
    assert all(half.facts.missing == forward.facts.missing for half in halves)
    assert channel.halves(halves[0]) == []
    give(channel, node("a", 2))
    assert [after.facts.sequence for after in channel.flush(NOW_MS)] == [3]


def test_large_chunks_are_forwarded_as_they_are_and_small_ones_are_joined():
    channel = make()
    for start in (0, 600):
        give(channel, *(node(f"m{number}") for number in range(start, start + 600)))
        channel.decode_pending(NOW_MS)
    assert [forward.batch.num_rows for forward in channel.flush(NOW_MS)] == [600, 600]
    for number in range(3):
        give(channel, *(node(f"m{machine}", 2 + number) for machine in range(100)))
        channel.decode_pending(NOW_MS)
    assert [forward.batch.num_rows for forward in channel.flush(NOW_MS)] == [300]
    for sequence in (5, 6):  # a trickle of others beside a flood
        add_report(channel, "b", messages.encode(node("b", sequence)), NOW_MS)
        give(channel, *(node(f"m{machine}", sequence) for machine in range(500)))
        channel.decode_pending(NOW_MS)
    forwards = channel.flush(NOW_MS)
    assert [forward.batch.num_rows for forward in forwards] == [500, 500, 2]
    assert len({forward.facts.sequence for forward in forwards}) == 3


def test_what_a_channel_holds_is_bounded_over_reports_and_batches():
    channel = make(rows_max=5)
    batch(channel, 1, *(node(f"m{n}") for n in range(3)))
    batch(channel, 2, *(node(f"n{n}") for n in range(3)))
    assert (channel.held, channel.dropped) == (3, {"overload": 3})
    give(channel, node("a"))
    batch(channel, 3, node("b"))
    assert (channel.held, channel.dropped) == (5, {"overload": 3})
    give(channel, node("c"))
    assert (channel.held, channel.dropped) == (5, {"overload": 4})
    assert len(rows_of(channel.flush(NOW_MS))) == 5


def test_a_machine_reports_for_itself_and_for_what_is_below_its_name():
    channel = make()
    for machine in ("a", "a.db", "ab", "b.a"):
        add_report(channel, "a", messages.encode(node(machine)), NOW_MS)
    assert [row.machine for row in rows_of(channel.flush(NOW_MS))] == ["a", "a.db"]
    assert channel.dropped == {"forged": 2}


TIMES = [
    (NOW_MS - WEEK_MS, None),
    (NOW_MS - WEEK_MS - 1, "too-old"),
    (NOW_MS + 60_000, None),
    (NOW_MS + 60_001, "from-the-future"),
]


@pytest.mark.parametrize(("at_ms", "reason"), TIMES)
@pytest.mark.parametrize("way", ["report", "batch"])
def test_reports_of_the_last_week_and_the_next_minute_count(way, at_ms, reason):
    channel = make()
    row, other = node("a", 1, at_ms=at_ms), node("b", 2)
    if way == "report":
        give(channel, row, other)
    else:
        batch(channel, 1, row, other)
    assert sequences(channel.flush(NOW_MS)) == ([2] if reason else [1, 2])
    assert +channel.dropped == ({reason: 1} if reason else {})


def test_odd_numbers_anywhere_in_a_batch_are_malformed():
    inf = float("inf")
    service = messages.ServiceReport(name="s", metrics={"x": 1.0})
    for change in ({"metrics": {"own": 1.0}}, {"services": (service,)}):
        channel = make()
        good = reports_columns.to_batch([node("a", **change)])
        columns = {name: good.column(name).to_pylist() for name in good.schema.names}
        if "metrics" in change:
            columns["extra"] = [[("own", inf)]]
        else:
            columns["services"][0][0]["metrics"] = [("x", inf)]
        odd = pa.RecordBatch.from_pydict(columns, schema=good.schema)
        channel.add_batch("x", arrow(batch=odd), NOW_MS)
        channel.add_batch("x", arrow(batch=good, sequence=2), NOW_MS)
        assert channel.dropped == {"malformed": 1}
        assert len(rows_of(channel.flush(NOW_MS))) == 1


# Repeats.


def test_rows_that_come_in_order_are_recognised_when_they_come_again():
    channel = make()
    for number in range(1, 6):
        batch(channel, number, node("a", number))
    batch(channel, 6, *(node("a", number) for number in range(1, 6)))
    assert sequences(channel.flush(NOW_MS)) == [1, 2, 3, 4, 5]
    assert channel.dropped == {"duplicate": 5}


def test_a_row_that_was_overtaken_by_rows_in_order_is_new_once():
    channel = make()
    for number, sequence in enumerate((10, 11, 12, 8, 8), 1):
        batch(channel, number, node("a", sequence))
    assert sequences(channel.flush(NOW_MS)) == [10, 11, 12, 8]
    assert channel.dropped == {"duplicate": 1}
    assert channel.gaps == -1, "one more than was known to be missing"


def test_rows_in_order_are_remembered_as_far_back_as_others_and_no_further():
    channel = make()
    kept = duplicates.KEPT
    for number in range(1, 2 * kept + 1):
        batch(channel, number, node("a", number))
    batch(channel, 1000, node("a", kept + 1), node("a", kept))
    assert channel.dropped == {"duplicate": 1, "late": 1}


def test_a_restart_with_a_continued_sequence_is_detected():
    """Late rows of the former run are distinguished from repetitions."""
    channel = make()
    batch(channel, 1, node("a", 5, boot=1))
    batch(channel, 2, node("a", 6, boot=2))
    batch(channel, 3, node("a", 5, boot=1), node("a", 4, boot=1), node("a", 6, boot=2))
    assert [(row.boot, row.sequence) for row in rows_of(channel.flush(NOW_MS))] == [(1, 5), (2, 6), (1, 4)]
    assert channel.dropped == {"duplicate": 2}


def test_of_runs_before_the_last_two_nothing_is_remembered():
    channel = make()
    give(channel, *(node("a", 1, boot=boot) for boot in (1, 2, 3, 2, 1)))
    assert [row.boot for row in rows_of(channel.flush(NOW_MS))] == [1, 2, 3, 1]
    assert channel.dropped == {"duplicate": 1}


def test_former_runs_are_remembered_of_a_bounded_number_of_machines():
    channel = make(machines_max=4)
    names = [f"m{number}" for number in range(4)]
    give(channel, *(node(name, 1, boot=1) for name in names[:1]))
    for name in ("a", "b"):
        give(channel, node(name, 1, boot=1), node(name, 1, boot=2))
    channel.decode_pending(NOW_MS)
    assert list(channel._known._former) == [b"a", b"b"]
    for name in ("c", "d", "e"):
        give(channel, node(name, 1, boot=1), node(name, 1, boot=2))
    channel.decode_pending(NOW_MS)
    assert list(channel._known._former) == [b"b", b"c", b"d", b"e"]
    give(channel, node("e", 1, boot=3))
    channel.decode_pending(NOW_MS)
    assert list(channel._known._former) == [b"b", b"c", b"d", b"e"], "it is among them"


def test_half_of_the_bound_of_machines_is_always_remembered_and_never_more_than_the_bound():
    for number in range(1, 60):
        channel = make(machines_max=20)
        names = [f"m{i}" for i in range(number)]
        give(channel, *(node(name) for name in names))
        channel.flush(NOW_MS)
        assert min(number, 10) <= channel.machines <= 20
        add_report(channel, names[-10 if number > 10 else 0], messages.encode(node(names[-10:][0])), NOW_MS)
        channel.decode_pending(NOW_MS)
        assert channel.dropped == {"duplicate": 1}


@pytest.mark.parametrize("boot", [1, 2])
def test_a_machine_that_only_repeats_itself_is_not_forgotten(boot):
    """Neither if what comes again is of its former run."""
    channel = make(machines_max=4)
    rows = [node("a", 1, boot=number) for number in range(1, boot + 1)]
    give(channel, *rows, node("b"), node("c"), node("d"))
    for _ in range(3):
        give(channel, *rows)
    assert len(rows_of(channel.flush(NOW_MS))) == boot + 3
    assert channel.dropped == {"duplicate": 3 * boot}


def test_a_machine_that_reports_again_after_others_is_counted_once():
    channel = make(machines_max=4)
    give(channel, node("a"), node("b"), node("c"), node("a", 2), node("b", 2))
    channel.flush(NOW_MS)
    assert channel.machines == 3
    assert not channel.dropped


# Missing machines.


@pytest.mark.parametrize("way", ["report", "batch", "batch in order"])
@pytest.mark.parametrize(
    ("silent_ms", "machines", "missing"),
    [(20_000, 2, 0), (20_001, 2, 1), (60_000, 2, 1), (60_001, 1, 0)],
)
def test_a_machine_is_missing_after_two_periods_and_gone_after_six(way, silent_ms, machines, missing):
    channel = make()
    later = NOW_MS + silent_ms
    rows = [node("quiet", 1), node("quiet", 2)] if way == "batch in order" else [node("quiet")]
    if way == "report":
        give(channel, *rows)
    else:
        for number, row in enumerate(rows, 1):
            batch(channel, number, row)
    channel.decode_pending(NOW_MS)
    give(channel, node("live", at_ms=later), now_ms=later)
    (forward,) = channel.flush(later)
    assert (forward.facts.machines, forward.facts.missing) == (machines, missing)
    assert forward.facts.partial is (missing > 0)
    assert (channel.machines, channel.missing) == (machines, missing)


def test_a_period_is_that_of_the_machines_last_report():
    channel = make()
    give(channel, node("a", 1, period_s=10.0), node("a", 2, period_s=100.0))
    later = NOW_MS + 150_000
    channel.decode_pending(NOW_MS)
    give(channel, node("b", at_ms=later), now_ms=later)
    assert channel.flush(later)[0].facts.missing == 0


def test_machines_are_looked_at_every_two_seconds():
    channel = make()
    give(channel, node("a"))
    channel.flush(NOW_MS)
    for after_ms, machines in ((1999, 1), (2000, 2), (3999, 2), (4000, 3)):
        give(channel, node(f"at {after_ms}"))
        channel.flush(NOW_MS + after_ms)
        assert channel.machines == (machines if after_ms < 2000 else channel.machines)
    assert channel.machines == 5


def test_a_repeat_does_not_make_a_silent_machine_live():
    channel = make()
    give(channel, node("a"))
    channel.decode_pending(NOW_MS)
    later = NOW_MS + 30_000
    give(channel, node("a"), node("b", at_ms=later), now_ms=later)
    assert channel.flush(later)[0].facts.missing == 1


def test_what_mergers_below_miss_is_added_and_holds_for_a_minute():
    channel = make()
    give(channel, node("quiet"))
    channel.decode_pending(NOW_MS)
    later = NOW_MS + 30_000
    for name, missing in (("y", 3), ("z", 4)):
        channel.add_batch(name, summaries(name, "m", missing=missing), later)
    for forward in channel.flush(later):
        assert (forward.facts.missing, forward.facts.partial) == (1 + 3 + 4, True)
    channel.add_batch("y", summaries("y", "m", missing=2, sequence=2), later + 1)
    assert [each.facts.missing for each in channel.flush(later + 60_000)] == [2 + 4]
    give(channel, node("live", at_ms=later), now_ms=later)
    assert [each.facts.missing for each in channel.flush(later + 60_001)] == [2]
    give(channel, node("live", 2, at_ms=later), now_ms=later)
    assert [each.facts.missing for each in channel.flush(later + 60_002)] == [0]


def test_mergers_below_cannot_make_the_number_of_missing_machines_too_large():
    channel = make()
    for name in ("y", "z"):
        channel.add_batch(name, summaries(name, "m", missing=(1 << 63) - 1), NOW_MS)
    (forward,) = channel.flush(NOW_MS)
    _, read = reports_columns.decode(forward.encode())
    assert read.missing == (1 << 63) - 1


# What goes on.


def test_repeats_alone_do_not_make_an_aggregate_partial():
    channel = make()
    give(channel, node("a"), node("a"))
    (forward,) = channel.flush(NOW_MS)
    assert (forward.facts.dropped, forward.facts.partial) == ({"duplicate": 1}, False)
    assert forward.batch.column("partial").to_pylist() == [False]
    give(channel, node("a"), node("a", 2))
    add_report(channel, "a", b"rubbish", NOW_MS)
    (forward,) = channel.flush(NOW_MS)
    assert (forward.facts.dropped, forward.facts.partial) == ({"duplicate": 1, "malformed": 1}, True)


def test_a_partial_batch_below_makes_one_aggregate_partial():
    channel = make()
    batch(channel, 1, node("a", 1), partial=True)
    batch(channel, 2, node("a", 2))
    assert channel.flush(NOW_MS)[0].facts.partial
    batch(channel, 3, node("a", 3))
    assert not channel.flush(NOW_MS)[0].facts.partial


def test_summaries_go_on_as_they_came():
    channel = make()
    data = summaries("y", "m")
    channel.add_batch("y", data, NOW_MS)
    (forward,) = channel.flush(NOW_MS)
    assert forward.batch.equals(reports_columns.decode(data)[0])
    assert not any(forward.batch.column("partial").to_pylist())


def test_an_aggregate_is_one_level_above_the_highest_below():
    channel = make()
    for number, level in enumerate((3, 1), 1):
        batch(channel, number, node("a", number), level=level)
    assert (channel.flush(NOW_MS)[0].facts.level, channel.level) == (4, 4)


def test_the_holding_time_begins_with_the_first_row():
    for first in ("rows", "summaries"):
        channel = make()
        for _ in range(2):
            for number, now_ms in enumerate((NOW_MS + 5, NOW_MS + 9)):
                if first == "rows":
                    channel.add_batch("x", arrow(node("a", number), sequence=channel.received), now_ms)
                else:
                    channel.add_batch("y", summaries("y", "m", sequence=channel.received), now_ms)
            for forward in channel.flush(NOW_MS + 20):
                assert (forward.facts.held_from_ms, forward.facts.held_to_ms) == (NOW_MS + 5, NOW_MS + 20)
            assert channel.held == 0


def test_the_groups_are_those_of_what_was_held_last():
    channel = make()
    give(channel, node("a", group="web"), node("b", group="db"))
    channel.add_batch("y", summaries("y", "m"), NOW_MS)
    channel.flush(NOW_MS)
    assert channel.groups == {"web", "db", "default"}
    give(channel, node("a", 2, group="web"))
    channel.flush(NOW_MS)
    assert channel.groups == {"web"}


def test_each_parent_learns_once_what_was_dropped():
    subscriptions = [
        interpreters.ForwardTarget("one", ("root",)),
        interpreters.ForwardTarget("two", ("root",), interpreter="merge"),
        interpreters.ForwardTarget("three", ("other",)),
    ]
    channel = aggregator.Aggregator(
        "c", 1, subscriptions, limits=aggregator.ChannelLimits(rows_per_message=1)
    )
    add_report(channel, "a", b"rubbish", NOW_MS)
    give(channel, node("a"), node("b"))
    facts_ = [(each.subscription.name, each.facts.dropped) for each in channel.flush(NOW_MS)]
    assert [each for each in facts_ if each[1]] == [("one", {"malformed": 1}), ("three", {"malformed": 1})]
    assert [name for name, _ in facts_].count("one") == 2


def test_a_subscription_that_selects_nothing_gets_no_message():
    channel = make(where="group = 'none'")
    give(channel, node("a"))
    assert channel.flush(NOW_MS) == []
    give(channel, node("b", group="none"))
    assert channel.flush(NOW_MS)[0].facts.sequence == 1


def test_an_interpreter_that_fails_costs_the_rows_and_the_summaries():
    to = interpreters.ForwardTarget("up", ("root",), interpreter="tests.monitor.test_aggregator:odd")
    channel = aggregator.Aggregator("c", 1, [to])
    give(channel, node("a"))
    data = summaries("y", "m")
    channel.add_batch("y", data, NOW_MS)
    assert channel.flush(NOW_MS) == []
    assert channel.dropped == {"interpreter-failed": 1 + reports_columns.decode(data)[0].num_rows}


def test_large_rows_are_sent_in_separate_messages():
    channel = make(message_bytes=1)
    give(channel, *(node(f"m{number}") for number in range(5)))
    assert [each.batch.num_rows for each in channel.flush(NOW_MS)] == [1] * 5
    two = reports_columns.to_batch([node("a"), node("b")])
    size = pa.ipc.get_record_batch_size(reports_columns.decode(arrow(batch=two))[0])
    fits = make(message_bytes=size)
    fits.add_batch("x", arrow(batch=two), NOW_MS)
    assert [each.batch.num_rows for each in fits.flush(NOW_MS)] == [2]
    halves = make(message_bytes=size - 1)
    halves.add_batch("x", arrow(batch=two), NOW_MS)
    assert [each.batch.num_rows for each in halves.flush(NOW_MS)] == [1, 1]


def test_of_many_reasons_the_most_frequent_are_listed_and_the_rest_summed_up():
    channel = make()
    claims = {f"r{number}": number + 1 for number in range(64)}
    batch(channel, 1, node("a", 1), dropped=claims)
    assert channel.flush(NOW_MS)[0].facts.dropped == claims
    batch(channel, 2, node("a", 2), dropped=claims)
    batch(channel, 3, node("a", 3), dropped={"r64": 100, "r65": 1})
    dropped = channel.flush(NOW_MS)[0].facts.dropped
    assert len(dropped) == 65
    assert dropped["r64"] == 100
    assert dropped["other"] == 1 + 1, "of the reasons that came least often"
    assert sum(dropped.values()) == sum(claims.values()) + 101


def test_the_facts_of_a_message_name_the_channel_and_how_it_was_made():
    channel = make("c", "merge", boot=7)
    give(channel, *(node(f"m{number}", group=f"g{number}") for number in range(200)))
    (forward,) = channel.flush(NOW_MS)
    facts = forward.facts
    assert (facts.channel, facts.boot, facts.sequence, facts.interpreter) == ("c", 7, 1, "merge")
    assert facts.schema == reports_columns.SUMMARY_SCHEMA
    assert len(forward.encode("zstd")) < len(forward.encode())


def test_limits_and_messages_are_values():
    for each in (aggregator.ChannelLimits(), aggregator.ForwardBatch(None, None, None)):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, 1)
        assert not hasattr(each, "__dict__")
    assert channel_channel.MESSAGE_BYTES_MAX < 1 << 20, "the default limit of a broker"
