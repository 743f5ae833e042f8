"""The realistic profile of a simulated fleet: what happens to machines, and metrics beyond the standard ones.

A plain fleet is the easiest case for the system: groups of one size, one group in a message, twelve
metrics, no restarts.  This profile has what makes real fleets expensive:

- Groups and zones have heavy-tailed sizes (Zipf's law), and machines of many groups share a message.
- Machines have one of four roles with 20 to 50 metrics: counters that grow and restart from zero at a reboot,
  and gauges that follow the load or only vary.
- 1 % of the machines reboot in ten minutes and are down for a minute; 1 % move to another group.
- 2 % are silent at any time, for two minutes each.
- Clocks are some milliseconds off; those of 0.5 % of the machines up to half a minute.

Everything is a pure function of the seed, the machine's number and the time, so any part of the fleet can be
computed alone and in any order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core.reports import columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REBOOT_EVERY_S = 60_000.0  # each machine: so 1 % of them in ten minutes
DOWN_S = 60.0  # how long a reboot takes
MOVE_EVERY_S = 60_000.0
SILENT_EVERY_S = 6_000.0
SILENT_SHARE = 0.02
CLOCK_MS = 50.0  # how far off a clock is at most
WRONG_CLOCK_MS = 30_000.0
WRONG_CLOCK_SHARE = 0.005
TAIL = 1.0  # exponent of Zipf's law: the n-th group has 1/n of the machines of the first

_HOST = (
    "tcp_established",
    "tcp_retransmits_total",
    "context_switches_total",
    "interrupts_total",
    "inodes_percent",
    "file_handles",
    "temperature_celsius",
    "entropy_bits",
)
_WEB = (
    *(f"http_{code}_responses_total" for code in ("2xx", "3xx", "4xx", "5xx")),
    *(f"http_request_{part}_ms" for part in ("p50", "p95", "p99")),
    "http_connections",
    "http_queue_length",
    "http_bytes_sent_total",
    "http_bytes_received_total",
    "tls_handshakes_total",
    "workers_busy",
    "workers_idle",
)
_DATABASE = (
    *(f"db_{verb}_total" for verb in ("selects", "inserts", "updates", "deletes", "commits", "rollbacks")),
    *(f"db_query_{part}_ms" for part in ("p50", "p95", "p99")),
    *(f"db_cache_{part}" for part in ("hits_total", "misses_total", "used_bytes")),
    "db_connections",
    "db_connections_waiting",
    "db_locks_held",
    "db_deadlocks_total",
    "db_replication_lag_ms",
    "db_wal_bytes_total",
    "db_checkpoints_total",
    "db_rows_read_total",
    "db_rows_written_total",
    "db_size_bytes",
)
_APPLICATION = (
    *(f"jvm_gc_{part}" for part in ("young_total", "old_total", "pause_p99_ms")),
    *(f"jvm_{part}" for part in ("heap_used_bytes", "heap_max_bytes", "threads", "classes")),
    *(f"rpc_{name}_calls_total" for name in ("login", "search", "order", "pay", "ship")),
    *(f"rpc_{name}_errors_total" for name in ("login", "search", "order", "pay", "ship")),
    *(f"rpc_{name}_p99_ms" for name in ("login", "search", "order", "pay", "ship")),
    *(f"queue_{name}_length" for name in ("mail", "index", "export", "import")),
    *(f"queue_{name}_done_total" for name in ("mail", "index", "export", "import")),
)
#: Metrics of each role besides the standard ones.
ROLES = (_HOST, (*_HOST, *_WEB), (*_HOST, *_DATABASE), (*_HOST, *_APPLICATION))
METRICS_MIN, METRICS_MAX = (len(columns.STANDARD_METRICS) + pick(map(len, ROLES)) for pick in (min, max))

_NAMES = tuple(dict.fromkeys(name for role in ROLES for name in role))


@dataclass(frozen=True, slots=True)
class RoleMetrics:
    """How the metrics of a role are computed: an array has a value for each metric."""

    codes: npt.NDArray[np.int32]  # of their names
    is_counter: Bools
    scale: Floats  # of a counter a second, or of a gauge
    noise: Floats  # seconds of a counter, or share of a gauge
    steps: Floats  # in a unit: values are rounded
    rounding: Floats

    @classmethod
    def of(cls, names: tuple[str, ...]) -> RoleMetrics:
        codes = np.array([_NAMES.index(name) for name in names], np.int32)
        is_counter = np.array([name.endswith("_total") for name in names])
        return cls(
            codes,
            is_counter,
            np.power(10.0, 1 + codes % 4, dtype=np.float64),
            np.where(is_counter, 0.5, 0.2),
            np.where(is_counter, 1.0, 1000.0),
            np.where(is_counter, 0.0, 0.5),
        )


_ROLE_METRICS = tuple(map(RoleMetrics.of, ROLES))


def uniform(seed: int, salt: int, numbers: Ints, more: Ints | int = 0) -> Floats:
    """Return for each number a pseudo-random value between 0 and 1 (splitmix64)."""
    key = np.asarray(seed * 1_000_003 + salt)
    return (hashed(hashed(numbers, key), more) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hashed(
    first: npt.NDArray[np.integer[Any]], other: npt.NDArray[np.integer[Any]] | int
) -> npt.NDArray[np.uint64]:
    """Return 64 bits that differ for different pairs."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        return _mixed(_mixed(first.astype(np.uint64) * golden) + np.asarray(other).astype(np.uint64) * golden)


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@functools.lru_cache(maxsize=8)
def _shares(count: int) -> Floats:
    """Return the end of each part if 0 to 1 is divided by Zipf's law."""
    weights = 1.0 / np.arange(1, count + 1) ** TAIL
    ends: Floats = np.cumsum(weights / weights.sum())
    return ends


