"""Dynamic replication: replicas follow the demand, by the thresholds and ratios of the paper.

Every interval, a node evaluates the requests for its replicas, by the node each request came from:

- a temporary replica with less demand than the deletion threshold is deleted;
- above the replication threshold, an origin with more than the migration ratio of the demand becomes the
  primary; an origin with more than the replication ratio gets a temporary replica.

To avoid flapping, the replication threshold is far above the deletion threshold, a migration also needs the
demand of a replication, a replica that was created within the interval is left alone, and local requests
count as demand of this node, so a context stays with its readers.  All holders receive every read, so for
permanent replicas only the primary decides.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from muster.inform import settings as settings_


class DemandCounts:
    """Requests in an interval. Indexed by origin first: most contexts are read from one origin."""

    def __init__(self) -> None:
        self._by_origin: dict[str, dict[str, int]] = {}

    def add(self, key: str, origin: str) -> None:
        counts = self._by_origin.get(origin)
        if counts is None:
            counts = self._by_origin[origin] = {}
        counts[key] = counts.get(key, 0) + 1

    def take(self) -> DemandCounts:
        """The counts until now; it begins again."""
        taken = DemandCounts()
        taken._by_origin, self._by_origin = self._by_origin, {}
        return taken

    def by_origin(self, key: str) -> dict[str, int]:
        """Requests for a key, by origin."""
        return {origin: counts[key] for origin, counts in self._by_origin.items() if key in counts}

    def of_origin(self, origin: str) -> Mapping[str, int]:
        """Requests from an origin, by key."""
        return self._by_origin.get(origin, {})

    def keys(self) -> set[str]:
        return set().union(*self._by_origin.values())


class ReplicaKind(enum.StrEnum):
    PRIMARY = "primary"
    PERMANENT = "permanent"
    TEMPORARY = "temporary"


@dataclass(frozen=True, slots=True)
class DeleteReplica:
    """Delete the local temporary replica."""


@dataclass(frozen=True, slots=True)
class MigrateReplica:
    to: str


@dataclass(frozen=True, slots=True)
class CreateReplica:
    to: str


Instruction = DeleteReplica | MigrateReplica | CreateReplica


def decide(
    me: str, kind: ReplicaKind, counts: Mapping[str, int], held_s: float, settings: settings_.InformSettings
) -> list[Instruction]:
    """``counts``: requests in the ended interval by origin; those of local clients are under ``me``."""
    total = sum(counts.values())
    rate = total / settings.interval_s
    if held_s < settings.interval_s:
        return []
    if kind is ReplicaKind.TEMPORARY:
        return [DeleteReplica()] if rate < settings.delete_per_s else []
    if kind is ReplicaKind.PERMANENT or rate <= settings.replicate_per_s:
        return []
    others = sorted((count, origin) for origin, count in counts.items() if origin != me)
    for count, origin in reversed(others):
        if count > settings.migration_ratio * total:
            return [MigrateReplica(origin)]
    return [
        CreateReplica(origin)
        for count, origin in reversed(others)
        if count > settings.replication_ratio * total
    ]


def migrated(holders: tuple[str, ...], me: str, to: str) -> tuple[str, ...]:
    """The holders after a migration from this primary to ``to``, the new primary.

    If ``to`` already has a permanent replica, this node keeps its own; else ``to`` takes its place.
    """
    if to in holders:
        return (to, *(node for node in holders if node != to))
    return (to, *(node for node in holders if node != me))
