"""Which zones a manager receives heartbeats from. A zone that is completely silent may be cut off. Pure."""

from __future__ import annotations

from muster.manage.manager import reconciler

ZONES_MAX = 10_000  # agents name their zones; further ones are treated as never seen


class ZoneReachability:
    def __init__(self, now: float) -> None:
        self.connected_since = now  # start of the connection: silence counts from here
        self.silent: set[str] = set()
        self._last_seen_at: dict[str, float] = {}  # by zone: the last heartbeat of any of its agents
        self._periods_s: dict[str, float] = {}  # by zone: the longest heartbeat period

    def record(self, zone: str, period_s: float, now: float) -> None:
        if zone not in self._last_seen_at and len(self._last_seen_at) >= ZONES_MAX:
            return
        self._last_seen_at[zone] = now
        if period_s > self._periods_s.get(zone, 0.0):
            self._periods_s[zone] = period_s

    def last_seen_at(self, zone: str) -> float:
        """When any agent of the zone was last seen."""
        return self._last_seen_at.get(zone, 0.0)

    def update(self, now: float) -> dict[str, bool]:
        """Zones whose reachability changed, and whether each is silent now."""
        changes = {}
        for zone, last_seen_at in self._last_seen_at.items():
            silence_s = now - max(last_seen_at, self.connected_since)
            silent = silence_s > reconciler.LATE_PERIODS * self._periods_s[zone]
            if silent != (zone in self.silent):
                changes[zone] = silent
        for zone, silent in changes.items():
            (self.silent.add if silent else self.silent.discard)(zone)
        return changes
