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
