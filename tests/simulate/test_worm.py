"""The worm's spread, as plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from muster.core import errors
from muster.demo import web_farm, worm

PLAN = worm.WormPlan(servers=2_000, seed=7)


def test_unhindered_it_takes_every_server_with_the_hole_and_no_other():
    curve = worm.spread_unchecked(PLAN, 200)
    assert curve[-1] == int(worm.WormFarm(PLAN).has_hole.sum())
    assert curve == sorted(curve)
    assert curve == worm.spread_unchecked(PLAN, 200)  # seeded


def test_farms_that_share_a_fleet_are_the_fleet():
    farm = worm.WormFarm(PLAN)
    parts = [
        worm.WormFarm(PLAN, first, count) for _, first, count in web_farm.split_farm("farm", PLAN.servers, 3)
    ]
    assert np.array_equal(np.concatenate([part.version for part in parts]), farm.version)
    assert [name for part in parts for name in part.names] == farm.names
    farm.release()
    assert sum(len(part.release()) for part in parts) == farm.fallen == PLAN.first_infected


def test_only_the_infected_try_others():
    farm = worm.WormFarm(PLAN)
    assert len(farm.attempts(60)) == 0
    fallen = farm.release()
    assert len(farm.attempts(60)) > 0
    farm.isolate(fallen.tolist())
    assert len(farm.attempts(60)) == 0


def test_what_is_patched_or_has_no_hole_does_not_fall():
    farm = worm.WormFarm(PLAN)
    farm.patch(np.flatnonzero(farm.has_hole)[:10].tolist())
    safe = np.flatnonzero(~farm.has_hole | (farm.condition == worm.ServerCondition.PATCHED))
    assert len(farm.struck(safe)) == 0
    assert len(farm.struck(np.arange(PLAN.servers))) == PLAN.servers - len(safe)


def test_an_infected_server_has_to_be_isolated_before_it_can_be_patched():
    farm = worm.WormFarm(PLAN)
    (first, *_) = farm.release().tolist()
    farm.patch([first])
    assert farm.condition[first] == worm.ServerCondition.INFECTED
    farm.isolate([first])
    farm.patch([first])
    assert farm.condition[first] == worm.ServerCondition.PATCHED
    assert farm.fallen == PLAN.first_infected


@pytest.mark.parametrize("wrong", [{"servers": 0}, {"first_infected": 0}, {"shares": (0.5, 0.2, 0.2)}])
def test_a_plan_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(errors.InvalidInput):
        worm.WormPlan(**wrong)
