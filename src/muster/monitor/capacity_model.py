"""The analytic model of a hierarchy: propagation time, staleness and number of machines.

The terms are those of the paper.  Level 0 is the sensor; level i receives from n_i senders
below.

    (1)  prop(0) = hold(0)
    (2)  prop(1) = prop(0) + in(1)
    (3)  prop(i) = prop(i-1) + hold(i-1) + out(i-1) + in(i)                          for i >= 2
    (4)  prop(i) = sum hold(0..i-1) + sum out(1..i-1) + sum in(1..i)
    (5)  stale(i) = prop(i) + period of the application's own report

Holding times are settings.  Input and output times depend on the load; the paper measured curves.  Here they
are computed from four measured costs (`CostParameters`): a message and a row, in and out.  These determine
the CPU load of a channel.  The input time is the service time of a message plus its waiting time (the mean of
an M/D/1 queue, which grows without bound as the load approaches 1, as in the paper).  The output time grows
with the forwarded rows, so linearly with the number of senders.

Pure arithmetic: no clock, no measurement.  `PAPER` is inferred: the paper's figures are lost, but its
text states that two levels carry about five times what one carries.  That fixes the ratio of the two costs.
Their size is chosen here; the paper states no number of machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from muster.core import errors


class CostParameters(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of one core."""

    message_s: float  # to receive a message, without its rows
    row_s: float  # to receive a row
    out_message_s: float = 0.0
    out_row_s: float = 0.0


TOLERANCE = 0.2  # of the measured time, by which a prediction may differ
PAPER = CostParameters(
    message_s=0.0675, row_s=0.005, out_message_s=0.01, out_row_s=0.001
)  # XML; inferred, see above


@dataclass(frozen=True, slots=True)
class HierarchyLevel:
    """A level of channels. ``senders``: the number of senders of each channel (n_i)."""

    senders: int
    hold_s: float
    costs: CostParameters


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Sensors of one period below levels of channels, the last of which is the root.

    ``latest``: a channel forwards only the latest report of each machine, as in the paper, instead of all
    reports of its holding time.
    """

    name: str
    period_s: float  # hold(0): the period of sensors
    levels: tuple[HierarchyLevel, ...]
    latest: bool = False

    @property
    def depth(self) -> int:
        return len(self.levels)

    @property
    def machines(self) -> int:
        return math.prod(level.senders for level in self.levels)


@dataclass(frozen=True, slots=True)
class ModelLevelFigures:
    messages_s: float  # received by a channel
    rows_s: float
    load: float  # of one core; 1 and above: saturated
    in_s: float
    out_s: float


@dataclass(frozen=True, slots=True)
class ModelFigures:
    machines: int
    levels: tuple[ModelLevelFigures, ...]
    propagation_s: float  # until the report is in the root; infinite if a level is saturated
    staleness_s: float
    limit: int | None  # the first level that is saturated

    @property
    def root_load(self) -> float:
        return self.levels[-1].load


def figures(hierarchy: Hierarchy, *, service_period_s: float = 0.0) -> ModelFigures:
    """Equations (1) to (5) for a balanced tree. ``service_period_s``: the period of application reports."""
    levels: list[ModelLevelFigures] = []
    machines_below = 1
    sent_every_s = hierarchy.period_s
    for level in hierarchy.levels:
        machines = machines_below * level.senders
        fresh_every_s = sent_every_s if hierarchy.latest else hierarchy.period_s
        messages_s = level.senders / sent_every_s
        rows_s = machines / fresh_every_s
        rows_in_message = rows_s / messages_s
        service_s = level.costs.message_s + rows_in_message * level.costs.row_s
        forward_every_s = level.hold_s or sent_every_s
        rows_out = machines if hierarchy.latest else rows_s * forward_every_s
        out_s = level.costs.out_message_s + rows_out * level.costs.out_row_s
        load = messages_s * service_s + out_s / forward_every_s
        levels.append(ModelLevelFigures(messages_s, rows_s, load, queue_s(service_s, load), out_s))
        machines_below, sent_every_s = machines, max(sent_every_s, level.hold_s)
    holds = [hierarchy.period_s, *(level.hold_s for level in hierarchy.levels)]
    propagation = propagation_s(
        holds, [figure.in_s for figure in levels], [figure.out_s for figure in levels]
    )
    limit = next((place for place, figure in enumerate(levels, start=1) if figure.load >= 1), None)
    return ModelFigures(machines_below, tuple(levels), propagation, propagation + service_period_s, limit)


def propagation_s(holds_s: Sequence[float], ins_s: Sequence[float], outs_s: Sequence[float]) -> float:
    """Equation (4) for the top level h: ``holds_s`` are of levels 0 to h - 1 (or h), ``ins_s`` of 1 to h."""
    depth = len(ins_s)
    return sum(holds_s[:depth]) + sum(outs_s[: depth - 1]) + sum(ins_s)


def queue_s(service_s: float, load: float) -> float:
    """Service and waiting time with random arrivals and constant service time (M/D/1)."""
    if load >= 1:
        return math.inf
    return service_s * (1 + load / (2 * (1 - load)))


def capacity(hierarchy: Hierarchy, *, machines_max: float = math.inf) -> int:
    """The maximum number of machines: the root gets more senders until a level is fully loaded.

    ``machines_max``: the limit of a channel's memory, for a root that is a channel.
    """
    below = math.prod(level.senders for level in hierarchy.levels[:-1])

    def fits(senders: int) -> bool:
        *lower, root = hierarchy.levels
        grown = replace(hierarchy, levels=(*lower, replace(root, senders=senders)))
        loads_fit = all(level.load <= 1 for level in figures(grown).levels)
        return loads_fit and senders * below <= machines_max

    return largest(fits) * below


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, if all smaller ones fit as well; 0 if none does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
        if high > 1 << 40:
            raise errors.InvalidInput("the costs are zero, so there is no limit")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def table_2(costs: CostParameters = PAPER, *, first: CostParameters | None = None) -> tuple[Hierarchy, ...]:
    """The four hierarchies of the paper. It varied the number of senders of the top level; here it is 1.

    ``first``: the costs of the first level, if they differ from the others.
    """

    def made(name: str, period_s: float, *below: tuple[int, float]) -> Hierarchy:
        shape = (*below, (1, 0.0))
        levels = [HierarchyLevel(senders, hold_s, costs) for senders, hold_s in shape]
        levels[0] = replace(levels[0], costs=first or costs)
        return Hierarchy(name, period_s, tuple(levels), latest=True)

    return (
        made("single-level", 60.0),
        made("two-level, 50 sensors", 30.0, (50, 30.0)),
        made("two-level, 100 sensors", 30.0, (100, 30.0)),
        made("three-level", 10.0, (10, 30.0), (10, 30.0)),
    )


# -- comparison with measurements ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCheck:
    predicted_s: float
    measured_s: float
    ratio: float
    holds: bool


def check(predicted_s: float, ages_s: Sequence[float]) -> ModelCheck:
    """Compare the predicted worst case with the oldest measured report, within `TOLERANCE`."""
    if not ages_s:
        raise errors.InvalidInput("there are no measurements")
    worst_s = max(ages_s)
    ratio = predicted_s / worst_s if worst_s > 0 else math.inf
    return ModelCheck(predicted_s, worst_s, ratio, abs(predicted_s - worst_s) <= TOLERANCE * worst_s)
