"""Measurements of the last half hour that are in no report: of queues, channels, brokers and nodes. Pure."""

from __future__ import annotations

import collections

from muster.core import errors
from muster.web.data.measurements.charts import Row

KEPT = 360
NAMES_MAX = 300  # of each kind; of further ones nothing is kept

#: The lines of a chart, by what it is about and its metric.
LINES = {
    ("queue", "depth"): ("waiting", "in flight"),
    ("queue", "rates"): ("in", "out"),
    ("channel", "reports"): ("reports", "dropped"),
    ("broker", "messages"): ("in", "out"),
    ("domain", "messages"): ("in", "out"),
    ("node", "contexts"): ("permanent", "temporary"),
    ("node", "rates"): ("messages",),
}


class SampleLog:
    def __init__(self) -> None:
        self._kept: dict[str, dict[str, collections.deque[tuple[float, dict[str, float]]]]] = {}

    def add(self, kind: str, name: str, at_s: float, values: dict[str, float]) -> None:
        named = self._kept.setdefault(kind, {})
        if name not in named and len(named) >= NAMES_MAX:
            return
        named.setdefault(name, collections.deque(maxlen=KEPT)).append((at_s, values))

    def forget(self, now_s: float, kept_s: float = 3600.0) -> None:
        """Forget what has had no measurement for a long time: its name may be another's place."""
        for named in self._kept.values():
            for name in [name for name, rows in named.items() if rows[-1][0] < now_s - kept_s]:
                del named[name]

    def rows(self, kind: str, name: str, metric: str) -> list[Row]:
        lines = LINES.get((kind, metric))
        if lines is None:
            raise errors.NotFound(f"there is no chart of {metric!r}")
        return [
            (at_s, {line: values.get(line) for line in lines})
            for at_s, values in self._kept.get(kind, {}).get(name, ())
        ]

    def names(self, kind: str) -> list[str]:
        return sorted(self._kept.get(kind, {}))
