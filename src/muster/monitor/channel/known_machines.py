"""The machines that a channel knows: which reports of theirs were received, and which are overdue. Pure.

A report is identified by (machine, boot, sequence); `core.duplicates` detects duplicates, in whatever order
they arrive.  A report that is too old to decide is dropped as ``late``.  The state is in arrays, so that the
usual case (the next report of a machine) takes a few array operations for a thousand machines; other reports
are observed one by one.

The memory is bounded: above ``machines_max`` the machines that were silent for longest are removed, and
below half of that none.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from muster.core import duplicates

MISSING_AFTER_PERIODS = 2
GONE_AFTER_PERIODS = 6
_FIRST_SIZE = 1024
_NEVER_MS = -(1 << 60)  # when an unused place received something

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class KnownMachines:
    """``dropped``: counts reports that are not new, by reason."""

    def __init__(self, machines_max: int, dropped: collections.Counter[str]) -> None:
        self.gaps = 0  # reports that were never received, according to the sequences
        self._dropped = dropped
        self._machines_max = machines_max
        # The place of each machine in the arrays. Those that report are moved from the old to the young.
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._free: list[int] = []
        self._former: dict[bytes, duplicates.Seen] = {}  # by machine: the previous boot
        self._boot = np.zeros(0, np.int64)
        self._high = np.zeros(0, np.int64)
        self._bits = np.zeros(0, np.uint64)
        self._received_ms = np.zeros(0, np.int64)
        self._period_ms = np.zeros(0)
        self._row = np.zeros(0, np.int64)  # scratch: the last row of each machine

    def observe_all(
        self, machines: Sequence[bytes], boot: Ints, sequence: Ints, period_s: Floats, now_ms: int
    ) -> Bools:
        """Which of the reports are new."""
        period_ms = period_s * 1000
        known = map(self._young.get, machines, itertools.repeat(-1))
        place = np.fromiter(known, np.int64, len(machines))
        rows = np.flatnonzero(place >= 0)
        others = len(machines) - len(rows)
        if others and 2 * (len(self._young) + others) >= self._machines_max:
            rows = rows[:0]  # machines may be removed: which ones depends on the order of the reports
        at = place[rows]
        usual = (self._boot[at] == boot[rows]) & (self._high[at] + 1 == sequence[rows])
        # Several reports of one machine are observed in their order.
        for order in (slice(None), slice(None, None, -1)):
            self._row[at[order]] = rows[order]
            usual &= self._row[at] == rows
        rows, at = rows[usual], at[usual]
        self._high[at] += 1
        self._bits[at] = self._bits[at] << np.uint64(1) | np.uint64(1)
        self._received_ms[at] = now_ms
        self._period_ms[at] = period_ms[rows]
        new = np.zeros(len(machines), np.bool_)
        new[rows] = True
        for row in np.flatnonzero(~new).tolist():
            new[row] = self.observe(
                machines[row], int(boot[row]), int(sequence[row]), float(period_ms[row]), now_ms
            )
        return new

    def observe(self, machine: bytes, boot: int, sequence: int, period_ms: float, now_ms: int) -> bool:
        """Whether a report is new."""
        place = self._young.get(machine)
        if place is None:
            place = self._old.pop(machine, None)  # not to be removed with the others
            if len(self._young) * 2 >= self._machines_max:
                self._forget_old()
            if place is None:
                place = self._young[machine] = self._new_place()
                self._set(place, boot, sequence, 1, period_ms, now_ms)
                return True
            self._young[machine] = place  # also for a duplicate: its machine is active
        known = int(self._boot[place]), int(self._high[place]), int(self._bits[place])
        if boot == known[0]:
            verdict, high, bits = self._observed(known[1], known[2], sequence)
            if verdict:
                self._set(place, boot, high, bits, period_ms, now_ms)
            return verdict
        former = self._former.get(machine)
        if former is not None and boot == former[0]:  # sent before the restart
            verdict, high, bits = self._observed(former[1], former[2], sequence)
            self._former[machine] = (boot, high, bits)
            return verdict
        if former is None and len(self._former) >= self._machines_max:
            del self._former[next(iter(self._former))]
        self._former[machine] = known
        self._set(place, boot, sequence, 1, period_ms, now_ms)
        return True

    def count(self, now_ms: int) -> tuple[int, int]:
        """Active machines, and those whose report is overdue. One that is silent for long is no longer
        expected."""
        silent_ms = now_ms - self._received_ms
        active = silent_ms <= GONE_AFTER_PERIODS * self._period_ms
        missing = active & (silent_ms > MISSING_AFTER_PERIODS * self._period_ms)
        return int(np.count_nonzero(active)), int(np.count_nonzero(missing))

    def _observed(self, high: int, bits: int, sequence: int) -> tuple[bool, int, int]:
        """As `duplicates.observe`, with counters."""
        verdict, highest, bits = duplicates.observe(high, bits, sequence)
        if verdict is not duplicates.DuplicateVerdict.NEW:
            self._dropped[verdict.value] += 1
            return False, highest, bits
        is_highest = sequence > high
        self.gaps += sequence - high - 1 if is_highest else -1
        return True, highest, bits

    def _set(self, place: int, boot: int, high: int, bits: int, period_ms: float, now_ms: int) -> None:
        self._boot[place], self._high[place], self._bits[place] = boot, high, bits
        self._received_ms[place], self._period_ms[place] = now_ms, period_ms

    def _new_place(self) -> int:
        if not self._free:
            size = len(self._boot)
            added = max(_FIRST_SIZE, size)
            for name in ("_boot", "_high", "_bits", "_received_ms", "_period_ms", "_row"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros(added, array.dtype)]))
            self._received_ms[size:] = _NEVER_MS
            self._free = list(range(size, size + added))
        return self._free.pop()

    def _forget_old(self) -> None:
        """Remove the machines that have not reported since the young ones were begun."""
        removed = list(self._old.values())
        self._received_ms[removed] = _NEVER_MS
        self._free += removed
        self._old, self._young = self._young, {}
