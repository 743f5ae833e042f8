"""The latest reports of applications to the sensor. Pure.

A pushed report is valid until its service has been silent for `LATE_AFTER` periods; then it is shown as late,
and after `FORGET_AFTER` periods it is removed.  Statsd lines are aggregated between two node reports:
counters become rates, timers their mean and maximum, sets the number of distinct values.  A gauge is removed
if it has not been set for `FORGET_AFTER` times `STATSD_PERIOD_S`; a service without lines becomes late and is
then removed, as one that pushes reports with that period.

The numbers of services, of metrics and of values of a set are bounded; excess input is counted.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from muster.core import errors, health, messages
from muster.core.telemetry import log

events = log.EventLog("monitor")

SERVICES_MAX = 256  # the limit of a node report
METRICS_MAX = 1024  # of one service; the limit of a service report
TIMER_METRICS = 3  # count, mean and maximum
SET_MAX = 10_000
LATE_AFTER = 3
FORGET_AFTER = 30
STATSD_PERIOD_S = 60.0  # in which a service is expected to send a line

_LINE = re.compile(
    r"([^:|@\n]{1,200}):([^|@\n]{1,64})\|(c|g|ms|h|d|s)(?:\|@([0-9.]{1,20}))?(?:\|#[^\n]{0,1000})?\Z"
)


@dataclass(slots=True)
class _PushedReport:
    report: messages.ServiceReport
    at_s: float
    period_s: float


@dataclass(slots=True)
class _Statsd:
    """One service's lines since the last node report."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, tuple[float, float]] = field(default_factory=dict)  # value, when it was set
    timers: dict[str, list[float]] = field(default_factory=dict)  # count, sum, largest
    sets: dict[str, set[str]] = field(default_factory=dict)
    at_s: float = 0.0

    def has_room_for(self, metric: str, kind: str) -> bool:
        others: dict[str, Mapping[str, object]] = {"c": self.counters, "g": self.gauges, "s": self.sets}
        known = others.get(kind, self.timers)
        metrics = len(self.counters) + len(self.gauges) + len(self.sets) + TIMER_METRICS * len(self.timers)
        return metric in known or metrics + (TIMER_METRICS if known is self.timers else 1) <= METRICS_MAX

    def forget_old(self, now_s: float) -> None:
        self.gauges = {name: gauge for name, gauge in self.gauges.items() if not _is_old(gauge[1], now_s)}


