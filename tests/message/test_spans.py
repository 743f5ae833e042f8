"""What is kept of done numbers, against a plain set."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from muster.message.dispatcher import sequence_set

_numbers = st.integers(1, 60)
_step = st.one_of(
    st.tuples(st.just("add"), _numbers, _numbers),
    st.tuples(st.just("cover"), _numbers, _numbers, st.lists(_numbers).map(sorted)),
    st.tuples(st.just("cut"), _numbers),
)


@given(st.lists(_step, max_size=12))
def test_spans_are_the_sets_they_stand_for(steps: list[tuple[Any, ...]]):
    kept, plain = sequence_set.SequenceSet(), set[int]()
    for what, *arguments in steps:
        match what:
            case "add":
                first, last = sorted(arguments)
                kept.add(first, last)
                plain |= set(range(first, last + 1))
            case "cover":
                first, last = sorted(arguments[:2])
                kept.cover(first, last, arguments[2])
                plain |= set(range(first, last + 1)) - set(arguments[2])
            case "cut":
                kept.cut(arguments[0])
                plain = {number for number in plain if number > arguments[0]}
        assert {number for number in range(70) if number in kept} == plain
        edges = [edge for span in kept for edge in span]
        assert edges == sorted(edges)
        assert all(before + 1 < after for (_, before), (after, _) in zip(kept, list(kept)[1:], strict=False))
