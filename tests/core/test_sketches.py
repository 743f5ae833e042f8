from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.core.reports import sketches

values = st.lists(st.floats(-1e12, 1e12).filter(lambda v: v == 0 or abs(v) > 1e-9), min_size=1, max_size=60)


def exact(numbers: list[float], share: float) -> float:
    return sorted(numbers)[int(share * (len(numbers) - 1))]


@given(values, st.lists(st.integers(0, 60), max_size=3), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_within_the_error_however_they_were_merged(numbers, cuts, share):
    places = [0, *sorted(min(cut, len(numbers)) for cut in cuts), len(numbers)]
    merged = sketches.QuantileSketch()
    for start, end in itertools.pairwise(places):
        part = sketches.QuantileSketch.of(numbers[start:end])
        merged.merge(sketches.QuantileSketch.from_bytes(bytes(part)))
    expected = exact(numbers, share)
    assert merged.count == len(numbers)
    assert merged.quantile(share) == pytest.approx(expected, rel=1.01 * sketches.RELATIVE_ERROR)


def test_buckets_are_bounded_and_high_quantiles_stay_right():
    numbers = np.exp(np.linspace(-300, 300, 100_000))
    sketch = sketches.QuantileSketch.of(numbers)
    assert len(bytes(sketch)) < 20_000
    assert sketch.quantile(0.99) == pytest.approx(numbers[int(0.99 * 99_999)], rel=0.011)


def test_distinct_is_exact_while_few_and_close_when_many():
    few = sketches.DistinctSketch.of(f"m{i}" for i in range(200))
    few.merge(sketches.DistinctSketch.of(f"m{i}" for i in range(100, 250)))
    assert few.count() == 250
    for count in (300, 5_000, 100_000):
        complete = sketches.DistinctSketch.of(f"m{i}" for i in range(count))
        assert complete.count() == pytest.approx(count, rel=0.06)


def test_merging_distinct_counts_in_any_order_gives_the_same():
    chance = random.Random(4)
    parts = [{f"m{chance.randrange(3000)}" for _ in range(chance.choice([3, 100, 900]))} for _ in range(12)]
    complete = bytes(sketches.DistinctSketch.of(set().union(*parts)))
    for _ in range(5):
        chance.shuffle(parts)
        merged = sketches.DistinctSketch()
        for part in parts:
            merged.merge(sketches.DistinctSketch.from_bytes(bytes(sketches.DistinctSketch.of(part))))
        assert bytes(merged) == complete


@pytest.mark.parametrize(
    "data", [b"x", b"\x93\x00\x80", b"\x93\x00\x81\xce\x00\x01\x00\x00\x01\x80", b"\xff" * 9]
)
def test_rubbish_is_no_sketch(data):
    with pytest.raises(errors.InvalidInput):
        sketches.QuantileSketch.from_bytes(data)
    with pytest.raises(errors.InvalidInput):
        sketches.DistinctSketch.from_bytes(data[:7])


@given(st.floats(1e-300, 1e300))
def test_a_bucket_with_fewer_bits_is_the_union_of_two_buckets(number):
    fine, coarse = (
        int(sketches.buckets(np.array([number]), bits)[0])
        for bits in (sketches.MANTISSA_BITS, sketches.MANTISSA_BITS - 1)
    )
    assert fine >> 1 == coarse
    middle = sketches.middles(np.array([fine]))
    assert sketches.buckets(middle, sketches.MANTISSA_BITS - 1)[0] == coarse
    assert abs(float(middle[0]) - number) <= sketches.RELATIVE_ERROR * number * 1.000001
