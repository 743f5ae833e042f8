"""What ``bench-pipeline`` measures: a broker, channels and the pipeline, and a fleet that is played to them.

The broker, the channels and the pipeline have the settings that the product has by default.  The generator
runs on the same cores; its CPU is measured and not counted, but it leaves that much less to the rest.

One fleet by itself: ``python -m benchmarks.pipeline_domain realistic 20000 4 6``, 4 periods of warm-up and
6 that are measured; a further 0: without channels, straight into the stream; after that, settings of the
pipeline, such as ``pipeline.shards=64``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from benchmarks import measure, monitor_rows, pipeline_tally, pipeline_worker
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import protocol as monitor_protocol
from muster.monitor.channel import channel as channel_service
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol, settings

PERIOD_S = pipeline_worker.PERIOD_S
TRIGGER_S = settings.PipelineSettings().trigger_s
GENERATOR = "generator"
CATCH_UP_S_MAX = 240
CHANNELS = 2


class DoesNotHold(errors.LimitExceeded):
    """A fleet that is too large for this machine, with the reason."""


@dataclass
class Played:
    """A fleet that was played for some time, without the time to warm up."""

    profile: str
    machines: int
    seconds: float
    rows: int  # sent while it was measured
    samples: int
    facts: dict[str, Any]  # of the generator
    batches: list[protocol.BatchProgress]  # begun after the warm-up
    before: protocol.BatchProgress  # the last one before them
    cpu_s: dict[str, float]
    memory_bytes: int
    caught_up_s: float
    system_late_s: list[float]  # of system reports, behind the end of their windows
    dropped: dict[str, int] = field(default_factory=dict)  # by channels

    @property
    def name(self) -> str:
        return f"{self.profile} fleet, {self.machines:,} machines"

    @property
    def load(self) -> str:
        plan = monitor_rows.plan(self.machines, self.profile, period_s=PERIOD_S)
        return f"{plan.describe()}; for {self.seconds:.0f} s"

    @property
    def product_cpu_s(self) -> float:
        return sum(used for name, used in self.cpu_s.items() if name != GENERATOR)

    @property
    def longest_batch_s(self) -> float:
        return max((batch.batch_s for batch in self.batches), default=float("inf"))

    @property
    def lag_growth_s(self) -> float:
        """How much older what is read was in the last third than in the first, at the median."""
        third = max(1, len(self.batches) // 3)
        first, last = (
            [batch.lag_s for batch in values] for values in (self.batches[:third], self.batches[-third:])
        )
        return measure.percentile(last or [float("inf")], 50) - measure.percentile(first or [0.0], 50)

    @property
    def late(self) -> int:
        last = self.batches[-1] if self.batches else self.before
        return last.counts.get("late", 0) - self.before.counts.get("late", 0)

    def faults(self) -> list[str]:
        """Why the fleet does not hold; empty where it does."""
        checks = {
            f"a batch of {self.longest_batch_s:.1f} s": self.longest_batch_s >= TRIGGER_S,
            f"the lag grew by {self.lag_growth_s:.1f} s": self.lag_growth_s > TRIGGER_S / 2,
            f"{self.caught_up_s:.1f} s behind at the end": self.caught_up_s > 2 * TRIGGER_S + 5,
            f"{self.facts['failed']} messages failed": self.facts["failed"] > 0,
            f"{self.late} late reports": self.late > self.facts["slow_clocks"],
            f"channels dropped {self.dropped}": bool(self.dropped),
        }
        return [*behind(self.facts), *(text for text, wrong in checks.items() if wrong)]


def behind(facts: dict[str, Any]) -> list[str]:
    """Why a generator that ended could not keep its rate; empty where it could."""
    behind_s = facts["behind_max_s"]
    return [f"the generator was {behind_s:.1f} s behind"] if behind_s >= PERIOD_S else []


def stuck(batches: list[protocol.BatchProgress], now_s: float, begun_s: float) -> list[str]:
    """Why a fleet that is measured since ``begun_s`` cannot hold any more; empty where it can."""
    counted = [batch for batch in batches if batch.at_ms / 1000 - batch.batch_s >= begun_s]
    longest_s = max((batch.batch_s for batch in counted), default=0.0)
    silent_s = now_s - max(begun_s, batches[-1].at_ms / 1000 if batches else begun_s)
    checks = {
        f"a batch of {longest_s:.1f} s": longest_s >= TRIGGER_S,
        f"no batch ended for {silent_s:.0f} s": silent_s >= 3 * TRIGGER_S,
    }
    return [text for text, wrong in checks.items() if wrong]


class Domain:
    """``with Domain(folder, channels=2) as domain: domain.play(…)``"""

    def __init__(self, place: pathlib.Path, *, channels: int, overrides: Sequence[str] = ()) -> None:
        self.place = place
        self._overrides = overrides
        self._channel_names = [f"c{number}" for number in range(1, channels + 1)]
        self._runner = asyncio.Runner()
        self._stack = contextlib.ExitStack()
        self._channels: list[measure.Worker] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._tallies: list[pathlib.Path] = []
        self._stored = 0  # rows in the stream
        self._machines = 0

    def __enter__(self) -> Self:
        self.place.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._runner)
            self._broker = broker.Broker(config.BrokerConfig(name="bench", directory=self.place / "broker"))
            self._runner.run(self._broker.start())
            stack.callback(lambda: self._runner.run(self._broker.stop()))
            self.url = self._broker.url
            hold_s = channel_service.ChannelOptions().hold_s
            for name in self._channel_names:
                worker = measure.Worker(
                    "benchmarks.monitor_worker", "channel", self.url, hold_s, name, log=self._log(name)
                )
                self._channels.append(stack.enter_context(worker))
                worker.hear()
            self.start()
            stack.callback(self.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        with (self.place / "pipeline.log").open("ab") as log:
            self._process = subprocess.Popen(
                measure.pipeline_command(self.place, self.url, *self._overrides),
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(measure.ROOT / "src")},
                start_new_session=True,
            )

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def fleet(self, profile: str, machines: int, periods: int) -> measure.Worker:
        """A generator that is ready to start."""
        self._machines = max(self._machines, machines)
        self._tallies.append(self.place / f"tally-{len(self._tallies)}.npz")
        worker = measure.Worker(
            "benchmarks.pipeline_worker",
            "fleet",
            self.url,
            profile,
            machines,
            periods,
            self._tallies[-1],
            *self._channel_names,
        )
        worker.hear(timeout_s=120)
        return worker

    def play(self, profile: str, machines: int, *, warm: int, periods: int) -> Played:
        """Play for ``warm`` periods and then for ``periods``, which are measured."""
        print(f"  {monitor_rows.plan(machines, profile, period_s=PERIOD_S).describe()}", flush=True)
        with self.fleet(profile, machines, warm + periods) as generator:
            self.wait_until_running()
            generator.tell("go")
            played = asyncio.run(self._watch(generator, profile, machines, warm, periods))
        faults = played.faults()
        held = "held" if not faults else f"does not hold ({', '.join(faults)})"
        ours_us, generator_us = (
            1e6 * used / played.rows for used in (played.product_cpu_s, played.cpu_s[GENERATOR])
        )
        print(
            f"    {played.seconds:.0f} s after {warm * PERIOD_S:.0f} s of warm-up: {held}; longest batch "
            f"{played.longest_batch_s:.1f} s, {ours_us:.1f} µs of CPU a report and "
            f"{generator_us:.1f} µs of the generator, "
            f"{played.memory_bytes / 2**20:,.0f} MiB",
            flush=True,
        )
        return played

    async def _watch(
        self, generator: measure.Worker, profile: str, machines: int, warm: int, periods: int
    ) -> Played:
        batches: list[protocol.BatchProgress] = []
        late_s: list[float] = []
        async with await client.connect([self.url], identity="bench") as bus:
            watching = [
                asyncio.create_task(_follow_batches(bus, batches)),
                asyncio.create_task(_follow_system(bus, late_s)),
            ]
            await asyncio.sleep(warm * PERIOD_S)
            begun_s, before_cpu, skipped = time.time(), self._cpu(generator), len(late_s)
            try:
                facts = await self._hear(generator, batches, begun_s)
            except DoesNotHold:
                lengths = ", ".join(f"{batch.batch_s:.1f}" for batch in batches)
                print(f"    batches, with those of the warm-up: {lengths} s", flush=True)
                whole_s = (time.time() - begun_s) * (os.cpu_count() or 1)
                for name, used_s in self._cpu(generator).items():
                    share = (used_s - before_cpu.get(name, 0.0)) / whole_s
                    print(f"    {name}: {share:.0%} of the machine since the warm-up", flush=True)
                raise
            seconds, after_cpu, memory = time.time() - begun_s, self._cpu(generator), self._memory()
            dropped = await self._settle_channels(facts["rows"])
            caught_up_s = await self._catch_up(bus)
            await asyncio.sleep(0.5)  # the progress of the last batch is on its way
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        counted = [batch for batch in batches if batch.at_ms / 1000 - batch.batch_s >= begun_s and batch.rows]
        earlier = [batch for batch in batches if batch.at_ms / 1000 - batch.batch_s < begun_s]
        share = periods / (warm + periods)
        return Played(
            profile,
            machines,
            seconds,
            int(facts["rows"] * share),
            int(facts["samples"] * share),
            facts,
            counted,
            earlier[-1] if earlier else protocol.BatchProgress(),
            {name: after_cpu[name] - before_cpu.get(name, 0.0) for name in after_cpu},
            memory,
            caught_up_s,
            late_s[skipped:],
            dropped,
        )

    async def _hear(
        self, generator: measure.Worker, batches: list[protocol.BatchProgress], begun_s: float
    ) -> dict[str, Any]:
        """What the generator says at the end; an error as soon as the fleet cannot hold any more."""
        while True:
            with contextlib.suppress(errors.TimedOut):
                facts: dict[str, Any] = await asyncio.to_thread(generator.hear, timeout_s=1)
                reasons = behind(facts)
                break
            reasons = stuck(batches, time.time(), begun_s)
            for name, channel in zip(self._channel_names, self._channels, strict=True):
                waiting_s = (await asyncio.to_thread(_ask, channel))["waiting_s"]
                if waiting_s > TRIGGER_S:
                    reasons.append(f"channel {name} could not forward for {waiting_s:.0f} s")
            if reasons:
                break
        if reasons:
            raise DoesNotHold(", ".join(reasons) + "".join(map(self._last_warning, self._channel_names)))
        return facts

    def _log(self, channel: str) -> pathlib.Path:
        return self.place / f"{channel}.log"

    def _last_warning(self, channel: str) -> str:
        lines = self._log(channel).read_text(errors="replace").splitlines()
        return f"; {len(lines)} warnings of {channel}, the last: {lines[-1]}" if lines else ""

    async def _settle_channels(self, rows: int) -> dict[str, int]:
        """Wait until channels forwarded what the fleet sent; what they dropped, by reason."""
        if not self._channels:
            self._stored += rows
            return {}
        before, dropped = -1, dict[str, int]()
        while True:
            counters = [_ask(channel) for channel in self._channels]
            forwarded = sum(row["forwarded"] for row in counters)
            dropped = {
                reason: sum(channel_counters["dropped"].get(reason, 0) for channel_counters in counters)
                for row in counters
                for reason in row["dropped"]
            }
            if forwarded == before or forwarded + sum(dropped.values()) >= self._stored + rows:
                break
            before = forwarded
            await asyncio.sleep(2 * channel_service.ChannelOptions().hold_s)
        self._stored = forwarded
        return dropped

    async def _catch_up(self, bus: client.NatsBus) -> float:
        """How long until all that was stored has been read."""
        began = time.monotonic()
        ask = pipeline_client.PipelineClient(bus)
        while time.monotonic() - began < CATCH_UP_S_MAX:
            if (await ask.progress()).total_rows >= self._stored:
                break
            await asyncio.sleep(0.2)
        return time.monotonic() - began

    def wait_until_running(self) -> None:
        async def wait() -> None:
            async with await client.connect([self.url], identity="bench") as bus:
                for stream in monitor_protocol.streams():
                    await bus.stream(stream)
                ask = pipeline_client.PipelineClient(bus)
                for _ in range(4000):
                    with contextlib.suppress(errors.Unavailable):
                        if (await ask.progress()).batch >= 0:
                            return
                    await asyncio.sleep(0.1)
            log = (self.place / "pipeline.log").read_text(errors="replace")
            raise errors.TimedOut(f"the pipeline did not start: {log[-2000:]}")

        asyncio.run(wait())

    def wrong_rows(self) -> int:
        """Reports in the history that are missing or there twice."""
        sent = pipeline_tally.Tally.load(self._tallies)
        return sent.wrong(pipeline_tally.Tally.read(self.place / "history", len(sent.counts)))

    def _tree(self) -> dict[str, list[psutil.Process]]:
        assert self._process is not None
        assert self._broker.pid is not None
        driver = psutil.Process(self._process.pid)
        processes: dict[str, list[psutil.Process]] = {
            "broker": [psutil.Process(self._broker.pid)],
            "channels": [psutil.Process(channel.pid) for channel in self._channels],
            "driver": [driver],
            "JVM": [],
            "workers": [],
        }
        for child in driver.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                processes["JVM" if child.name() == "java" else "workers"].append(child)
        return processes

    def _cpu(self, generator: measure.Worker) -> dict[str, float]:
        used = {"workers": 0.0}
        for name, processes in {**self._tree(), GENERATOR: [psutil.Process(generator.pid)]}.items():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used[name] = used.get(name, 0.0) + times.user + times.system
                    # Spark replaces its Python workers: those that ended are counted by their parents.
                    used["workers"] += times.children_user + times.children_system
        return used

    def _memory(self) -> int:
        total = 0
        for processes in self._tree().values():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
        return total


def _ask(channel: measure.Worker) -> dict[str, Any]:
    channel.tell("how far?")
    facts: dict[str, Any] = channel.hear()
    return facts


async def _follow_batches(bus: client.NatsBus, batches: list[protocol.BatchProgress]) -> None:
    async for progress in pipeline_client.PipelineClient(bus).follow_progress():
        batches.append(progress)  # noqa: PERF401


async def _follow_system(bus: client.NatsBus, late_s: list[float]) -> None:
    async with await bus.subscribe(columns.result_subject("pipeline", "system")) as subscription:
        async for message in subscription:
            decoded = messages.decode(message.data, columns.SystemReport)
            if decoded.reports:
                late_s.append(time.time() - decoded.to_ms / 1000)


def main(
    profile: str, machines: int, warm: int, periods: int, channels: int = CHANNELS, *overrides: str
) -> None:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Domain(pathlib.Path(folder), channels=channels, overrides=overrides) as domain,
    ):
        played = domain.play(profile, machines, warm=warm, periods=periods)
        for name, used_s in played.cpu_s.items():
            print(f"    {name}: {1e6 * used_s / played.rows:.1f} µs of CPU a report")
        last = played.batches[-1].cpu_ms if played.batches else {}
        for stage, used_ms in last.items():
            spent_us = 1000 * (used_ms - played.before.cpu_ms.get(stage, 0))
            print(f"    of the workers, {stage}: {spent_us / played.rows:.1f} µs")
        domain.stop()
        print(f"    {domain.wrong_rows():,} reports lost or doubled")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:])  # type: ignore[arg-type]
