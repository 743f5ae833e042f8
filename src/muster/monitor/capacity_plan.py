"""Plans a hierarchy for a fleet: channels, brokers, and Spark as the root. Pure.

`plan` computes the smallest tree for a fleet.  `trade_off` answers the question of the paper: how
many machines can be monitored, depending on the age of reports, their size and the depth of the tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from muster.core import errors
from muster.monitor import capacity_model
from muster.monitor.capacity_model import CostParameters, HierarchyLevel
from muster.monitor.channel import aggregator

ROOT_SENDERS_MAX = 64
TARGET_LOAD = 0.7  # of a core: above that queues are usually long
STANDARD_METRICS = 12
METRIC_SHARE = 0.11  # of the cost of a row with the standard metrics: the cost of each further metric
#: Machines that one channel tracks and never forgets.
CHANNEL_MACHINES_MAX = aggregator.ChannelLimits().machines_max // 2


class BatchCosts(msgspec.Struct, frozen=True):
    """The time of a micro-batch on the machine of the pipeline: a fixed part, and one for each report."""

    fixed_s: float
    report_s: float


class BrokerCosts(msgspec.Struct, frozen=True):
    message_s: float = 2.2e-6  # CPU time to route a message of 512 bytes
    connections_max: int = 10_000  # measured; each takes 48 kB


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured costs (``bench-monitor``, ``bench-pipeline_plain``, ``bench-bus``; 2 shared cores)."""

    channel: CostParameters = CostParameters(message_s=5e-6, row_s=7e-6, out_message_s=4e-4, out_row_s=6e-7)  # noqa: RUF009
    inner: CostParameters = CostParameters(message_s=4e-4, row_s=1e-6, out_message_s=4e-4, out_row_s=4e-7)  # noqa: RUF009
    root: CostParameters = CostParameters(message_s=1e-4, row_s=7e-6)  # noqa: RUF009  (Spark: roll-up, staleness, history)
    batch_s: float = 0.5  # of Spark, for each batch
    brokers: BrokerCosts = BrokerCosts()  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    machines: int
    period_s: float
    hierarchy: capacity_model.Hierarchy
    figures: capacity_model.ModelFigures
    channels: tuple[int, ...]  # the number at each level, without the root
    brokers: int
    broker_load: float  # of a core, for each broker
    broker_limit: str  # what determines the number of brokers
    root_cores: float
    limits: str  # text: the first bottleneck


@dataclass(frozen=True, slots=True)
class FleetPlanner:
    """The parameters of a plan other than the size of the fleet and its period.

    ``batch``: fitted costs of the pipeline instead of the measured ones, for the cores that it has.
    ``metrics``: the number of metrics in a report.
    """

    hold_s: float = 1.0
    trigger_s: float = 10.0
    root_cores: float = 2.0
    load: float = TARGET_LOAD
    metrics: int = STANDARD_METRICS
    costs: MeasuredCosts = MeasuredCosts()
    batch: BatchCosts | None = None

    def plan(self, machines: int, period_s: float, *, levels: int | None = None) -> CapacityPlan:
        """The smallest tree for the fleet, with Spark as its root (its trigger is the holding time).

        Sensors use as few first-level channels as load and memory allow.  ``levels``: the number of levels of
        channels; None: another level is added if there are more channels than the root should have
        senders.
        """
        positive = (machines, period_s, self.hold_s, self.trigger_s, self.root_cores, self.metrics)
        if min(positive) <= 0:
            raise errors.InvalidInput(
                "machines, period, holding time, trigger, cores and metrics must be above zero"
            )
        below, counts = self._channels(machines, period_s, levels)
        root = self._root()
        tree = capacity_model.Hierarchy(
            "plan", period_s, (*below, HierarchyLevel(counts[-1], self.trigger_s, root))
        )
        model = capacity_model.figures(tree, service_period_s=period_s)
        # In the root a report is visible after its batch: the trigger time is added.
        batch_s = root.out_message_s + machines / period_s * self.trigger_s * root.row_s
        total_s = model.propagation_s + self.trigger_s + batch_s
        model = replace(model, propagation_s=total_s, staleness_s=total_s + period_s)
        brokers, broker_load, broker_limit = self._brokers(machines, period_s, counts)
        return CapacityPlan(
            machines=machines,
            period_s=period_s,
            hierarchy=tree,
            figures=model,
            channels=tuple(counts),
            brokers=brokers,
            broker_load=broker_load,
            broker_limit=broker_limit,
            root_cores=model.root_load * self.root_cores,
            limits=self._limits(model),
        )

    def machines_max(self, period_s: float, levels: int, staleness_s: float) -> int:
        """The largest fleet that overloads no level and whose reports are not older than this."""

        def fits(machines: int) -> bool:
            model = self.plan(machines, period_s, levels=levels).figures
            overloaded = any(level.load > self.load for level in model.levels)
            return not overloaded and model.staleness_s <= staleness_s

        return capacity_model.largest(fits)

    def channel_machines(self, period_s: float) -> int:
        """The largest number of machines of one first-level channel."""
        costs = self._sized(self.costs.channel)
        a_row_s = costs.message_s + costs.row_s + costs.out_row_s
        by_load = int((self.load - costs.out_message_s / self.hold_s) * period_s / a_row_s)
        return max(1, min(by_load, CHANNEL_MACHINES_MAX))

    def _channels(
        self, machines: int, period_s: float, levels: int | None
    ) -> tuple[list[HierarchyLevel], list[int]]:
        channel, inner = self._sized(self.costs.channel), self._sized(self.costs.inner)
        counts = [math.ceil(machines / self.channel_machines(period_s))]
        below = [HierarchyLevel(math.ceil(machines / counts[0]), self.hold_s, channel)]
        while len(counts) < levels if levels else counts[-1] > ROOT_SENDERS_MAX:
            above = _between(counts[-1], machines / period_s, self.hold_s, self.load, inner)
            above = min(max(above, math.ceil(machines / CHANNEL_MACHINES_MAX)), counts[-1])
            if not levels and above == counts[-1]:  # another level would not reduce the number
                break
            below.append(HierarchyLevel(math.ceil(counts[-1] / above), self.hold_s, inner))
            counts.append(above)
        return below, counts

    def _root(self) -> CostParameters:
        """The costs of the root in wall time; the fixed part of a batch is the cost of its output."""
        if self.batch is not None:
            scaled = self._sized(CostParameters(message_s=0.0, row_s=self.batch.report_s))
            return msgspec.structs.replace(scaled, out_message_s=self.batch.fixed_s)
        sized = self._sized(self.costs.root)
        return msgspec.structs.replace(
            sized,
            message_s=sized.message_s / self.root_cores,
            row_s=sized.row_s / self.root_cores,
            out_message_s=self.costs.batch_s,
        )

    def _sized(self, costs: CostParameters) -> CostParameters:
        """The costs of reports with this number of metrics."""
        factor = 1 + METRIC_SHARE * max(0, self.metrics - STANDARD_METRICS)
        return msgspec.structs.replace(costs, row_s=costs.row_s * factor, out_row_s=costs.out_row_s * factor)

    def _brokers(self, machines: int, period_s: float, channels: Sequence[int]) -> tuple[int, float, str]:
        """The number of brokers, the load of each, and what determines the number."""
        costs = self.costs.brokers
        messages_s = machines / period_s + sum(channels) / self.hold_s
        by_connections = math.ceil(machines / costs.connections_max)
        by_load = math.ceil(messages_s * costs.message_s / self.load)
        if max(by_connections, by_load) > 1:  # most messages pass two brokers
            messages_s *= 2
            by_load = math.ceil(messages_s * costs.message_s / self.load)
        count = max(1, by_connections, by_load)
        limit = "connections of sensors" if by_connections >= by_load else "messages"
        return count, messages_s * costs.message_s / count, limit if count > 1 else "one is enough"

    def _limits(self, model: capacity_model.ModelFigures) -> str:
        if model.root_load >= 1:
            needed = math.ceil(model.root_load * self.root_cores / self.load)
            return f"the root: {self.root_cores:g} cores are not enough, {needed} are needed"
        if model.root_load > self.load:
            return f"the load of the root is {model.root_load:.0%}: use a longer trigger or another core"
        room = self.load / model.root_load if model.root_load else math.inf
        return f"the root is the first limit, at {room:.1f} times this fleet; channels are added as needed"


