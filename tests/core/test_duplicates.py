"""Repeats are recognised against a model that remembers everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from muster.core import duplicates
from muster.core.duplicates import DuplicateVerdict
from muster.core.reports import duplicate_columns


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from((7, 3)), st.integers(0, 100)), max_size=200))
def test_an_item_is_new_once_and_late_only_outside_the_window(items):
    windows = duplicates.DuplicateWindows(10)
    seen: set[tuple[str, int, int]] = set()
    for source, boot, sequence in items:
        highest = max((number for *run, number in seen if run == [source, boot]), default=sequence)
        verdict = windows.observe(source, boot, sequence)
        if highest - sequence >= duplicates.KEPT:
            assert verdict is DuplicateVerdict.LATE
        else:
            assert (verdict is DuplicateVerdict.NEW) == ((source, boot, sequence) not in seen)
            assert (verdict is DuplicateVerdict.DUPLICATE) == ((source, boot, sequence) in seen)
        if verdict is DuplicateVerdict.NEW:
            seen.add((source, boot, sequence))
        windows = duplicates.DuplicateWindows(10, windows.remembered())


def test_two_boots_of_a_source_are_remembered():
    windows = duplicates.DuplicateWindows(10)
    assert [windows.observe("a", boot, 1) for boot in (1, 2, 1, 2)] == [
        DuplicateVerdict.NEW,
        DuplicateVerdict.NEW,
        DuplicateVerdict.DUPLICATE,
        DuplicateVerdict.DUPLICATE,
    ]
    assert windows.observe("a", 3, 1) is DuplicateVerdict.NEW
    assert windows.observe("a", 2, 1) is DuplicateVerdict.DUPLICATE
    assert windows.observe("a", 1, 1) is DuplicateVerdict.NEW  # two restarts ago


def test_memory_is_bounded():
    high, bits = 0, 1
    for sequence in range(1, 3 * duplicates.KEPT):
        _, high, bits = duplicates.observe(high, bits, sequence)
    assert bits == (1 << 64) - 1
    windows = duplicates.DuplicateWindows(2)
    for source in ("a", "b", "c"):
        windows.observe(source, 1, 1)
    assert list(windows.remembered()) == ["b", "c"]
    windows.observe("b", 1, 2)
    assert list(windows.remembered()) == ["b", "c"]


def test_a_far_jump_forgets_what_was_before():
    assert duplicates.observe(1, 1, 1 + duplicates.KEPT) == (DuplicateVerdict.NEW, 1 + duplicates.KEPT, 1)
    assert duplicates.observe(1, 1, duplicates.KEPT) == (
        DuplicateVerdict.NEW,
        duplicates.KEPT,
        1 << (duplicates.KEPT - 1) | 1,
    )


@given(
    st.lists(st.tuples(st.integers(-1, 300), st.integers(0, (1 << 64) - 1), st.integers(0, 300)), min_size=1)
)
def test_arrays_are_observed_like_single_numbers(states):
    high, bits, sequence = zip(*states, strict=True)
    new, highest, marked = duplicate_columns.observe(
        np.array(high), np.array(bits, np.uint64), np.array(sequence)
    )
    for index, state in enumerate(states):
        verdict, *after = duplicates.observe(*state)
        assert new[index] == (verdict is DuplicateVerdict.NEW)
        assert [int(highest[index]), int(marked[index])] == after


def test_a_window_of_another_length():
    verdicts = [duplicates.observe(1000, 1, sequence, 1024)[0] for sequence in (1000, 1, -23, -24)]
    assert verdicts == [
        DuplicateVerdict.DUPLICATE,
        DuplicateVerdict.NEW,
        DuplicateVerdict.NEW,
        DuplicateVerdict.LATE,
    ]
    assert duplicates.observe(0, 1, 5000, 1024) == (DuplicateVerdict.NEW, 5000, 1)


SEQUENCES = st.lists(st.integers(0, 100), min_size=1, max_size=30)


@given(SEQUENCES, SEQUENCES)
def test_a_union_knows_what_either_window_has_seen(seen_first, seen_other):
    first, other = (_windows(c=[(7, number) for number in numbers]) for numbers in (seen_first, seen_other))
    joined = duplicates.DuplicateWindows.union(10, first, other)
    ((boot, high, bits),) = joined.remembered()["c"]
    assert (boot, high) == (7, max(*seen_first, *seen_other))
    assert bits < 1 << duplicates.KEPT
    # Which of the numbers a window has counted is known from its bits: some came too late for it.
    counted = [
        {window_high - place for place in range(duplicates.KEPT) if window_bits >> place & 1}
        for window in (first, other)
        for _, window_high, window_bits in window.remembered()["c"]
    ]
    for number in range(high - duplicates.KEPT + 1, high + 1):
        is_known = duplicates.observe(high, bits, number)[0] is DuplicateVerdict.DUPLICATE
        assert is_known == any(number in numbers for numbers in counted)


def test_a_union_has_the_sources_of_both_and_drops_the_oldest_over_its_limit():
    first, other = _windows(a=[(1, 1)], b=[(1, 1)]), _windows(c=[(1, 1)])
    union = duplicates.DuplicateWindows.union
    assert list(union(4, first, other).remembered()) == ["a", "b", "c"]
    assert list(union(3, first, other).remembered()) == ["a", "b", "c"]
    assert list(union(2, first, other).remembered()) == ["b", "c"]
    assert list(first.remembered()) == ["a", "b"], "the windows themselves are not changed"


def test_a_union_keeps_the_two_latest_boots_of_a_source():
    both, one, others = (
        _windows(a=[(boot, 5) for boot in boots]).remembered()["a"] for boots in ((1, 2), (1,), (3, 4))
    )

    def boots(first: list[duplicates.Seen], other: list[duplicates.Seen]) -> list[int]:
        windows = (duplicates.DuplicateWindows(10, {"a": list(seen)}) for seen in (first, other))
        return [seen[0] for seen in duplicates.DuplicateWindows.union(10, *windows).remembered()["a"]]

    assert boots(both, one) == boots(one, both) == [2, 1], "the window that knows more has the later boots"
    assert boots(both, others) == [2, 1]
    assert boots(others, both) == [4, 3], "neither knows more: the first counts"
    assert boots(others, one) == [4, 3]


def _windows(**seen: list[tuple[int, int]]) -> duplicates.DuplicateWindows:
    windows = duplicates.DuplicateWindows(10)
    for source, items in seen.items():
        for boot, sequence in items:
            windows.observe(source, boot, sequence)
    return windows


SEQUENCES = st.lists(st.integers(0, 150) | st.sampled_from([1 << 40, (1 << 40) + 5, (1 << 62) - 1]))


@given(SEQUENCES, SEQUENCES)
def test_joined_windows_have_the_items_of_both(first, other):
    """However far ahead of the other a source has counted in one of them."""
    windows = duplicates.DuplicateWindows(10), duplicates.DuplicateWindows(10)
    for window, sequences in zip(windows, (first, other), strict=True):
        for sequence in sequences:
            window.observe("a", 1, sequence)
    joined = duplicates.DuplicateWindows.union(10, *windows)
    highest = max([*first, *other], default=0)
    for sequence in range(max(0, highest - duplicates.KEPT + 1), highest + 1):
        seen = sequence in first or sequence in other
        state = duplicates.DuplicateWindows(10, {"a": list(joined.remembered().get("a", []))})
        expected = DuplicateVerdict.DUPLICATE if seen else DuplicateVerdict.NEW
        assert state.observe("a", 1, sequence) is expected
