"""The pages of resources, manifests, rollouts and managers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec

from muster.manage import operations
from muster.manage import rows as rows_
from muster.web import actions
from muster.web.auth import sessions
from muster.web.components import drawings, page, plots
from muster.web.pages import system

SHOWN = 50
TIMELINE_S, LANES_MAX = 3600.0, 20
MOVES = ("reassign", "rollout")
TEMPLATE = "resources.html"
WORDS = ("name", "type", "group", "agent", "state", "manager", "desired", "labels.", "facts.")


def resources(request: page.PageRequest) -> page.DashboardPage:
    where = request.parameter("where")

    async def summary() -> page.Values:
        return {"totals": await request.get("/summary")}

    async def rows() -> page.Values:
        listing = await request.get("/resources", where=where, cursor=request.parameter("after"), limit=SHOWN)
        return {"listing": listing, "columns": operations.RESOURCES.columns}

    return page.DashboardPage(
        "Resources",
        TEMPLATE,
        (
            page.PageSection("summary", "By state", summary, ("manage",), 5.0),
            page.PageSection("rows", "Resources", rows, ("manage",), 5.0),
        ),
        lead="The desired and the observed state of all resources.",
        values={"kind": "list", "where": where, "words": WORDS},
    )


def apply(request: page.PageRequest) -> page.DashboardPage:
    """A manifest is planned when the form is sent, and applied only from the plan."""
    text = request.query.get("manifest", "").replace("\r\n", "\n")

    async def plan() -> page.Values:
        actions.require_role(request.person, sessions.WebRole.OPERATOR, "apply manifests")
        return {"steps": (await request.post("/plans", manifest=text)).items if text.strip() else []}

    return page.DashboardPage(
        "Apply a manifest",
        TEMPLATE,
        (page.PageSection("plan", "Plan", plan, (), 3600.0),),
        lead="The plan shows what would change, field by field. Nothing changes before it is applied.",
        values={"kind": "apply", "text": text},
    )


def rollouts(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> page.Values:
        listed = list(reversed(await request.get("/rollouts")))[:SHOWN]
        return {"rollouts": listed, "active": rows_.ACTIVE_ROLLOUT}

    return page.DashboardPage(
        "Rollouts",
        TEMPLATE,
        (page.PageSection("rollouts", "Newest first", rows, ("manage",), 3.0),),
        lead="Updates change a group in waves. If a resource does not become healthy, they stop and revert.",
        values={"kind": "rollouts"},
    )


def resource(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")

    async def details() -> page.Values:
        return {"details": (await request.get("/resources/{name}", name=name)).value}

    async def specification() -> page.Values:
        spec = (await details())["details"].spec
        return {"spec": json.dumps(msgspec.to_builtins(spec), indent=2, ensure_ascii=False)}

    async def measured() -> Sequence[plots.Plot]:
        return await plots.charted(request, "resource", name)

    return page.DashboardPage(
        f"Resource {name}",
        TEMPLATE,
        (
            page.PageSection("facts", "Observed state", details, ("manage",), 3.0),
            plots.section(request, "Measured", measured, id="resource", wide=True),
            page.PageSection("spec", "Desired state", specification, ("manage",), 10.0, wide=False),
            system.decisions(request, name),
        ),
        values={"kind": "resource", "name": name},
    )


def managers(request: page.PageRequest) -> page.DashboardPage:
    async def who() -> page.Values:
        listed = await request.get("/managers")
        most = max((manager.resources for manager in listed), default=1) or 1
        return {"managers": listed, "most": most, "columns": operations.MANAGERS.columns}

    async def moved() -> page.Values:
        now_s = time.time()
        moves = [
            record
            for what in MOVES
            for record in (await request.get("/activity", what=what, limit=system.RECORDS_MAX)).items
            if now_s - record.at_ms / 1000 < TIMELINE_S
        ]
        moves.sort(key=lambda record: -record.at_ms)
        names = [manager.name for manager in await request.get("/managers")]
        lanes: dict[str, list[drawings.Span]] = {name: [] for name in names}
        for record in moves:
            look = "bad" if record.what == "reassign" else "busy"
            moment = (record.at_ms / 1000, record.at_ms / 1000, look, f"{record.what}: {record.why}")
            if record.target in lanes or record.what == "reassign":
                lanes.setdefault(record.target, []).append(moment)
        shown = dict(list(lanes.items())[:LANES_MAX])
        drawn = drawings.timeline(shown, from_s=now_s - TIMELINE_S, to_s=now_s)
        return {"moves": moves, "drawn": drawn}

    async def agents() -> page.Values:
        return {
            "agents": (await request.get("/agents"))[:100],
            "columns": (*operations.AGENTS.columns, "types"),
        }

    return page.DashboardPage(
        "Managers",
        TEMPLATE,
        (
            page.PageSection("who", "Managers", who, ("manage",), 2.0),
            page.PageSection("moved", "Failovers and rollouts", moved, ("activity", "manage"), 5.0),
            page.PageSection("agents", "Agents", agents, ("manage",), 10.0),
        ),
        lead="Every resource is assigned to one manager, which holds a lease. If it fails, others take over.",
        values={"kind": "managers"},
    )
