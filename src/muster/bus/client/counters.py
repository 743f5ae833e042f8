"""Counters of a connection, for `statistics` and for the metrics of the process, if it has any."""

from __future__ import annotations

import collections
import enum

from muster.bus import api
from muster.core.telemetry import metrics


class ConnectionCounter(enum.Enum):
    """Metric, description, and the reason if several share one name."""

    DROPPED = ("bus_dropped_messages", "Messages dropped before they were read.", "slow-reader")
    FORBIDDEN = ("bus_refused", "Requests that the brokers refused.", "forbidden")
    FULL = ("bus_refused", "Requests that the brokers refused.", "stream-full")
    RECONNECTED = ("bus_reconnections", "Reconnections.", "")
    RENEWED = ("bus_renewed_subscriptions", "Subscriptions a broker had lost.", "")
    HANDLER_FAILED = ("bus_failed_handlers", "Messages whose handler raised.", "")
    MALFORMED = ("bus_refused_messages", "Messages refused before any handler.", "malformed-subject")
    MISROUTED = ("bus_refused_messages", "Messages refused before any handler.", "other-subject")
    REPUBLISHED = ("bus_refused_messages", "Messages refused before any handler.", "reply-of-broker")
    BAD_TRACE = ("bus_ignored_headers", "Headers that could not be read.", "malformed-trace")


class ConnectionCounters:
    def __init__(self, to: metrics.Metrics | None) -> None:
        self._totals: collections.Counter[ConnectionCounter] = collections.Counter()
        self._metrics: dict[ConnectionCounter, metrics.Counter] = {}
        if to is not None:
            for count in ConnectionCounter:
                name, words, reason = count.value
                self._metrics[count] = to.counter(name, words, ("reason",) if reason else ())

    def add(self, what: ConnectionCounter, number: int = 1) -> int:
        """Returns the new total: that of the first one is 1."""
        self._totals[what] += number
        if what in self._metrics:
            reason = what.value[2]
            self._metrics[what].add(number, **({"reason": reason} if reason else {}))
        return self._totals[what]

    def statistics(self) -> api.BusStatistics:
        return api.BusStatistics(
            reconnects=self._totals[ConnectionCounter.RECONNECTED],
            violations=self._totals[ConnectionCounter.FORBIDDEN],
            dropped=self._totals[ConnectionCounter.DROPPED],
            renewed=self._totals[ConnectionCounter.RENEWED],
            refused_full=self._totals[ConnectionCounter.FULL],
        )
