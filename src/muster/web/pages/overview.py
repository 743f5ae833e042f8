"""The overview: health of the fleet, age of reports, throughput and alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.core import errors, messages
from muster.core.reports import columns
from muster.manage import operations
from muster.web.components import charts, page, plots, templates, widgets
from muster.web.components.html import Markup, join, tag
from muster.web.data import rows
from muster.web.pages import alerts as alerts_
from muster.web.pages import machines

CHANGES_SHOWN = 8
ALERTS_SHOWN = 8
LINES_MAX = 3
DEFAULT_METRIC = "cpu_percent"
QUIET = (messages.AlertState.SILENCED, messages.AlertState.ACKNOWLEDGED)

Systems = Sequence[tuple[float, columns.Rollups]]


def overview(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def figures() -> Markup:
        summary = await source.machine_summary()
        rates = source.feed.load[-1][1] if source.feed.load else {}
        through = sum(rate for name, rate in rates.items() if name.endswith(" in"))
        stale, oldest = summary.stale, f"oldest {widgets.seconds(summary.oldest_s)}"
        look = "warn" if stale else "good" if summary.machines else ""
        stale_href = page.link_to("/machines", state="stale")
        reports_s = widgets.rate(source.feed.machines.rows_per_s())
        return templates.tiles(
            widgets.Tile("Machines", f"{summary.machines:,}", _groups(summary), "busy", "/machines"),
            widgets.Tile("Stale", f"{stale:,}", "no report for 2.5 periods", look, stale_href),
            widgets.Tile("Age of a report", widgets.seconds(summary.median_s), oldest, "", "/report-delay"),
            await _resources(source),
            await _alerts(source),
            widgets.Tile("Reports", reports_s, "at the root", "", "/pipeline"),
            widgets.Tile("Messages", widgets.rate(through), "into the brokers", "", "/brokers"),
        )

    async def resources() -> Markup:
        summary = await source.read(operations.SUMMARY)
        if not summary.resources:
            return widgets.empty(
                "There are no resources yet.",
                join("Apply a manifest: ", tag("code", "muster apply -f fleet.yaml")),
            )
        return join(
            charts.shares(summary.states, label="Resources by state"),
            widgets.more_link("List resources", "/resources"),
        )

    async def firing() -> Markup:
        alerts = await source.alerts()
        return await alerts_.alert_table(request, alerts[:ALERTS_SHOWN], max(0, len(alerts) - ALERTS_SHOWN))

    async def changes() -> Markup:
        recent = list(source.feed.changes)[-CHANGES_SHOWN:]
        return templates.render("changes.html", changes=reversed(recent))

    watched = watched_metrics(list(source.feed.systems))
    return page.DashboardPage(
        "Overview",
        (
            page.PageSection("figures", "", figures, ("machines", "manage", "alerts"), 3.0),
            machines.map_section(request, watched[0] if watched[0] != DEFAULT_METRIC else ""),
            page.PageSection("alerts", "Alerts", firing, ("alerts",), 5.0),
            plots.section(request, "Fleet", plots.metrics("fleet", "", watched)),
            plots.section(request, "Age of reports on arrival", [plots.Plot("domain", "age")], id="age"),
            plots.section(
                request, "Messages through the brokers", [plots.Plot("domain", "messages")], id="in"
            ),
            page.PageSection("resources", "Resources by state", resources, ("manage",), 3.0, wide=False),
            page.PageSection("changes", "Latest changes", changes, ("manage",), 5.0, wide=False),
        ),
    )


def watched_metrics(systems: Systems) -> list[str]:
    """The metrics to draw: those specific to this fleet (a window may lack them), else CPU and load."""
    own = {name for _, metrics in systems for name in metrics} - {*columns.STANDARD_METRICS}
    return (sorted(own) or [DEFAULT_METRIC])[:LINES_MAX]


def _groups(machines: rows.MachineSummary) -> str:
    return f"in {widgets.count(len(machines.groups), 'group')}"


async def _alerts(source: Any) -> widgets.Tile:
    try:
        alerts = await source.alerts()
    except errors.Unavailable:
        return widgets.Tile("Alerts firing", "–", "no reply", "", "/alerts")
    judged = bool(alerts) or await source.judged()
    count, note, look = alert_figures(alerts, judged=judged)
    return widgets.Tile("Alerts firing", str(count), note, look, "/alerts")


def alert_figures(alerts: Sequence[messages.Alert], *, judged: bool) -> tuple[int, str, str]:
    """The number of firing alerts, a note and the look; silenced and acknowledged ones are in the note."""
    firing = [alert for alert in alerts if alert.state is messages.AlertState.FIRING]
    quiet = [alert for alert in alerts if alert.state in QUIET]
    bad, warn = (
        sum(alert.severity is messages.Severity.CRITICAL for alert in chosen) for chosen in (firing, quiet)
    )
    notes = [f"{bad or 'none'} critical"] if firing else []
    notes += [f"{len(quiet)} silenced or acknowledged{', critical' if warn else ''}"] if quiet else []
    note = "; ".join(notes) or ("no alerts" if judged else "no rules are evaluated")
    return len(firing), note, "bad" if bad else "warn" if firing or warn else "good" if judged else ""


async def _resources(source: Any) -> widgets.Tile:
    try:
        summary = await source.read(operations.SUMMARY)
    except errors.MusterError:
        return widgets.Tile("Resources", "–", "no reply from the registry", "", "/resources")
    states = summary.states
    ended = states.get("failed", 0) + states.get("down", 0) - summary.down_as_desired
    wrong = ended + states.get("late", 0) + states.get("unknown", 0)
    note = f"{wrong:,} unhealthy" if wrong else "all healthy" if summary.resources else "none yet"
    look = "bad" if ended else "warn" if wrong else "good"
    return widgets.Tile("Resources", f"{summary.resources:,}", note, look, "/resources")
