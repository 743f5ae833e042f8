"""The fleet's reports through bus, Spark and Parquet, and back to the bus.

A fleet is played as first-level channels forward it: a thousand machines a message, a dozen metrics each,
every ten seconds.  The broker syncs each message to disk before it acknowledges.  The pipeline is the real
process with its defaults.  CPU is that of processes, from the kernel; the share of Spark's Python workers is
split by what they say of themselves.  Memory is what processes have to themselves and their part of what they
share.

The peer is Prometheus (Debian's package, fetched once into a cache where that is possible), which scrapes the
same samples as text; only its own CPU counts, not the pages'.  Of both, the first periods are not counted:
Spark compiles then, and Prometheus makes its series.

A phase that fails is told of, and costs its own rows only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq

from benchmarks import harness, measure, pipeline_worker
from muster.bus import client
from muster.bus.brokers import broker, config
from muster.core import errors, messages, reports
from muster.monitor import protocol as monitor_protocol
from muster.pipeline import client as pipeline_client
from muster.pipeline import history, protocol, settings
from muster.pipeline import run as run_

PERIOD_S = pipeline_worker.PERIOD_S
METRICS = len(reports.STANDARD_METRICS)
TRIGGER_S, DELAY_S = 10.0, settings.Pipeline().delay_s
MILLION = 1_000_000


@dataclass(frozen=True)
class Sizes:
    both: tuple[int, ...]  # machines of the fleets that Prometheus gets too; of the last there is a goal
    both_periods: int
    large: int
    large_periods: int
    larger: tuple[int, ...]
    larger_periods: int
    killed: int
    killed_periods: int


FULL = Sizes((100_000, 200_000), 6, MILLION, 60, (1_500_000, 2 * MILLION), 6, MILLION, 6)
QUICK = Sizes((20_000,), 1, 100_000, 2, (), 0, 0, 0)
WARM_PERIODS = 6  # Spark compiles
NEW_PERIODS = 2  # it knows all, and meets new machines
RUN_S_MAX, QUICK_S_MAX = 2100, 300


def run(quick: bool) -> list[harness.Row]:
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, asyncio.Runner() as runner:
        place = pathlib.Path(folder)
        started = broker.Broker(
            config.BrokerConfig(
                name="bench", directory=place / "broker", storage=config.Storage(file_bytes_max=16 << 30)
            )
        )
        runner.run(started.start())
        rows: list[harness.Row] = []
        try:
            _measure(started, place, sizes, rows)
        except errors.TimedOut as error:  # what was measured until then is worth showing
            if not rows:
                raise
            print(f"  cut off: {error}", flush=True)
        finally:
            runner.run(started.stop())
        return rows


def _measure(started: broker.Broker, place: pathlib.Path, sizes: Sizes, rows: list[harness.Row]) -> None:
    """Into ``rows``, phase by phase."""
    pid = started.pid
    assert pid is not None
    bench = Bench(started.url, pid, place)
    with bench.pipeline():
        both: list[Played] = []
        for machines in sizes.both:
            bench.play(machines, 1 if sizes is QUICK else WARM_PERIODS if not both else NEW_PERIODS)
            both.append(bench.play(machines, sizes.both_periods))
        large = bench.play(sizes.large, sizes.large_periods)
        rows += _sustained(large)
        held = max((one.machines for one in (*both, large) if one.holds), default=0)
        for machines in sizes.larger:
            with _phase(f"{machines:,} machines"):
                found = bench.play(machines, sizes.larger_periods)
                rows += _larger(found)
                held = max(held, machines) if found.holds else held
    rows.append(_row("largest fleet that held", held, "machines", 2 * MILLION))
    if sizes.killed:
        took_s = float("inf")
        with _phase("kill -9 of the driver"):
            took_s = bench.recover(sizes)
        rows.append(_row("caught up after kill -9 of the driver", took_s, "s", 60, "lower"))
    rows.append(_row("reports lost or doubled in Parquet", bench.wrong_rows(), "rows", 0, "lower"))
    if sizes is not QUICK:
        _draw(large)
    for one in both:
        with _phase("Prometheus"):
            rows += _peer(one, sizes, place)


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


@dataclass
class Played:
    """One fleet, played for a while into a running pipeline."""

    machines: int
    seconds: float
    rows: int
    told: dict[str, Any]
    batches: list[protocol.Progress] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    caught_up_s: float = 0.0
    late_s: list[float] = field(default_factory=list)  # of system reports, behind the end of their windows

    @property
    def holds(self) -> bool:
        """Nothing failed, the generator kept its pace, and nothing was left behind but the last batch."""
        return (
            not self.told["failed"]
            and self.told["behind_max_s"] < PERIOD_S
            and self.caught_up_s < 2 * TRIGGER_S + 5
            and self.counted("late") == 0
        )

    def counted(self, reason: str) -> int:
        """Since the first batch."""
        if not self.batches:
            return 0
        return self.batches[-1].counts.get(reason, 0) - self.batches[0].counts.get(reason, 0)

    @property
    def lag_growth_s(self) -> float:
        """How much older what is read was in the last third than in the first, at the median."""
        third = max(1, len(self.batches) // 3)
        early, recent = (
            [one.lag_s for one in some] for some in (self.batches[:third], self.batches[-third - 1 : -1])
        )
        return measure.percentile(recent or [0.0], 50) - measure.percentile(early or [0.0], 50)


class Bench:
    def __init__(self, url: str, broker_pid: int, place: pathlib.Path) -> None:
        self.url = url
        self.place = place
        self.stored = 0  # rows in the stream
        self._broker = psutil.Process(broker_pid)
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def pipeline(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        options = run_.Options(
            folder=str(self.place),
            servers=(self.url,),
            settings=settings.Pipeline(
                trigger_s=TRIGGER_S, delay_s=DELAY_S, memory="2g", operators=("*",), compact=False
            ),
        )
        path = self.place / "options.json"
        path.write_bytes(msgspec.json.encode(options))
        log = (self.place / "pipeline.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "muster.pipeline.run", str(path)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(measure.ROOT / "src")},
                start_new_session=True,
            )

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def play(self, machines: int, periods: int) -> Played:
        with measure.Worker("benchmarks.pipeline_worker", "fleet", self.url, machines, periods) as fleet:
            fleet.hear(timeout_s=120)
            self._wait_for_pipeline()
            before, began = self._cpu(), time.monotonic()
            fleet.tell("go")
            batches, late_s, told = asyncio.run(self._watch(fleet, periods))
            ended = time.monotonic()
            self.stored += told["rows"]
            caught_up_s = asyncio.run(self._catch_up(batches))
            after = self._cpu()
        cpu_s = {name: after[name] - before.get(name, 0.0) for name in after}
        cpu_s["generator"] = told["cpu_s"]
        played = Played(
            machines,
            ended - began,
            told["rows"],
            told,
            batches,
            cpu_s,
            self._memory(),
            caught_up_s,
            late_s,
        )
        print(
            f"  {machines:,} machines for {played.seconds:.0f} s: "
            f"{'holds' if played.holds else 'does not hold'}, {played.caught_up_s:.1f} s behind at the end, "
            f"{1e6 * sum(cpu_s.values()) / max(1, played.rows):.2f} µs of CPU a report",
            flush=True,
        )
        return played

    async def _watch(
        self, fleet: measure.Worker, periods: int
    ) -> tuple[list[protocol.Progress], list[float], dict[str, Any]]:
        """Progress and system reports while the fleet plays."""
        batches: list[protocol.Progress] = []
        late_s: list[float] = []
        async with await client.connect([self.url], identity="bench") as bus:
            ask = pipeline_client.Client(bus)

            async def progress() -> None:
                async for one in ask.follow_progress():
                    batches.append(one)  # noqa: PERF401

            async def system() -> None:
                subject = reports.result_subject("pipeline", "system")
                async with await bus.subscribe(subject) as subscription:
                    async for message in subscription:
                        found = messages.decode(message.data, reports.SystemReport)
                        if found.reports:
                            late_s.append(time.time() - found.to_ms / 1000)

            watching = [asyncio.create_task(progress()), asyncio.create_task(system())]
            told = await asyncio.to_thread(fleet.hear, timeout_s=periods * PERIOD_S + 300)
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        return batches, late_s, told

    async def _catch_up(self, batches: list[protocol.Progress]) -> float:
        """How long until all that was stored has been read; adds the batches that takes."""
        began = time.monotonic()
        async with await client.connect([self.url], identity="bench") as bus:
            ask = pipeline_client.Client(bus)
            while True:
                found = await ask.progress()
                if not batches or found.batch > batches[-1].batch:
                    batches.append(found)
                if found.total_rows + self._before >= self.stored:
                    break
                if time.monotonic() - began > 240:
                    raise errors.TimedOut("the pipeline does not catch up")
                await asyncio.sleep(0.2)
        return time.monotonic() - began

    _before = 0  # rows that pipelines read before the one that runs now

    def recover(self, sizes: Sizes) -> float:
        """Killed at full rate: from its next start until it is no further behind than usual."""
        self.start()
        self._before = self.stored
        worker = measure.Worker(
            "benchmarks.pipeline_worker", "fleet", self.url, sizes.killed, sizes.killed_periods
        )
        with worker as fleet:
            fleet.hear(timeout_s=120)
            self._wait_for_pipeline()
            fleet.tell("go")
            time.sleep(2 * PERIOD_S)
            assert self._process is not None
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.start()
            began = time.monotonic()
            took_s = asyncio.run(self._until_caught_up(began))
            self.stored += fleet.hear(timeout_s=300)["rows"]
            self._before = -1 << 62
            time.sleep(3 * TRIGGER_S)
        self.stop()
        return took_s

    async def _until_caught_up(self, began: float) -> float:
        async with await client.connect([self.url], identity="bench") as bus:
            ask = pipeline_client.Client(bus)
            while time.monotonic() - began < 300:
                try:
                    found = await ask.progress()
                    if found.state == "running" and found.batch >= 0 and found.lag_s < 2 * TRIGGER_S:
                        return time.monotonic() - began
                except errors.Unavailable:
                    pass
                await asyncio.sleep(0.2)
        raise errors.TimedOut("the pipeline did not catch up in 300 s")

    def wrong_rows(self) -> int:
        """Reports in the history that are missing or there twice: each message has a thousand, once."""
        root = self.place / "history"
        found = np.zeros(1, np.int64)
        for path in history.files(root, history.NODES):
            column = pq.read_table(path, columns=[history.SEQUENCE]).column(0).to_numpy()
            counts = np.bincount(column)
            if len(counts) > len(found):
                found, counts = counts, found
            found[: len(counts)] += counts
        there = found[found > 0]
        each = pipeline_worker.MACHINES_A_MESSAGE
        return int(np.abs(there - each).sum()) + abs(len(there) * each - self.stored)

    def _wait_for_pipeline(self) -> None:
        async def wait() -> None:
            async with await client.connect([self.url], identity="bench") as bus:
                for wanted in monitor_protocol.streams():
                    await bus.stream(wanted)
                ask = pipeline_client.Client(bus)
                for _ in range(4000):
                    try:
                        if (await ask.progress()).batch >= 0:
                            return
                    except errors.Unavailable:
                        pass
                    await asyncio.sleep(0.1)
            raise errors.TimedOut(f"the pipeline did not start: {self._last_words()}")

        asyncio.run(wait())

    def _last_words(self) -> str:
        return (self.place / "pipeline.log").read_text(errors="replace")[-2000:]

    def _tree(self) -> dict[str, list[psutil.Process]]:
        assert self._process is not None
        driver = psutil.Process(self._process.pid)
        found: dict[str, list[psutil.Process]] = {
            "broker": [self._broker],
            "driver": [driver],
            "JVM": [],
            "workers": [],
        }
        for child in driver.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found["JVM" if child.name() == "java" else "workers"].append(child)
        return found

    def _cpu(self) -> dict[str, float]:
        used: dict[str, float] = {}
        for name, processes in self._tree().items():
            for one in processes:
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    used[name] = used.get(name, 0.0) + times.user + times.system
        return used

    def _memory(self) -> int:
        total = 0
        for processes in self._tree().values():
            for one in processes:
                with contextlib.suppress(psutil.Error):
                    total += one.memory_full_info().pss
        return total


def _sustained(large: Played) -> list[harness.Row]:
    name = f"{large.machines:,} machines"
    cores = os.cpu_count() or 1
    usual = large.batches[1:] or large.batches
    whole_s = large.seconds + large.caught_up_s
    end_to_end = TRIGGER_S + DELAY_S + 5
    total = sum(large.cpu_s.values())
    return [
        _row(f"{name}: reports", large.rows / large.seconds, "1/s", 0.99 * large.machines / PERIOD_S),
        _row(f"{name}: for", large.seconds, "s"),
        _row(f"{name}: behind at the end", large.caught_up_s, "s", 2 * TRIGGER_S + 5, "lower"),
        _row(f"{name}: growth of the lag", large.lag_growth_s, "s", TRIGGER_S / 2, "lower"),
        _row(
            f"{name}: batch p50", measure.percentile([one.batch_s for one in usual], 50), "s", None, "lower"
        ),
        _row(f"{name}: longest batch", max(one.batch_s for one in usual), "s", TRIGGER_S, "lower"),
        _row(
            f"{name}: system report after its window, p99",
            measure.percentile(large.late_s or [float("inf")], 99),
            "s",
            end_to_end,
            "lower",
        ),
        *(
            _row(f"{name}: CPU, {stage}", 100 * used / whole_s / cores, "% of the machine", None, "lower")
            for stage, used in _shares(large).items()
        ),
        _row(f"{name}: CPU, all", 100 * total / whole_s / cores, "% of the machine", 90, "lower"),
        _row(f"{name}: CPU of a report", total / large.rows * 1e6, "µs", None, "lower"),
        _row(f"{name}: memory", large.memory_bytes / 2**20, "MiB", None, "lower"),
    ]


def _larger(found: Played) -> list[harness.Row]:
    name = f"{found.machines:,} machines"
    cores = os.cpu_count() or 1
    whole_s = found.seconds + found.caught_up_s
    usual = found.batches[1:] or found.batches
    return [
        _row(f"{name}: behind at the end", found.caught_up_s, "s", 2 * TRIGGER_S + 5, "lower"),
        _row(f"{name}: longest batch", max(one.batch_s for one in usual), "s", None, "lower"),
        _row(f"{name}: fleet behind its own clock", found.told["behind_max_s"], "s", PERIOD_S, "lower"),
        _row(
            f"{name}: CPU, all",
            100 * sum(found.cpu_s.values()) / whole_s / cores,
            "% of the machine",
            None,
            "lower",
        ),
    ]


def _shares(large: Played) -> dict[str, float]:
    """CPU seconds of each stage."""
    first, last = large.batches[0].cpu_ms, large.batches[-1].cpu_ms
    spent = {stage: (ms - first.get(stage, 0)) / 1000 for stage, ms in last.items()}
    rest = large.cpu_s["workers"] - sum(spent.values())
    return {
        "broker": large.cpu_s["broker"],
        "Spark's JVM": large.cpu_s["JVM"],
        **{f"workers: {stage}": used for stage, used in spent.items()},
        "workers: reading the stream, and Spark": max(0.0, rest),
        "driver: results": large.cpu_s["driver"],
        "(the fleet itself)": large.cpu_s["generator"],
    }


def _draw(large: Played) -> None:
    """How long batches took and how old their newest report was, over the whole run; and who worked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    harness.RESULTS.mkdir(exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), width_ratios=(2, 1))
    began_ms = large.batches[0].at_ms
    minutes = [(one.at_ms - began_ms) / 60_000 for one in large.batches]
    axes[0].plot(minutes, [one.batch_s for one in large.batches], label="batch, s")
    axes[0].plot(minutes, [one.lag_s for one in large.batches], label="age of its newest report, s")
    axes[0].axhline(TRIGGER_S, color="grey", linestyle=":", label="trigger, s")
    axes[0].set(title=f"{large.machines:,} machines every {PERIOD_S:g} s", xlabel="minutes", ylim=(0, None))
    axes[0].legend(fontsize=8)
    shares = _shares(large)
    axes[1].barh(list(shares), [1e6 * used / large.rows for used in shares.values()])
    axes[1].invert_yaxis()
    axes[1].set(title="CPU of a report, µs")
    axes[1].tick_params(labelsize=7)
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "pipeline-run.png", dpi=100)
    plt.close(figure)


