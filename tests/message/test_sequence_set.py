"""`SequenceSet` compared with a plain set of numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from muster.message.dispatcher.index import sequence_set

_numbers = st.integers(1, 60)
_step = st.one_of(
    st.tuples(st.just("add"), _numbers, _numbers),
    st.tuples(st.just("cover"), _numbers, _numbers, st.lists(_numbers).map(sorted)),
    st.tuples(st.just("cut"), _numbers),
)


@given(st.lists(_step, max_size=12))
def test_a_sequence_set_contains_what_a_plain_set_does(steps: list[tuple[Any, ...]]):
    ranges, plain = sequence_set.SequenceSet(), set[int]()
    for what, *arguments in steps:
        match what:
            case "add":
                first, last = sorted(arguments)
                ranges.add(first, last)
                plain |= set(range(first, last + 1))
            case "cover":
                first, last = sorted(arguments[:2])
                ranges.cover(first, last, arguments[2])
                plain |= set(range(first, last + 1)) - set(arguments[2])
            case "cut":
                ranges.cut(arguments[0])
                plain = {number for number in plain if number > arguments[0]}
        assert {number for number in range(70) if number in ranges} == plain
        edges = [edge for pair in ranges for edge in pair]
        assert edges == sorted(edges)
        assert all(
            before + 1 < after for (_, before), (after, _) in zip(ranges, list(ranges)[1:], strict=False)
        )
