"""The pipeline restarted after kill -9, and beside Prometheus; what its other benchmarks have in common.

Two fleets are played, each machine reporting every ten seconds (`muster.simulate.fleet`): a plain one, and a
realistic one with uneven groups mixed in messages, 20 to 50 metrics, reboots, silent machines, moves and
wrong clocks.  Their parameters are printed.  Single reports go to two channels, over one connection instead
of one for each machine; the channels store batches in the stream, which the broker syncs to disk; the
pipeline reads them, writes the history and publishes what it rolled up.  All settings are the defaults: no
alert rules, 1 GB for Spark, compaction on.

A fleet *holds* if every batch after the warm-up is shorter than the trigger, the lag does not grow, channels
drop nothing, and no report is late but those of machines whose clocks are behind.  `pipeline_plain` and
`pipeline_realistic` play sizes downwards, for ten minutes each, until one holds; a fleet that cannot hold any
more ends at once.  ``MACHINES=300000,200000`` chooses other sizes.  A quick run plays one small size for a
few batches.

CPU is that of processes, from the kernel.  The generator runs on the same cores: its CPU is measured and not
counted, but a fleet that just held would be larger if the generator ran elsewhere.

`pipeline_alone` plays what first-level channels would store, a thousand machines a message, straight into
the stream: the channels are somewhere else.  The peer is Prometheus (`pipeline_peer`).

A phase that fails is printed, and costs its own rows only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks import harness, measure, pipeline_domain, pipeline_peer
from muster.bus.client import client
from muster.core import errors
from muster.pipeline import client as pipeline_client
from muster.pipeline import settings

PERIOD_S, TRIGGER_S = pipeline_domain.PERIOD_S, pipeline_domain.TRIGGER_S
DELAY_S = settings.PipelineSettings().delay_s
MILLION = 1_000_000
RUN_S_MAX, QUICK_S_MAX = 1800, 600
LADDER_S_MAX = 7200  # each size that is tried takes up to 13 minutes
WARM_PERIODS, HOLD_PERIODS = 3, 60
QUICK_WARM_PERIODS, QUICK_HOLD_PERIODS = 1, 2
RECOVERY_PERIODS, PEER_PERIODS = 6, 6
PEER_MACHINES = {"plain": 200_000, "realistic": 20_000}
QUICK_MACHINES = {"plain": 50_000, "realistic": 10_000}
LARGEST_GOALS = {"plain": 2 * MILLION, "realistic": 500_000}


def run(quick: bool) -> list[harness.Row]:
    rows: list[harness.Row] = []
    with _bench() as bench:
        machines = QUICK_MACHINES["plain"] if quick else MILLION
        with _phase("kill -9 of the driver"), bench.domain(0) as domain:
            played = domain.play("plain", machines, warm=WARM_PERIODS, periods=QUICK_HOLD_PERIODS)
            metric = f"pipeline alone, {machines:,} machines: caught up after kill -9 of the driver"
            recovered = _row(metric, _recover(domain, machines), "s", 60, "lower")
            rows += harness.under(played.load, [recovered])
        for profile, peer_machines in PEER_MACHINES.items() if not quick else ():
            with _phase(f"{profile} fleet beside Prometheus"):
                beside = bench.play(
                    profile, peer_machines, pipeline_domain.CHANNELS, PEER_PERIODS, PEER_PERIODS
                )
                peer = pipeline_peer.rows(
                    beside, PEER_PERIODS, PEER_PERIODS, bench.place, has_goal=profile == "plain"
                )
                rows += harness.under(beside.load, peer)
        rows.append(bench.wrong_row())
    return rows


def sizes(profile: str, default: tuple[int, ...], quick: bool) -> tuple[int, ...]:
    """The machines to play, largest first."""
    if quick:
        return (QUICK_MACHINES[profile],)
    chosen = os.environ.get("MACHINES")
    return tuple(sorted(map(int, chosen.split(",")), reverse=True)) if chosen else default


def largest(profile: str, default: tuple[int, ...], quick: bool) -> list[harness.Row]:
    """The largest fleet, of these sizes from the largest downwards, that holds for ten minutes."""
    warm, periods = (QUICK_WARM_PERIODS, QUICK_HOLD_PERIODS) if quick else (WARM_PERIODS, HOLD_PERIODS)
    tried: list[int] = []
    held: pipeline_domain.Played | None = None
    with _bench() as bench:
        for machines in sizes(profile, default, quick):
            tried.append(machines)
            try:
                played = bench.play(profile, machines, pipeline_domain.CHANNELS, warm, periods)
            except pipeline_domain.DoesNotHold as error:
                print(f"    does not hold: {error}", flush=True)
                continue
            if not played.faults():
                held = played
                break
        metric = f"{profile} fleet: largest that held for {periods * PERIOD_S:.0f} s"
        row = _row(metric, held.machines if held else 0, "machines", LARGEST_GOALS[profile])
        rows = harness.under(f"tried: {', '.join(f'{machines:,}' for machines in tried)}", [row])
        if held:
            rows += harness.under(held.load, _costs(held))
            if not quick:
                _draw(held)
        return [*rows, bench.wrong_row()]


def alone(quick: bool) -> list[harness.Row]:
    """The pipeline without channels, one size of the plain fleet for ten minutes."""
    warm, periods = (QUICK_WARM_PERIODS, QUICK_HOLD_PERIODS) if quick else (WARM_PERIODS, HOLD_PERIODS)
    with _bench() as bench:
        played = bench.play("plain", sizes("plain", (MILLION,), quick)[0], 0, warm, periods)
        return [*harness.under(played.load, _sustained(played)), bench.wrong_row()]


@contextlib.contextmanager
def _bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Bench(pathlib.Path(folder))


class Bench:
    def __init__(self, place: pathlib.Path) -> None:
        self.place = place
        self._wrong_rows = 0
        self._domains = 0

    @contextlib.contextmanager
    def domain(self, channels: int) -> Iterator[pipeline_domain.Domain]:
        """A new broker, channels and pipeline; at the end the history is compared with what was sent."""
        self._domains += 1
        folder = self.place / f"domain-{self._domains}"
        try:
            with pipeline_domain.Domain(folder, channels=channels) as domain:
                yield domain
                domain.stop()
                wrong = domain.wrong_rows()
                if wrong:
                    print(f"    {wrong:,} reports lost or doubled", flush=True)
                self._wrong_rows += wrong
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def play(
        self, profile: str, machines: int, channels: int, warm: int, periods: int
    ) -> pipeline_domain.Played:
        with self.domain(channels) as domain:
            return domain.play(profile, machines, warm=warm, periods=periods)

    def wrong_row(self) -> harness.Row:
        return _row("reports lost or doubled, to Parquet", self._wrong_rows, "rows", 0, "lower")


def _recover(domain: pipeline_domain.Domain, machines: int) -> float:
    """Killed at full rate: from its next start until it is no further behind than usual."""
    with domain.fleet("plain", machines, RECOVERY_PERIODS) as generator:
        generator.tell("go")
        time.sleep(2 * PERIOD_S)
        domain.kill()
        domain.start()
        began = time.monotonic()
        took_s = asyncio.run(_until_caught_up(domain.url, began))
        generator.hear(timeout_s=300)
        time.sleep(3 * TRIGGER_S)
    return took_s


async def _until_caught_up(url: str, began: float) -> float:
    async with await client.connect([url], identity="bench") as bus:
        ask = pipeline_client.PipelineClient(bus)
        while time.monotonic() - began < 300:
            with contextlib.suppress(errors.Unavailable):
                progress = await ask.progress()
                if progress.state == "running" and progress.batch >= 0 and progress.lag_s < 2 * TRIGGER_S:
                    return time.monotonic() - began
            await asyncio.sleep(0.2)
    raise errors.TimedOut("the pipeline did not catch up in 300 s")


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    try:
        yield
    except (errors.MusterError, OSError, psutil.Error) as error:
        if "did not end in" in str(error):  # the whole benchmark's time is up
            raise
        print(f"  {name}: failed: {error}", flush=True)


def _row(
    metric: str, ours: float, unit: str, goal: float | None = None, better: Any = "higher"
) -> harness.Row:
    return harness.Row(metric=metric, ours=ours, unit=unit, better=better, goal=goal)


def _costs(played: pipeline_domain.Played) -> list[harness.Row]:
    """Of a fleet that held, with channels."""
    name = played.name
    whole_s = played.seconds * (os.cpu_count() or 1)
    return [
        _row(f"{name}: longest batch", played.longest_batch_s, "s", TRIGGER_S, "lower"),
        _row(f"{name}: growth of the lag", played.lag_growth_s, "s", TRIGGER_S / 2, "lower"),
        _row(f"{name}: behind at the end", played.caught_up_s, "s", 2 * TRIGGER_S + 5, "lower"),
        _row(
            f"{name}: system report after its window, longest",
            max(played.system_late_s, default=float("inf")),
            "s",
            TRIGGER_S + DELAY_S + 5,
            "lower",
        ),
        _row(f"{name}: CPU of a report", played.product_cpu_s / played.rows * 1e6, "µs", None, "lower"),
        *(
            _row(f"{name}: CPU of a report, {stage}", used / played.rows * 1e6, "µs", None, "lower")
            for stage, used in _shares(played).items()
        ),
        _row(
            f"{name}: CPU, all but the generator",
            100 * played.product_cpu_s / whole_s,
            "% of the machine",
            None,
            "lower",
        ),
        _row(
            f"{name}: CPU, the generator",
            100 * played.cpu_s[pipeline_domain.GENERATOR] / whole_s,
            "% of the machine",
            None,
            "lower",
        ),
        _row(f"{name}: memory", played.memory_bytes / 2**20, "MiB", None, "lower"),
    ]


def _sustained(played: pipeline_domain.Played) -> list[harness.Row]:
    """Of the pipeline alone."""
    name = f"pipeline alone, {played.machines:,} machines"
    cores = os.cpu_count() or 1
    total = sum(played.cpu_s.values())
    return [
        _row(f"{name}: reports", played.rows / played.seconds, "1/s", 0.99 * played.machines / PERIOD_S),
        _row(f"{name}: for", played.seconds, "s"),
        _row(f"{name}: behind at the end", played.caught_up_s, "s", 2 * TRIGGER_S + 5, "lower"),
        _row(f"{name}: growth of the lag", played.lag_growth_s, "s", TRIGGER_S / 2, "lower"),
        _row(
            f"{name}: batch, median",
            measure.percentile([batch.batch_s for batch in played.batches] or [float("inf")], 50),
            "s",
            None,
            "lower",
        ),
        _row(f"{name}: longest batch", played.longest_batch_s, "s", TRIGGER_S, "lower"),
        _row(
            f"{name}: system report after its window, longest",
            max(played.system_late_s, default=float("inf")),
            "s",
            TRIGGER_S + DELAY_S + 5,
            "lower",
        ),
        _row(f"{name}: CPU, all", 100 * total / played.seconds / cores, "% of the machine", 90, "lower"),
        _row(f"{name}: CPU of a report", played.product_cpu_s / played.rows * 1e6, "µs", None, "lower"),
        _row(f"{name}: memory", played.memory_bytes / 2**20, "MiB", None, "lower"),
    ]


def _shares(played: pipeline_domain.Played) -> dict[str, float]:
    """CPU seconds of each stage. What workers do is split by what they measure of themselves."""
    last = played.batches[-1].cpu_ms if played.batches else {}
    spent = {stage: (ms - played.before.cpu_ms.get(stage, 0)) / 1000 for stage, ms in last.items()}
    rest = played.cpu_s["workers"] - sum(spent.values())
    return {
        "channels": played.cpu_s.get("channels", 0.0),
        "broker": played.cpu_s["broker"],
        "Spark's JVM": played.cpu_s["JVM"],
        **{f"workers: {stage}": used for stage, used in spent.items()},
        "workers: reading the stream, and Spark": max(0.0, rest),
        "driver: results": played.cpu_s["driver"],
    }


def _draw(played: pipeline_domain.Played) -> None:
    """How long batches took and how old their newest report was, over the run; and what used the CPU."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    harness.RESULTS.mkdir(exist_ok=True)
    figure, (over_time, by_stage) = plt.subplots(1, 2, figsize=(12, 4), width_ratios=(2, 1))
    began_ms = played.batches[0].at_ms
    minutes = [(batch.at_ms - began_ms) / 60_000 for batch in played.batches]
    over_time.plot(minutes, [batch.batch_s for batch in played.batches], label="batch, s")
    over_time.plot(minutes, [batch.lag_s for batch in played.batches], label="age of its newest report, s")
    over_time.axhline(TRIGGER_S, color="grey", linestyle=":", label="trigger, s")
    over_time.set(title=f"{played.name}, every {PERIOD_S:g} s", xlabel="minutes", ylim=(0, None))
    over_time.legend(fontsize=8)
    shares = _shares(played)
    by_stage.barh(list(shares), [1e6 * used / played.rows for used in shares.values()])
    by_stage.invert_yaxis()
    by_stage.set(title="CPU of a report, µs")
    by_stage.tick_params(labelsize=7)
    for axis in (over_time, by_stage):
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / f"{played.profile}-fleet-run.png", dpi=100)
    plt.close(figure)