def heavy_tailed(chance: Floats, count: int) -> Ints:
    """Return the part, of ``count`` parts with sizes by Zipf's law, for each value between 0 and 1."""
    return np.minimum(np.searchsorted(_shares(count), chance, side="right"), count - 1)


def largest_share(count: int) -> float:
    return float(_shares(count)[0])


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The machines of a slot at one tick."""

    groups: Ints
    boot: Ints  # number of reboots since the start of the fleet
    sequence: Ints
    uptime_s: Floats
    reports: Bools  # neither rebooting nor silent


@dataclass(frozen=True, slots=True)
class RealisticFleet:
    """Constant properties of the machines of a slot."""

    seed: int
    numbers: Ints
    group_count: int
    period_s: float
    roles: Ints
    members: tuple[Ints, ...]  # of each role: the rows of its machines
    clock_ms: Ints  # offset of their clocks
    factor: Floats  # of their metrics
    groups: Ints  # before they move
    reboot_s: Floats  # at the fleet's start: since the last reboot, move and silence
    move_s: Floats
    silent_s: Floats

    @classmethod
    def create(cls, seed: int, numbers: Ints, group_count: int, period_s: float) -> RealisticFleet:
        off = uniform(seed, 15, numbers) * 2 - 1
        wrong = uniform(seed, 16, numbers) < WRONG_CLOCK_SHARE
        roles = (uniform(seed, 17, numbers) * len(ROLES)).astype(np.int64)
        return cls(
            seed,
            numbers,
            group_count,
            period_s,
            roles,
            tuple(np.flatnonzero(roles == role) for role in range(len(ROLES))),
            np.where(wrong, off * WRONG_CLOCK_MS, off * CLOCK_MS).astype(np.int64),
            0.5 + uniform(seed, 18, numbers),
            heavy_tailed(uniform(seed, 14, numbers), group_count),
            uniform(seed, 11, numbers) * REBOOT_EVERY_S,
            uniform(seed, 13, numbers) * MOVE_EVERY_S,
            uniform(seed, 12, numbers) * SILENT_EVERY_S,
        )

    def at(self, tick: int) -> FleetSample:
        at_s = tick * self.period_s
        age_s = at_s + self.reboot_s
        boots = np.floor(age_s / REBOOT_EVERY_S)
        up_s = age_s - boots * REBOOT_EVERY_S
        rebooted = boots > 0
        # The tick of the first report since the last reboot, or of the fleet's start.
        first = np.where(rebooted, np.ceil((at_s - up_s + DOWN_S) / self.period_s - 1e-9), 0.0)
        return FleetSample(
            groups=self._groups(at_s),
            boot=boots.astype(np.int64),
            sequence=(tick - first).astype(np.int64) + 1,
            uptime_s=np.where(rebooted, up_s - DOWN_S, up_s),
            reports=((at_s + self.silent_s) % SILENT_EVERY_S >= SILENT_SHARE * SILENT_EVERY_S)
            & (tick >= first),
        )

    def _groups(self, at_s: float) -> Ints:
        moves = np.floor((at_s + self.move_s) / MOVE_EVERY_S).astype(np.int64)
        moved = np.flatnonzero(moves)
        if not len(moved):
            return self.groups
        groups = self.groups.copy()
        chance = uniform(self.seed, 14, self.numbers[moved], moves[moved])
        groups[moved] = heavy_tailed(chance, self.group_count)
        return groups

    def values(self, moment: FleetSample, load: Floats, chance: np.random.Generator) -> list[Floats]:
        """Return for each role the values of its metrics: a row for each of its members."""
        uptime_s, share = np.maximum(moment.uptime_s, 0.0), 0.3 + load / 100
        return [
            self._role_values(metrics, members, uptime_s[members], share[members], chance)
            for metrics, members in zip(_ROLE_METRICS, self.members, strict=True)
        ]

    def _role_values(
        self,
        metrics: RoleMetrics,
        members: Ints,
        uptime_s: Floats,
        share: Floats,
        chance: np.random.Generator,
    ) -> Floats:
        # The noise of a counter is smaller than its growth in a period, so it never decreases.
        values = chance.random((len(members), len(metrics.codes)))
        values *= np.where(metrics.is_counter, metrics.noise * self.period_s, metrics.noise)
        values += np.where(metrics.is_counter, uptime_s[:, None], share[:, None])
        values *= metrics.scale * metrics.steps
        values *= self.factor[members, None]
        values += metrics.rounding
        np.floor(values, out=values)
        values /= metrics.steps
        return values

    def extra(self, values: list[Floats]) -> pa.MapArray:
        """Return the values of each role as the column ``extra`` of reports."""
        sizes = np.array([len(names) for names in ROLES])[self.roles]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        keys, items = np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1])
        for metrics, members, part in zip(_ROLE_METRICS, self.members, values, strict=True):
            places = offsets[members][:, None] + np.arange(len(metrics.codes))
            keys[places], items[places] = metrics.codes, part
        names = pa.DictionaryArray.from_arrays(pa.array(keys), pa.array(_NAMES))
        return pa.MapArray.from_arrays(pa.array(offsets), names, pa.array(items))
