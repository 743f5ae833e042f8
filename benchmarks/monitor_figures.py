"""The paper's figures 3 to 5: one channel and the four hierarchies, as the model has them and as measured.

A point is a channel that takes a message of each of its senders and writes what it holds, all of it done: the
processor time of each step is measured.  The waiting time is computed from these times and random arrivals
within the holding time of the senders, since no machine here has thousands of senders.  Lines are the
model's, with the costs fitted to messages of several sizes.

    python -m benchmarks.monitor_figures      measures the costs and the points, and draws (a minute)
"""

from __future__ import annotations

import functools
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from benchmarks import harness, monitor_rows, monitor_xml
from muster.core import messages
from muster.core.reports import columns
from muster.monitor import capacity_model, report_xml
from muster.monitor.channel import aggregator, interpreters

HOLD_S = 30.0  # of the channel, and of its senders in figure 4
HOLDS_S = (1.0, 5.0, 30.0)  # of the senders in figure 3
SENDERS = (10, 30, 100, 300, 900)
SIZE = 30  # reports in a message, in figure 3
SIZES = (3, 10, 30)  # the same, in figure 4
ROWS_MAX = 9000  # of a point
ROUNDS = 3
TITLES = {"xml": "XML, lxml", "arrow": "Arrow"}


class Costs(Protocol):
    """What `benchmarks.monitor` measures of a form of messages."""

    @property
    def costs(self) -> capacity_model.CostParameters: ...


class Point(NamedTuple):
    load: float
    in_s: float
    out_s: float


def draw(forms: Mapping[str, Costs], ours: Sequence[capacity_model.Hierarchy], channel_s: float) -> None:
    """Measure the points, and draw them with the lines of the model."""
    import matplotlib as mpl

    mpl.use("Agg")
    harness.RESULTS.mkdir(exist_ok=True)
    costs = {name: form.costs for name, form in forms.items()}
    by_hold: dict[str, list[tuple[str, float, int]]] = {}
    by_size: dict[str, list[tuple[str, float, int]]] = {}
    for name in forms:
        by_hold[name] = [(f"senders hold {hold_s:g} s", hold_s, SIZE) for hold_s in HOLDS_S]
        by_size[name] = [(f"{size} reports each", HOLD_S, size) for size in SIZES]
    _draw_channel("monitor-holds.png", costs, by_hold)
    _draw_channel("monitor-channel.png", costs, by_size)
    _draw_hierarchies(forms, ours, channel_s)


