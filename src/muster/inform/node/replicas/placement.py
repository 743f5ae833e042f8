"""Placement of replicas: by proximity, unless the nearest node is too loaded.

Rabinovich's selection, as in the paper: choose the closest candidate, unless its load is more than
`LOAD_RATIO` times that of the least loaded candidate; then choose that one.  Repeat with the rest until there
are enough. Nodes above their load watermark are candidates only if there are no others.  The first choice is
the primary.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOAD_RATIO = 2.0
LOAD_FLOOR = 0.01  # loads below it count as equal


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    node: str
    load: float  # 1: full by the settings of the node
    proximity_ms: float
    zone: str = "default"


def rank(candidates: Iterable[ReplicaCandidate], count: int, *, watermark: float = 1.0) -> list[str]:
    """Return the best ``count`` nodes (or fewer), best first."""
    rest = sorted(candidates, key=lambda candidate: candidate.node)
    chosen: list[str] = []
    while rest and len(chosen) < count:
        able = [candidate for candidate in rest if candidate.load < watermark] or rest
        closest = min(able, key=lambda candidate: (candidate.proximity_ms, candidate.load))
        idlest = min(able, key=lambda candidate: (candidate.load, candidate.proximity_ms))
        best = idlest if closest.load > LOAD_RATIO * max(idlest.load, LOAD_FLOOR) else closest
        chosen.append(best.node)
        rest.remove(best)
    return chosen


def repair_plan(
    holders: Sequence[str], live: Sequence[ReplicaCandidate], replicas: int, *, watermark: float = 1.0
) -> tuple[str, ...]:
    """Return ``holders`` without lost nodes, with new ones added; the order, and so the primary, stays.

    If none of them is alive, the result is that of a new context.
    """
    alive = {candidate.node for candidate in live}
    kept = [node for node in holders if node in alive]
    others = [candidate for candidate in live if candidate.node not in kept]
    return (*kept, *rank(others, replicas - len(kept), watermark=watermark))
