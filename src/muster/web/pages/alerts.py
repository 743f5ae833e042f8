"""Alerts: what is wrong, who has it in hand, and what nobody is to be told of."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import messages
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup, join, tag


async def alert_table(seen: page.PageRequest, found: Sequence[messages.Alert]) -> Markup:
    if not found and not await seen.known.source.judged():
        hint = join("No pipeline judges rules: ", tag("code", "muster pipeline run"), ".")
        return widgets.empty("Every budget has room.", hint)
    rows: list[list[Child]] = [
        [
            widgets.badge(one.severity.value),
            widgets.badge(one.state.value),
            one.rule,
            _about(one.about),
            join(widgets.moment(one.since_ms), f" ({widgets.relative_time(one.since_ms)})"),
            widgets.number(one.value, 2),
            one.reason,
            widgets.action_button(seen, "acknowledge", "Acknowledge", rule=one.rule, about=one.about)
            if one.state in (messages.AlertState.FIRING, messages.AlertState.SILENCED)
            else "",
        ]
        for one in found
    ]
    return widgets.table(
        ["Severity", "State", "Rule", "About", "Since", "#Value", "Reason", ""],
        rows,
        label="Alerts",
        none=widgets.empty("Nothing is wrong.", "Rules are judged by the pipeline, budgets by the domain."),
    )


def _about(about: str) -> Child:
    kind, _, name = about.partition(":")
    if name and kind in ("node", "group"):
        return widgets.link(about, f"/{kind}", name=name)
    return about


def alerts(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def firing() -> Markup:
        return await alert_table(seen, (await source.alerts())[:200])

    async def silences() -> Markup:
        rows: list[list[Child]] = [
            [
                tag("code", one["covers"]),
                widgets.moment(one["from_ms"]),
                widgets.moment(one["until_ms"]),
                one["by"],
                one["reason"],
                widgets.action_button(seen, "unsilence", "End it", id=one["id"]),
            ]
            for one in (await source.silences())[:200]
        ]
        return widgets.table(
            ["Covers", "From", "Until", "By", "Reason", ""],
            rows,
            label="Silences",
            none="Nothing is silenced.",
        )

    form = Markup("")
    if seen.may_act:
        form = tag(
            "details",
            tag("summary", "Silence some alerts"),
            widgets.action_button(
                seen,
                "silence",
                "Silence",
                widgets.field(
                    "Which",
                    "covers",
                    required=True,
                    placeholder="group = 'web'",
                    hint="A predicate over rule, about, scope, severity and group.",
                ),
                widgets.field("How long", "for", "1h", required=True),
                widgets.field("Why", "reason"),
            ),
            cls="panel",
        )
    return page.DashboardPage(
        "Alerts",
        (
            page.PageSection("alerts", "Not resolved", firing, ("alerts",), 5.0),
            page.PageSection("silences", "Silences and maintenance", silences, ("alerts",), 10.0),
        ),
        lead="What the pipeline's rules and the streams' budgets find wrong, the worst first.",
        head=form,
    )
