"""A hybrid logical clock: stamps that are close to wall time and never contradict cause and effect.

A timestamp is an integer (milliseconds of wall time in the upper bits, a 16-bit counter in the lower bits)
and the node that created it. The rules:

- The next timestamp of a node is its last one plus one, or the wall time if that is later.  So timestamps
  only grow, whatever the wall clock does, and an overflow of the counter carries into the milliseconds.
- After a node has received a timestamp, it creates no lower one (`HybridClock.observe`): effects have later
  timestamps than causes.
- A timestamp that is further ahead of wall time than ``max_drift_s`` is rejected: one broken clock must not
  move the complete fleet into the future.  "Wall time" is the latest time that this node ever read: while
  its own clock is set back, it accepts the timestamps of others.
- Equal timestamps of different nodes are ordered by the names of the nodes.

**Restarts.** A node that crashed does not know its last timestamp. Therefore it issues timestamps only below
a ceiling that it has stored before (`ClockReservation`), and starts above that ceiling after a restart. One
write every few seconds is sufficient for all timestamps between. Right after a start, timestamps may be ahead
of wall time by the unused part of the reservation. A node that is ahead reserves little (`STEP_MS`), so that
many restarts in a short time do not add up. A clock without a reservation is for data that does not outlive
its process.

Nothing here reads the time: the caller brings it, in nanoseconds since 1970.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from muster.core import errors, subjects

_COUNTER_BITS = 16
STEP_MS = 100  # the least that is reserved: some millions of stamps
_MAX_TIME = (1 << 63) - 1  # fits a database's signed integer, until the year 6429
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUV"  # in ASCII's order, so that text sorts as numbers do
_PAIRS = [high + low for high in _DIGITS for low in _DIGITS]
_TEXT = re.compile(rf"([{_DIGITS}]{{13}})-([A-Za-z0-9_-]{{1,128}})\Z")


class ClockSkewTooLarge(errors.Refused):
    """A stamp from a clock that runs ahead. ``ahead_s`` is by how much."""

    code = "too-far-ahead"

    def __init__(self, stamp: HybridTimestamp, ahead_s: float, max_drift_s: float) -> None:
        super().__init__(
            f"the stamp {stamp} is {ahead_s:.3f} s ahead of this node's time; accepted: {max_drift_s:g} s",
            hint=f"set the clock of {stamp.node}, or of this machine",
        )
        self.ahead_s = ahead_s


@dataclass(frozen=True, slots=True, order=True)
class HybridTimestamp:
    """Sorts as time does; so do its text and its bytes."""

    time: int
    node: str

    def __post_init__(self) -> None:
        if not 0 <= self.time <= _MAX_TIME:
            raise errors.InvalidInput(f"{self.time} is no stamp's time: it has at most 63 bits")
        subjects.token(self.node)

    @property
    def wall_ms(self) -> int:
        return self.time >> _COUNTER_BITS

    @property
    def counter(self) -> int:
        return self.time & ((1 << _COUNTER_BITS) - 1)

    def __str__(self) -> str:
        """13 digits of base 32, and the node: valid in a subject, a header, a key."""
        return format_timestamp(self.time, self.node)

    def __bytes__(self) -> bytes:
        return self.time.to_bytes(8, "big") + self.node.encode("ascii")

    @classmethod
    def parse(cls, text: str) -> HybridTimestamp:
        match = _TEXT.match(text)
        if not match:
            raise errors.InvalidInput(
                f"{text[:60]!r} is not a stamp: expected 13 digits of base 32, a -, a node"
            )
        return cls(int(match[1], 32), match[2])

    @classmethod
    def from_bytes(cls, data: bytes) -> HybridTimestamp:
        try:
            return cls(int.from_bytes(data[:8], "big"), data[8:].decode("ascii"))
        except UnicodeDecodeError as error:
            raise errors.InvalidInput("these bytes are not a stamp: the node's name is not ASCII") from error


def format_timestamp(time: int, node: str) -> str:
    """The age of the timestamp of that node and time."""
    first, rest = divmod(time, 1 << 60)
    pairs = _PAIRS
    return (
        f"{_DIGITS[first]}{pairs[rest >> 50]}{pairs[(rest >> 40) & 1023]}{pairs[(rest >> 30) & 1023]}"
        f"{pairs[(rest >> 20) & 1023]}{pairs[(rest >> 10) & 1023]}{pairs[rest & 1023]}-{node}"
    )


class ClockReservation(NamedTuple):
    """The stored state of a clock: after a crash the node does not repeat a timestamp."""

    ceiling: int = 0  # no stamp at or above it has been issued
    wall_ms: int = 0  # the latest wall time read

    def __str__(self) -> str:
        return f"{self.ceiling} {self.wall_ms}"

    @classmethod
    def parse(cls, text: str) -> ClockReservation:
        match = re.match(r"([0-9]{1,19}) ([0-9]{1,15})\Z", text)
        if not match or int(match[1]) > _MAX_TIME:
            raise errors.InvalidInput(f"{text[:60]!r} is not a clock reservation: expected two integers")
        return cls(int(match[1]), int(match[2]))


class HybridClock:
    """The clock of one node. Not thread-safe."""

    def __init__(
        self,
        node: str,
        *,
        max_drift_s: float = 60.0,
        stored: ClockReservation | None = None,
        reserve_s: float = 10.0,
    ) -> None:
        """``stored``: the last stored reservation, `ClockReservation()` at the first start; None: no
        reservation."""
        if reserve_s >= max_drift_s:
            raise errors.InvalidInput(
                f"reserve_s = {reserve_s:g} must be below max_drift_s = {max_drift_s:g}, or others would "
                "refuse the first stamps after a restart"
            )
        self.node = subjects.token(node)
        self.refused = 0  # stamps that were too far ahead
        self._max_drift_s = max_drift_s
        self._reserve_ms = int(reserve_s * 1000)
        self._last = stored.ceiling if stored else 0
        self._wall_ms = stored.wall_ms if stored else 0
        self._ceiling = stored.ceiling if stored is not None else None
        self._needed = 0  # a stamp that could not be issued below the ceiling

    def now(self, wall_ns: int) -> HybridTimestamp:
        """The stamp of something that happens here: higher than all before."""
        return self._issue(max(self._last + 1, self._read(wall_ns) << _COUNTER_BITS))

    def observe(self, stamp: HybridTimestamp, wall_ns: int) -> HybridTimestamp:
        """Receive ``stamp`` and return a higher timestamp; `ClockSkewTooLarge` leaves the clock unchanged."""
        self.check(stamp, wall_ns)
        return self._issue(max(self._last + 1, stamp.time + 1, self._wall_ms << _COUNTER_BITS))

    def check(self, stamp: HybridTimestamp, wall_ns: int) -> None:
        ahead_s = (stamp.wall_ms - self._read(wall_ns)) / 1000
        if ahead_s > self._max_drift_s:
            self.refused += 1
            raise ClockSkewTooLarge(stamp, ahead_s, self._max_drift_s)

    def to_store(self, wall_ns: int) -> ClockReservation | None:
        """The reservation to store now and then pass to `stored`; None while at least half of the last one is
        left."""
        if self._ceiling is None:
            return None
        wall_ms = self._read(wall_ns)
        ahead_ms = max(wall_ms, max(self._last, self._needed) >> _COUNTER_BITS)
        ceiling_ms = max(wall_ms + self._reserve_ms, ahead_ms + STEP_MS)
        if (self._ceiling >> _COUNTER_BITS) - ahead_ms >= (ceiling_ms - ahead_ms) / 2:
            return None
        return ClockReservation(ceiling_ms << _COUNTER_BITS, self._wall_ms)

    def stored(self, reservation: ClockReservation) -> None:
        """``reservation`` is safely stored: stamps below its ceiling may be issued."""
        if self._ceiling is not None:
            self._ceiling = max(self._ceiling, reservation.ceiling)

    def ahead_s(self, wall_ns: int) -> float:
        """How far the last timestamp is ahead of wall time: 0 unless a clock was set back or others are
        ahead."""
        return max(0.0, (self._last >> _COUNTER_BITS) / 1000 - wall_ns / 1e9)

    def _read(self, wall_ns: int) -> int:
        self._wall_ms = max(self._wall_ms, wall_ns // 1_000_000)
        return self._wall_ms

    def _issue(self, time: int) -> HybridTimestamp:
        if self._ceiling is not None and time >= self._ceiling:
            self._needed = time
            raise errors.Unavailable(
                f"the clock of {self.node} has no stamps left that a restart could not repeat",
                hint="store the result of `to_store`, then pass it to `stored`",
            )
        stamp = HybridTimestamp(time, self.node)
        self._last = time
        return stamp
