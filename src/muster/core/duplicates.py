"""Recognise repeats of numbered items, such as reports and batches. Pure.

A source numbers its items and names the run in which it counts: its *boot*. A boot is only an identifier. It
may come from a clock that was corrected later, so a lower boot is not an older one.

For each source the highest sequence of its current boot is stored, with a bit for each of the `KEPT` - 1
sequences below it, so that items that arrive out of order are not taken for duplicates. The same is stored
for the previous boot, because items of an earlier run may arrive after a restart.

`muster.core.reports.duplicate_columns` is the same for arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

KEPT = 64

#: The boot, the highest sequence, and a bit for each sequence seen: bit i is for the sequence i below the
#: highest.
Seen = tuple[int, int, int]


class DuplicateVerdict(enum.Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    LATE = "late"  # too far below the highest to distinguish it from a duplicate


def observe(high: int, bits: int, sequence: int, kept: int = KEPT) -> tuple[DuplicateVerdict, int, int]:
    """Whether ``sequence`` is new within its boot, and the new state in that case."""
    ahead = sequence - high
    if ahead >= kept:
        return DuplicateVerdict.NEW, sequence, 1
    if ahead > 0:
        return DuplicateVerdict.NEW, sequence, (bits << ahead | 1) & (1 << kept) - 1
    if -ahead >= kept:
        return DuplicateVerdict.LATE, high, bits
    if bits >> -ahead & 1:
        return DuplicateVerdict.DUPLICATE, high, bits
    return DuplicateVerdict.NEW, high, bits | 1 << -ahead


class DuplicateWindows:
    """The items of many sources; with more than ``most`` sources the oldest source is removed."""

    def __init__(self, most: int, remembered: Mapping[str, list[Seen]] | None = None) -> None:
        self._most = most
        self._seen: dict[str, list[Seen]] = dict(remembered or {})  # the current boot first

    def observe(self, source: str, boot: int, sequence: int) -> DuplicateVerdict:
        seen = self._seen.get(source)
        if seen is None:
            if len(self._seen) >= self._most:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[source] = []
        for place, (known, high, bits) in enumerate(seen):
            if known == boot:
                verdict, high, bits = observe(high, bits, sequence)
                seen[place] = boot, high, bits
                return verdict
        seen.insert(0, (boot, sequence, 1))
        del seen[2:]
        return DuplicateVerdict.NEW

    def remembered(self) -> dict[str, list[Seen]]:
        """To be stored, and given to the constructor later."""
        return self._seen

    @classmethod
    def union(cls, most: int, first: DuplicateWindows, other: DuplicateWindows) -> DuplicateWindows:
        """The items that either has seen, of sources whose items both could see."""
        joined = cls(most, {source: list(seen) for source, seen in first._seen.items()})
        for source, seen in other._seen.items():
            joined._seen[source] = _union(joined._seen.get(source, []), seen)
        for source in list(joined._seen)[: max(0, len(joined._seen) - most)]:
            del joined._seen[source]
        return joined


def _union(first: list[Seen], other: list[Seen]) -> list[Seen]:
    longer, shorter = (first, other) if len(first) >= len(other) else (other, first)
    by_boot: dict[int, tuple[int, int]] = {boot: (high, bits) for boot, high, bits in longer}
    for boot, high, bits in shorter:
        known_high, known_bits = by_boot.get(boot, (high, bits))
        highest = max(known_high, high)
        by_boot[boot] = highest, _below(known_bits, highest - known_high) | _below(bits, highest - high)
    return [(boot, high, bits) for boot, (high, bits) in by_boot.items()][:2]


def _below(bits: int, ahead: int) -> int:
    """The bits for a highest sequence that is so far ahead: a source chooses how far."""
    return bits << min(ahead, KEPT) & (1 << KEPT) - 1
