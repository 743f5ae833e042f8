from __future__ import annotations

import pytest

from tests.inform import simulation


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_nothing_acknowledged_is_lost_one_primary_at_a_time_and_copies_come_back(first: int):
    acknowledged = sum(
        len(versions)
        for seed in range(first, first + 10)
        for versions in simulation.run(seed).acknowledged.values()
    )
    assert acknowledged > 100, "there was something to lose"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_a_thousand_seeds(first: int):
    for seed in range(first, first + 50):
        simulation.run(seed)


def test_a_seed_is_a_run():
    assert simulation.run(3).history == simulation.run(3).history
