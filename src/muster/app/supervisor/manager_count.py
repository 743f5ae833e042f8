"""How many managers a machine runs: enough for the resources that they manage, by measured load. Pure.

The registry gives each manager of the domain an even share of the resources, so the managers of one machine
show what a share costs. The load of a process is the time that its threads ran or waited for a core.
"""

from __future__ import annotations

from collections.abc import Mapping

LOOK_S = 5.0
BUSY = 0.6  # of a core, for each manager: with more, another one is started
CALM = 0.3  # of a core, for each manager that would be left: with less, one ends
BUSY_LOOKS, CALM_LOOKS = 3, 60


class ManagerCount:
    """``count`` begins at ``least``, and is never above ``most``."""

    def __init__(self, least: int, most: int) -> None:
        self.count = least
        self._least, self._most = least, max(least, most)
        self._before: dict[int, tuple[float, int]] = {}
        self._busy = self._calm = 0

    def look(self, now_s: float, active_ns: Mapping[int, int]) -> int:
        """``active_ns``: of each manager that runs, by its pid, since its start. Returns the count due."""
        loads = [
            max(0, active - before) / 1e9 / (now_s - at_s)
            for pid, active in active_ns.items()
            for at_s, before in [self._before.get(pid, (now_s, 0))]
            if now_s > at_s
        ]
        self._before = {pid: (now_s, active) for pid, active in active_ns.items()}
        if len(loads) != self.count:  # some have just started or ended
            self._busy = self._calm = 0
            return self.count
        load = sum(loads)
        self._busy = self._busy + 1 if load > BUSY * self.count else 0
        self._calm = self._calm + 1 if load < CALM * (self.count - 1) else 0
        if self._busy >= BUSY_LOOKS and self.count < self._most:
            self.count, self._busy = self.count + 1, 0
        elif self._calm >= CALM_LOOKS and self.count > self._least:
            self.count, self._calm = self.count - 1, 0
        return self.count
