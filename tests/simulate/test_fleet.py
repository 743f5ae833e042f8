from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from muster.core import errors
from muster.core.reports import columns
from muster.simulate import fleet

PLAN = fleet.FleetPlan(machines=2500, period_s=10.0, groups=3, zones=4, seed=7)


def play(made: fleet.VirtualFleet, tick: int = 0, at_ms: int = 1000) -> pa.Table:
    return pa.Table.from_batches([made.batch(slot, tick, at_ms) for slot in made.slots])


def test_the_same_seed_gives_the_same_fleet_in_any_order_and_share():
    table = play(fleet.VirtualFleet(PLAN), 5)
    assert table.num_rows == 2500
    assert table.schema.equals(columns.node_schema())
    shares = [fleet.VirtualFleet(PLAN.share(number, 2)) for number in (2, 1)]
    assert [share.machines for share in shares] == [1500, 1000]
    play(shares[0], 4)
    parts = pa.concat_tables([play(shares[1], 5), play(shares[0], 5)])
    assert parts.equals(table)
    assert not play(fleet.VirtualFleet(fleet.FleetPlan(machines=2500, seed=8)), 5).equals(table)


def test_reports_are_valid_and_load_is_correlated():
    made = fleet.VirtualFleet(fleet.FleetPlan(machines=400, groups=2, zones=2, rows_per_message=200))
    rows = columns.from_batch(made.batch(made.slots[0], 3, 1_700_000_000_000))
    assert all(0 <= row.metrics["cpu_percent"] <= 100 for row in rows)
    assert len({row.machine for row in rows}) == 200
    ticks = np.array([play(made, tick)["cpu_percent"].to_numpy() for tick in range(120)])
    first, second = ticks[:, :200].mean(axis=1), ticks[:, 200:].mean(axis=1)
    assert abs(np.corrcoef(ticks[:, 0], ticks[:, 1])[0, 1]) > 0.2  # machines of one group go together
    assert np.corrcoef(first, ticks[:, 5])[0, 1] > np.corrcoef(second, ticks[:, 5])[0, 1]


def test_faults_affect_only_their_targets_and_only_while_they_last():
    made = fleet.VirtualFleet(PLAN)
    made.add_fault(fleet.FleetFault.parse("silent zone=z1 at 20s for 10s"))
    made.add_fault(fleet.FleetFault.parse("hot group=g2 at 20s"))
    made.add_fault(fleet.FleetFault.parse("skewed share=0.1 at 20s"))
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
    made = fleet.VirtualFleet(PLAN, faults=(fleet.FleetFault("leak", from_s=0.0),))
    means = [np.mean(play(made, tick)["memory_percent"].to_numpy()) for tick in (0, 10, 30)]
    assert means[1] - means[0] > 10
    assert means[2] > means[1]


REALISTIC = fleet.FleetPlan(machines=20_000, groups=1000, zones=40, seed=3, profile="realistic")


@pytest.fixture(scope="module")
def realistic_fleet() -> fleet.VirtualFleet:
    return fleet.VirtualFleet(REALISTIC, boot=100)


def test_a_realistic_fleet_is_the_same_in_any_order_and_share(realistic_fleet: fleet.VirtualFleet):
    table = play(realistic_fleet, 70)
    shares = [fleet.VirtualFleet(REALISTIC.share(number, 2), boot=100) for number in (2, 1)]
    play(shares[0], 3)
    parts = pa.concat_tables([play(shares[1], 70), play(shares[0], 70)])
    assert parts.combine_chunks().equals(table.combine_chunks())
    assert table.schema.equals(columns.node_schema())


def test_realistic_groups_and_zones_are_uneven_and_mixed_in_messages(realistic_fleet: fleet.VirtualFleet):
    table = play(realistic_fleet)
    for column, count, largest in (("group", 1000, 0.13), ("zone", 40, 0.23)):
        sizes = np.sort(np.unique(table[column].to_numpy(zero_copy_only=False), return_counts=True)[1])
        assert 0.9 * count < len(sizes) <= count
        assert sizes[-1] / table.num_rows == pytest.approx(largest, rel=0.1)
        assert np.median(sizes) < np.mean(sizes) / 2
    first = realistic_fleet.batch(realistic_fleet.slots[0], 0, 1000)
    assert len(first["group"].unique()) > 200


def test_realistic_machines_have_20_to_50_metrics_and_counters_grow(realistic_fleet: fleet.VirtualFleet):
    slot = realistic_fleet.slots[0]
    ticks = [
        {row.machine: row for row in columns.from_batch(realistic_fleet.batch(slot, tick, 1_700_000_000_000))}
        for tick in range(3)
    ]
    assert {len(row.metrics) for row in ticks[0].values()} == {20, 34, 42, 50}
    counted = 0
    for machine in ticks[0].keys() & ticks[1].keys() & ticks[2].keys():
        before, now, after = (tick[machine] for tick in ticks)
        if before.boot == after.boot:
            counted += 1
            for name in before.metrics:
                if name.endswith("_total"):
                    assert before.metrics[name] < now.metrics[name] < after.metrics[name]
    assert counted > 900


def test_realistic_machines_reboot_fall_silent_move_and_have_wrong_clocks(
    realistic_fleet: fleet.VirtualFleet,
):
    """Over ten minutes: 1 % reboot, 1 % move; at any time 2 % are silent; 0.5 % of the clocks are wrong."""
    before, after = (play(realistic_fleet, tick, 1_000_000) for tick in (0, 60))
    assert all(0.97 < table.num_rows / REALISTIC.machines < 0.99 for table in (before, after))
    both = before.select(["machine", "boot", "sequence", "group"]).join(
        after.select(["machine", "boot", "sequence", "group"]),
        "machine",
        join_type="inner",
        right_suffix="_after",
    )
    boots, sequence = (
        both[f"{name}_after"].to_numpy() - both[name].to_numpy() for name in ("boot", "sequence")
    )
    rebooted = boots == 1
    assert set(boots) == {0, 1}
    assert 0.005 < np.mean(rebooted) < 0.015
    assert set(sequence[~rebooted]) == {60}
    assert sequence[rebooted].max() < 55, "numbers begin anew, after a minute"
    moved = np.mean(
        both["group"].to_numpy(zero_copy_only=False) != both["group_after"].to_numpy(zero_copy_only=False)
    )
    assert 0.005 < moved < 0.015
    off_ms = np.abs(after["reported_at"].cast("int64").to_numpy() / 1000 - 1_000_000)
    assert 0.003 < np.mean(off_ms > 50) < 0.007
    assert off_ms.max() < 30_001


def test_a_plan_describes_its_load():
    assert "2,500 machines every 10 s, 3 groups" in PLAN.describe()
    text = REALISTIC.describe()
    for part in ("1,000 groups (the largest 13%)", "20 to 50 metrics", "1% reboot and 1% move", "2% silent"):
        assert part in text


@pytest.mark.parametrize("text", ["", "burn", "hot hue=red", "hot share=2", "hot at never", "silent zone="])
def test_what_is_no_fault_is_refused_with_the_list(text):
    with pytest.raises(errors.InvalidInput):
        fleet.FleetFault.parse(text)
