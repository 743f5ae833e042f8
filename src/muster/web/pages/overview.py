"""The overview: is the fleet well, how old is what one sees, how much goes through, what calls for help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from muster.core import errors, messages
from muster.core.reports import columns
from muster.web.components import charts, page, widgets
from muster.web.components.html import Markup, join, tag
from muster.web.pages import alerts as alerts_

CHANGES_SHOWN = 8
LINES_MAX = 3

Systems = Sequence[tuple[float, columns.Rollups]]


def overview(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def figures() -> Markup:
        machines = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
        rates = source.load[-1][1] if source.load else {}
        through = sum(rate for name, rate in rates.items() if name.endswith(" in"))
        stale = machines["stale"]
        return widgets.tiles(
            widgets.tile(
                "Machines", f"{machines['machines']:,}", _groups(machines), look="busy", href="/tree"
            ),
            widgets.tile(
                "Stale",
                f"{stale:,}",
                "silent for over 2.5 periods",
                look="warn" if stale else "good" if machines["machines"] else "",
                href=page.link_to("/tree", state="stale"),
            ),
            widgets.tile(
                "Age of a report",
                widgets.seconds(machines["median_s"]),
                f"oldest {widgets.seconds(machines['oldest_s'])}",
                href="/capacity",
            ),
            await _resources(source),
            await _alerts(source),
            widgets.tile(
                "Reports", f"{source.machines.rows_per_s():,.0f}/s", "reaching the top", href="/pipeline"
            ),
            widgets.tile("Messages", f"{through:,.0f}/s", "into the brokers", href="/brokers"),
        )

    async def machines() -> Markup:
        found = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
        if not found["machines"]:
            source.must_hear()
            return widgets.empty(
                "No machine has reported yet.",
                join(
                    "Start ",
                    tag("code", "muster channel"),
                    " and ",
                    tag("code", "muster sensor"),
                    ", or play a fleet: ",
                    tag("code", "muster simulate sensors"),
                    ".",
                ),
            )
        return join(
            charts.shares(found["states"], label="Machines by state"),
            widgets.more_link("Descend by group", "/tree"),
        )

    async def resources() -> Markup:
        found = await source.summary()
        if not found["resources"]:
            return widgets.empty(
                "Nothing is managed yet.",
                join("Apply a manifest: ", tag("code", "muster apply -f fleet.yaml")),
            )
        return join(
            charts.shares(found["states"], label="Resources by state"),
            widgets.more_link("List them", "/resources"),
        )

    async def through() -> Markup:
        times = [(at, rates) for at, rates in source.load]
        into = [(at, sum(r for n, r in rates.items() if n.endswith(" in"))) for at, rates in times]
        out = [(at, sum(r for n, r in rates.items() if n.endswith(" out"))) for at, rates in times]
        return charts.lines(
            [charts.ChartLine("in", into, "line-1"), charts.ChartLine("out", out, "line-2")],
            label="Messages through the brokers in a second",
            unit="/s",
        )

    async def ages() -> Markup:
        found = source.machines.seconds()[-300:]
        return charts.lines(
            [
                charts.ChartLine(
                    "median", charts.split_gaps([(one.at_s, one.p50_s) for one in found]), "line-1"
                ),
                charts.ChartLine(
                    "oldest", charts.split_gaps([(one.at_s, one.max_s) for one in found]), "line-2"
                ),
            ],
            label="Age of reports when they reach the top",
            unit=" s",
        )

    async def metrics() -> Markup:
        systems = list(source.systems)
        if not systems:
            return await _no_system(source)
        names = watched_metrics(systems)
        share = all(is_share(systems, name) for name in names)
        drawn = [
            charts.ChartLine(name.replace("_", " "), _means(systems, name, 100 if share else 1), f"line-{n}")
            for n, name in enumerate(names, 1)
        ]
        label = "Of all machines, by Spark" if share else "Means over the fleet, by Spark"
        units = {" %" if share else widgets.unit(name) for name in names}
        return join(
            charts.lines(drawn, label=label, unit=units.pop() if len(units) == 1 else ""),
            widgets.more_link("Farther back", page.link_to("/history", metric=names[0])),
        )

    async def firing() -> Markup:
        found = await source.alerts()
        listed = await alerts_.alert_table(seen, found[:8])
        return join(listed, widgets.more_link("All alerts", "/alerts") if found else None)

    async def changes() -> Markup:
        found = list(source.changes)[-CHANGES_SHOWN:]
        if not found:
            return widgets.empty("No resource has changed its state since this page's server started.")
        return tag(
            "ul",
            *(
                tag(
                    "li",
                    widgets.moment(one.since_ms),
                    " ",
                    widgets.link(one.resource, "/resource", name=one.resource),
                    " ",
                    widgets.badge(one.state.value),
                    f" {one.reason}" if one.reason else "",
                )
                for one in reversed(found)
            ),
            cls="feed",
        )

    return page.DashboardPage(
        "Overview",
        (
            page.PageSection("figures", "", figures, ("machines", "manage", "alerts"), 3.0),
            page.PageSection("machines", "Machines by state", machines, ("machines",), 3.0, wide=False),
            page.PageSection("resources", "Resources by state", resources, ("manage",), 3.0, wide=False),
            page.PageSection("metrics", "What the fleet reports", metrics, ("reports",), 3.0, wide=False),
            page.PageSection("ages", "Age of reports on arrival", ages, (), 3.0, wide=False),
            page.PageSection("alerts", "Alerts", firing, ("alerts",), 5.0),
            page.PageSection("through", "Throughput", through, (), 5.0, wide=False),
            page.PageSection("changes", "Latest changes", changes, ("manage",), 5.0, wide=False),
        ),
    )


async def _no_system(source: Any) -> Markup:
    try:
        progress = await source.progress()
    except errors.NotConnected:
        raise
    except errors.MusterError:
        hint = join("Start one: ", tag("code", "muster pipeline run"), ".")
        return widgets.empty("No pipeline has made a report of the whole fleet.", hint)
    return widgets.empty(f"The pipeline is {progress.state}; its first report is to come.", progress.reason)


def watched_metrics(systems: Systems) -> list[str]:
    """What to draw: metrics that only this fleet has (a window may lack them), else its processors' load."""
    own = {name for _, metrics in systems for name in metrics} - {*columns.STANDARD_METRICS}
    return (sorted(own) or ["cpu_percent"])[:LINES_MAX]


