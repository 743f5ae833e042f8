"""Maintenance of the history in a process of its own, step by step with the permission of the driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline.history import maintenance, maintenance_process
from muster.pipeline.job import history_upkeep
from tests.pipeline import test_history, traffic


class ExpiringLease:
    """The driver's lease, which is lost after a number of checks."""

    epoch = 1

    def __init__(self, checks: int) -> None:
        self.left = checks

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise errors.StaleEpoch("superseded", epoch=1, current=2)

    async def confirm(self) -> None: ...


LATER_MS = test_history.T0 + 86_400_000


def upkeep(
    root: Path,
    checks: int = 100,
    limits: maintenance.MaintenanceLimits = maintenance.UNLIMITED,
    clock_ms: int = LATER_MS,
) -> history_upkeep.HistoryUpkeep:
    return history_upkeep.HistoryUpkeep(
        str(root), limits, ExpiringLease(checks), log.EventLog("pipeline"), lambda: clock_ms
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for batch in range(3):
        test_history.store(tmp_path, batch, [traffic.report("m", batch + 1, test_history.T0 + batch * 1000)])
    return tmp_path


async def test_a_process_with_a_lower_priority_maintains_the_tables(root, monkeypatch):
    done = await upkeep(root).maintain(with_vacuum=True)
    assert (done["hours"], done["compacted"]) == (1, 3)
    assert len(test_history.read(root)) == 3
    raised: list[int] = []
    monkeypatch.setattr(os, "nice", raised.append)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(AttributeError):
        maintenance_process.main()
    assert raised == [maintenance_process.NICE]


async def test_without_the_lease_no_further_step_is_done(root):
    with pytest.raises(errors.StaleEpoch):
        await upkeep(root, checks=1).maintain(with_vacuum=True)
    assert len(test_history.read(root, "hourly")) == 1, "the first step had permission"
    assert len(list((root / "nodes").rglob("*.parquet"))) == 3, "nothing was merged"


async def test_a_failure_is_reported_with_its_cause(root):
    for file in (root / "nodes").rglob("*.parquet"):
        file.write_bytes(b"damaged")
    with pytest.raises(errors.Unavailable, match=r"could not be maintained: .*nodes"):
        await upkeep(root).maintain(with_vacuum=False)


def test_the_end_of_the_driver_ends_the_process(monkeypatch):
    """The driver's end closes the pipe."""
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read) as closed, open(os.devnull, "w") as nowhere:
        monkeypatch.setattr("sys.stdin", closed)
        monkeypatch.setattr("sys.stdout", nowhere)
        with pytest.raises(SystemExit):
            maintenance_process._wait_for_permission()


async def test_rows_are_not_too_old_because_the_local_clock_is_ahead(root):
    limits = maintenance.MaintenanceLimits(max_age_s=3600.0)
    await upkeep(root, limits=limits, clock_ms=test_history.T0 + 10_000).maintain(with_vacuum=False)
    assert len(test_history.read(root)) == 3, "they are years old by the local clock"
    await upkeep(root, limits=limits, clock_ms=LATER_MS + 86_400_000).maintain(with_vacuum=False)
    assert len(test_history.read(root)) == 0
