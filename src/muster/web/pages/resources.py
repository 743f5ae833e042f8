"""The pages of resources, manifests, rollouts and managers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

from muster.core import errors, messages
from muster.manage import operations, protocol
from muster.manage import rows as rows_
from muster.web import actions
from muster.web.auth import sessions
from muster.web.components import drawings, page, plots
from muster.web.pages import system

SHOWN = 50
TIMELINE_S, LANES_MAX = 3600.0, 20
MOVES = ("reassign", "rollout")
TEMPLATE = "resources.html"
YAML: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}
DERIVED = ("digest", "template", "index")  # of a specification, not of its entry
STEPS_SHOWN, STEPS_S = 200, 3.0  # not with every change: a rollout may have 100,000 steps
STEP_LOOKS = {"done": "good", "running": "busy", "failed": "bad", "pending": "calm"}  # others as elsewhere
WORST = "failed unreachable in-doubt running pending done skipped"  # states of steps, the worst first
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
    text, name = request.query.get("manifest", "").replace("\r\n", "\n"), request.parameter("resource")

    async def form() -> page.Values:
        if text or not name:
            return {"text": text}
        return {"text": entry_text((await request.get("/resources/{name}", name=name)).value.spec)}

    async def plan() -> page.Values:
        actions.require_role(request.person, sessions.WebRole.OPERATOR, "apply manifests")
        return {"steps": (await request.post("/plans", manifest=text)).items if text.strip() else []}

    return page.DashboardPage(
        "Apply a manifest",
        TEMPLATE,
        (
            page.PageSection("form", "", form, (), 3600.0),
            page.PageSection("plan", "Plan", plan, (), 3600.0),
        ),
        lead="The plan shows what would change, field by field. Nothing changes before it is applied.",
        values={"kind": "apply", "text": text},
    )


def entry_text(spec: protocol.ResourceSpec) -> str:
    """The manifest with the entry that a specification was made of."""
    if spec.entry:
        raise errors.Refused(
            f"{spec.name} is an instance of {spec.entry}", hint=f"apply the entry {spec.entry} instead"
        )
    text: str = yaml.safe_dump({"resources": [entry(spec)]}, **YAML)
    return text


def entry(spec: protocol.ResourceSpec) -> dict[str, Any]:
    made = msgspec.to_builtins(spec)
    if spec.where and not spec.entry:  # the registry chooses the agent and fills in the template
        made |= spec.template
        del made["agent"]
    return {name: value for name, value in made.items() if name not in DERIVED and value not in ({}, [], "")}


def rollouts(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> page.Values:
        return {"rollouts": (await request.get("/rollouts"))[: -SHOWN - 1 : -1]}

    return page.DashboardPage(
        "Rollouts",
        TEMPLATE,
        (page.PageSection("rollouts", "Newest first", rows, ("manage",), 3.0),),
        lead="Updates change a group in waves. If a resource does not become healthy, they stop and revert.",
        values={"kind": "rollouts", "active": rows_.ACTIVE_ROLLOUT, "looks": STEP_LOOKS, "words": WORDS},
    )


def rollout(request: page.PageRequest) -> page.DashboardPage:
    id = request.parameter("id")

    async def own() -> page.Values:
        chosen = [row for row in await request.get("/rollouts") if row.id == id]
        if not chosen:
            raise errors.NotFound(f"there is no rollout {id[:100]!r}")
        return {"rollouts": chosen}

    async def steps() -> page.Values:
        listed = sorted(await request.get("/rollouts/{id}/steps", id=id), key=lambda step: step.wave)
        waves = [(wave, list(inside)) for wave, inside in itertools.groupby(listed, lambda step: step.wave)]
        worst = sorted(listed, key=lambda step: (WORST.find(step.state), step.wave, step.name))
        columns = ("name", "state", "reason", "result")
        return {
            "waves": waves,
            "steps": worst[:STEPS_SHOWN],
            "hidden": len(listed) - STEPS_SHOWN,
            "columns": columns if len(waves) < 2 else ("wave", *columns),
        }

    async def changes() -> page.Values:
        (row,) = (await own())["rollouts"]
        changed = [
            revision
            for group in row.groups
            for revision in await request.get("/groups/{group}/revisions", group=group)
            if revision.rollout == id
        ]
        return {"changes": changed[:STEPS_SHOWN]}

    return page.DashboardPage(
        f"Rollout {id}",
        TEMPLATE,
        (
            page.PageSection("rollouts", "Progress", own, ("manage",), 2.0),
            page.PageSection("waves", "Waves", steps, (), STEPS_S),
            page.PageSection("changed", "What it changes", changes, ("manage",), 30.0),
            page.PageSection("steps", "Resources", steps, (), STEPS_S),
        ),
        values={"kind": "rollout", "id": id, "active": rows_.ACTIVE_ROLLOUT, "looks": STEP_LOOKS},
    )


def resource(request: page.PageRequest) -> page.DashboardPage:
    name = request.parameter("name")

    async def details() -> page.Values:
        return {"details": (await request.get("/resources/{name}", name=name)).value}

    async def specification() -> page.Values:
        return {"spec": yaml.safe_dump(entry((await details())["details"].spec), **YAML)}

    async def measured() -> Sequence[plots.Plot]:
        return await plots.charted(request, "resource", name)

    return page.DashboardPage(
        f"Resource {name}",
        TEMPLATE,
        (
            page.PageSection("facts", "Observed state", details, ("manage",), 3.0, wide=False),
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
        return {
            "managers": listed,
            "most": most,
            "columns": ("name", "state", "resources", "", "expires_in_s"),
        }

    async def moved() -> page.Values:
        now_s = time.time()
        moves = [
            record
            for what in MOVES
            for record in (await request.get("/activity", what=what, limit=system.RECORDS_MAX)).items
            if now_s - record.at_ms / 1000 < TIMELINE_S and record.outcome is messages.DecisionOutcome.DONE
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
