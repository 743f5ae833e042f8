"""The page of alerts: by rule, over time, and the silences."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from muster.core import messages
from muster.pipeline import operations
from muster.web.components import charts, page, records, templates, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.data.measurements import alert_spans

PAGES = {"node": "/machine", "group": "/group", "zone": "/zone"}
OPEN = (messages.AlertState.FIRING, messages.AlertState.SILENCED)
SHOWN = 200
LANES_MAX = 24
TIMELINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RuleAlerts:
    """The alerts of a rule."""

    rule: str
    alerts: Sequence[messages.Alert]

    @property
    def severity(self) -> str:
        return self.alerts[0].severity.value

    @property
    def open(self) -> int:
        return sum(alert.state in OPEN for alert in self.alerts)

    @property
    def words(self) -> str:
        return widgets.count(len(self.alerts), "alert")

    @property
    def covers(self) -> str:
        """A predicate over alerts."""
        return f"rule = '{self.rule.replace(chr(39), 2 * chr(39))}'"


def by_rule(shown: Sequence[messages.Alert]) -> list[RuleAlerts]:
    """In the order of their first alerts."""
    rules: dict[str, list[messages.Alert]] = {}
    for alert in shown:
        rules.setdefault(alert.rule, []).append(alert)
    return [RuleAlerts(rule, alerts) for rule, alerts in rules.items()]


async def alert_table(request: page.PageRequest, shown: Sequence[messages.Alert], hidden: int = 0) -> Markup:
    if not shown and not await request.web.source.judged():
        hint = join("No pipeline evaluates rules: ", tag("code", "muster run pipeline"), ".")
        return widgets.empty("All budgets have free space.", hint)
    if not shown:
        return widgets.empty(
            "There are no alerts.", "The pipeline evaluates rules; the domain checks budgets."
        )
    return templates.render(
        "alerts.html",
        request=request,
        groups=by_rule(shown),
        about=_about,
        words=_words,
        chart_of=_chart_of,
        hidden=hidden,
    )


def _about(about: str) -> Child:
    kind, _, name = about.partition(":")
    if name and kind in PAGES:
        return join(f"{'machine' if kind == 'node' else kind} ", widgets.link(name, PAGES[kind], name=name))
    return "the whole fleet" if about == "system" else about.replace(":", " ", 1)


def _words(alert: messages.Alert) -> str:
    return alert_spans.in_words(alert.condition, alert.value) or widgets.measurement(alert.value)


def _chart_of(alert: messages.Alert) -> str | None:
    """The chart of what the rule is about, with its threshold and when it fired."""
    metric = alert_spans.metric_of(alert.condition)
    scope, _, name = alert.about.partition(":")
    if metric is None or scope not in ("system", *PAGES):
        return None
    return page.link_to("/history", scope="machine" if scope == "node" else scope, name=name, metric=metric)


def timeline(spans: Sequence[alert_spans.AlertSpan], now_s: float) -> Markup:
    """A lane for each alert; silenced and acknowledged times are in the colours of these states."""
    lanes: dict[str, list[charts.Span]] = {}
    for span in spans:
        end_s = now_s if span.to_ms is None else span.to_ms / 1000
        lane = f"{span.rule} · {span.about.partition(':')[2] or span.about}"
        if end_s < now_s - TIMELINE_S or (lane not in lanes and len(lanes) >= LANES_MAX):
            continue
        times = [*((at_ms / 1000, state) for at_ms, state in span.changes), (end_s, "")]
        for (begin_s, state), (until_s, _) in itertools.pairwise(times):
            look = widgets.severity_class(span.severity if state == "firing" else state)
            words = f"{span.rule} of {span.about}: {state} for {widgets.seconds(until_s - begin_s)}"
            lanes.setdefault(lane, []).append((begin_s, until_s, look, words))
    if not lanes:
        return widgets.empty("No alert fired in the last hour.")
    label = f"Alerts of the last hour: {len(lanes)}"
    return charts.timeline(lanes, from_s=now_s - TIMELINE_S, to_s=now_s, label=label)


def alerts(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source
    severity, state, text = (request.parameter(name) for name in ("severity", "state", "text"))

    async def firing() -> Markup:
        listed = [
            alert
            for alert in await source.alerts()
            if severity in ("", alert.severity.value)
            and state in ("", alert.state.value)
            and text.lower() in f"{alert.rule} {alert.about} {alert.reason}".lower()
        ]
        if not listed and (severity or state or text):
            return widgets.empty("No alert matches.", widgets.link("Show all", "/alerts"))
        return await alert_table(request, listed[:SHOWN], max(0, len(listed) - SHOWN))

    async def over_time() -> Markup:
        return timeline(await source.alert_spans(), time.time())

    async def silences() -> Markup:
        return records.table(
            (await source.read(operations.SILENCES))[:200],
            operations.SILENCES.columns,
            cells={
                "covers": lambda silence: tag("code", silence.covers),
                "": lambda silence: widgets.action_button(request, "unsilence", "End", id=silence.id),
            },
            label="Silences",
            none="There are no silences.",
        )

    severities = [("", "any severity"), *((item.value, item.value) for item in messages.Severity)]
    states = [("", "any state"), *((item.value, item.value) for item in messages.AlertState)]
    return page.DashboardPage(
        "Alerts",
        (
            page.PageSection("alerts", "Unresolved alerts by rule", firing, ("alerts",), 5.0),
            page.PageSection("time", "The last hour", over_time, ("alerts",), 10.0),
            page.PageSection("silences", "Silences and maintenance", silences, ("alerts",), 10.0),
        ),
        lead="Alerts of the pipeline's rules and of the streams' budgets, the most severe first.",
        head=templates.render(
            "alerts_head.html",
            request=request,
            severity=severity,
            severities=severities,
            state=state,
            states=states,
            text=text,
        ),
    )
