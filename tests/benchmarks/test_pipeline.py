"""What ``bench-pipeline`` decides from its measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks import monitor_rows, pipeline_domain, pipeline_tally
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.fleet import blocks
from muster.pipeline.history import data_files, delta, tables
from muster.simulate import fleet


@pytest.fixture(scope="module")
def sent() -> pa.Table:
    made = fleet.VirtualFleet(monitor_rows.plan(1500, "realistic"), boot=5)
    return pa.Table.from_batches(
        [made.batch(slot, tick, 1_700_000_000_000) for tick in (0, 1) for slot in made.slots]
    )


def tally(rows: pa.Table) -> pipeline_tally.Tally:
    filled = pipeline_tally.Tally(1500)
    filled.add(rows)
    return filled


def test_a_report_lost_and_another_one_doubled_are_seen(sent: pa.Table) -> None:
    first, second = sent.slice(0, 1), sent.slice(1, 1)
    rest = sent.slice(2)
    assert tally(sent).wrong(tally(pa.concat_tables([rest, second, first]))) == 0
    assert tally(sent).wrong(tally(pa.concat_tables([rest, second, second]))) == 2
    assert tally(sent).wrong(tally(pa.concat_tables([rest, second]))) == 1
    assert tally(sent).wrong(tally(pa.concat_tables([sent, second]))) == 1


def test_of_one_machine_too(sent: pa.Table) -> None:
    machine = sent["machine"][0]
    rows = sent.filter(pa.compute.equal(sent["machine"], machine))
    assert rows.num_rows == 2
    doubled = pa.concat_tables([rows.slice(0, 1), rows.slice(0, 1)])
    assert tally(rows).wrong(tally(doubled)) == 2


def test_what_is_in_the_history_is_read(sent: pa.Table, tmp_path: Path) -> None:
    half = sent.num_rows // 2
    for batch, rows in enumerate((sent.slice(0, half), sent.slice(half))):
        pieces = [
            blocks.ReportPiece.from_message(batch, 0, part, columns.BatchInfo()) for part in rows.to_batches()
        ]
        table = pa.Table.from_batches([piece.rows() for piece in pieces])
        written = data_files.write(tmp_path / "history", tables.NODES, table, f"r-{batch}")
        delta.HistoryTable(tmp_path / "history", tables.NODES).commit(written.files, ("r", batch))
    stored = tmp_path / "sent.npz"
    tally(sent).save(stored)
    loaded = pipeline_tally.Tally.load([stored])
    assert loaded.wrong(pipeline_tally.Tally.read(tmp_path / "history", 1500)) == 0


def played(**changes: object) -> pipeline_domain.Played:
    batches = [protocol.BatchProgress(batch=number, batch_s=4.0, lag_s=3.0) for number in range(6)]
    facts = {"behind_max_s": 0.1, "failed": 0, "slow_clocks": 10}
    good = pipeline_domain.Played(
        profile="plain",
        machines=10,
        seconds=60.0,
        rows=60,
        samples=720,
        facts=facts,
        batches=batches,
        before=protocol.BatchProgress(),
        cpu_s={},
        memory_bytes=1,
        caught_up_s=5.0,
        system_late_s=[],
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def batch(batch_s: float = 4.0, lag_s: float = 3.0, late: int = 0) -> protocol.BatchProgress:
    return protocol.BatchProgress(batch_s=batch_s, lag_s=lag_s, counts={"late": late})


def test_a_fleet_holds() -> None:
    assert played().faults() == []
    assert played(batches=[batch(late=10)]).faults() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batches": [batch(), batch(batch_s=10.5), batch()]}, "a batch of 10.5 s"),
        ({"batches": [batch(lag_s=3.0 + 2 * number) for number in range(9)]}, "the lag grew"),
        ({"batches": []}, "a batch of inf s"),
        ({"batches": [batch(late=11)]}, "11 late reports"),
        ({"caught_up_s": 30.0}, "30.0 s behind at the end"),
        ({"dropped": {"overload": 3}}, "channels dropped"),
        ({"facts": {"behind_max_s": 11.0, "failed": 0, "slow_clocks": 0}}, "the generator was 11.0 s behind"),
        ({"facts": {"behind_max_s": 0.0, "failed": 2, "slow_clocks": 0}}, "2 messages failed"),
    ],
)
def test_a_fleet_does_not_hold(changes: dict[str, object], why: str) -> None:
    assert any(fault.startswith(why) for fault in played(**changes).faults())


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([(1005, 4.0)], []),
        ([(1005, 14.0)], []),  # begun in the warm-up
        ([(1015, 11.0)], ["a batch of 11.0 s"]),
        ([(985, 4.0)], ["no batch ended for 30 s"]),
        ([], ["no batch ended for 30 s"]),
    ],
)
def test_a_fleet_that_cannot_hold_any_more_ends_at_once(
    batches: list[tuple[int, float]], why: list[str]
) -> None:
    done = [protocol.BatchProgress(at_ms=at_s * 1000, batch_s=batch_s) for at_s, batch_s in batches]
    assert pipeline_domain.stuck(done, now_s=1030, begun_s=1000) == why