def _between(below: int, rows_s: float, hold_s: float, load: float, costs: CostParameters) -> int:
    """The number of channels above ``below`` channels; ``below`` if another level would not reduce it."""
    a_sender_s = costs.message_s / hold_s + rows_s / below * (costs.row_s + costs.out_row_s)
    senders = int((load - costs.out_message_s / hold_s) / a_sender_s)
    return math.ceil(below / senders) if senders > 1 else below


# -- the question of the paper ------------------------------------------------------------------------------

STALENESS_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
PERIODS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0)
TRIGGERS_S = (1.0, 2.0, 5.0, 10.0, 30.0)
SIZES = (STANDARD_METRICS, 50)
DEPTHS = (1, 2, 3)


class TradeOff(msgspec.Struct, frozen=True):
    """The largest fleet for a limit of the age of reports, a size of reports and a depth."""

    staleness_s: float
    metrics: int
    depth: int  # levels above the sensors; 1: a single channel, without Spark
    machines: int  # 0: not possible
    period_s: float
    trigger_s: float | None  # of Spark
    channels: int
    brokers: int


def trade_off(
    planner: FleetPlanner,
    *,
    staleness_s: Iterable[float] = STALENESS_S,
    sizes: Iterable[int] = SIZES,
) -> list[TradeOff]:
    """The best period and trigger for each combination, by the number of machines."""
    return [
        _best(replace(planner, metrics=metrics), limit_s, depth)
        for metrics, depth, limit_s in itertools.product(sizes, DEPTHS, staleness_s)
    ]


def _best(planner: FleetPlanner, limit_s: float, depth: int) -> TradeOff:
    best = TradeOff(limit_s, planner.metrics, depth, 0, 0.0, None, 0, 0)
    for period_s, trigger_s in itertools.product(PERIODS_S, TRIGGERS_S if depth > 1 else (0.0,)):
        if 2 * period_s + trigger_s > limit_s:
            continue
        if depth == 1:
            machines = planner.channel_machines(period_s)
            channels, brokers = 1, planner._brokers(machines, period_s, [1])[0]
        else:
            chosen = replace(planner, trigger_s=trigger_s)
            machines = chosen.machines_max(period_s, depth - 1, limit_s)
            if not machines:
                continue
            made = chosen.plan(machines, period_s, levels=depth - 1)
            channels, brokers = sum(made.channels), made.brokers
        if machines > best.machines:
            best = TradeOff(limit_s, planner.metrics, depth, machines, period_s, trigger_s, channels, brokers)
    return best
