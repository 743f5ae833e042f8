"""Where copies go: by proximity, unless the near one has too much to do.

Rabinovich's selection, as the paper uses it: of the candidates take the closest, unless its load is more
than `LOAD_RATIO` times that of the least loaded one; then take that one.  Again among the rest, until there
are enough.  Nodes above their load watermark are no candidates while there are others.  The first one taken
is the primary.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOAD_RATIO = 2.0
LOAD_FLOOR = 0.01  # below it a load is none: twice of next to nothing means nothing


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    node: str
    load: float  # 1: full by its own settings
    proximity_ms: float
    zone: str = "default"


def rank(candidates: Iterable[ReplicaCandidate], count: int, *, watermark: float = 1.0) -> list[str]:
    """The best ``count`` (fewer if there are not so many), best first."""
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
    holders: Sequence[str], live: Sequence[ReplicaCandidate], copies: int, *, watermark: float = 1.0
) -> tuple[str, ...]:
    """``holders`` without those that are gone, filled up again; the order (so the primary) stays.

    With nobody of them alive, the same as for a new context.
    """
    alive = {candidate.node for candidate in live}
    kept = [node for node in holders if node in alive]
    others = [candidate for candidate in live if candidate.node not in kept]
    return (*kept, *rank(others, copies - len(kept), watermark=watermark))


def repair_owner(holders: Sequence[str], alive: Iterable[str]) -> str | None:
    """Who sees to a context's copies: the primary, or the first permanent holder that lives."""
    living = set(alive)
    return next((node for node in holders if node in living), None)
