"""bench-message measures every subscriber, and a lost delivery is no sample."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measure, message, message_peers
from muster.bus.brokers import broker as brokers
from muster.core import errors


async def test_the_delays_of_every_subscriber_are_counted(broker: brokers.Broker):
    with contextlib.ExitStack() as stack:
        publisher, subscriber = (
            stack.enter_context(measure.Worker(message.WORKER, role, broker.url))
            for role in ("publisher", "subscriber")
        )
        subscriber.tell([2, 5])
        publisher.hear()
        subscriber.hear()
        for count in (3, 4):  # one run begins where the last one ended
            publisher.tell([count, 100, 0])
            publisher.hear()
            subscriber.tell([count])
            delays_us = subscriber.hear()["delays_us"]
            assert [len(delays) for delays in delays_us] == [count] * 5
            assert min(map(min, delays_us)) > 0


def test_a_subscriber_that_is_served_last_shows_in_the_slowest_p99_only():
    delays = np.full((100, 1000), 10, np.int32)
    delays[7] = 500
    assert message_peers.p50(delays) == 10
    assert message_peers.p99(delays) == 10
    assert message_peers.slowest_p99(delays) == 500


def test_a_delivery_that_did_not_arrive_is_an_error_and_no_sample(tmp_path: Path):
    file = tmp_path / "delays"
    np.array([[3, 4], [5, 6]], "<i4").tofile(file)
    assert message_peers.read_delays(file, 2).tolist() == [[3, 4], [5, 6]]
    np.array([[3, 4], [5, -1]], "<i4").tofile(file)
    with pytest.raises(errors.InvariantViolation, match="1 of 4 deliveries did not arrive"):
        message_peers.read_delays(file, 2)


def test_a_full_run_has_a_thousand_messages_for_each_percentile():
    assert all(cell.rate * cell.seconds >= 1000 for cell in message_peers.FULL.cells)