def is_share(systems: Systems, name: str) -> bool:
    """Whether its values are 0 or 1 all along: then its mean is a share of the machines."""
    known = [metrics[name] for _, metrics in systems if name in metrics]
    return all(one.min is not None and one.max is not None and 0 <= one.min <= one.max <= 1 for one in known)


def _means(systems: Systems, name: str, scale: float) -> list[charts.Point]:
    found: list[charts.Point] = []
    for at_s, metrics in systems:
        one = metrics.get(name)
        found.append((at_s, scale * one.sum / one.count if one is not None and one.count else None))
    return found


def _groups(machines: dict[str, Any]) -> str:
    return f"in {widgets.count(len(machines['groups']), 'group')}"


async def _alerts(source: Any) -> Markup:
    try:
        found = [one for one in await source.alerts() if one.state is messages.AlertState.FIRING]
    except errors.Unavailable:
        return widgets.tile("Alerts firing", "–", "nobody answers", href="/alerts")
    worst = any(one.severity is messages.Severity.CRITICAL for one in found)
    judged = bool(found) or await source.judged()
    return widgets.tile(
        "Alerts firing",
        len(found),
        "critical" if worst else "none critical" if found else "all quiet" if judged else "no rule is judged",
        look="bad" if worst else "warn" if found else "good" if judged else "",
        href="/alerts",
    )


async def _resources(source: Any) -> Markup:
    try:
        found = await source.summary()
    except errors.MusterError:
        return widgets.tile("Resources", "–", "no registry answers", href="/resources")
    states = found["states"]
    wrong = sum(states.get(name, 0) for name in ("down", "failed", "late", "unknown"))
    return widgets.tile(
        "Resources",
        f"{found['resources']:,}",
        f"{wrong:,} not well" if wrong else "all well" if found["resources"] else "none yet",
        look="bad" if states.get("failed") or states.get("down") else "warn" if wrong else "good",
        href="/resources",
    )
