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

**Restarts.** A node does not store its last timestamp.  It receives the timestamps of the log that it loads,
and the primary of a context stamps above the last version of that context, so that a restart contradicts
neither.

Nothing here reads the time: the caller brings it, in nanoseconds since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.core import errors, subjects

_COUNTER_BITS = 16
_MAX_TIME = (1 << 63) - 1  # fits a database's signed integer, until the year 6429
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUV"  # in ASCII's order, so that text sorts as numbers do
_PAIRS = [high + low for high in _DIGITS for low in _DIGITS]


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
    """Sorts as time does; so does its text."""

    time: int
    node: str

    def __post_init__(self) -> None:
        if not 0 <= self.time <= _MAX_TIME:
            raise errors.InvalidInput(f"{self.time} is no stamp's time: it has at most 63 bits")
        subjects.token(self.node)

    @property
    def wall_ms(self) -> int:
        return self.time >> _COUNTER_BITS

    def __str__(self) -> str:
        """13 digits of base 32, and the node: valid in a subject, a header, a key."""
        return format_timestamp(self.time, self.node)


def format_timestamp(time: int, node: str) -> str:
    """The text of the timestamp of that node and time."""
    first, rest = divmod(time, 1 << 60)
    pairs = _PAIRS
    return (
        f"{_DIGITS[first]}{pairs[rest >> 50]}{pairs[(rest >> 40) & 1023]}{pairs[(rest >> 30) & 1023]}"
        f"{pairs[(rest >> 20) & 1023]}{pairs[(rest >> 10) & 1023]}{pairs[rest & 1023]}-{node}"
    )


def wall_ms_of(text: str) -> int:
    """The time of a timestamp's text, in milliseconds since 1970."""
    return int(text.partition("-")[0], 32) >> _COUNTER_BITS


class HybridClock:
    """The clock of one node. Not thread-safe."""

    def __init__(self, node: str, *, max_drift_s: float = 60.0) -> None:
        self.node = subjects.token(node)
        self.refused = 0  # stamps that were too far ahead
        self._max_drift_s = max_drift_s
        self._last = 0
        self._wall_ms = 0

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

    def _read(self, wall_ns: int) -> int:
        self._wall_ms = max(self._wall_ms, wall_ns // 1_000_000)
        return self._wall_ms

    def _issue(self, time: int) -> HybridTimestamp:
        self._last = time
        return HybridTimestamp(time, self.node)
