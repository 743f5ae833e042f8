"""Two drivers as processes: the standby takes over, and a driver that wakes up again changes nothing."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from muster.bus import leases
from muster.bus.client import client
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol
from muster.pipeline.history import tables
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.pipeline import driver_process, test_history, traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MACHINES = 20
TAKEOVER_S = 30.0  # on a machine that is not busy; the test allows more and reports the time
RULES = "rules:\n  - {name: there, scope: node, when: cpu_percent > 5}\n"


class ReportLoop:
    """Reports twice a second until it is stopped."""

    def __init__(self, url: str) -> None:
        self.sent = 0
        self.stop = asyncio.Event()
        self._url = url

    async def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            at_ms = traffic.now_ms()
            rows = [traffic.report(f"m{n}", number, at_ms, group=f"g{n % 3}") for n in range(MACHINES)]
            await traffic.store(self._url, traffic.body(rows))
            self.sent += len(rows)
            try:
                await asyncio.wait_for(self.stop.wait(), 0.5)
            except TimeoutError:
                continue


async def driver(folder: Path, url: str) -> child_process.ChildProcess:
    (folder / "rules.yaml").write_text(RULES)
    command = driver_process.command(
        folder, url, trigger_s=1.0, window_s=2.0, delay_s=2.0, operators="*", rules=folder / "rules.yaml"
    )
    return await child_process.start(*command)


async def status(ask: pipeline_client.PipelineClient) -> protocol.BatchProgress | None:
    try:
        return await ask.progress()
    except errors.MusterError:
        return None


def pause(pid: int) -> list[psutil.Process]:
    """The process, Java and Spark's Python workers, as when a machine or container is paused."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # Spark ends idle workers
            member.suspend()
    return family


def resume(family: list[psutil.Process]) -> None:
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.resume()


def in_batch(term: Path) -> bool:
    """Whether Spark has planned a batch and not committed it."""
    offsets, commits = (
        {int(path.name) for path in (term / "spark" / name).iterdir() if path.name.isdecimal()}
        for name in ("offsets", "commits")
    )
    return bool(offsets - commits)


def snapshot(folder: Path) -> dict[str, int]:
    """Files, and when they were changed."""
    files = {}
    for parent, _, names in os.walk(folder):  # passes over folders that are removed meanwhile
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files[str(path.relative_to(folder))] = path.stat().st_mtime_ns
    return files


async def test_a_driver_whose_java_process_hangs_gives_up_its_lease(broker, tmp_path):
    """Its Python still renews the lease, but nothing is processed any more."""
    await traffic.store(broker.url)
    async with (
        await client.connect([broker.url], identity="ann") as bus,
        await driver(tmp_path, broker.url) as first,
    ):
        ask = pipeline_client.PipelineClient(bus)

        async def runs() -> bool:
            progress = await status(ask)
            return progress is not None and progress.batch >= 0

        await eventually(runs, timeout_s=300)
        (java,) = [
            child for child in psutil.Process(first.pid).children(recursive=True) if child.name() == "java"
        ]
        java.suspend()
        started = time.monotonic()
        assert await first.wait(timeout_s=120) == errors.Unavailable.exit_code
        sys.stderr.write(f"\ngave up {time.monotonic() - started:.1f} s after Java was stopped\n")
        assert any("did not respond" in line for line in first.lines)
        async with await leases.Leases.open(bus) as all_leases:
            assert await all_leases.holder(protocol.driver_lease("pipeline")) is None


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_standby_takes_over_and_the_former_driver_changes_nothing(broker, tmp_path, how):
    await traffic.store(broker.url)
    fleet = ReportLoop(broker.url)
    root, terms = tmp_path / "history", tmp_path / "pipeline" / "checkpoint" / "drivers"
    async with (
        await client.connect([broker.url], identity="ann") as bus,
        await driver(tmp_path, broker.url) as first,
    ):
        ask = pipeline_client.PipelineClient(bus)

        async def is_driver(pid: int) -> protocol.BatchProgress | None:
            progress = await status(ask)
            if progress is None or not progress.driver.endswith(f":{pid}") or progress.total_rows == 0:
                return None
            return progress

        sending = asyncio.create_task(fleet.run())
        before = await eventually(lambda: is_driver(first.pid), timeout_s=300)
        async with await driver(tmp_path, broker.url) as second:

            async def is_standby() -> bool:
                progress = await status(ask)
                return progress is not None and any(
                    process.endswith(f":{second.pid}") for process in progress.standbys
                )

            await eventually(is_standby, timeout_s=300)  # and prepared
            assert before is not None
            old = terms / f"{before.epoch:08}"
            await eventually(lambda: in_batch(old), timeout_s=60)
            started = time.monotonic()
            paused: list[psutil.Process] = []
            if how == "killed":
                await first.kill()
            else:
                paused = pause(first.pid)
            after = await eventually(lambda: is_driver(second.pid), timeout_s=240)
            took_s = time.monotonic() - started
            assert after is not None
            stages = ", ".join(f"{stage} {taken_ms / 1000:.1f}" for stage, taken_ms in after.start_ms.items())
            lease_s = took_s - sum(after.start_ms.values()) / 1000
            sys.stderr.write(
                f"\ntakeover after {how}: {took_s:.1f} s (goal {TAKEOVER_S:g} s): "
                f"lease and answer {lease_s:.1f}, {stages}\n"
            )
            assert after.epoch > before.epoch
            if how == "stopped":
                await eventually(lambda: list(snapshot(old)) == ["spark"], timeout_s=120)
                left = {item for item in snapshot(tmp_path).items() if _is_of(item[0], before.epoch)}
                resume(paused)
                code = await first.wait(timeout_s=120)
                assert code == errors.StaleEpoch.exit_code, "\n".join(list(first.lines)[-60:])
                now = {item for item in snapshot(tmp_path).items() if _is_of(item[0], before.epoch)}
                assert now <= left, "it wrote to its checkpoint or its alert state"
            fleet.stop.set()
            await sending
            await eventually(lambda: _rolled_up(root, fleet.sent), timeout_s=240)
            await ask.stop()
            assert await second.wait(timeout_s=120) == 0
        rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
        assert len(rows) == len(set(rows)) == fleet.sent
        fired = [(row["about"], row["state"]) for row in test_history.read(root, tables.ALERTS)]
        assert sorted(fired) == sorted((f"node:m{n}", "firing") for n in range(MACHINES))
        for name in (protocol.ALERTS_STREAM, columns.SYSTEM_STREAM):
            stream = await bus.open_stream(name)
            subjects = [
                stored.subject
                async for stored in stream.read((await stream.state()).first_sequence, gaps=True)
            ]
            # One marker for each driver.
            assert sum(subject.endswith(f".{protocol.MARKER}") for subject in subjects) == 2


def _is_of(path: str, epoch: int) -> bool:
    """Whether a file is in the checkpoint or the alert state of a driver."""
    return path.startswith(f"pipeline/checkpoint/drivers/{epoch:08}/") or path.endswith(
        f"alerts-{epoch:08}.json"
    )


def _rolled_up(root: Path, expected: int) -> bool:
    rows = test_history.read(root, tables.GROUPS)
    total = sum(row["cpu_percent_count"] or 0 for row in rows if row["scope"] == "system")
    assert total <= expected, "reports were counted twice"
    return bool(total == expected)
