from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import clock

MS = 1_000_000
NOW = 1_700_000_000_000 * MS

names = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
stamps = st.builds(clock.HybridTimestamp, st.integers(0, (1 << 63) - 1), names)


def test_stamps_follow_wall_time_and_count_within_a_millisecond() -> None:
    ours = clock.HybridClock("a")
    first, second, third = ours.now(NOW), ours.now(NOW), ours.now(NOW + MS)
    assert first.time == NOW // MS << 16
    assert second.time == first.time + 1
    assert third.time == (NOW // MS + 1) << 16


@given(st.lists(st.integers(0, 4 * 10**18), min_size=2))
def test_stamps_increase_for_any_wall_clock(readings: list[int]) -> None:
    ours = clock.HybridClock("a")
    issued = [ours.now(reading) for reading in readings]
    assert all(before < after for before, after in itertools.pairwise(issued))


def test_a_counter_that_overflows_runs_into_the_milliseconds() -> None:
    ours = clock.HybridClock("a")
    issued = [ours.now(NOW) for _ in range(70_000)]
    assert issued == sorted(set(issued))
    assert issued[-1].wall_ms == NOW // MS + 1


def test_an_effect_is_stamped_after_its_cause() -> None:
    ahead, behind = clock.HybridClock("ahead"), clock.HybridClock("behind")
    cause = ahead.now(NOW + 30_000 * MS)
    effect = behind.observe(cause, NOW)
    assert effect > cause
    assert behind.now(NOW) > effect
    assert effect.wall_ms == NOW // MS + 30_000


def test_a_stamp_from_a_broken_clock_is_refused_counted_and_changes_nothing() -> None:
    ours = clock.HybridClock("a", max_drift_s=60)
    before = ours.now(NOW)
    with pytest.raises(clock.ClockSkewTooLarge, match=r"3600\.000 s ahead") as caught:
        ours.observe(clock.HybridClock("liar").now(NOW + 3_600_000 * MS), NOW)
    assert caught.value.ahead_s == 3600
    assert ours.refused == 1
    assert ours.now(NOW).time == before.time + 1


@given(st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=40))
def test_no_sequence_of_stamps_drags_a_clock_beyond_its_bound(remote_stamps: list[tuple[int, bool]]) -> None:
    ours = clock.HybridClock("a", max_drift_s=60)
    for ahead_ms, restamped in remote_stamps:
        base = ours.now(NOW).wall_ms if restamped else NOW // MS  # a liar may build upon our own last stamp
        with contextlib.suppress(clock.ClockSkewTooLarge):
            ours.observe(clock.HybridTimestamp((base + ahead_ms) << 16, "liar"), NOW)
        assert ours.now(NOW).wall_ms - NOW // MS <= 60_001


def test_a_clock_set_back_accepts_the_stamps_of_others() -> None:
    ours, other = clock.HybridClock("a", max_drift_s=60), clock.HybridClock("b")
    ours.now(NOW)
    received = other.now(NOW + 1000 * MS)
    assert ours.observe(received, NOW - 3_600_000 * MS) > received
    assert ours.refused == 0


def test_nodes_break_ties_by_name() -> None:
    assert clock.HybridClock("a").now(NOW) < clock.HybridClock("b").now(NOW)


@given(st.lists(stamps, min_size=2))
def test_text_sorts_as_stamps_do(several: list[clock.HybridTimestamp]) -> None:
    assert sorted(several, key=str) == sorted(several)
    digits, _, node = str(several[0]).partition("-")
    assert clock.HybridTimestamp(int(digits, 32), node) == several[0]
