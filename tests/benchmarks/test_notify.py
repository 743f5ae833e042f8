"""bench-notify: addresses that are new for each event, beside repeated ones."""

from __future__ import annotations

import random

import pytest

from benchmarks import notify, notify_world
from muster.notify.matcher import kernels_numpy


@pytest.mark.parametrize("share", notify.SHARES)
def test_new_addresses_all_differ(share: str):
    dice = random.Random(1)
    texts = [notify_world.address(dice, share, digits=9) for _ in range(2000)]
    assert len(set(texts)) == len(texts)


def test_repeated_and_new_addresses_are_timed_for_every_event():
    held = notify_world.build(500, 10, kernels_numpy)
    work = notify._work(held, "1%", 20)
    repeated = notify._repeated(held, work, rounds=2)
    assert repeated.samples == len(repeated.cpu) == 40
    fresh = notify.Fresh(held, "1%", 30)
    assert fresh().samples == 30
    pooled = notify.Times.pooled([repeated, fresh()])
    assert pooled.samples == 70
    assert min(pooled.wall) <= pooled.p50 <= max(pooled.wall)
