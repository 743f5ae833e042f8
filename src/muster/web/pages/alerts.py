"""The page of alerts and silences."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import messages
from muster.pipeline import operations
from muster.web.components import page, records, widgets
from muster.web.components.html import Child, Markup, join, tag

PAGES = {"node": "/machine", "group": "/group", "zone": "/zone"}


async def alert_table(request: page.PageRequest, shown: Sequence[messages.Alert]) -> Markup:
    if not shown and not await request.web.source.judged():
        hint = join("No pipeline evaluates rules: ", tag("code", "muster run pipeline"), ".")
        return widgets.empty("All budgets have free space.", hint)

    def since(alert: messages.Alert) -> Markup:
        return join(widgets.moment(alert.since_ms), f" ({widgets.relative_time(alert.since_ms)})")

    def acts(alert: messages.Alert) -> Markup:
        about = {"rule": alert.rule, "about": alert.about}
        open_ = alert.state in (messages.AlertState.FIRING, messages.AlertState.SILENCED)
        return join(
            widgets.action_button(request, "acknowledge", "Acknowledge", **about) if open_ else "",
            widgets.action_button(request, "resolve", "Resolve", **about),
        )

    return records.table(
        shown,
        operations.ALERTS.columns,
        cells={
            "about": lambda alert: _about(alert.about),
            "since_ms": since,
            "value": lambda alert: widgets.measurement(alert.value),
            "": acts,
        },
        label="Alerts",
        none=widgets.empty(
            "There are no alerts.", "The pipeline evaluates rules; the domain checks budgets."
        ),
    )


def _about(about: str) -> Child:
    kind, _, name = about.partition(":")
    if name and kind in PAGES:
        return widgets.link(name, PAGES[kind], name=name)
    return about


def alerts(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def firing() -> Markup:
        return await alert_table(request, (await source.alerts())[:200])

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
