"""Machines that a user removes from the fleet."""

import msgspec
import pyarrow as pa
import pytest

from muster.bus import api
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, removal, state
from muster.pipeline.source import shard_keys
from muster.web.data.measurements import latest_reports
from tests.pipeline import traffic

T0 = 1_700_000_000_000


def fleet() -> state.FleetState:
    silent = rules.AlertRule(name="silent", scope="node", when="age_s > 30")
    known = state.FleetState(state.FleetStatePlan(rules=(silent,), delay_s=5.0))
    rows = [traffic.report(f"m{n}", 1, T0, group="old" if n < 3 else "new") for n in range(5)]
    batch = columns.to_batch(rows)
    known.feed([blocks.ReportPiece.from_message(1, T0, batch, columns.BatchInfo())], T0)
    assert len(known.feed([], T0 + 60_000).changes) == 5
    return known


def test_a_removal_ends_the_alerts_of_machines_and_their_groups():
    known = fleet()
    request = removal.MachineRemoval(machines=("m1", "m4", "never-seen"), at_ms=T0 + 70_000)
    output = known.feed([], T0 + 71_000, removals=[request])
    assert sorted(output.removed) == ["m1", "m4"]
    assert sorted((change.machine, change.on) for change in output.changes) == [("m1", False), ("m4", False)]
    assert output.machines == 3
    where = removal.MachineRemoval(where="group = 'old' AND age_s > 10", at_ms=T0 + 80_000)
    output = known.feed([], T0 + 90_000, removals=[where])
    assert sorted(output.removed) == ["m0", "m2"]
    assert [window.names for window in output.closed if window.gone and window.scope == "group"] == [["old"]]


def test_a_machine_that_reported_after_the_removal_stays():
    known = fleet()
    batch = columns.to_batch([traffic.report("m1", 2, T0 + 60_000, group="old")])
    piece = blocks.ReportPiece.from_message(2, T0 + 65_000, batch, columns.BatchInfo())
    request = removal.MachineRemoval(machines=("m0", "m1"), at_ms=T0 + 64_000)
    assert known.feed([piece], T0 + 66_000, removals=[request]).removed == ["m0"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"machines": ("a",), "where": "TRUE"},
        {"where": "colour = 'red'"},
        {"where": "cpu_percent > 5"},
        {"where": "("},
    ],
)
def test_a_removal_without_a_valid_selection_is_refused(given):
    with pytest.raises(errors.InvalidInput):
        removal.MachineRemoval(**given).validate()


def test_only_the_pipeline_itself_removes_machines():
    body = msgspec.json.encode(removal.MachineRemoval(machines=("m1",)))
    own, other = protocol.removal("pipeline"), protocol.removal("c1")
    messages = [
        api.StoredMessage(subject, data, {}, number, T0 * 1_000_000)
        for number, (subject, data) in enumerate([(own, body), (other, body), (own, b"{"), (own, b"{}")], 1)
    ]
    (batch,) = shard_keys.with_shard_key(messages, [0, 1], 2, removal_subject=own)
    rows = batch.to_pylist()
    assert [msgspec.json.decode(row["removals"]) for row in rows] == [
        [{"machines": ["m1"], "where": "", "at_ms": T0}]
    ] * 2
    counts = msgspec.json.decode(rows[0]["counts"])
    assert sum(counts.values()) == 3
    assert rows[1]["counts"] is None


async def test_the_dashboard_drops_removed_machines_unless_they_report_again():
    latest = latest_reports.LatestReports()
    latest.add(columns.to_batch([traffic.report(f"m{n}", 1, T0 + n) for n in range(4)]))
    latest.remove(["m0", "m2", "m3"], T0 + 2)
    table = await latest.table()
    assert sorted(table.column("machine").to_pylist()) == ["m1", "m3"]
    assert isinstance(table, pa.Table)
