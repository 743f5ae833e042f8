"""The page of alerts: by rule, over time, and the silences; the alerts about one thing on its page."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster.core import errors, messages, units
from muster.pipeline import operations
from muster.web.components import drawings, page, texts
from muster.web.data.measurements import alert_spans

PAGES = {"node": "/machine", "group": "/group", "zone": "/zone"}
OPEN = (messages.AlertState.FIRING, messages.AlertState.SILENCED)
TEMPLATE = "alerts.html"
SHOWN = 50  # of each rule
RULES_SHOWN = 100
LANES_MAX = 24
SEVERITIES = ("critical", "warning", "info")
TIMELINE_S = 3600.0
LASTS = ("1h", "6h", "1d", "7d")


@dataclass(frozen=True, slots=True)
class AlertRow:
    """An alert, with what it is about: a link, or words only."""

    alert: messages.Alert
    kind: str
    name: str
    path: str

    @property
    def words(self) -> str:
        """The condition with the measured value."""
        return alert_spans.in_words(self.alert.condition, self.alert.value) or texts.measurement(
            self.alert.value
        )

    @property
    def chart(self) -> dict[str, str]:
        """What shows the metric of the rule, with its threshold and when it fired; nothing if none does."""
        metric = alert_spans.metric_of(self.alert.condition)
        if metric is None or not (self.path or self.alert.about == "system"):
            return {}
        scope = self.kind if self.path else "system"
        return {"scope": scope, "name": self.name, "metric": metric}


def row(alert: messages.Alert) -> AlertRow:
    kind, _, name = alert.about.partition(":")
    path = PAGES.get(kind, "") if name else ""
    if path:
        return AlertRow(alert, "machine" if kind == "node" else kind, name, path)
    words = "the whole fleet" if alert.about == "system" else alert.about.replace(":", " ", 1)
    return AlertRow(alert, words, "", "")


@dataclass(frozen=True, slots=True)
class RuleAlerts:
    """The alerts of a rule, of which the first have a row."""

    alerts: Sequence[messages.Alert]
    rows: Sequence[AlertRow]

    @property
    def open(self) -> int:
        return sum(alert.state in OPEN for alert in self.alerts)


def by_rule(listed: Sequence[messages.Alert], limit: int) -> list[RuleAlerts]:
    """In the order of their first alerts, with at most ``limit`` rows each."""
    rules: dict[str, list[messages.Alert]] = {}
    for alert in listed:
        rules.setdefault(alert.rule, []).append(alert)
    return [RuleAlerts(alerts, [row(alert) for alert in alerts[:limit]]) for alerts in rules.values()]


async def are_judged(request: page.PageRequest) -> bool:
    """Whether a pipeline runs, which evaluates rules."""
    try:
        await request.get("/pipeline/progress")
    except errors.Unavailable:
        return False
    return True


async def table(
    request: page.PageRequest, alerts: Sequence[messages.Alert], limit: int = SHOWN, rules: int = RULES_SHOWN
) -> dict[str, Any]:
    """The values of the block ``alerts``, with at most so many rows of each rule, and rules."""
    groups = by_rule(alerts, limit)
    return {
        "groups": groups[:rules],
        "hidden": max(0, len(groups) - rules),
        "judged": bool(alerts) or await are_judged(request),
        "filtered": False,
        "own": False,
    }


def section_about(request: page.PageRequest, about: str) -> page.PageSection:
    """The alerts about a machine, a group or a zone."""

    async def load() -> page.Values:
        own = [alert for alert in await request.get("/alerts") if alert.about == about]
        return {**await table(request, own), "own": True}

    return page.PageSection("alerts", "Alerts", load, ("alerts",), 5.0, template=TEMPLATE)


def lane_of(span: alert_spans.AlertSpan) -> str:
    return f"{span.rule} · {span.about.partition(':')[2] or span.about}"


def timeline(
    spans: Sequence[alert_spans.AlertSpan], now_s: float, past_s: float = TIMELINE_S
) -> dict[str, list[drawings.Span]]:
    """A lane for each alert, the most severe first; silenced and acknowledged times are in the colours of
    these states."""
    lanes: dict[str, list[drawings.Span]] = {}
    for span in sorted(spans, key=lambda span: SEVERITIES.index(span.severity)):
        end_s = now_s if span.to_ms is None else span.to_ms / 1000
        lane = lane_of(span)
        if end_s < now_s - past_s or (lane not in lanes and len(lanes) >= LANES_MAX):
            continue
        times = [*((at_ms / 1000, state) for at_ms, state in span.changes), (end_s, "")]
        for (begin_s, state), (until_s, _) in itertools.pairwise(times):
            look = texts.tone(span.severity if state == "firing" else state)
            words = f"{span.rule} of {span.about}: {state} for {texts.seconds(until_s - begin_s)}"
            lanes.setdefault(lane, []).append((begin_s, until_s, look, words))
    return lanes


def alerts(request: page.PageRequest) -> page.DashboardPage:
    severity, state, text = (request.parameter(name) for name in ("severity", "state", "text"))
    last = request.parameter("last")
    last = last if last in LASTS else LASTS[0]

    async def firing() -> page.Values:
        listed = [
            alert
            for alert in await request.get("/alerts")
            if severity in ("", alert.severity.value)
            and state in ("", alert.state.value)
            and text.lower() in f"{alert.rule} {alert.about} {alert.reason}".lower()
        ]
        return {**await table(request, listed), "filtered": bool(severity or state or text)}

    async def over_time() -> page.Values:
        now_s, past_s = time.time(), units.parse_duration_s(last)
        spans = await request.get("/alerts/spans")
        lanes = timeline(spans, now_s, past_s)
        links = {lane_of(span): page.link_to("/loop", rule=span.rule, about=span.about) for span in spans}
        return {
            "lanes": lanes,
            "links": links if request.may_act else {},
            "drawn": drawings.timeline(lanes, from_s=now_s - past_s, to_s=now_s),
            "last": last,
            "lasts": LASTS,
        }

    async def silences() -> page.Values:
        listed = (await request.get("/silences"))[:200] if await are_judged(request) else []
        return {"silences": listed, "columns": operations.SILENCES.columns}

    severities = [("", "any severity"), *((item.value, item.value) for item in messages.Severity)]
    states = [("", "any state"), *((item.value, item.value) for item in messages.AlertState)]
    return page.DashboardPage(
        "Alerts",
        TEMPLATE,
        (
            page.PageSection("alerts", "Unresolved alerts by rule", firing, ("alerts",), 5.0),
            page.PageSection("time", "Over time", over_time, ("alerts",), 10.0),
            page.PageSection("silences", "Silences and maintenance", silences, ("alerts",), 10.0),
        ),
        lead="Alerts of the pipeline's rules and of the streams' budgets, the most severe first.",
        values={
            "severity": severity,
            "severities": severities,
            "state": state,
            "states": states,
            "text": text,
        },
    )
