"""The pages of resources and managers."""

from __future__ import annotations

import json
import time

import msgspec

from muster.manage import operations
from muster.manage import rows as rows_
from muster.web import actions
from muster.web.auth import sessions
from muster.web.components import charts, page, plots, records, templates, widgets
from muster.web.components.html import Markup, join, tag

SHOWN = 50
MACHINE_METRICS = ("cpu_percent", "memory_percent")  # of its machine, if it is not measured itself
TIMELINE_S, LANES_MAX = 3600.0, 20
MOVES = ("reassign", "rollout")


def resources(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source
    where = request.parameter("where")

    async def summary() -> Markup:
        totals = await source.read(operations.SUMMARY)
        if not totals.resources:
            return widgets.empty(
                "There are no resources yet.",
                join("Apply a manifest: ", tag("code", "muster apply -f fleet.yaml")),
            )
        return charts.shares(totals.states, label="Resources by state")

    async def rows() -> Markup:
        result = await source.resources(where=where, after=request.parameter("after"), limit=SHOWN)
        return join(
            records.table(
                result.items,
                operations.RESOURCES.columns,
                cells={"name": lambda row: widgets.link(row.name, "/resource", name=row.name)},
                label="Resources",
                none="No resource matches.",
            ),
            widgets.pages(request, result.next, shown=len(result.items)),
        )

    return page.DashboardPage(
        "Resources",
        (
            page.PageSection("summary", "By state", summary, ("manage",), 5.0),
            page.PageSection("rows", "Resources", rows, ("manage",), 5.0),
        ),
        lead="The desired and the observed state of all resources.",
        head=join(
            widgets.search(
                "/resources",
                widgets.field(
                    "Filter",
                    "where",
                    where,
                    placeholder="group = 'web' AND state <> 'up'",
                    hint="A predicate over name, type, group, agent, state, manager, labels and facts.",
                ),
            ),
            widgets.more_link("Apply a manifest", "/apply") if request.may_act else None,
        ),
    )


def apply(request: page.PageRequest) -> page.DashboardPage:
    """A manifest is planned when the form is sent, and applied only from the plan."""
    text = request.query.get("manifest", "").replace("\r\n", "\n")

    async def plan() -> Markup:
        actions.require_role(request.person, sessions.WebRole.OPERATOR, "apply manifests")
        steps = await request.web.source.plan(text) if text.strip() else []
        return templates.render("steps.html", request=request, steps=steps, text=text)

    return page.DashboardPage(
        "Apply a manifest",
        (page.PageSection("plan", "Plan", plan, (), 3600.0),),
        lead="The plan shows what would change, field by field. Nothing changes before it is applied.",
        head=templates.render("plan.html", request=request, text=text),
    )


def rollouts(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> Markup:
        listed = list(reversed(await request.web.source.read(operations.ROLLOUTS)))[:SHOWN]
        return templates.render(
            "rollouts.html", request=request, rollouts=listed, active=rows_.ACTIVE_ROLLOUT
        )

    return page.DashboardPage(
        "Rollouts",
        (page.PageSection("rollouts", "Newest first", rows, ("manage",), 3.0),),
        lead="Updates change a group in waves. If a resource does not become healthy, they stop and revert.",
    )


def resource(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")
    source = request.web.source

    async def facts() -> Markup:
        details = await source.read(operations.DESCRIBE, name=name)
        return widgets.facts(
            {
                "State": join(widgets.badge(details.state), f" {details.reason}"),
                "Since": join(
                    widgets.moment(details.since_ms), f" ({widgets.relative_time(details.since_ms)})"
                ),
                "Desired state": details.desired + ("" if details.applied else ", not applied yet"),
                "Drift": details.drift or "none",
                "Type": details.type,
                "Group": details.group,
                "Agent": details.agent,
                "Manager": f"{details.manager or 'none'}, epoch {details.epoch}",
                "Restarts": f"{details.restarts:,}",
                "Waits for": ", ".join(details.waits_for) or "nothing",
                "Generation": f"{details.generation}, applied by {details.applied_by}",
            }
        )

    async def specification() -> Markup:
        details = await source.read(operations.DESCRIBE, name=name)
        return tag("pre", json.dumps(msgspec.to_builtins(details.spec), indent=2, ensure_ascii=False))

    async def decisions() -> Markup:
        return recent_decisions(request, target=name)

    async def measured() -> list[plots.Plot]:
        machine = await source.charts.machine_of((await source.read(operations.DESCRIBE, name=name)).agent)
        own = await source.charts.service_metrics(machine, name)
        return plots.metrics("resource", name, own) or plots.metrics("machine", machine, MACHINE_METRICS)

    return page.DashboardPage(
        f"Resource {name}",
        (
            page.PageSection("facts", "Observed state", facts, ("manage",), 3.0),
            plots.section(request, "Measured", measured, id="resource", wide=True),
            page.PageSection("spec", "Desired state", specification, ("manage",), 10.0, wide=False),
            page.PageSection("decided", "Activity", decisions, ("activity",), 10.0, wide=False),
        ),
        head=templates.render("resource_actions.html", request=request, name=name)
        if request.may_act
        else Markup(""),
    )


def managers(request: page.PageRequest) -> page.DashboardPage:
    source = request.web.source

    async def who() -> Markup:
        listed = await source.read(operations.MANAGERS)
        most = max((manager.resources for manager in listed), default=1) or 1
        return records.table(
            listed,
            operations.MANAGERS.columns,
            cells={
                "resources": lambda manager: widgets.link(
                    f"{manager.resources:,}", "/resources", where=f"manager = '{manager.name}'"
                ),
                "": lambda manager: charts.bar(manager.resources / most, look="good"),
                "state": lambda manager: widgets.badge(
                    "draining" if manager.leaving else "up" if manager.expires_in_s > 0 else "late"
                ),
            },
            label="Managers",
            none=widgets.empty("There is no manager.", "Set manage.enabled in the domain's settings."),
        )

    async def moved() -> Markup:
        now_s = time.time()
        moves = [
            record
            for record in source.feed.decisions
            if record.what in MOVES and now_s - record.at_ms / 1000 < TIMELINE_S
        ]
        names = [manager.name for manager in await source.read(operations.MANAGERS)]
        lanes: dict[str, list[charts.Span]] = {name: [] for name in names}
        for record in moves:
            look = "bad" if record.what == "reassign" else "busy"
            moment = (record.at_ms / 1000, record.at_ms / 1000, look, f"{record.what}: {record.why}")
            if record.target in lanes or record.what == "reassign":
                lanes.setdefault(record.target, []).append(moment)
        label = f"Failovers and rollouts of the last hour: {len(moves)}"
        shown = dict(list(lanes.items())[:LANES_MAX])
        chart = charts.timeline(shown, from_s=now_s - TIMELINE_S, to_s=now_s, label=label) if moves else ""
        return templates.render("managers.html", chart=chart, moves=list(reversed(moves))[:30])

    async def agents() -> Markup:
        listed = await source.read(operations.AGENTS)
        return records.table(
            listed[:100],
            (*operations.AGENTS.columns, "types"),
            label="Agents",
            none="There are no agents yet.",
        )

    return page.DashboardPage(
        "Managers",
        (
            page.PageSection("who", "Managers", who, ("manage",), 2.0),
            page.PageSection("moved", "Failovers and rollouts", moved, ("activity", "manage"), 5.0),
            page.PageSection("agents", "Agents", agents, ("manage",), 10.0),
        ),
        lead="Every resource is assigned to one manager, which holds a lease. If it fails, others take over.",
    )


def recent_decisions(request: page.PageRequest, *, target: str) -> Markup:
    records_ = [
        record
        for record in reversed(request.web.source.feed.decisions)
        if target in record.target.split(", ")
    ][:20]
    return records.table(
        records_,
        ("at_ms", "who", "what", "outcome", "why"),
        label="Decisions",
        none="There are no recent records.",
    )