@functools.cache
def _rows(count: int) -> list[messages.NodeReport]:
    return monitor_rows.reports_(count * 11 // 10 + 10, "plain")[:count]  # some are silent


def _arrow(
    parts: Sequence[list[messages.NodeReport]],
) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
    channel = aggregator.Aggregator("c", 1, [interpreters.ForwardTarget("up", ("root",))])
    now_ms = parts[0][0].at_ms
    made = [
        (
            f"s{number}",
            columns.encode(
                columns.to_batch(part), columns.BatchInfo(channel=f"s{number}"), compression="lz4"
            ),
        )
        for number, part in enumerate(parts)
    ]
    takes = [functools.partial(channel.add_batch, name, data, now_ms) for name, data in made]
    return takes, lambda: [forward.encode("lz4") for forward in channel.flush(now_ms)]


def _xml(
    parts: Sequence[list[messages.NodeReport]],
) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
    held: dict[str, messages.NodeReport] = {}
    made = [
        report_xml.encode(
            columns.GroupReport(group="g", from_ms=0, to_ms=1, machines=len(part), nodes=tuple(part))
        )
        for part in parts
    ]

    def take(data: bytes) -> None:
        held.update((row.machine, row) for row in monitor_xml.read_xml(data))

    return [functools.partial(take, data) for data in made], lambda: monitor_xml.write_xml([*held.values()])


_MAKERS = {"arrow": _arrow, "xml": _xml}


def measure(form: str, senders: int, hold_s: float, size: int) -> Point:
    """A channel with so many senders, each of which sends ``size`` reports every ``hold_s``."""
    served_s, out_s = _served(form, senders, size)
    load = sum(served_s) / hold_s + out_s / HOLD_S
    return Point(load, math.inf if load >= 1 else _in_s(served_s, hold_s), out_s)


@functools.cache
def _served(form: str, senders: int, size: int) -> tuple[Sequence[float], float]:
    """The times of the messages and of the output; the best of some rounds."""
    rows = _rows(ROWS_MAX)[: senders * size]
    best: tuple[Sequence[float], float] = (), math.inf
    for _ in range(ROUNDS):
        takes, write = _MAKERS[form]([rows[at : at + size] for at in range(0, len(rows), size)])
        served_s = []
        for step in (*takes, write):
            start = time.process_time()
            step()
            served_s.append(time.process_time() - start)
        *taken_s, out_s = served_s
        if not best[0] or sum(served_s) < sum(best[0]) + best[1]:
            best = taken_s, out_s
    return best


def _in_s(served_s: Sequence[float], hold_s: float, rounds: int = 5) -> float:
    """The mean time from the arrival of a message to its end; each sender sends once in ``hold_s``."""
    chance = random.Random(len(served_s))
    free_s = total_s = 0.0
    for turn in range(rounds):
        arrivals = sorted(turn * hold_s + chance.random() * hold_s for _ in served_s)
        for arrived_s, took_s in zip(arrivals, served_s, strict=True):
            free_s = max(free_s, arrived_s) + took_s
            total_s += free_s - arrived_s
    return total_s / rounds / len(served_s)


def _model(
    senders: int, hold_s: float, size: int, costs: capacity_model.CostParameters
) -> capacity_model.ModelLevelFigures:
    """The same by the model. With several reports in a message, the senders are channels themselves."""
    top = capacity_model.HierarchyLevel(senders, HOLD_S, costs)
    below = []
    if size > 1:
        free = capacity_model.CostParameters(message_s=0.0, row_s=0.0)
        below = [capacity_model.HierarchyLevel(size, hold_s, free)]
    tree = capacity_model.Hierarchy("one", hold_s, (*below, top), latest=True)
    return capacity_model.figures(tree).levels[-1]


def _draw_channel(
    file: str,
    costs: Mapping[str, capacity_model.CostParameters],
    curves: Mapping[str, Sequence[tuple[str, float, int]]],
) -> None:
    """Load, input and output time of one channel by its senders."""
    import numpy as np
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(costs), 3, figsize=(13, 7), squeeze=False)
    for row, name in enumerate(costs):
        for colour, (label, hold_s, size) in enumerate(curves[name]):
            line = np.unique(np.geomspace(1, 1e6, 400).astype(int))
            made = [_model(int(n), hold_s, size, costs[name]) for n in line]
            measured = {n: measure(name, n, hold_s, size) for n in SENDERS if n * size <= ROWS_MAX}
            for place, (lines, points) in enumerate(
                (
                    ([100 * each.load for each in made], [100 * each.load for each in measured.values()]),
                    ([1e3 * each.in_s for each in made], [1e3 * each.in_s for each in measured.values()]),
                    ([1e3 * each.out_s for each in made], [1e3 * each.out_s for each in measured.values()]),
                )
            ):
                kept = [(n, value) for n, each, value in zip(line, made, lines, strict=True) if each.load < 1]
                axes[row][place].plot(*zip(*kept, strict=True), color=f"C{colour}", label=label)
                there = [
                    (n, value) for n, value in zip(measured, points, strict=True) if math.isfinite(value)
                ]
                axes[row][place].plot(*zip(*there, strict=True), "o", color=f"C{colour}")
        for place, what in enumerate(("CPU, %", "input time, ms", "output time, ms")):
            title = f"{TITLES[name]}: {what}"
            axes[row][place].set(
                title=title, xlabel="senders", xscale="log", yscale="log" if place else "linear"
            )
            axes[row][place].grid(visible=True, alpha=0.3)
        axes[row][0].legend(fontsize=7)
        axes[row][0].set_ylim(0, 100)
    figure.suptitle("Points: measured; lines: the model with the costs measured here", fontsize=9)
    figure.tight_layout()
    figure.savefig(harness.RESULTS / file, dpi=100)
    plt.close(figure)


def _draw_hierarchies(
    forms: Mapping[str, Costs], ours: Sequence[capacity_model.Hierarchy], channel_s: float
) -> None:
    """Figure 5: propagation time and load of the root by size, for the four hierarchies."""
    import numpy as np
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex="col")
    sides = {"XML": capacity_model.table_2(forms["xml"].costs), "rows, then Arrow": ours}
    for column, (name, trees) in enumerate(sides.items()):
        for tree in trees:
            *below, root = tree.levels
            each = max(1, capacity_model.capacity(tree) // math.prod(level.senders for level in below))
            senders = np.unique(np.geomspace(max(1, each / 1000), each * 1.05, 200).astype(int))
            made = [
                capacity_model.figures(replace(tree, levels=(*below, replace(root, senders=int(n)))))
                for n in senders
            ]
            machines = [prediction.machines for prediction in made]
            axes[0][column].plot(
                machines, [min(prediction.propagation_s, 200) for prediction in made], label=tree.name
            )
            axes[1][column].plot(
                machines, [100 * min(prediction.root_load, 1) for prediction in made], label=tree.name
            )
        axes[0][column].set_title(f"{name}, costs measured here")
        axes[0][column].set_ylabel("propagation, worst case, s")
        axes[1][column].set_ylabel("load of the root, %")
        axes[1][column].set_xlabel("machines")
        for row in (0, 1):
            axes[row][column].set_xscale("log")
            axes[row][column].grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Table 2's hierarchies; one core of a channel carries {channel_s:,.0f} single reports/s")
    figure.tight_layout()
    figure.savefig(harness.RESULTS / "monitor-hierarchies.png", dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure the costs as `benchmarks.monitor` does, and draw, with the channel of the stored run."""
    from benchmarks import monitor

    stored = json.loads((harness.RESULTS / "monitor.json").read_text())["rows"]
    channel_s = next(row["ours"] for row in stored if row["metric"] == "one channel, single reports, a core")
    forms = monitor.measure_forms("plain", monitor.SIZES, rounds=5)
    draw({name: forms[name] for name in TITLES}, monitor.trees_of(forms, channel_s), channel_s)


if __name__ == "__main__":
    main()
