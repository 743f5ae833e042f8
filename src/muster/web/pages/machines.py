"""The pages of machines: the map, the list, groups and zones, one machine with its services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.core.reports import columns
from muster.web.components import charts, page, plots, records, templates, widgets
from muster.web.components.html import Child, Markup, join, tag
from muster.web.data.measurements import latest_reports

STATES = ("", "up", "late", "stale", "unknown", "down", "failed", "draining", "starting")
SHOWN = 50
PLOTS_MAX = 16
NO_REPORT = join(
    "Sensors report to channels: ",
    tag("code", "muster run channel"),
    ", then ",
    tag("code", "muster run sensor"),
    "; or simulate a fleet: ",
    tag("code", "muster simulate sensors"),
    ".",
)
_QUOTE = "'"


def machines(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def system() -> Markup:
        report = await source.system()
        if report is None:
            return widgets.empty("There is no report yet.", NO_REPORT)
        return _report(report)

    async def groups() -> Markup:
        summary = await source.machine_summary()
        if not summary.groups:
            source.require_connection()
        largest = max((row.machines for row in summary.groups), default=1)
        return records.table(
            summary.groups[:200],
            ("group", "machines", "cpu_percent", "memory_percent", "oldest_s"),
            cells={
                "group": lambda row: widgets.link(row.group, "/group", name=row.group),
                "": lambda row: charts.bar(row.machines / largest),
                "#stale": lambda row: f"{row.states.get('stale', 0):,}",
                "unhealthy": lambda row: _unwell(row.states),
            },
            label="Groups",
            none="There are no groups yet.",
        )

    return page.DashboardPage(
        "Machines",
        (
            page.PageSection("groups", "Groups", groups, ("machines",), 3.0),
            _listed(request),
            page.PageSection("system", "System", system, ("reports", "machines"), 5.0),
        ),
        lead="Groups, machines and the report of the whole fleet.",
        head=_filter(request),
    )


def _unwell(states: Mapping[str, int]) -> Markup:
    others = {name: n for name, n in states.items() if name not in ("up", "stale")}
    return join(*(join(widgets.badge(f"{name} {count:,}"), " ") for name, count in others.items()))


def _filter(request: page.PageRequest, **kept: str) -> Markup:
    options = [(state, state or "any state") for state in STATES]
    return widgets.search(
        request.path,
        widgets.field("State of machines", "state", request.parameter("state"), options=options),
        **kept,
    )


def _listed(request: page.PageRequest, *, group: str = "", zone: str = "") -> page.PageSection:
    async def listed() -> Markup:
        rows, total, next_ = await request.web.source.feed.machines.page(
            group=group,
            zone=zone,
            state=request.parameter("state"),
            after=request.parameter("after"),
            limit=SHOWN,
        )
        if not rows:
            request.web.source.require_connection()
        return join(
            records.table(
                rows,
                (
                    *("machine", "group", "zone", "state", "age_s", "cpu_percent", "memory_percent"),
                    *("load_1m", "services"),
                ),
                cells={
                    "machine": lambda row: widgets.link(row.machine, "/machine", name=row.machine),
                    "group": lambda row: widgets.link(row.group, "/group", name=row.group),
                    "zone": lambda row: widgets.link(row.zone, "/zone", name=row.zone),
                },
                label="Machines",
                none="No machine matches.",
            ),
            widgets.pages(request, next_, total=total, shown=len(rows)),
        )

    return page.PageSection("nodes", "Machines", listed, ("machines",), 3.0)


def _trail(*steps: Child) -> Markup:
    made: list[Child] = []
    for index, step in enumerate(steps):
        made += ["›", step] if index else [step]
    return tag("nav", *(tag("span", link) for link in made), cls="trail", aria_label="Breadcrumbs")


def machine_map(request: page.PageRequest) -> page.DashboardPage:
    return page.DashboardPage(
        "Map",
        (map_section(request, request.parameter("metric"), title=""),),
        lead="Every machine by zone and group. Click a machine, a group or a zone for its page.",
    )


def map_section(
    request: page.PageRequest, metric: str, *, title: str = "Map of the fleet"
) -> page.PageSection:
    async def make() -> Markup:
        if not (await request.web.source.machine_summary()).machines:
            request.web.source.require_connection()
            return widgets.empty("No machine has reported yet.", NO_REPORT)
        return templates.render("map.html", metric=metric)

    return page.PageSection("map", title, make, (), 10.0)


def group(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")

    async def report() -> Markup:
        return _report(await request.web.source.group(name))

    return _members(request, "group", name, report, _listed(request, group=name or "\0"))


def zone(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")

    async def report() -> Markup:
        return _report(await request.web.source.zone(name))

    return _members(request, "zone", name, report, _listed(request, zone=name or "\0"))


def _report(report: columns.GroupReport | columns.SystemReport) -> Markup:
    states = charts.shares(report.states, label="Machines by state") if report.states else None
    return templates.render("report.html", report=report, states=states, figure=_figure)


def _members(
    request: page.PageRequest, kind: str, name: str, report: page.Make, listed: page.PageSection
) -> page.DashboardPage:
    async def measured() -> list[plots.Plot]:
        source = request.web.source
        latest = await (source.group(name) if kind == "group" else source.zone(name))
        return plots.metrics(kind, name, chosen_metrics(latest.metrics))

    return page.DashboardPage(
        f"{kind.capitalize()} {name}",
        (
            plots.section(request, "Mean and 95 % of the machines", measured, id=kind, wide=True),
            listed,
            page.PageSection("report", "Report", report, ("reports", "machines"), 5.0),
        ),
        head=join(_trail(widgets.link("Machines", "/machines"), name), _filter(request, name=name)),
    )


def chosen_metrics(measured: Iterable[str]) -> list[str]:
    """Those specific to this fleet, and the standard ones that matter most."""
    names = set(measured)
    return [*sorted(names - {*columns.STANDARD_METRICS}), *(m for m in latest_reports.METRICS if m in names)][
        :PLOTS_MAX
    ]


def machine(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")
    source = request.web.source

    async def report() -> Markup:
        return templates.render("machine.html", report=await source.node(name), figure=_figure)

    async def services() -> Markup:
        return templates.render("services.html", report=await source.node(name), figure=_figure)

    async def measured() -> list[plots.Plot]:
        latest = await source.node(name)
        known = [metric for metric in columns.STANDARD_METRICS if metric in latest.metrics]
        own = sorted({*latest.metrics} - {*known})
        charted = plots.metrics("machine", name, [*own, *known][:PLOTS_MAX])
        for service in latest.services[:PLOTS_MAX]:
            charted += [
                plots.Plot("service", metric, f"{name}/{service.name}", f"{service.name}: {metric}")
                for metric in sorted(service.metrics)[:4]
            ]
        return charted

    return page.DashboardPage(
        f"Machine {name}",
        (
            plots.section(request, "Measured", measured, id="machine", wide=True),
            page.PageSection("services", "Services", services, ("machines",), 3.0),
            page.PageSection("report", "Latest report", report, ("machines",), 3.0),
        ),
        head=_trail(widgets.link("Machines", "/machines"), name),
        foot=widgets.more_link(
            "History", page.link_to("/history", where=f"machine = '{name.replace(_QUOTE, 2 * _QUOTE)}'")
        ),
    )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_bytes"):
        return widgets.size(value)
    if name.endswith("_bytes_s"):
        return f"{widgets.size(value)}/s"
    if name.endswith("_percent"):
        return widgets.percent(value)
    if name.endswith("_s"):
        return widgets.seconds(value)
    return widgets.measurement(value)
