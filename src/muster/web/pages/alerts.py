"""The page of alerts and silences."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import messages
from muster.pipeline import operations
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup, join, tag


async def alert_table(request: page.PageRequest, shown: Sequence[messages.Alert]) -> Markup:
    if not shown and not await request.web.source.judged():
        hint = join("No pipeline evaluates rules: ", tag("code", "muster pipeline run"), ".")
        return widgets.empty("All budgets have free space.", hint)
    rows: list[list[Child]] = [
        [
            widgets.badge(alert.severity.value),
            widgets.badge(alert.state.value),
            alert.rule,
            _about(alert.about),
            join(widgets.moment(alert.since_ms), f" ({widgets.relative_time(alert.since_ms)})"),
            widgets.measurement(alert.value),
            alert.reason,
            join(
                widgets.action_button(
                    request, "acknowledge", "Acknowledge", rule=alert.rule, about=alert.about
                )
                if alert.state in (messages.AlertState.FIRING, messages.AlertState.SILENCED)
                else "",
                widgets.action_button(request, "resolve", "Resolve", rule=alert.rule, about=alert.about),
            ),
        ]
        for alert in shown
    ]
    return widgets.table(
        ["Severity", "State", "Rule", "About", "Since", "#Value", "Reason", ""],
        rows,
        label="Alerts",
        none=widgets.empty(
            "There are no alerts.", "The pipeline evaluates rules; the domain checks budgets."
        ),
    )


def _about(about: str) -> Child:
    kind, _, name = about.partition(":")
    if name and kind in ("node", "group"):
        return widgets.link(about, f"/{kind}", name=name)
    return about


def alerts(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def firing() -> Markup:
        return await alert_table(request, (await source.alerts())[:200])

    async def silences() -> Markup:
        rows: list[list[Child]] = [
            [
                tag("code", silence.covers),
                widgets.moment(silence.from_ms),
                widgets.moment(silence.until_ms),
                silence.by,
                silence.reason,
                widgets.action_button(request, "unsilence", "End", id=silence.id),
            ]
            for silence in (await source.read(operations.SILENCES))[:200]
        ]
        return widgets.table(
            ["Covers", "From", "Until", "By", "Reason", ""],
            rows,
            label="Silences",
            none="There are no silences.",
        )

    form = Markup("")
    if request.may_act:
        form = tag(
            "details",
            tag("summary", "Silence alerts"),
            widgets.action_button(
                request,
                "silence",
                "Silence",
                widgets.field(
                    "Which",
                    "covers",
                    required=True,
                    placeholder="group = 'web'",
                    hint="A predicate over rule, about, scope, severity and group.",
                ),
                widgets.field("Duration", "for", "1h", required=True),
                widgets.field("Why", "reason"),
            ),
            cls="panel",
        )
    return page.DashboardPage(
        "Alerts",
        (
            page.PageSection("alerts", "Unresolved alerts", firing, ("alerts",), 5.0),
            page.PageSection("silences", "Silences and maintenance", silences, ("alerts",), 10.0),
        ),
        lead="Alerts of the pipeline's rules and of the streams' budgets, the most severe first.",
        head=form,
    )
