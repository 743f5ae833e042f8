"""`feature_world` with some seeds; ``python -m tests.message.feature_world`` searches more."""

from __future__ import annotations

import pytest

from tests.message import feature_world


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_every_feature_keeps_its_promises_under_faults(first: int):
    problems = {seed: feature_world.run(seed) for seed in range(first, first + 10)}
    assert not any(problems.values()), problems


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_feature_keeps_its_promises_for_long():
    problems = {seed: found for seed in range(100, 2100) if (found := feature_world.run(seed))}
    assert not problems
