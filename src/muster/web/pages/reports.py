"""The report tree: from the system to a group, to a machine, to its services."""

from __future__ import annotations

from collections.abc import Mapping

from muster.core.reports import columns
from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag

STATES = ("", "up", "late", "stale", "unknown", "down", "failed", "draining", "starting")
SHOWN = 50
_QUOTE = "'"


def tree(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def system() -> Markup:
        found = await source.system()
        if found is None:
            return widgets.empty(
                "There is no report yet.",
                join(
                    "Sensors report to channels: ",
                    tag("code", "muster channel"),
                    ", then ",
                    tag("code", "muster sensor"),
                    ".",
                ),
            )
        return join(
            widgets.facts(
                {
                    "Machines": f"{found.machines:,}",
                    "Reports": f"{found.reports:,}",
                    "Stale": f"{found.stale:,}",
                    "Window": join(widgets.moment(found.from_ms), " to ", widgets.moment(found.to_ms)),
                    "Complete": "no: something is missing in it" if found.partial else "yes",
                }
            ),
            rollups(found.metrics),
        )

    async def groups() -> Markup:
        found = await source.cache.get("machine summary", "machines", 2.0, source.machines.summary)
        if not found["groups"]:
            source.must_hear()
        largest = max((one["machines"] for one in found["groups"]), default=1)
        rows: list[list[Child]] = [
            [
                widgets.link(one["group"], "/group", name=one["group"]),
                f"{one['machines']:,}",
                charts.bar(one["machines"] / largest),
                f"{one['states'].get('stale', 0):,}",
                _unwell(one["states"]),
                widgets.percent(one["cpu_percent"]),
                widgets.percent(one["memory_percent"]),
                widgets.seconds(one["oldest_s"]),
            ]
            for one in found["groups"][:200]
        ]
        return widgets.table(
            ["Group", "#Machines", "", "#Stale", "Not well", "#CPU", "#Memory", "#Oldest report"],
            rows,
            label="Groups",
            none="No group yet.",
        )

    return page.DashboardPage(
        "Reports",
        (
            page.PageSection("groups", "Groups", groups, ("machines",), 3.0),
            _machines(seen, ""),
            page.PageSection("system", "The system", system, ("reports", "machines"), 5.0),
        ),
        lead="System, group, machine, service: descend by a name.",
        head=_filter(seen),
    )


def _unwell(states: Mapping[str, int]) -> Markup:
    found = {name: n for name, n in states.items() if name not in ("up", "stale")}
    return join(*(join(widgets.badge(f"{name} {count:,}"), " ") for name, count in found.items()))


def _filter(seen: page.PageRequest, **kept: str) -> Markup:
    options = [(state, state or "any state") for state in STATES]
    return widgets.search(
        seen.path, widgets.field("State of machines", "state", seen.asked("state"), options=options), **kept
    )


def _machines(seen: page.PageRequest, group: str) -> page.PageSection:
    async def machines() -> Markup:
        rows, total, next_ = await seen.known.source.machines.page(
            group=group, state=seen.asked("state"), after=seen.asked("after"), limit=SHOWN
        )
        if not rows:
            seen.known.source.must_hear()
        made: list[list[Child]] = [
            [
                widgets.link(one["machine"], "/node", name=one["machine"]),
                widgets.link(one["group"], "/group", name=one["group"]),
                one["zone"],
                widgets.badge(one["state"]),
                widgets.seconds(one["age_s"]),
                widgets.percent(one["cpu_percent"]),
                widgets.percent(one["memory_percent"]),
                widgets.number(one["load_1m"], 2),
                one["services"],
            ]
            for one in rows
        ]
        return join(
            widgets.table(
                ["Machine", "Group", "Zone", "State", "#Age", "#CPU", "#Memory", "#Load", "#Services"],
                made,
                label="Machines",
                none="No machine fits.",
            ),
            widgets.pages(seen, next_, total=total, shown=len(rows)),
        )

    return page.PageSection("nodes", "Machines", machines, ("machines",), 3.0)


def _trail(*steps: Child) -> Markup:
    made: list[Child] = []
    for index, step in enumerate(steps):
        made += ["›", step] if index else [step]
    return tag("nav", *(tag("span", one) for one in made), cls="trail", aria_label="Where this is")


def group(seen: page.PageRequest) -> page.DashboardPage:
    name = seen.asked("name")

    async def report() -> Markup:
        found = await seen.known.source.group(name)
        return join(
            charts.shares(found.states, label="Machines by state") if found.states else None,
            widgets.facts(
                {
                    "Machines": f"{found.machines:,}",
                    "Stale": f"{found.stale:,}",
                    "Window": join(widgets.moment(found.from_ms), " to ", widgets.moment(found.to_ms)),
                }
            ),
            rollups(found.metrics),
        )

    return page.DashboardPage(
        f"Group {name}",
        (
            _machines(seen, name or "\0"),
            page.PageSection("report", "Its report", report, ("reports", "machines"), 5.0),
        ),
        head=join(
            _trail(widgets.link("System", "/tree"), name),
            _filter(seen, name=name),
        ),
        foot=widgets.more_link(
            "Its past", page.link_to("/history", scope="group", name=name, metric="cpu_percent", last="1h")
        ),
    )


def node(seen: page.PageRequest) -> page.DashboardPage:
    name = seen.asked("name")
    source = seen.known.source

    async def report() -> Markup:
        found = await source.node(name)
        return join(
            widgets.facts(
                {
                    "Group": widgets.link(found.group, "/group", name=found.group),
                    "Zone": found.zone,
                    "Reported": join(widgets.moment(found.at_ms), f", {widgets.relative_time(found.at_ms)}"),
                    "Period": widgets.seconds(found.period_s),
                    "Report": f"{found.sequence:,} since its sensor started",
                    "Given up": f"{found.dropped:,} reports while cut off",
                }
            ),
            tag("h3", "Measured"),
            widgets.table(
                ["Metric", "#Value"],
                [[metric, _figure(metric, value)] for metric, value in sorted(found.metrics.items())],
                label="Metrics",
                none="Its last report has no metrics.",
            ),
        )

    async def services() -> Markup:
        found = await source.node(name)
        return widgets.table(
            ["Service", "State", "Reason", "Measured"],
            [
                [
                    one.name,
                    widgets.badge(one.state.value),
                    one.reason,
                    ", ".join(f"{metric} {_figure(metric, value)}" for metric, value in one.metrics.items()),
                ]
                for one in found.services
            ],
            label="Services",
            none="Its sensor reports no services.",
        )

    return page.DashboardPage(
        f"Machine {name}",
        (
            page.PageSection("services", "Services", services, ("machines",), 3.0),
            page.PageSection("report", "Its latest report", report, ("machines",), 3.0),
        ),
        head=_trail(widgets.link("System", "/tree"), name),
        foot=widgets.more_link(
            "Its past", page.link_to("/history", where=f"machine = '{name.replace(_QUOTE, 2 * _QUOTE)}'")
        ),
    )


def rollups(metrics: Mapping[str, columns.MetricRollup]) -> Markup:
    rows: list[list[Child]] = [
        [
            name,
            _figure(name, one.sum / one.count if one.count else None),
            *(_figure(name, value) for value in (one.min, one.p50, one.p95, one.p99, one.max)),
            f"{one.count:,}",
        ]
        for name, one in sorted(metrics.items())
    ]
    return widgets.table(
        ["Metric", "#Mean", "#Least", "#Median", "#95 %", "#99 %", "#Greatest", "#Machines"],
        rows,
        label="Metrics",
        none="No metric was measured.",
    )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_bytes"):
        return widgets.size(value)
    if name.endswith("_bytes_s"):
        return f"{widgets.size(value)}/s"
    if name.endswith("_percent"):
        return f"{value:.1f} %"
    return widgets.seconds(value) if name.endswith("_s") else f"{value:,.2f}"
