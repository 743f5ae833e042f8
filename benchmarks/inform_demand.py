"""The paper's dynamic-replication experiment (the text around its Figure 13), on a virtual clock.

All contexts are at one node (Indianapolis) and are asked for, at random, through another (Bloomington).
The nodes are the real ones, over the simulated network with the paper's distance; only time is not.

The paper does not give the request rate, and it decides everything: above the replication threshold all
contexts move in the first intervals, far below it hardly any does, and only just below it does it take the
paper's minutes, because in each interval those contexts move that chance has asked for often enough.  So
there are rows for several rates.  The rows without a rate have the one that comes nearest to the paper: they
say no more than that such a rate exists.  The figures do not depend on the machine or its load.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
import statistics
from typing import NamedTuple

import msgspec

from benchmarks import harness
from muster.bus.memory import network
from muster.inform import protocol, settings
from muster.inform.node import node
from muster.testing import virtual_clock

RUN_S_MAX = 3600
HOP_S = 0.00242 / 4  # there and back: four hops make the paper's 2.42 ms
REQUESTS_PER_S = 0.165  # for each context: nearest to the paper's minutes
OTHER_REQUESTS_PER_S = (0.12, 0.14, 0.19, 0.25)


class Sample(NamedTuple):
    minute: float
    mean_ms: float
    deviation_ms: float
    moved: float  # share of the contexts that are at the readers' node now


async def _experiment(
    contexts: int, minutes: float, requests_per_s: float, seed: int, interval_s: float
) -> list[Sample]:
    net = network.SimulatedNetwork(
        seed, faults=network.NetworkFaults(delay_s_min=HOP_S, delay_s_max=HOP_S * 1.05)
    )
    expected = msgspec.convert({"replicas": 1, "interval_s": interval_s}, settings.InformSettings)
    chance = random.Random(seed)
    async with (
        await net.connect("bloomington") as here,
        await net.connect("indianapolis") as there,
        await node.start(here, settings=expected, now_ns=net.now_ns) as near,
        await node.start(there, settings=expected, now_ns=net.now_ns) as far,
    ):
        keys = [f"k{number}" for number in range(contexts)]
        for key in keys:
            await far.writer.write(protocol.PutContext(key, b"x" * 1700), "indianapolis")
        loop = asyncio.get_running_loop()
        samples: list[Sample] = []
        start = loop.time()
        while loop.time() < start + minutes * 60:
            until, took_ms = loop.time() + 20.0, []
            while loop.time() < until:
                await asyncio.sleep(chance.expovariate(requests_per_s * contexts))
                began = loop.time()
                await near.reader.get(protocol.GetContext(chance.choice(keys)), "reader")
                waited_s = loop.time() - began
                took_ms.append(waited_s * 1000)  # none where it was read from memory
            moved = near.replicas.permanent / contexts
            samples.append(
                Sample(
                    (loop.time() - start) / 60, statistics.fmean(took_ms), statistics.pstdev(took_ms), moved
                )
            )
        return samples


def experiment(
    contexts: int,
    minutes: float,
    *,
    requests_per_s: float = REQUESTS_PER_S,
    seed: int = 7,
    interval_s: float = 100.0,
) -> list[Sample]:
    return virtual_clock.run_virtual(_experiment(contexts, minutes, requests_per_s, seed, interval_s))


def first_minute(samples: list[Sample], share: float) -> float:
    return next((sample.minute for sample in samples if sample.moved >= share), float("inf"))


def moved_by(samples: list[Sample], minute: float) -> float:
    """The share of the contexts that are at their readers then."""
    return max((sample.moved for sample in samples if sample.minute <= minute), default=0.0)


def draw(samples: list[Sample], path: pathlib.Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    minutes = [sample.minute for sample in samples]
    axes.plot(minutes, [sample.mean_ms for sample in samples], label="mean of an access, ms")
    axes.plot(minutes, [sample.deviation_ms for sample in samples], label="standard deviation, ms")
    axes.plot(
        minutes, [sample.moved for sample in samples], label="share moved to its readers", linestyle=":"
    )
    axes.set_xlabel("minutes")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(quick: bool) -> list[harness.Row]:
    contexts = 40 if quick else 200
    samples = experiment(contexts, 40)
    if not quick:
        draw(samples, harness.RESULTS / "inform-demand.png")
    by_rate = {rate: experiment(contexts, 17, requests_per_s=rate) for rate in OTHER_REQUESTS_PER_S}
    by_rate[REQUESTS_PER_S] = samples
    made = [
        harness.Row(
            metric=f"dynamic replication: {name} of the contexts at their readers",
            ours=first_minute(samples, share),
            unit="min",
            better="lower",
            paper=paper,
        )
        for name, share, paper in (
            ("half", 0.5, 8.0),
            ("nine in ten", 0.9, None),
            ("all but one in twenty", 0.95, 16.0),
        )
    ] + [
        harness.Row(
            metric=f"dynamic replication, {rate:g} requests/s a context: at readers after {minute} min",
            ours=100 * moved_by(by_rate[rate], minute),
            unit="%",
            better="higher",
            paper=paper,
        )
        for rate in sorted(by_rate)
        for minute, paper in ((8, 50.0), (16, 95.0))
    ]
    return harness.under(f"{contexts} contexts, threshold and interval of the defaults", made)
