"""What a connection counts: for its `statistics`, and for the process's metrics where it is given them."""

from __future__ import annotations

import collections
import enum

from muster.bus import api
from muster.core.telemetry import metrics


class Count(enum.Enum):
    """Metric, what it counts, and the reason where several stand under one name."""

    DROPPED = ("bus_dropped_messages", "Messages dropped before a reader saw them.", "slow-reader")
    FORBIDDEN = ("bus_refused", "What the brokers refused.", "forbidden")
    FULL = ("bus_refused", "What the brokers refused.", "stream-full")
    RECONNECTED = ("bus_reconnections", "Times a connection was made anew.", "")
    RENEWED = ("bus_renewed_subscriptions", "Subscriptions a broker had lost.", "")
    HANDLER_FAILED = ("bus_failed_handlers", "Messages whose handler raised.", "")
    BAD_TRACE = ("bus_ignored_headers", "Headers that could not be read.", "malformed-trace")


class Counts:
    def __init__(self, to: metrics.Metrics | None) -> None:
        self._totals: collections.Counter[Count] = collections.Counter()
        self._metrics: dict[Count, metrics.Counter] = {}
        if to is not None:
            for count in Count:
                name, words, reason = count.value
                self._metrics[count] = to.counter(name, words, ("reason",) if reason else ())

    def add(self, what: Count, number: int = 1) -> None:
        self._totals[what] += number
        if what in self._metrics:
            reason = what.value[2]
            self._metrics[what].add(number, **({"reason": reason} if reason else {}))

    def statistics(self) -> api.BusStatistics:
        return api.BusStatistics(
            reconnects=self._totals[Count.RECONNECTED],
            violations=self._totals[Count.FORBIDDEN],
            dropped=self._totals[Count.DROPPED],
            renewed=self._totals[Count.RENEWED],
            refused_full=self._totals[Count.FULL],
        )
