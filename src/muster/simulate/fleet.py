"""A simulated fleet: the reports of each machine at each tick. Pure and seeded.

Load is correlated as in a real fleet: a common daily wave, slowly drifting offsets of each zone and each
group, a level of each machine, and noise.  The other metrics are derived from the load.  The same seed gives
the same fleet, whatever part of it is requested and in which order, so several processes can each simulate a
share.

There are two profiles.  ``plain``: groups and zones of one size, one group in a message as far as possible,
and the standard metrics.  ``realistic``: uneven groups mixed in messages, more metrics, reboots, silences,
moves and wrong clocks (`realistic`).

Faults apply to a part of the fleet for some time, and are given as text: ``hot group=web at 30s for 60s``.

    silent      reports nothing                     hot         load goes to the top
    leak        memory fills                        slow        reports carry a time a minute ago
    skewed      reports carry a time an hour ahead  twice       every message is sent twice
    garbage     messages are cut off in the middle
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import errors, units
from muster.core.reports import columns
from muster.simulate import realistic

Floats = npt.NDArray[np.float64]

FAULTS = ("silent", "hot", "leak", "slow", "skewed", "twice", "garbage")
DAY_S = 86400.0
DRIFT = 0.95  # share of an offset that remains at the next tick
MOOD_TICKS = 64  # an offset is the sum of so many past shocks, so any tick can be computed alone
LEAK_PERCENT_S = 0.2
_UPTIME = columns.STANDARD_METRICS.index("uptime_s")
_FAULT = re.compile(
    r"(?P<kind>[a-z]+)(?:\s+(?P<what>group|zone|share)=(?P<which>\S+))?"
    r"(?:\s+at\s+(?P<at>\S+))?(?:\s+for\s+(?P<lasts>\S+))?\Z"
)


@dataclass(frozen=True, slots=True)
class FleetFault:
    kind: str
    what: str = "share"  # group, zone or share of all machines
    which: str = "1"
    from_s: float = 0.0  # since the fleet's start
    to_s: float = math.inf

    @classmethod
    def parse(cls, text: str, *, now_s: float = 0.0) -> FleetFault:
        """Parse ``hot zone=z3 at 30s for 60s``; by default it begins now and never ends."""
        match = _FAULT.match(text.strip())
        if match is None or match["kind"] not in FAULTS:
            raise errors.InvalidInput(
                f"{text[:80]!r} is not a fault: use {', '.join(FAULTS)}, as in 'hot group=g3 at 30s for 1m'"
            )
        from_s = units.parse_duration_s(match["at"]) if match["at"] else now_s
        lasts_s = units.parse_duration_s(match["lasts"]) if match["lasts"] else math.inf
        fault = cls(match["kind"], match["what"] or "share", match["which"] or "1", from_s, from_s + lasts_s)
        if fault.what == "share":
            fault.share()
        return fault

    def share(self) -> float:
        try:
            share = float(self.which)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise errors.InvalidInput(f"a share must be between 0 and 1, not {self.which[:20]!r}")
        return share

    def holds(self, at_s: float) -> bool:
        return self.from_s <= at_s < self.to_s


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The parameters of a fleet. ``first`` and ``count`` define the share that is simulated here."""

    machines: int
    period_s: float = 10.0
    groups: int = 100
    zones: int = 8
    seed: int = 1
    prefix: str = "sim"
    rows_per_message: int = 1000
    first: int = 0
    count: int | None = None
    profile: Literal["plain", "realistic"] = "plain"

    def __post_init__(self) -> None:
        if self.machines < 1 or self.groups < 1 or self.zones < 1 or self.rows_per_message < 1:
            raise errors.InvalidInput("machines, groups, zones and rows must be at least one")
        if not 0 < self.period_s <= 86400:
            raise errors.InvalidInput("a period must be between 0 and a day")

    def share(self, number: int, of: int) -> FleetPlan:
        """Return the share of process ``number`` (from 1) ``of`` several; messages are not divided."""
        if not 1 <= number <= of:
            raise errors.InvalidInput(f"share {number} of {of}")
        slots = math.ceil(self.machines / self.rows_per_message)
        low, high = (slots * place // of * self.rows_per_message for place in (number - 1, number))
        return replace(self, first=low, count=max(0, min(high, self.machines) - low))

    def describe(self) -> str:
        """Describe the parameters of the load, to be printed with a result."""
        size = f"{self.profile} fleet: {self.machines:,} machines every {self.period_s:g} s"
        if self.profile == "plain":
            return (
                f"{size}, {self.groups:,} groups and {self.zones} zones of one size, one group in a message, "
                f"{len(columns.STANDARD_METRICS)} metrics, seed {self.seed}"
            )
        return (
            f"{size}, {self.groups:,} groups (the largest {realistic.largest_share(self.groups):.0%}) and "
            f"{self.zones} zones (the largest {realistic.largest_share(self.zones):.0%}) mixed in messages, "
            f"{realistic.METRICS_MIN} to {realistic.METRICS_MAX} metrics; "
            f"{600 / realistic.REBOOT_EVERY_S:.0%} reboot and "
            f"{600 / realistic.MOVE_EVERY_S:.0%} move in ten minutes, "
            f"{realistic.SILENT_SHARE:.0%} silent, {realistic.WRONG_CLOCK_SHARE:.1%} of the clocks up to "
            f"{realistic.WRONG_CLOCK_MS / 1000:.0f} s off, seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class FleetSlot:
    """The machines that report in one message."""

    number: int
    names: pa.Array
    groups: pa.Array
    zones: pa.Array
    group_numbers: npt.NDArray[np.int64]
    zone_numbers: npt.NDArray[np.int64]
    level: Floats  # of load, for each machine
    cores: Floats
    luck: Floats  # between 0 and 1, fixed: selects machines for a fault of a share
    lives: realistic.RealisticFleet | None = None  # of the realistic profile


@dataclass(frozen=True, slots=True)
class FleetReports:
    """The machines of a slot at one tick."""

    slot: FleetSlot  # with the groups of this tick
    reporting: npt.NDArray[np.bool_]
    boot: npt.NDArray[np.int64]
    sequence: npt.NDArray[np.int64]
    reported_ms: npt.NDArray[np.int64]
    standard: Floats  # a row for each machine
    extra: list[Floats]  # of the realistic profile: for each role a row for each of its machines


class VirtualFleet:
    def __init__(self, plan: FleetPlan, *, boot: int = 1, faults: tuple[FleetFault, ...] = ()) -> None:
        self.plan = plan
        self.faults = list(faults)
        self._boot = boot
        self._group_names = pa.array([f"g{number}" for number in range(plan.groups)])
        count = plan.machines - plan.first if plan.count is None else plan.count
        ends = range(plan.first, plan.first + count, plan.rows_per_message)
        self.slots = [
            self._slot(first, min(first + plan.rows_per_message, plan.first + count)) for first in ends
        ]

    @property
    def machines(self) -> int:
        return sum(len(slot.names) for slot in self.slots)

    def add_fault(self, fault: FleetFault) -> None:
        self.faults.append(fault)

    def active(self, at_s: float, *kinds: str) -> list[FleetFault]:
        return [fault for fault in self.faults if fault.kind in kinds and fault.holds(at_s)]

    def sample(self, slot: FleetSlot, tick: int, at_ms: int) -> FleetReports:
        """Return the reports of the machines of a slot at tick ``tick`` (from 0) and wall time ``at_ms``."""
        at_s = tick * self.plan.period_s
        chance = np.random.default_rng((self.plan.seed, 3, tick, slot.number))
        moment = None if slot.lives is None else slot.lives.at(tick)
        if moment is not None:  # machines move between groups
            slot = replace(slot, group_numbers=moment.groups)
        load = self._load(slot, tick, chance)
        for fault in self.active(at_s, "hot"):
            load = np.where(self._hit(slot, fault), 97.0 + 3 * chance.random(len(load)), load)
        load = np.clip(load, 0.5, 100.0)
        standard = self._metrics(slot, load, at_s, chance)
        rows = len(load)
        reported_ms = np.full(rows, at_ms, np.int64)
        for fault in self.active(at_s, "slow", "skewed"):
            shift_ms = -60_000 if fault.kind == "slow" else 3_600_000
            reported_ms[self._hit(slot, fault)] = at_ms + shift_ms
        boot = np.full(rows, self._boot, np.int64)
        sequence = np.full(rows, tick + 1, np.int64)
        reporting = np.ones(rows, np.bool_)
        extra: list[Floats] = []
        if slot.lives is not None and moment is not None:
            boot += moment.boot
            sequence, reporting = moment.sequence, moment.reports
            reported_ms += slot.lives.clock_ms
            standard[:, _UPTIME] = np.floor(moment.uptime_s)
            extra = slot.lives.values(moment, load, chance)
        for fault in self.active(at_s, "silent"):
            reporting = reporting & ~self._hit(slot, fault)
        return FleetReports(slot, reporting, boot, sequence, reported_ms, standard, extra)

    def batch(self, slot: FleetSlot, tick: int, at_ms: int) -> pa.RecordBatch:
        """Return the same in columns, without the machines that do not report."""
        made = self.sample(slot, tick, at_ms)
        lives, rows = slot.lives, len(made.reporting)
        known: dict[str, Any] = {
            "machine": slot.names,
            "group": slot.groups if lives is None else self._group_names.take(made.slot.group_numbers),
            "zone": slot.zones,
            "boot": made.boot,
            "sequence": made.sequence,
            "reported_at": pa.array(made.reported_ms * 1000).cast(pa.timestamp("us", tz="UTC")),
            "period_s": np.full(rows, self.plan.period_s),
            "state": _repeated("up", rows),
            "dropped": np.zeros(rows, np.int64),
            "partial": _repeated(False, rows),
            "extra": _nothing("extra", rows) if lives is None else lives.extra(made.extra),
            "services": _nothing("services", rows),
            **{name: made.standard[:, place] for place, name in enumerate(columns.STANDARD_METRICS)},
        }
        arrays = [
            value if isinstance(value := known[field.name], pa.Array) else pa.array(value, field.type)
            for field in columns.node_schema()
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=columns.node_schema())
        return batch if made.reporting.all() else batch.filter(pa.array(made.reporting))

    def _load(self, slot: FleetSlot, tick: int, chance: np.random.Generator) -> Floats:
        days = np.full(len(slot.level), tick * self.plan.period_s / DAY_S)
        if slot.lives is not None:  # zones are around the world
            days += slot.zone_numbers / self.plan.zones
        day: Floats = 12 * np.sin(2 * math.pi * days)
        groups, zones = self._moods(tick)
        mood = groups[slot.group_numbers] + zones[slot.zone_numbers]
        return slot.level + day + mood + chance.normal(0, 4, len(slot.level))

    @functools.lru_cache(maxsize=4)  # noqa: B019  (every slot of a tick needs the same)
    def _moods(self, tick: int) -> tuple[Floats, Floats]:
        weights = DRIFT ** np.arange(MOOD_TICKS)
        groups = np.zeros(self.plan.groups)
        zones = np.zeros(self.plan.zones)
        for back, weight in enumerate(weights):
            if tick < back:
                break
            shocks = np.random.default_rng((self.plan.seed, 2, tick - back))
            groups += weight * shocks.normal(0, 2.0, self.plan.groups)
            zones += weight * shocks.normal(0, 1.0, self.plan.zones)
        return groups, zones

    def _metrics(self, slot: FleetSlot, load: Floats, at_s: float, chance: np.random.Generator) -> Floats:
        """Return the standard metrics: a row for each machine."""
        rows = len(load)
        memory = np.clip(25 + slot.level * 0.6 + load * 0.15 + chance.normal(0, 1, rows), 1, 100)
        for fault in self.active(at_s, "leak"):
            grown = (at_s - fault.from_s) * LEAK_PERCENT_S
            memory = np.where(self._hit(slot, fault), np.minimum(memory + grown, 99.9), memory)
        traffic = np.exp(chance.normal(11, 0.4, rows)) * (0.2 + load / 50)
        values = {
            "cpu_percent": load,
            "load_1m": load / 100 * slot.cores + np.abs(chance.normal(0, 0.1, rows)),
            "memory_percent": memory,
            "memory_used_bytes": np.floor(memory / 100 * slot.cores * 4e9),
            "swap_percent": np.clip((memory - 90) * 5, 0, 100),
            "disk_percent": np.minimum(20 + slot.luck * 60 + at_s / DAY_S, 100),
            "disk_read_bytes_s": np.floor(traffic * 0.3),
            "disk_write_bytes_s": np.floor(traffic * 0.5),
            "network_in_bytes_s": np.floor(traffic),
            "network_out_bytes_s": np.floor(traffic * 1.7),
            "processes": np.floor(120 + slot.cores * 8 + load),
            "uptime_s": np.full(rows, at_s) + np.floor(slot.luck * 1e6),
        }
        standard = np.stack([values[name] for name in columns.STANDARD_METRICS], axis=1)
        return np.round(standard, 2, out=standard)

    def _hit(self, slot: FleetSlot, fault: FleetFault) -> npt.NDArray[np.bool_]:
        if fault.what == "share":
            return slot.luck < fault.share()
        names, numbers = ("g", slot.group_numbers) if fault.what == "group" else ("z", slot.zone_numbers)
        number = fault.which.removeprefix(names)
        hit: npt.NDArray[np.bool_] = numbers == (int(number) if number.isdecimal() else -1)
        return hit

    def _slot(self, first: int, end: int) -> FleetSlot:
        plan = self.plan
        numbers = np.arange(first, end)
        # The machines of a message are in one group as far as possible, like those of a first-level channel.
        together = min(plan.rows_per_message, math.ceil(plan.machines / plan.groups))
        group_numbers = (numbers // together) % plan.groups
        zone_numbers = numbers % plan.zones
        lives = None
        if plan.profile == "realistic":
            lives = realistic.RealisticFleet.create(plan.seed, numbers, plan.groups, plan.period_s)
            group_numbers = lives.at(0).groups
            zone_numbers = realistic.heavy_tailed(realistic.uniform(plan.seed, 19, numbers), plan.zones)
        own = np.random.default_rng((plan.seed, 1, first))
        return FleetSlot(
            number=first,
            names=pa.array([f"{plan.prefix}.{number:07}" for number in numbers.tolist()]),
            groups=pa.array([f"g{number}" for number in group_numbers.tolist()]),
            zones=pa.array([f"z{number}" for number in zone_numbers.tolist()]),
            group_numbers=group_numbers,
            zone_numbers=zone_numbers,
            level=own.gamma(4.0, 8.0, len(numbers)),
            cores=own.choice([2.0, 4.0, 8.0, 16.0, 32.0], len(numbers)),
            luck=own.random(len(numbers)),
            lives=lives,
        )


@functools.lru_cache(maxsize=16)
def _repeated(value: Any, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), rows)


@functools.lru_cache(maxsize=16)
def _nothing(column: str, rows: int) -> pa.Array:
    return pa.nulls(rows, columns.node_schema().field(column).type)
