"""Dynamic replication: copies follow the demand, by the paper's thresholds and ratios.

Every interval, a node looks at what was asked of its copies, by the node each request came from:

- a temporary copy that was asked for less often than the deletion threshold goes;
- above the replication threshold, an origin with more than the migration ratio of the demand is asked to hold
  the context instead of us; one with more than the replication ratio gets a temporary copy.

Against flapping: the replication threshold is far above the deletion one; a migration needs the demand that
a replication needs, not only the ratio; a copy that came within the interval is left alone; what is asked
here counts as our own demand, so a context that moved to its readers stays.  Holders all hear every access,
so for permanent copies only the primary decides.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemandThresholds:
    interval_s: float = 100.0
    replicate_per_s: float = 0.18
    delete_per_s: float = 0.03
    migration_ratio: float = 0.6
    replication_ratio: float = 0.2


class DemandCounts:
    """Requests in an interval. By origin first: of a million contexts, most are asked for by one."""

    def __init__(self) -> None:
        self._by_origin: dict[str, dict[str, int]] = {}

    def add(self, key: str, origin: str) -> None:
        counts = self._by_origin.get(origin)
        if counts is None:
            counts = self._by_origin[origin] = {}
        counts[key] = counts.get(key, 0) + 1

    def of(self, key: str) -> dict[str, int]:
        """By origin."""
        return {origin: counts[key] for origin, counts in self._by_origin.items() if key in counts}

    def keys(self) -> set[str]:
        return set().union(*self._by_origin.values())


class ReplicaKind(enum.Enum):
    PRIMARY = "primary"
    PERMANENT = "permanent"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True)
class DeleteReplica:
    """Our temporary copy."""


@dataclass(frozen=True, slots=True)
class MigrateReplica:
    to: str


@dataclass(frozen=True, slots=True)
class CreateReplica:
    to: str


Instruction = DeleteReplica | MigrateReplica | CreateReplica


def decide(
    me: str, kind: ReplicaKind, counts: Mapping[str, int], held_s: float, thresholds: DemandThresholds
) -> list[Instruction]:
    """``counts``: requests in the interval that has ended, by origin; our own clients' are under ``me``."""
    total = sum(counts.values())
    rate = total / thresholds.interval_s
    if held_s < thresholds.interval_s:
        return []
    if kind is ReplicaKind.TEMPORARY:
        return [DeleteReplica()] if rate < thresholds.delete_per_s else []
    if kind is ReplicaKind.PERMANENT or rate <= thresholds.replicate_per_s:
        return []
    others = sorted((count, origin) for origin, count in counts.items() if origin != me)
    for count, origin in reversed(others):
        if count > thresholds.migration_ratio * total:
            return [MigrateReplica(origin)]
    return [
        CreateReplica(origin)
        for count, origin in reversed(others)
        if count > thresholds.replication_ratio * total
    ]


def migrated(holders: tuple[str, ...], me: str, to: str) -> tuple[str, ...]:
    """The holders after a migration from us, the primary, to ``to``, which is the primary then.

    One that holds a permanent copy already becomes the primary and we stay; else it takes our place.
    """
    if to in holders:
        return (to, *(node for node in holders if node != to))
    return (to, *(node for node in holders if node != me))
