"""Decisions of a bootstrap node: which processes should run, which are missing, when to restart them. Pure.

A leaf of the bootstrap tree is *active*: it runs the processes of its domain. An inner node is *passive*: it
only runs its children, which are bootstrap nodes themselves. Both use the same rule: a process that ended, or
is silent for too long, is restarted, with a delay that grows while it keeps failing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 15.0
DOUBLINGS_MAX = 16  # of the delay, which is bounded separately
STEADY_S = 30.0  # a process that ran this long counts as stable again


class ProcessPhase(enum.Enum):
    MISSING = "missing"
    RUNNING = "running"
    HELD = "held"  # held by an operator: not restarted


@dataclass(slots=True)
class SupervisedProcess:
    """A supervised process. Times use the loop's clock."""

    phase: ProcessPhase = ProcessPhase.MISSING
    started_at: float = 0.0
    last_seen_at: float = 0.0
    due_at: float = 0.0
    failures: int = 0
    starts: int = 0
    reason: str = ""
    beats: bool = False  # it sends heartbeats, so its silence is significant


class RestartPlanner:
    def __init__(self, names: Iterable[str], *, silent_s: float | None = None) -> None:
        """``silent_s``: a process without a heartbeat for this long is killed and restarted."""
        self.processes = {name: SupervisedProcess() for name in names}
        self._silent_s = silent_s

    def due(self, now: float) -> list[str]:
        """Processes to start now."""
        return [
            name
            for name, process in self.processes.items()
            if process.phase is ProcessPhase.MISSING and process.due_at <= now
        ]

    def silent(self, now: float) -> list[str]:
        """Processes to kill: they send heartbeats and have been silent for too long."""
        if self._silent_s is None:
            return []
        return [
            name
            for name, process in self.processes.items()
            if process.phase is ProcessPhase.RUNNING
            and process.beats
            and now - max(process.last_seen_at, process.started_at) > self._silent_s
        ]

    def started(self, name: str, now: float, *, beats: bool = True) -> None:
        """``beats`` False: it was started manually and sends no heartbeats."""
        process = self.processes[name]
        process.phase, process.started_at, process.last_seen_at, process.beats = (
            ProcessPhase.RUNNING,
            now,
            now,
            beats,
        )
        process.starts += 1

    def record_heartbeat(self, name: str, now: float) -> None:
        process = self.processes[name]
        process.last_seen_at, process.beats = now, True

    def ended(self, name: str, now: float, reason: str) -> None:
        process = self.processes[name]
        if process.phase is ProcessPhase.RUNNING and now - process.started_at > STEADY_S:
            process.failures = 0
        process.failures += 1
        process.phase, process.reason = ProcessPhase.MISSING, reason
        doublings = min(process.failures - 2, DOUBLINGS_MAX)
        pause_s = 0.0 if process.failures == 1 else min(PAUSE_S_MAX, PAUSE_S_MIN * 2**doublings)
        process.due_at = now + pause_s

    def next_at(self) -> float | None:
        return min(
            (process.due_at for process in self.processes.values() if process.phase is ProcessPhase.MISSING),
            default=None,
        )
