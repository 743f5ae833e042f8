"""Which zones a manager hears. One that is silent as a whole is cut off, as far as anybody can tell. Pure."""

from __future__ import annotations

from muster.manage.manager import reconciler


class ZoneReachability:
    def __init__(self, now: float) -> None:
        self.heard_since = now  # before that, this manager was deaf: silence is counted from here
        self.silent: set[str] = set()
        self._heard_at: dict[str, float] = {}  # of a zone: any agent of it
        self._periods_s: dict[str, float] = {}  # the longest heard of in a zone

    def hear(self, zone: str, period_s: float, now: float) -> None:
        self._heard_at[zone] = now
        if period_s > self._periods_s.get(zone, 0.0):
            self._periods_s[zone] = period_s

    def heard_at(self, zone: str) -> float:
        """When any agent of the zone was heard last."""
        return self._heard_at.get(zone, 0.0)

    def look(self, now: float) -> dict[str, bool]:
        """Zones of which it is another story now: whether each is silent."""
        news = {}
        for zone, heard_at in self._heard_at.items():
            silence_s = now - max(heard_at, self.heard_since)
            silent = silence_s > reconciler.LATE_PERIODS * self._periods_s[zone]
            if silent != (zone in self.silent):
                news[zone] = silent
        for zone, silent in news.items():
            (self.silent.add if silent else self.silent.discard)(zone)
        return news
