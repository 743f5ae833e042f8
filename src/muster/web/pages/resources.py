"""Resources and managers: what is managed, who manages what, and how it moved."""

from __future__ import annotations

import json
import time

from muster.web.components import charts, page, widgets
from muster.web.components.html import Child, Markup, join, tag

SHOWN = 50
TIMELINE_S = 3600.0
MOVES = ("reassign", "rollout")


def resources(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source
    where = seen.asked("where")

    async def summary() -> Markup:
        found = await source.summary()
        if not found["resources"]:
            return widgets.empty(
                "Nothing is managed yet.",
                join("Apply a manifest: ", tag("code", "muster apply -f fleet.yaml")),
            )
        return charts.shares(found["states"], label="Resources by state")

    async def rows() -> Markup:
        found = await source.resources(where=where, after=seen.asked("after"), limit=SHOWN)
        made: list[list[Child]] = [
            [
                widgets.link(one["name"], "/resource", name=one["name"]),
                one["type"],
                one["group"],
                one["agent"],
                widgets.badge(one["state"]),
                one["wanted"],
                one["manager"] or "–",
                f"{one['restarts']:,}",
                join(widgets.moment(one["since_ms"])),
                one["reason"] or one["drift"],
            ]
            for one in found.items
        ]
        head = [
            "Resource",
            "Type",
            "Group",
            "Agent",
            "State",
            "Wanted",
            "Manager",
            "#Restarts",
            "Since",
            "Reason",
        ]
        return join(
            widgets.table(head, made, label="Resources", none="No resource fits."),
            widgets.pages(seen, found.next, shown=len(made)),
        )

    form = Markup("")
    if seen.may_act:
        form = tag(
            "details",
            tag("summary", "Apply a manifest"),
            widgets.action_button(
                seen,
                "apply",
                "Apply",
                widgets.field(
                    "Manifest",
                    "manifest",
                    rows=10,
                    required=True,
                    placeholder="resources:\n  - name: web-1\n    type: process\n    agent: local",
                ),
            ),
            cls="panel",
        )
    return page.DashboardPage(
        "Resources",
        (
            page.PageSection("summary", "By state", summary, ("manage",), 5.0),
            page.PageSection("rows", "Resources", rows, ("manage",), 5.0),
        ),
        lead="What manifests ask for, and how it is.",
        head=join(
            widgets.search(
                "/resources",
                widgets.field(
                    "Which resources",
                    "where",
                    where,
                    placeholder="group = 'web' AND state <> 'up'",
                    hint="A predicate over name, type, group, agent, state, manager, labels and facts.",
                ),
            ),
            form,
        ),
    )


def resource(seen: page.PageRequest) -> page.DashboardPage:
    name = seen.asked("name")
    source = seen.known.source

    async def facts() -> Markup:
        one = await source.resource(name)
        return widgets.facts(
            {
                "State": join(widgets.badge(one["state"]), f" {one['reason']}"),
                "Since": join(
                    widgets.moment(one["since_ms"]), f" ({widgets.relative_time(one['since_ms'])})"
                ),
                "Wanted": one["wanted"] + ("" if one["applied"] else ", not applied yet"),
                "Drift": one["drift"] or "none",
                "Type": one["type"],
                "Group": one["group"],
                "Agent": one["agent"],
                "Manager": f"{one['manager'] or 'none'}, epoch {one['epoch']}",
                "Restarts": f"{one['restarts']:,}",
                "Waits for": ", ".join(one["waits_for"]) or "nothing",
                "Generation": f"{one['generation']}, applied by {one['applied_by']}",
            }
        )

    async def specification() -> Markup:
        one = await source.resource(name)
        return tag("pre", json.dumps(one["spec"], indent=2, ensure_ascii=False))

    async def decisions() -> Markup:
        return recent_decisions(seen, target=name)

    acts = Markup("")
    if seen.may_act:
        acts = tag(
            "div",
            widgets.action_button(seen, "drain", "Drain", name=name),
            widgets.action_button(seen, "undrain", "Let it work", name=name),
            widgets.action_button(
                seen, "delete", "Delete", name=name, sure=f"Take {name} down and forget it?", look="danger"
            ),
            tag(
                "details",
                tag("summary", "Carry out an operation"),
                widgets.action_button(
                    seen,
                    "execute",
                    "Carry out",
                    widgets.field("Operation", "operation", required=True, placeholder="restart"),
                    widgets.field("Arguments", "arguments", rows=3, placeholder="name=value"),
                    name=name,
                ),
            ),
            cls="panel",
        )
    return page.DashboardPage(
        f"Resource {name}",
        (
            page.PageSection("facts", "How it is", facts, ("manage",), 3.0),
            page.PageSection("spec", "What it should be", specification, ("manage",), 10.0, wide=False),
            page.PageSection("decided", "Decisions about it", decisions, ("audit",), 10.0, wide=False),
        ),
        head=acts,
    )


def managers(seen: page.PageRequest) -> page.DashboardPage:
    source = seen.known.source

    async def who() -> Markup:
        found = await source.managers()
        most = max((one["resources"] for one in found), default=1) or 1
        rows: list[list[Child]] = [
            [
                one["name"],
                widgets.badge("draining" if one["leaving"] else "up" if one["expires_in_s"] > 0 else "late"),
                widgets.link(f"{one['resources']:,}", "/resources", where=f"manager = '{one['name']}'"),
                charts.bar(one["resources"] / most, look="good"),
                widgets.seconds(max(0.0, one["expires_in_s"])),
            ]
            for one in found
        ]
        return widgets.table(
            ["Manager", "State", "#Resources", "", "#Lease runs for"],
            rows,
            label="Managers",
            none=widgets.empty("No manager is there.", "Set manage.enabled in the domain's settings."),
        )

    async def moved() -> Markup:
        now_s = time.time()
        found = [
            one for one in source.decisions if one.what in MOVES and now_s - one.at_ms / 1000 < TIMELINE_S
        ]
        names = [one["name"] for one in await source.managers()]
        lanes = [*names, *sorted({one.target for one in found if one.what == "reassign"} - set(names))]
        if not found or not lanes:
            return widgets.empty(
                "No fail-over in the last hour.",
                "When a manager dies, its resources move, and it shows here.",
            )
        marks = [
            charts.TimelineMark(
                one.target,
                one.at_ms / 1000,
                f"{one.what}: {one.why}",
                "bad" if one.what == "reassign" else "busy",
            )
            for one in found
        ]
        return join(
            charts.timeline(
                lanes[:20],
                marks,
                from_s=now_s - TIMELINE_S,
                to_s=now_s,
                label=f"Fail-overs of the last hour: {len(found)}",
            ),
            widgets.table(
                ["When", "What", "Of", "Why"],
                [
                    [widgets.moment(one.at_ms), one.what, one.target, one.why]
                    for one in list(reversed(found))[:30]
                ],
                label="Fail-overs",
            ),
        )

    async def agents() -> Markup:
        found = await source.agents()
        rows: list[list[Child]] = [
            [
                one["name"],
                f"{one['resources']:,}",
                one.get("zone", ""),
                "no more" if one.get("cordoned") else "new resources",
                ", ".join(one.get("types") or ()),
            ]
            for one in found[:100]
        ]
        return widgets.table(
            ["Agent", "#Resources", "Zone", "Takes", "Types"],
            rows,
            label="Agents",
            none="No agent has come yet.",
        )

    return page.DashboardPage(
        "Managers",
        (
            page.PageSection("who", "Who manages what", who, ("manage",), 2.0),
            page.PageSection("moved", "Fail-overs", moved, ("audit", "manage"), 5.0),
            page.PageSection("agents", "Agents", agents, ("manage",), 10.0),
        ),
        lead="Every resource has one manager at a time, under a lease. When one dies, others take over.",
    )


def recent_decisions(seen: page.PageRequest, *, target: str) -> Markup:
    found = [one for one in reversed(seen.known.source.decisions) if target in one.target.split(", ")][:20]
    return widgets.table(
        ["When", "Who", "What", "Outcome", "Why"],
        [
            [widgets.moment(one.at_ms), one.who, one.what, widgets.badge(one.outcome.value), one.why]
            for one in found
        ],
        label="Decisions",
        none="None that is remembered here.",
    )
