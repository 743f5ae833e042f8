from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import clock, errors

MS = 1_000_000
NOW = 1_700_000_000_000 * MS

names = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
stamps = st.builds(clock.HybridTimestamp, st.integers(0, (1 << 63) - 1), names)


def test_stamps_follow_wall_time_and_count_within_a_millisecond() -> None:
    ours = clock.HybridClock("a")
    first, second, third = ours.now(NOW), ours.now(NOW), ours.now(NOW + MS)
    assert (first.wall_ms, first.counter) == (NOW // MS, 0)
    assert (second.wall_ms, second.counter) == (NOW // MS, 1)
    assert (third.wall_ms, third.counter) == (NOW // MS + 1, 0)


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
    assert behind.ahead_s(NOW) == pytest.approx(30.0, abs=0.01)


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
        assert ours.ahead_s(NOW) <= 60.001


def test_a_clock_set_back_still_believes_the_others() -> None:
    ours, other = clock.HybridClock("a", max_drift_s=60), clock.HybridClock("b")
    ours.now(NOW)
    received = other.now(NOW + 1000 * MS)
    assert ours.observe(received, NOW - 3_600_000 * MS) > received
    assert ours.refused == 0


def test_nodes_break_ties_by_name() -> None:
    assert clock.HybridClock("a").now(NOW) < clock.HybridClock("b").now(NOW)


@given(st.lists(stamps, min_size=2))
def test_text_and_bytes_read_back_and_sort_as_stamps_do(several: list[clock.HybridTimestamp]) -> None:
    for stamp in several:
        assert clock.HybridTimestamp.parse(str(stamp)) == stamp
        assert clock.HybridTimestamp.from_bytes(bytes(stamp)) == stamp
    in_order = sorted(several)
    assert sorted(several, key=str) == in_order
    assert sorted(several, key=bytes) == in_order


@pytest.mark.parametrize(
    "text", ["", "x", "0" * 13, "0" * 13 + "-", "0" * 13 + "-a.b", "V" * 13 + "-a", "w" * 13 + "-a"]
)
def test_what_is_no_stamp_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        clock.HybridTimestamp.parse(text)


@given(st.one_of(st.text(max_size=40).map(str.encode), st.binary(max_size=40)))
def test_any_bytes_are_a_stamp_or_a_clear_error(data: bytes) -> None:
    try:
        stamp = clock.HybridTimestamp.from_bytes(data)
    except errors.InvalidInput:
        return
    assert bytes(stamp) == data


class Node:
    """A node with a disk, which may crash at any moment."""

    def __init__(self) -> None:
        self.disk = str(clock.ClockReservation())
        self.start()

    def start(self) -> None:
        self.clock = clock.HybridClock("n", stored=clock.ClockReservation.parse(self.disk), reserve_s=10)

    def stamp(self, wall_ns: int) -> clock.HybridTimestamp:
        if (reservation := self.clock.to_store(wall_ns)) is not None:
            self.disk = str(reservation)
            self.clock.stored(reservation)
        return self.clock.now(wall_ns)


@given(st.lists(st.tuples(st.integers(-20_000, 20_000), st.booleans()), min_size=1, max_size=60))
def test_a_crash_never_repeats_a_stamp(steps: list[tuple[int, bool]]) -> None:
    node, wall_ns, issued = Node(), NOW, list[clock.HybridTimestamp]()
    for step_ms, crash in steps:
        wall_ns += step_ms * MS
        issued.append(node.stamp(wall_ns))
        if crash:
            node.start()
    assert all(before < after for before, after in itertools.pairwise(issued))


def test_a_crash_between_deciding_and_storing_is_safe() -> None:
    node = Node()
    last = node.stamp(NOW)
    assert node.clock.to_store(NOW + 9_000 * MS) is not None  # never written
    node.start()
    assert node.stamp(NOW - 60_000 * MS) > last


def test_without_room_below_the_ceiling_no_stamp_is_issued() -> None:
    ours = clock.HybridClock("n", stored=clock.ClockReservation())
    with pytest.raises(errors.Unavailable):
        ours.now(NOW)
    reservation = ours.to_store(NOW)
    assert reservation is not None
    ours.stored(reservation)
    assert ours.now(NOW).time < reservation.ceiling
    assert ours.to_store(NOW) is None
    with pytest.raises(errors.Unavailable):
        ours.now(NOW + 10_000 * MS)


def test_restarts_in_a_row_do_not_add_up() -> None:
    stored, last = clock.ClockReservation(), clock.HybridTimestamp(0, "n")
    peer = clock.HybridClock("peer")
    for number in range(50):
        wall_ns = NOW + number * 200 * MS
        ours = clock.HybridClock("n", stored=stored)
        if (reservation := ours.to_store(wall_ns)) is not None:
            stored = reservation
            ours.stored(reservation)
        stamp = ours.now(wall_ns)
        peer.check(stamp, wall_ns)
        assert stamp > last
        assert ours.ahead_s(wall_ns) <= 10.1
        last = stamp


def test_a_stamp_of_a_peer_that_is_ahead_is_observed_after_another_reservation() -> None:
    ours = clock.HybridClock("n", stored=clock.ClockReservation())
    ahead = clock.HybridTimestamp((NOW // MS + 55_000) << 16, "fast")

    def store() -> clock.ClockReservation:
        reservation = ours.to_store(NOW)
        assert reservation is not None
        ours.stored(reservation)
        return reservation

    store()
    with pytest.raises(errors.Unavailable):
        ours.observe(ahead, NOW)
    stored = store()
    assert ours.observe(ahead, NOW) > ahead
    again = clock.HybridClock("n", stored=stored)
    more = again.to_store(NOW)
    assert more is not None
    again.stored(more)
    clock.HybridClock("peer").check(again.now(NOW), NOW)  # not too far ahead, also after a restart


def test_one_write_serves_for_half_the_reserved_time() -> None:
    node, writes = Node(), set[str]()
    for ms in range(0, 60_000, 10):
        node.stamp(NOW + ms * MS)
        writes.add(node.disk)
    assert len(writes) <= 13


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "-1 0", "x y", "9" * 19 + " 1", "1" * 30 + " 0"])
def test_a_damaged_reservation_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        clock.ClockReservation.parse(text)


def test_a_reservation_longer_than_the_drift_others_accept_is_refused() -> None:
    with pytest.raises(errors.InvalidInput, match="below max_drift_s"):
        clock.HybridClock("n", max_drift_s=5, reserve_s=5)
