"""The bootstrap node's decisions: what should run, what is missing, when it is started again. Pure.

A leaf of the bootstrap tree is *active*: it keeps its domain's processes alive.  An inner node is *passive*:
its only care is that its children, bootstrap nodes themselves, live.  Both are one rule over different names:
whoever has ended, or has been silent for too long, is started anew, with a pause that grows while it keeps
falling.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 15.0
DOUBLINGS_MAX = 16  # of the pause, which has its own bound
STEADY_S = 30.0  # after so long a process counts as sound again


class ProcessPhase(enum.Enum):
    MISSING = "missing"
    RUNNING = "running"
    HELD = "held"  # by hand: not started again


@dataclass(slots=True)
class SupervisedProcess:
    """One process under care. Times are of the loop's clock."""

    phase: ProcessPhase = ProcessPhase.MISSING
    started_at: float = 0.0
    heard_at: float = 0.0
    due_at: float = 0.0
    falls: int = 0
    starts: int = 0
    reason: str = ""
    beats: bool = False  # it is known to beat here, so that its silence means something


class RestartPlanner:
    def __init__(self, names: Iterable[str], *, silent_s: float | None = None) -> None:
        """``silent_s``: a ward that has not been heard of for so long is ended and started anew."""
        self.wards = {name: SupervisedProcess() for name in names}
        self._silent_s = silent_s

    def due(self, now: float) -> list[str]:
        """Whom to start now."""
        return [
            name
            for name, ward in self.wards.items()
            if ward.phase is ProcessPhase.MISSING and ward.due_at <= now
        ]

    def silent(self, now: float) -> list[str]:
        """Which to end, because they beat and have not been heard for too long."""
        if self._silent_s is None:
            return []
        return [
            name
            for name, ward in self.wards.items()
            if ward.phase is ProcessPhase.RUNNING
            and ward.beats
            and now - max(ward.heard_at, ward.started_at) > self._silent_s
        ]

    def started(self, name: str, now: float, *, beats: bool = True) -> None:
        """``beats`` False: it was started by hand and may not know of this node."""
        ward = self.wards[name]
        ward.phase, ward.started_at, ward.heard_at, ward.beats = ProcessPhase.RUNNING, now, now, beats
        ward.starts += 1

    def heard(self, name: str, now: float) -> None:
        ward = self.wards[name]
        ward.heard_at, ward.beats = now, True

    def ended(self, name: str, now: float, reason: str) -> None:
        ward = self.wards[name]
        if ward.phase is ProcessPhase.RUNNING and now - ward.started_at > STEADY_S:
            ward.falls = 0
        ward.falls += 1
        ward.phase, ward.reason = ProcessPhase.MISSING, reason
        doublings = min(ward.falls - 2, DOUBLINGS_MAX)
        pause_s = 0.0 if ward.falls == 1 else min(PAUSE_S_MAX, PAUSE_S_MIN * 2**doublings)
        ward.due_at = now + pause_s

    def next_at(self) -> float | None:
        return min(
            (ward.due_at for ward in self.wards.values() if ward.phase is ProcessPhase.MISSING), default=None
        )
