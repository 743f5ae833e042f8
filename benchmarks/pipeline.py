"""The fleet's reports through channels, bus, Spark and Parquet, and back to the bus.

Two fleets are played, each machine reporting every ten seconds (`muster.simulate.fleet`): a plain one, and a
realistic one with uneven groups mixed in messages, 20 to 50 metrics, reboots, silent machines, moves and
wrong clocks.  Their parameters are printed.  Single reports go to two channels, over one connection instead
of one for each machine; the channels store batches in the stream, which the broker syncs to disk; the
pipeline reads them, writes the history and publishes what it rolled up.  All settings are the defaults: no
alert rules, 1 GB for Spark, compaction on.

A fleet *holds* if every batch after the warm-up is shorter than the trigger, the lag does not grow, channels
drop nothing, and no report is late but those of machines whose clocks are behind.  Sizes are tried upwards,
for a minute each; the largest that held is then played for ten minutes, and if it fails, the next smaller
one.  A quick run plays one small size for a few batches.

CPU is that of processes, from the kernel.  The generator runs on the same cores: its CPU is measured and not
counted, but a fleet that just held would be larger if the generator ran elsewhere.

``pipeline alone`` plays what first-level channels would store, a thousand machines a message, straight into
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
from dataclasses import dataclass
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
RUN_S_MAX, QUICK_S_MAX = 10_800, 600


@dataclass(frozen=True)
class Sizes:
    ladder: dict[str, tuple[int, ...]]  # machines that are tried, by profile
    warm_periods: int
    probe_periods: int  # 0: the largest is played at once
    hold_periods: int
    alone: int = 0  # machines for the pipeline alone
    alone_periods: int = 0
    larger: tuple[int, ...] = ()  # the pipeline alone with more of them, for as long as a probe
    killed_periods: int = 0
    peer_periods: int = 0  # the smallest of each ladder is what Prometheus gets too


FULL = Sizes(
    {
        "plain": (200_000, 300_000, 400_000, 500_000, 600_000, 800_000, MILLION, 1_500_000, 2 * MILLION),
        "realistic": (20_000, 30_000, 40_000, 60_000, 80_000, 120_000, 200_000, 300_000, 500_000),
    },
    warm_periods=6,
    probe_periods=6,
    hold_periods=60,
    alone=MILLION,
    alone_periods=60,
    larger=(1_500_000, 2 * MILLION),
    killed_periods=6,
    peer_periods=6,
)
QUICK = Sizes({"plain": (50_000,), "realistic": (10_000,)}, warm_periods=1, probe_periods=0, hold_periods=2)
GOALS = {"plain": 2 * MILLION, "realistic": 500_000}


def run(quick: bool) -> list[harness.Row]:
    return measured(QUICK if quick else FULL)


def measured(sizes: Sizes) -> list[harness.Row]:
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            _measure(Bench(pathlib.Path(folder), sizes), rows)
        except errors.TimedOut as error:  # what was measured until then is worth showing
            if not rows:
                raise
            print(f"  cut off: {error}", flush=True)
    return rows


def _measure(bench: Bench, rows: list[harness.Row]) -> None:
    sizes = bench.sizes
    held: list[pipeline_domain.Played] = []
    for profile in sizes.ladder:
        with _phase(f"{profile} fleet"):
            largest = bench.largest(profile)
            metric = f"{profile} fleet: largest that held for {sizes.hold_periods * PERIOD_S:.0f} s"
            tried = _row(metric, largest.machines if largest else 0, "machines", GOALS[profile])
            ladder = ", ".join(f"{machines:,}" for machines in sizes.ladder[profile])
            rows += harness.under(f"tried: {ladder}", [tried])
            if largest:
                rows += harness.under(largest.load, _costs(largest))
                held.append(largest)
    if sizes.alone:
        with _phase("pipeline alone"):
            rows += bench.alone()
    rows.append(_row("reports lost or doubled, to Parquet", bench.wrong_rows, "rows", 0, "lower"))
    if sizes.peer_periods:
        _draw(held)
        for profile, played in bench.smallest.items():
            with _phase("Prometheus"):
                beside = pipeline_peer.rows(
                    played, sizes.warm_periods, sizes.peer_periods, bench.place, has_goal=profile == "plain"
                )
                rows += harness.under(played.load, beside)


class Bench:
    def __init__(self, place: pathlib.Path, sizes: Sizes) -> None:
        self.place = place
        self.sizes = sizes
        self.wrong_rows = 0
        self.smallest: dict[str, pipeline_domain.Played] = {}
        self._domains = 0

    @contextlib.contextmanager
    def domain(self, channels: int) -> Iterator[pipeline_domain.Domain]:
        """A new broker, channels and pipeline; at the end the history is compared with what was sent."""
        self._domains += 1
        folder = self.place / f"domain-{self._domains}"
        with pipeline_domain.Domain(folder, channels=channels) as domain:
            yield domain
            domain.stop()
            wrong = domain.wrong_rows()
            if wrong:
                print(f"    {wrong:,} reports lost or doubled", flush=True)
            self.wrong_rows += wrong
        shutil.rmtree(folder, ignore_errors=True)

    def largest(self, profile: str) -> pipeline_domain.Played | None:
        """The largest fleet of the ladder that held, with channels."""
        ladder, sizes = self.sizes.ladder[profile], self.sizes
        if sizes.probe_periods:
            held = []
            for machines in ladder:
                played = self._play(profile, machines, sizes.probe_periods)
                if played is None:
                    break
                self.smallest.setdefault(profile, played)
                held.append(machines)
            ladder = tuple(held)
        for machines in reversed(ladder):
            if played := self._play(profile, machines, sizes.hold_periods):
                return played
        return None

    def _play(self, profile: str, machines: int, periods: int) -> pipeline_domain.Played | None:
        """None if the fleet does not hold."""
        try:
            with self.domain(pipeline_domain.CHANNELS) as domain:
                played = domain.play(profile, machines, warm=self.sizes.warm_periods, periods=periods)
        except pipeline_domain.DoesNotHold as error:
            print(f"    does not hold: {error}", flush=True)
            return None
        return None if played.faults() else played

    def alone(self) -> list[harness.Row]:
        sizes = self.sizes
        with self.domain(0) as domain:
            played = domain.play("plain", sizes.alone, warm=sizes.warm_periods, periods=sizes.alone_periods)
            larger = []
            for machines in sizes.larger:
                with _phase(f"pipeline alone, {machines:,} machines"):
                    more = domain.play(
                        "plain", machines, warm=sizes.warm_periods, periods=sizes.probe_periods
                    )
                    larger += harness.under(more.load, _larger(more))
            rows = _sustained(played)
            if sizes.killed_periods:
                took_s = float("inf")
                with _phase("kill -9 of the driver"):
                    took_s = _recover(domain, sizes)
                metric = "pipeline alone: caught up after kill -9 of the driver"
                rows.append(_row(metric, took_s, "s", 60, "lower"))
        return [*harness.under(played.load, rows), *larger]


def _recover(domain: pipeline_domain.Domain, sizes: Sizes) -> float:
    """Killed at full rate: from its next start until it is no further behind than usual."""
    with domain.fleet("plain", sizes.alone, sizes.killed_periods) as generator:
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


def _larger(played: pipeline_domain.Played) -> list[harness.Row]:
    name = f"pipeline alone, {played.machines:,} machines"
    return [
        _row(f"{name}: behind at the end", played.caught_up_s, "s", 2 * TRIGGER_S + 5, "lower"),
        _row(f"{name}: longest batch", played.longest_batch_s, "s", TRIGGER_S, "lower"),
        _row(f"{name}: fleet behind its own clock", played.facts["behind_max_s"], "s", PERIOD_S, "lower"),
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


def _draw(held: list[pipeline_domain.Played]) -> None:
    """How long batches took and how old their newest report was, over the run; and what used the CPU."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    if not held:
        return
    harness.RESULTS.mkdir(exist_ok=True)
    figure, axes = plt.subplots(len(held), 2, figsize=(12, 4 * len(held)), width_ratios=(2, 1), squeeze=False)
    for (over_time, by_stage), played in zip(axes, held, strict=True):
        began_ms = played.batches[0].at_ms
        minutes = [(batch.at_ms - began_ms) / 60_000 for batch in played.batches]
        over_time.plot(minutes, [batch.batch_s for batch in played.batches], label="batch, s")
        over_time.plot(
            minutes, [batch.lag_s for batch in played.batches], label="age of its newest report, s"
        )
        over_time.axhline(TRIGGER_S, color="grey", linestyle=":", label="trigger, s")
        over_time.set(title=f"{played.name}, every {PERIOD_S:g} s", xlabel="minutes", ylim=(0, None))
        over_time.legend(fontsize=8)
        shares = _shares(played)
        by_stage.barh(list(shares), [1e6 * used / played.rows for used in shares.values()])
        by_stage.invert_yaxis()
        by_stage.set(title="CPU of a report, µs")
        by_stage.tick_params(labelsize=7)
    for axis in axes.flat:
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "pipeline-run.png", dpi=100)
    plt.close(figure)
