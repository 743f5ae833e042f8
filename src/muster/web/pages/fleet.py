"""The overview, the map, and the pages of machines, groups and zones."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import errors, messages
from muster.web.components import page, plots, templates, texts
from muster.web.data import rows
from muster.web.data.measurements import chart_queries
from muster.web.pages import alerts as alerts_
from muster.web.rest import reports

STATES = tuple(
    (state, state or "any state")
    for state in ("", "up", "late", "stale", "unknown", "down", "failed", "draining", "starting")
)
SHOWN = 50
CHANGES_SHOWN = 8
ALERTS_SHOWN, RULES_SHOWN = 4, 6
LINES_MAX = 3
QUIET = (messages.AlertState.SILENCED, messages.AlertState.ACKNOWLEDGED)
TEMPLATE = "fleet.html"


def overview(request: page.PageRequest) -> page.DashboardPage:
    async def figures() -> page.Values:
        seen: rows.FleetOverview = await request.get("/overview")
        machines = seen.machines
        oldest = f"oldest {texts.seconds(machines.oldest_s)}"
        look = "warn" if machines.stale else "good" if machines.machines else ""
        stale_href = page.link_to("/machines", state="stale")
        groups = f"in {texts.counted(len(machines.groups), 'group')}"
        return {
            "made": [
                templates.Tile("Machines", f"{machines.machines:,}", groups, "busy", "/machines"),
                templates.Tile("Stale", f"{machines.stale:,}", "no report for 2.5 periods", look, stale_href),
                templates.Tile(
                    "Age of a report", texts.seconds(machines.median_s), oldest, "", "/report-delay"
                ),
                _resources(seen),
                await _alerts(request),
                templates.Tile("Reports", texts.rate(seen.reports_per_s), "at the root", "", "/pipeline"),
                templates.Tile(
                    "Messages", texts.rate(seen.messages_per_s), "into the brokers", "", "/brokers"
                ),
            ]
        }

    async def resources() -> page.Values:
        return {"totals": await request.get("/summary")}

    async def firing() -> page.Values:
        return await alerts_.table(request, await request.get("/alerts"), ALERTS_SHOWN, RULES_SHOWN)

    async def changes() -> page.Values:
        return {"changes": (await request.get("/state-changes", limit=CHANGES_SHOWN)).items}

    async def watched() -> Sequence[plots.Plot]:
        return own_metrics(await plots.charted(request, "fleet"))

    return page.DashboardPage(
        "Overview",
        TEMPLATE,
        (
            page.PageSection("figures", "", figures, ("machines", "manage", "alerts"), 3.0),
            _map_section(request, "Map of the fleet"),
            page.PageSection("alerts", "Alerts", firing, ("alerts",), 5.0, template=alerts_.TEMPLATE),
            plots.section(request, "Fleet", watched),
            plots.section(request, "Age of reports on arrival", [plots.Plot("domain", "age")], id="age"),
            plots.section(
                request, "Messages through the brokers", [plots.Plot("domain", "messages")], id="in"
            ),
            page.PageSection("resources", "Resources by state", resources, ("manage",), 3.0, wide=False),
            page.PageSection("changes", "Latest changes", changes, ("manage",), 5.0),
        ),
    )


def own_metrics(charted: Sequence[plots.Plot]) -> Sequence[plots.Plot]:
    """The first charts of the fleet: those of its own metrics, else CPU."""
    own = [plot for plot in charted if plot.metric not in reports.STANDARD]
    return (own or [plot for plot in charted if plot.metric == "cpu_percent"])[:LINES_MAX]


async def _alerts(request: page.PageRequest) -> templates.Tile:
    try:
        listed = await request.get("/alerts")
    except errors.Unavailable:
        return templates.Tile("Alerts firing", "–", "no reply", "", "/alerts")
    judged = bool(listed) or await alerts_.are_judged(request)
    count, note, look = alert_figures(listed, judged=judged)
    return templates.Tile("Alerts firing", str(count), note, look, "/alerts")


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


def _resources(seen: rows.FleetOverview) -> templates.Tile:
    summary = seen.resources
    if summary is None:
        return templates.Tile("Resources", "–", "no reply from the registry", "", "/resources")
    states = summary.states
    ended = states.get("failed", 0) + states.get("down", 0) - summary.down_as_desired
    wrong = ended + states.get("late", 0) + states.get("unknown", 0)
    note = f"{wrong:,} unhealthy" if wrong else "all healthy" if summary.resources else "none yet"
    look = "bad" if ended else "warn" if wrong else "good"
    return templates.Tile("Resources", f"{summary.resources:,}", note, look, "/resources")


def machine_map(request: page.PageRequest) -> page.DashboardPage:
    return page.DashboardPage(
        "Map",
        TEMPLATE,
        (_map_section(request, ""),),
        lead="Every machine by zone and group. Click a machine, a group or a zone for its page.",
    )


def _map_section(request: page.PageRequest, title: str) -> page.PageSection:
    async def load() -> page.Values:
        machines = (await request.get("/overview")).machines.machines
        return {"machines": machines, "metric": request.parameter("metric")}

    return page.PageSection("map", title, load, (), 10.0)


def machines(request: page.PageRequest) -> page.DashboardPage:
    async def groups() -> page.Values:
        listed = await request.get("/reports/groups")
        return {"groups": listed[:200], "largest": max((row.machines for row in listed), default=1)}

    async def system() -> page.Values:
        try:
            report = await request.get("/reports/system", past=reports.NOW)
        except errors.NotFound:
            return {"report": None}
        return {"report": report, "states_now": (await request.get("/overview")).machines.states}

    return page.DashboardPage(
        "Machines",
        TEMPLATE,
        (
            page.PageSection("groups", "Groups", groups, ("machines",), 3.0),
            _listed(request),
            page.PageSection("report", "The whole fleet", system, ("reports", "machines"), 5.0),
        ),
        lead="Groups, machines and the report of the whole fleet.",
        values={"states": STATES, "name": ""},
    )


def _listed(request: page.PageRequest, *, group: str = "", zone: str = "") -> page.PageSection:
    async def listed() -> page.Values:
        state, after = request.parameter("state"), request.parameter("after")
        listing = await request.get(
            "/reports/nodes", group=group, zone=zone, state_=state, cursor=after, limit=SHOWN
        )
        return {"machines": listing}

    return page.PageSection("machines", "Machines", listed, ("machines",), 3.0)


def group(request: page.PageRequest) -> page.DashboardPage:
    return _members(request, "group")


def zone(request: page.PageRequest) -> page.DashboardPage:
    return _members(request, "zone")


def _members(request: page.PageRequest, kind: str) -> page.DashboardPage:
    name = request.parameter("name")

    async def report() -> page.Values:
        past = {"past": reports.NOW} if kind == "group" else {}
        made = await request.get(f"/reports/{kind}s/{{name:path}}", name=name, **past)
        groups = await request.get("/reports/groups") if kind == "group" else ()
        # Not those of the report, which counts each report of its window.
        return {"report": made, "states_now": next((row.states for row in groups if row.group == name), {})}

    async def measured() -> Sequence[plots.Plot]:
        return await plots.charted(request, kind, name)

    return page.DashboardPage(
        f"{kind.capitalize()} {name}",
        TEMPLATE,
        (
            alerts_.section_about(request, f"{kind}:{name}"),
            plots.section(request, "Mean and 95 % of the machines", measured, id=kind, wide=True),
            _listed(request, **{kind: name or "\0"}),
            page.PageSection("report", "Report", report, ("reports", "machines"), 5.0),
        ),
        values={"states": STATES, "name": name},
    )


def machine(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")

    async def report() -> page.Values:
        return {"report": await request.get("/reports/nodes/{name:path}", name=name, past=reports.NOW)}

    async def measured() -> Sequence[plots.Plot]:
        return await plots.charted(request, "machine", name)

    async def hosted() -> page.Values:
        """Its resources, and the resource with its name: in some fleets each machine is one."""
        agents = chart_queries.agents_of(name)
        where = " OR ".join([f"agent = {texts.literal(agent)}" for agent in agents])
        listing = await request.get(
            "/resources", where=f"{where} OR name = {texts.literal(name)}", limit=SHOWN
        )
        own = {row.agent for row in listing.items} & {*agents}
        return {"hosted": listing, "agent": min(own, default=""), "where": where}

    return page.DashboardPage(
        f"Machine {name}",
        TEMPLATE,
        (
            alerts_.section_about(request, f"node:{name}"),
            plots.section(request, "Measured", measured, id="machine", wide=True),
            page.PageSection("hosted", "Resources", hosted, ("manage",), 5.0),
            page.PageSection("services", "Services", report, ("machines",), 3.0),
            page.PageSection("latest", "Latest report", report, ("machines",), 3.0),
        ),
        values={"states": (), "name": name},
    )
