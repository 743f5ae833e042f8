"""The arithmetic of `muster capacity --check`."""

import numpy as np

from muster.app.operations import capacity_check
from muster.pipeline import protocol


def batch(number: int, began_s: float, took_s: float, newest_s: float) -> protocol.BatchProgress:
    return protocol.BatchProgress(
        batch=number,
        batch_s=took_s,
        at_ms=int((began_s + took_s) * 1000),
        newest_ms=int(newest_s * 1000),
        trigger_s=10.0,
    )


def test_a_report_is_in_the_root_when_its_batch_is_done_and_catching_up_does_not_count():
    batches = [
        batch(0, 100, 15, 100),  # the first one also starts Spark's workers
        batch(1, 115, 2, 115),  # behind it there was more to read than comes between two triggers
        batch(2, 120, 1, 120),
        batch(3, 130, 2, 130),
        batch(9, 200, 1, 200),  # some are not known
    ]
    steady = capacity_check.steady_batches(batches)
    assert [item.batch for _, item in steady] == [2, 3]
    read = capacity_check.ingest_times(np.array([99.0, 110, 116, 120, 121, 130, 131, 199]), steady)
    assert np.array_equal(read, [np.nan, np.nan, 121, 121, 132, 132, np.nan, np.nan], equal_nan=True)


def test_the_prediction_is_the_sum_of_the_stages():
    stages = {"channels of level 1": 1.0, "Spark's trigger": 10.0, "batch": 2.0}
    actual = capacity_check._checked(stages, np.array([3.0, 8.0, 12.0]), 5)
    assert (actual.predicted_s, actual.measured_s, actual.p50_s, actual.holds) == (13.0, 12.0, 8.0, True)
    assert not capacity_check._checked(stages, np.array([16.5]), 5).holds
