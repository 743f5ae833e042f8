from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from muster.core import errors, reports
from muster.simulate import fleet

PLAN = fleet.Plan(machines=2500, period_s=10.0, groups=3, zones=4, seed=7)


def play(made: fleet.Fleet, tick: int = 0, at_ms: int = 1000) -> pa.Table:
    return pa.Table.from_batches([made.batch(slot, tick, at_ms) for slot in made.slots])


def test_the_same_seed_gives_the_same_fleet_in_any_order_and_share():
    whole = play(fleet.Fleet(PLAN), 5)
    assert whole.num_rows == 2500
    assert whole.schema.equals(reports.node_schema())
    shares = [fleet.Fleet(PLAN.share(number, 2)) for number in (2, 1)]
    assert [one.machines for one in shares] == [1500, 1000]
    play(shares[0], 4)
    parts = pa.concat_tables([play(shares[1], 5), play(shares[0], 5)])
    assert parts.equals(whole)
    assert not play(fleet.Fleet(fleet.Plan(machines=2500, seed=8)), 5).equals(whole)


def test_reports_are_valid_and_load_is_correlated():
    made = fleet.Fleet(fleet.Plan(machines=400, groups=2, zones=2, rows_per_message=200))
    rows = reports.from_batch(made.batch(made.slots[0], 3, 1_700_000_000_000))
    assert all(0 <= row.metrics["cpu_percent"] <= 100 for row in rows)
    assert len({row.machine for row in rows}) == 200
    ticks = np.array([play(made, tick)["cpu_percent"].to_numpy() for tick in range(120)])
    first, second = ticks[:, :200].mean(axis=1), ticks[:, 200:].mean(axis=1)
    assert abs(np.corrcoef(ticks[:, 0], ticks[:, 1])[0, 1]) > 0.2  # machines of one group go together
    assert np.corrcoef(first, ticks[:, 5])[0, 1] > np.corrcoef(second, ticks[:, 5])[0, 1]


def test_faults_hit_whom_they_name_while_they_last():
    made = fleet.Fleet(PLAN)
    made.add_fault(fleet.Fault.parse("silent zone=z1 at 20s for 10s"))
    made.add_fault(fleet.Fault.parse("hot group=g2 at 20s"))
    made.add_fault(fleet.Fault.parse("skewed share=0.1 at 20s"))
    assert play(made, 1).num_rows == 2500
    during = play(made, 2)
    assert "z1" not in during["zone"].to_pylist()
    assert during.num_rows == 1875
    hot = during.filter(pa.array([group == "g2" for group in during["group"].to_pylist()]))
    assert min(hot["cpu_percent"].to_pylist()) > 96
    ahead = sum(at == 3_601_000_000 for at in during["reported_at"].cast("int64").to_pylist())
    assert 0.05 < ahead / during.num_rows < 0.15
    assert play(made, 3).num_rows == 2500


def test_a_leak_grows():
    made = fleet.Fleet(PLAN, faults=(fleet.Fault("leak", from_s=0.0),))
    means = [np.mean(play(made, tick)["memory_percent"].to_numpy()) for tick in (0, 10, 30)]
    assert means[1] - means[0] > 10
    assert means[2] > means[1]


@pytest.mark.parametrize("text", ["", "burn", "hot hue=red", "hot share=2", "hot at never", "silent zone="])
def test_what_is_no_fault_is_refused_with_the_list(text):
    with pytest.raises(errors.InvalidInput):
        fleet.Fault.parse(text)
