"""Sensors and channels, and a root that aggregates what arrives.

The pure state of the pipeline (`muster.pipeline.fleet`) stands for Spark at the root.
"""

from __future__ import annotations

import asyncio
import time

from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import settings
from muster.monitor.channel import channel, interpreters
from muster.monitor.sensor import sensor
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, rollups
from muster.pipeline.fleet import state as fleet_state
from tests.sim import domain as domain_
from tests.sim import history as history_
from tests.sim import host

LEAVES = ("leaf-1", "leaf-2")
TOPS = ("top-1", "top-2")
MACHINES = tuple(f"machine-{number}" for number in range(6))
PERIOD_S = 5.0
BASE = 16  # a machine's value is a power of it, so that a sum shows how often each machine was counted
HOT_PERCENT, COOL_PERCENT = 99.0, 1.0
HOT_S = 12.0  # all machines are hot, and then cool, for so long: many alerts begin and end together
RULE = rules.AlertRule(name="hot", scope="node", when="memory_percent > 90")
PLAN = fleet_state.FleetStatePlan(window_s=PERIOD_S, delay_s=10.0, rules=(RULE,), changes_max=2)


class InventedSensor(sensor.Sensor):
    """A sensor with an invented measurement; each report is an event of the history."""

    history: history_.History
    value: float

    def measure(self) -> dict[str, float]:
        return {"cpu_percent": self.value}

    async def sample(self) -> messages.NodeReport:
        self._sequence += 1
        report = messages.NodeReport(
            machine=self.machine,
            group=self._settings.group,
            zone=self._settings.zone,
            boot=self._boot,
            sequence=self._sequence,
            at_ms=time.time_ns() // 1_000_000,
            period_s=self._settings.period_s,
            dropped=self._buffer.dropped,
            metrics=self.measure(),
        )
        self.history.event(
            *(self.machine, "report"),
            key=self.machine,
            group=report.group,
            at_ms=report.at_ms,
            sequence=report.sequence,
        )
        return report


class SimulatedSensor(InventedSensor):
    """Hot and cool in turns, until the simulation is calm."""

    domain: domain_.Domain

    def measure(self) -> dict[str, float]:
        turn = int(asyncio.get_running_loop().time() / HOT_S)
        hot = turn % 2 == 1 and not self.domain.calm.is_set()
        return super().measure() | {"memory_percent": HOT_PERCENT if hot else COOL_PERCENT}


def record_windows(
    history: history_.History, actor: str, output: fleet_state.ShardOutput, window_ms: int, group: str = ""
) -> None:
    """The closed windows of groups, or of one, as events."""
    for many in rollups.scope_totals(output.closed):
        if many.scope == "group" and not many.gone and group in ("", many.name):
            history.event(
                *(actor, "aggregate"),
                key=many.name,
                from_ms=many.from_ms,
                window_ms=window_ms,
                known=many.known,
                stale=many.stale,
                machines=many.cell.machine_count(),
                total=many.cell.total,
                sum=many.cell.rollups()["cpu_percent"].sum if many.cell.total else 0.0,
                partial=many.cell.partial,
                dropped=sum(many.cell.dropped.values()),
            )


class ReportPart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        self._position = 0
        for name in LEAVES:
            domain.add_host(name, self._leaf, role="channel")
        for name in TOPS:
            domain.add_host(name, self._top, role="channel")
        for name in MACHINES:
            domain.add_host(name, self._machine, role="sensor")
        domain.add_host("root", self._root)

    # Programs.

    async def _leaf(self, machine: host.Host) -> None:
        up = interpreters.ForwardTarget("up", TOPS)
        options = channel.ChannelOptions(subscriptions=(up,), hold_s=0.5, compression=None)
        await channel.Channel(await machine.connect(), options).start()
        await _forever()

    async def _top(self, machine: host.Host) -> None:
        options = channel.ChannelOptions(hold_s=0.5, sensors=False, compression=None)
        await channel.Channel(await machine.connect(), options).start()
        await _forever()

    async def _machine(self, machine: host.Host) -> None:
        number = MACHINES.index(machine.name)
        options = settings.SensorSettings(
            intake=False, group=f"group-{number % 2}", period_s=PERIOD_S, channels=LEAVES
        )
        made = SimulatedSensor(await machine.connect(), options, machine.folder)
        made.domain, made.history = self._domain, self._history
        made.value = float(BASE ** (number // 2))
        await made.start()
        await _forever()

    async def _root(self, machine: host.Host) -> None:
        bus = await machine.connect()
        fleet = fleet_state.FleetState(PLAN)
        while True:
            await asyncio.sleep(1.0)
            try:
                stream = await bus.open_stream(columns.REPORTS_STREAM)
                state = await stream.state()
                pieces = []
                if state.last_sequence > self._position:
                    async for stored in stream.read(self._position + 1, state.last_sequence):
                        batch, facts = columns.decode(stored.data)
                        stored_ms = stored.stored_at_ns // 1_000_000
                        pieces.append(
                            blocks.ReportPiece.from_message(stored.sequence, stored_ms, batch, facts)
                        )
            except (errors.Unavailable, errors.NotFound):
                continue
            self._position = state.last_sequence
            output = fleet.feed(pieces, state.now_ns // 1_000_000)
            for change in output.changes:
                self._history.event(machine.name, "alert", key=change.machine, on=change.on)
            record_windows(self._history, machine.name, output, PLAN.window_ms)

    # The end.

    def missing(self) -> str | None:
        """The last window of each group counts all of its machines, and none is hot any more."""
        last = {event.key: event for event in self._history.of("aggregate")}
        for group in ("group-0", "group-1"):
            expected = sum(f"group-{number % 2}" == group for number in range(len(MACHINES)))
            counted = last[group].facts["machines"] if group in last else 0
            if counted < expected:
                return f"{group} counts {counted} of {expected} machines"
        firing = {event.key: event.facts["on"] for event in self._history.of("alert")}
        if any(firing.values()):
            return f"alerts do not end: {sorted(name for name, on in firing.items() if on)}"
        return None

    async def finish(self) -> None:
        for number, name in enumerate(MACHINES):
            self._history.fact("machine", key=name, group=f"group-{number % 2}", value=BASE ** (number // 2))
        for stored in self._domain.net.stored.get(columns.REPORTS_STREAM, ()):
            batch, _ = columns.decode(stored.message.data)
            for name in set(batch.column("machine").to_pylist()):
                self._history.fact("stored", key=name, at_s=stored.at_s)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
