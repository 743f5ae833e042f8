"""The costs that the benchmark of the monitor derives from its measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import monitor
from muster.core import errors


@given(st.floats(1e-6, 1e-2), st.floats(1e-7, 1e-3))
def test_the_costs_are_found_again_from_measurements(message_s, row_s):
    points = [(m, m * r, m * message_s + m * r * row_s) for m, r in ((1000, 1), (100, 10), (10, 1000))]
    actual = monitor.fit(points)
    assert actual.message_s == pytest.approx(message_s, rel=1e-3)
    assert actual.row_s == pytest.approx(row_s, rel=1e-3)
    with pytest.raises(errors.InvalidInput):
        monitor.fit([(10, 10, 1), (20, 20, 2)])