def _peer(both: Played, sizes: Sizes, place: pathlib.Path) -> list[harness.Row]:
    ours_cpu = sum(used for name, used in both.cpu_s.items() if name != "generator")
    million = both.rows * METRICS / MILLION
    warm = 1 if sizes is QUICK else WARM_PERIODS
    found = _prometheus(both.machines, warm * PERIOD_S, sizes.both_periods * PERIOD_S, place)
    name = f"{both.machines:,} machines"
    peer_name = "Prometheus" if found else None
    goal = 1.0 if found and both.machines == sizes.both[-1] else None
    return [
        harness.Row(
            metric=f"{name}: CPU for a million samples",
            ours=ours_cpu / million,
            unit="s",
            better="lower",
            peer=found["cpu_s"] if found else None,
            peer_name=peer_name,
            goal=goal,
            goal_is="ratio",
        ),
        harness.Row(
            metric=f"{name}: memory for a million samples a period",
            ours=both.memory_bytes / 2**20 / (both.machines * METRICS / MILLION),
            unit="MiB",
            better="lower",
            peer=found["memory_bytes"] / 2**20 / (both.machines * METRICS / MILLION) if found else None,
            peer_name=peer_name,
            goal=goal,
            goal_is="ratio",
        ),
    ]


def _prometheus(machines: int, warm_s: float, seconds: float, place: pathlib.Path) -> dict[str, float] | None:
    """CPU seconds for each million samples, and memory; None where there is no Prometheus to be had."""
    binary = _prometheus_binary()
    if binary is None:
        return None
    with measure.Worker("benchmarks.pipeline_worker", "pages", machines) as pages:
        told = pages.hear(timeout_s=300)
        target = f"static_configs: [{{targets: ['127.0.0.1:{told['port']}']}}]"
        jobs = "\n".join(
            f"  - job_name: p{number}\n    metrics_path: /m/{number}\n    {target}"
            for number in range(told["pages"])
        )
        settings_file = place / "prometheus.yml"
        settings_file.write_text(f"global: {{scrape_interval: {PERIOD_S:g}s}}\nscrape_configs:\n{jobs}\n")
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={settings_file}",
                f"--storage.tsdb.path={place / f'prometheus-{machines}'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            one = psutil.Process(process.pid)
            time.sleep(warm_s + PERIOD_S)  # pages are scraped at times that it chooses within a period
            before = one.cpu_times()
            pages.tell("count")
            first = pages.hear()["samples"]
            time.sleep(seconds)
            after, memory = one.cpu_times(), one.memory_full_info().pss
            pages.tell("count")
            samples = pages.hear()["samples"] - first
        finally:
            process.terminate()
            process.wait(60)
    if not samples:
        return None
    used_s = after.user + after.system - before.user - before.system
    return {"cpu_s": used_s / (samples / MILLION), "memory_bytes": float(memory)}


def _prometheus_binary() -> str | None:
    """The one on this machine, or Debian's, fetched once and unpacked without installing it."""
    if found := shutil.which("prometheus"):
        return found
    cache = (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        / "muster"
        / "prometheus"
    )
    binary = cache / "usr" / "bin" / "prometheus"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["apt-get", "download", "prometheus"], cwd=cache, check=True, capture_output=True, timeout=60
            )
            package = next(cache.glob("prometheus_*.deb"))
            subprocess.run(["dpkg", "-x", package, cache], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError, StopIteration):
            return None
    return str(binary) if binary.exists() else None
