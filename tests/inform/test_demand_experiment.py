"""The paper's dynamic-replication experiment, small: half of the contexts move to their readers, then all."""

from __future__ import annotations

import pytest

from benchmarks import inform_demand


@pytest.mark.may_block(reason="time is virtual")
def test_half_of_the_contexts_move_to_their_readers_and_then_all():
    samples = inform_demand.experiment(20, 25)
    half, all_ = (inform_demand.first_minute(samples, share) for share in (0.5, 1.0))
    assert 100 / 60 < half < all_ <= 25
    assert samples[-1].mean_ms < samples[0].mean_ms / 5
    peak = max(samples, key=lambda sample: sample.deviation_ms)
    assert 0.1 < peak.moved < 1, "accesses differ most while some contexts are here and some there"
    moved = [sample.moved for sample in samples]
    assert moved == sorted(moved), "none goes back"
