"""The overview: health of the fleet, age of reports, throughput and alerts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.core import errors, messages
from muster.core.reports import columns
from muster.manage import operations as manage_operations
from muster.pipeline import operations as pipeline_operations
from muster.web.components import charts, page, widgets
from muster.web.components.html import Markup, join, tag
from muster.web.data import latest_reports, rows
from muster.web.pages import alerts as alerts_

CHANGES_SHOWN = 8
LINES_MAX = 3
AGES_STEP_S = 10  # a point of the chart: within a second, a single batch may arrive
QUIET = (messages.AlertState.SILENCED, messages.AlertState.ACKNOWLEDGED)

Systems = Sequence[tuple[float, columns.Rollups]]


def overview(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def figures() -> Markup:
        machines = await source.feed.cache.get(
            "machine summary", "machines", 2.0, source.feed.machines.summary
        )
        rates = source.feed.load[-1][1] if source.feed.load else {}
        through = sum(rate for name, rate in rates.items() if name.endswith(" in"))
        stale = machines.stale
        return widgets.tiles(
            widgets.tile("Machines", f"{machines.machines:,}", _groups(machines), look="busy", href="/tree"),
            widgets.tile(
                "Stale",
                f"{stale:,}",
                "no report for 2.5 periods",
                look="warn" if stale else "good" if machines.machines else "",
                href=page.link_to("/tree", state="stale"),
            ),
            widgets.tile(
                "Age of a report",
                widgets.seconds(machines.median_s),
                f"oldest {widgets.seconds(machines.oldest_s)}",
                href="/capacity",
            ),
            await _resources(source),
            await _alerts(source),
            widgets.tile(
                "Reports", widgets.rate(source.feed.machines.rows_per_s()), "at the root", href="/pipeline"
            ),
            widgets.tile("Messages", widgets.rate(through), "into the brokers", href="/brokers"),
        )

    async def machines() -> Markup:
        summary = await source.feed.cache.get(
            "machine summary", "machines", 2.0, source.feed.machines.summary
        )
        if not summary.machines:
            source.require_connection()
            return widgets.empty(
                "No machine has reported yet.",
                join(
                    "Start ",
                    tag("code", "muster run channel"),
                    " and ",
                    tag("code", "muster run sensor"),
                    ", or simulate a fleet: ",
                    tag("code", "muster simulate sensors"),
                    ".",
                ),
            )
        return join(
            charts.shares(summary.states, label="Machines by state"),
            widgets.more_link("Browse by group", "/tree"),
        )

    async def resources() -> Markup:
        summary = await source.read(manage_operations.SUMMARY)
        if not summary.resources:
            return widgets.empty(
                "There are no resources yet.",
                join("Apply a manifest: ", tag("code", "muster apply -f fleet.yaml")),
            )
        return join(
            charts.shares(summary.states, label="Resources by state"),
            widgets.more_link("List resources", "/resources"),
        )

    async def through() -> Markup:
        times = [(at, rates) for at, rates in source.feed.load]
        into = [(at, sum(r for n, r in rates.items() if n.endswith(" in"))) for at, rates in times]
        out = [(at, sum(r for n, r in rates.items() if n.endswith(" out"))) for at, rates in times]
        return charts.lines(
            [charts.ChartLine("in", into, "line-1"), charts.ChartLine("out", out, "line-2")],
            label="Messages through the brokers per second",
            unit="/s",
        )

    async def ages() -> Markup:
        seconds = latest_reports.merged(source.feed.machines.seconds(), AGES_STEP_S)
        return charts.lines(
            [
                charts.ChartLine("median", [(second.at_s, second.p50_s) for second in seconds], "line-1"),
                charts.ChartLine("oldest", [(second.at_s, second.max_s) for second in seconds], "line-2"),
            ],
            label="Age of reports when they reach the root",
            unit=" s",
        )

    async def metrics() -> Markup:
        systems = list(source.feed.systems)
        if not systems:
            return await _no_system(source)
        names = watched_metrics(systems)
        share = all(is_share(systems, name) for name in names)
        drawn = [
            charts.ChartLine(name.replace("_", " "), _means(systems, name, 100 if share else 1), f"line-{n}")
            for n, name in enumerate(names, 1)
        ]
        label = (
            "Share of all machines, computed by Spark" if share else "Means over the fleet, computed by Spark"
        )
        units = {" %" if share else widgets.unit(name) for name in names}
        return join(
            charts.lines(drawn, label=label, unit=units.pop() if len(units) == 1 else ""),
            widgets.more_link("Longer periods", page.link_to("/history", metric=names[0])),
        )

    async def firing() -> Markup:
        alerts = await source.alerts()
        listed = await alerts_.alert_table(request, alerts[:8])
        return join(listed, widgets.more_link("All alerts", "/alerts") if alerts else None)

    async def changes() -> Markup:
        recent = list(source.feed.changes)[-CHANGES_SHOWN:]
        if not recent:
            return widgets.empty("No resource has changed its state since the web process started.")
        return tag(
            "ul",
            *(
                tag(
                    "li",
                    widgets.moment(change.since_ms),
                    " ",
                    widgets.link(change.resource, "/resource", name=change.resource),
                    " ",
                    widgets.badge(change.state.value),
                    f" {change.reason}" if change.reason else "",
                )
                for change in reversed(recent)
            ),
            cls="feed",
        )

    return page.DashboardPage(
        "Overview",
        (
            page.PageSection("figures", "", figures, ("machines", "manage", "alerts"), 3.0),
            page.PageSection("machines", "Machines by state", machines, ("machines",), 3.0, wide=False),
            page.PageSection("resources", "Resources by state", resources, ("manage",), 3.0, wide=False),
            page.PageSection("metrics", "Fleet metrics", metrics, ("reports",), 3.0, wide=False),
            page.PageSection("ages", "Age of reports on arrival", ages, (), 3.0, wide=False),
            page.PageSection("alerts", "Alerts", firing, ("alerts",), 5.0),
            page.PageSection("through", "Throughput", through, (), 5.0, wide=False),
            page.PageSection("changes", "Latest changes", changes, ("manage",), 5.0, wide=False),
        ),
    )


async def _no_system(source: Any) -> Markup:
    try:
        progress = await source.read(pipeline_operations.PROGRESS)
    except errors.NotConnected:
        raise
    except errors.MusterError:
        hint = join("Start the pipeline: ", tag("code", "muster run pipeline"), ".")
        return widgets.empty("The pipeline has not published a system report yet.", hint)
    return widgets.empty(f"The pipeline is {progress.state}; its first report is pending.", progress.reason)


def watched_metrics(systems: Systems) -> list[str]:
    """The metrics to draw: those specific to this fleet (a window may lack them), else CPU and load."""
    own = {name for _, metrics in systems for name in metrics} - {*columns.STANDARD_METRICS}
    return (sorted(own) or ["cpu_percent"])[:LINES_MAX]


def is_share(systems: Systems, name: str) -> bool:
    """Whether all values are between 0 and 1: then the mean is a share of the machines."""
    known = [metrics[name] for _, metrics in systems if name in metrics]
    return all(
        rollup.min is not None and rollup.max is not None and 0 <= rollup.min <= rollup.max <= 1
        for rollup in known
    )


def _means(systems: Systems, name: str, scale: float) -> list[charts.Point]:
    points: list[charts.Point] = []
    for at_s, metrics in systems:
        rollup = metrics.get(name)
        points.append(
            (at_s, scale * rollup.sum / rollup.count if rollup is not None and rollup.count else None)
        )
    return points


def _groups(machines: rows.MachineSummary) -> str:
    return f"in {widgets.count(len(machines.groups), 'group')}"


async def _alerts(source: Any) -> Markup:
    try:
        alerts = await source.alerts()
    except errors.Unavailable:
        return widgets.tile("Alerts firing", "–", "no reply", href="/alerts")
    judged = bool(alerts) or await source.judged()
    count, note, look = alert_figures(alerts, judged=judged)
    return widgets.tile("Alerts firing", count, note, look=look, href="/alerts")


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


async def _resources(source: Any) -> Markup:
    try:
        summary = await source.read(manage_operations.SUMMARY)
    except errors.MusterError:
        return widgets.tile("Resources", "–", "no reply from the registry", href="/resources")
    states = summary.states
    ended = states.get("failed", 0) + states.get("down", 0) - summary.down_as_desired
    wrong = ended + states.get("late", 0) + states.get("unknown", 0)
    return widgets.tile(
        "Resources",
        f"{summary.resources:,}",
        f"{wrong:,} unhealthy" if wrong else "all healthy" if summary.resources else "none yet",
        look="bad" if ended else "warn" if wrong else "good",
        href="/resources",
    )