class ServiceReports:
    def __init__(self) -> None:
        self.dropped: collections.Counter[str] = collections.Counter()
        self._pushed: dict[str, _PushedReport] = {}
        self._truncated: set[str] = set()  # services with too many metrics, each logged once
        self._statsd: dict[str, _Statsd] = {}
        self._collected_s: float | None = None

    def push(
        self, report: messages.ServiceReport, now_s: float, *, period_s: float = 10.0, merge: bool = False
    ) -> None:
        """`errors.LimitExceeded` if there are too many services. Excess metrics are dropped and counted.

        ``merge``: the report has some of the service's metrics; the others stay as they are.
        """
        if report.name not in self._pushed and len(self._pushed) >= SERVICES_MAX:
            raise errors.LimitExceeded(f"{SERVICES_MAX} services report already; {report.name!r} is rejected")
        if merge and report.name in self._pushed:
            before = self._pushed[report.name].report.metrics
            report = msgspec.structs.replace(report, metrics={**before, **report.metrics})
        report = self._bounded(report)
        try:
            msgspec.json.encode(report)
        except UnicodeEncodeError as error:  # the node report could not be encoded
            raise messages.MalformedMessage(
                f"a service report with text that is not Unicode: {error}"
            ) from error
        self._pushed[report.name] = _PushedReport(report, now_s, period_s)

    def _bounded(self, report: messages.ServiceReport) -> messages.ServiceReport:
        if len(report.metrics) <= METRICS_MAX:
            return report
        self.dropped["service-metrics"] += len(report.metrics) - METRICS_MAX
        if report.name not in self._truncated:
            self._truncated.add(report.name)
            events.warning(
                "metrics-truncated", service=report.name, metrics=len(report.metrics), kept=METRICS_MAX
            )
        kept = dict(itertools.islice(report.metrics.items(), METRICS_MAX))
        return msgspec.structs.replace(report, metrics=kept)

    def statsd(self, data: bytes, now_s: float) -> None:
        """A datagram: lines of ``service.metric:value|type[|@rate]``."""
        try:
            lines = data.decode().split("\n")
        except UnicodeDecodeError:
            self.dropped["statsd-malformed"] += 1
            return
        for line in filter(None, lines):
            if not self._line(line.strip(), now_s):
                self.dropped["statsd-malformed"] += 1

    def collect(self, now_s: float) -> tuple[messages.ServiceReport, ...]:
        """The service reports for the next node report."""
        since_s, self._collected_s = self._collected_s, now_s
        reports: dict[str, messages.ServiceReport] = {}
        for name, latest in list(self._pushed.items()):
            silent = (now_s - latest.at_s) / latest.period_s
            if silent > FORGET_AFTER:
                del self._pushed[name]
                self._truncated.discard(name)
            elif silent > LATE_AFTER and latest.report.state is health.HealthState.UP:
                reports[name] = messages.ServiceReport(
                    name=name,
                    state=health.HealthState.LATE,
                    reason=f"silent for {now_s - latest.at_s:.0f} s",
                    metrics=latest.report.metrics,
                )
            else:
                reports[name] = latest.report
        passed_s = max(now_s - since_s, 1e-3) if since_s is not None else None
        for name, gathered in list(self._statsd.items()):
            gathered.forget_old(now_s)
            metrics = _figures(gathered, passed_s)
            if not metrics:
                del self._statsd[name]
            elif name in reports:
                pushed = reports[name]
                metrics = {**pushed.metrics, **metrics}
                reports[name] = self._bounded(msgspec.structs.replace(pushed, metrics=metrics))
            elif len(reports) < SERVICES_MAX:
                silent_s = now_s - gathered.at_s
                late = silent_s > LATE_AFTER * STATSD_PERIOD_S
                reports[name] = messages.ServiceReport(
                    name=name,
                    state=health.HealthState.LATE if late else health.HealthState.UP,
                    reason=f"silent for {silent_s:.0f} s" if late else "",
                    metrics=metrics,
                )
            else:
                self.dropped["statsd-services"] += 1
        return tuple(reports.values())

    def _forget_silent(self, now_s: float) -> None:
        self._statsd = {
            name: gathered for name, gathered in self._statsd.items() if not _is_old(gathered.at_s, now_s)
        }

    def _line(self, line: str, now_s: float) -> bool:
        match = _LINE.match(line)
        if match is None:
            return False
        name, text, kind, sampled = match.groups()
        service, dot, metric = name.partition(".")
        if not (dot and service and metric):
            service, metric = "statsd", name
        gathered = self._statsd.get(service)
        if gathered is None:
            if len(self._statsd) >= SERVICES_MAX:
                self._forget_silent(now_s)
            if len(self._statsd) >= SERVICES_MAX:
                self.dropped["statsd-services"] += 1
                return True
            gathered = self._statsd[service] = _Statsd()
        if not gathered.has_room_for(metric, kind):
            gathered.forget_old(now_s)
        if not gathered.has_room_for(metric, kind):
            self.dropped["statsd-metrics"] += 1
            return True
        gathered.at_s = now_s
        if kind == "s":
            values = gathered.sets.setdefault(metric, set())
            if len(values) < SET_MAX:
                values.add(text)
            return True
        try:
            value, rate = float(text), float(sampled or 1)
        except ValueError:
            return False
        if not math.isfinite(value) or not 0 < rate <= 1:
            return False
        if kind == "c":
            gathered.counters[metric] = gathered.counters.get(metric, 0.0) + value / rate
        elif kind == "g":
            signed = text[0] in "+-"
            before = gathered.gauges.get(metric, (0.0, 0.0))[0] if signed else 0.0
            gathered.gauges[metric] = before + value, now_s
        else:
            timer = gathered.timers.setdefault(metric, [0.0, 0.0, -math.inf])
            timer[0] += 1 / rate
            timer[1] += value / rate
            timer[2] = max(timer[2], value)
        return True


def trim(services: Sequence[messages.ServiceReport], room_bytes: int) -> list[messages.ServiceReport]:
    """The services without some metrics of the largest ones: all together take about ``room_bytes``."""
    sizes = [len(msgspec.json.encode(service)) for service in services]
    left, limit = room_bytes, 0
    for place, size in enumerate(sorted(sizes)):
        limit = left // (len(sizes) - place)
        if size > limit:
            break
        left -= size
    return [
        service
        if size <= limit
        else msgspec.structs.replace(
            service,
            metrics=dict(itertools.islice(service.metrics.items(), len(service.metrics) * limit // size)),
        )
        for service, size in zip(services, sizes, strict=True)
    ]


def _is_old(at_s: float, now_s: float) -> bool:
    return now_s - at_s > FORGET_AFTER * STATSD_PERIOD_S


def _figures(gathered: _Statsd, passed_s: float | None) -> dict[str, float]:
    """The figures since the last call. Gauges are kept; counters without an interval continue to count."""
    metrics = {name: value for name, (value, _) in gathered.gauges.items()}
    if passed_s is not None:
        metrics |= {f"{name}_s": count / passed_s for name, count in gathered.counters.items()}
        gathered.counters = {}
    for name, (count, total, largest) in gathered.timers.items():
        metrics |= {f"{name}_count": count, f"{name}_mean": total / count, f"{name}_max": largest}
    metrics |= {f"{name}_distinct": float(len(values)) for name, values in gathered.sets.items()}
    gathered.timers, gathered.sets = {}, {}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
