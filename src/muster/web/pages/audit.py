"""The audit, and who may log in."""

from __future__ import annotations

import asyncio

from muster.web import actions
from muster.web.auth import sessions
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup, join
from muster.web.data import bus_feed
from muster.web.rest import audit as rest
from muster.web.rest import base

SHOWN = 100


def audit(seen: page.PageRequest) -> page.DashboardPage:
    who, what, target = seen.asked("who"), seen.asked("what"), seen.asked("target")

    async def rows() -> Markup:
        found = rest.select(seen.known, who=who, what=what, target=target)
        some, next_ = base.behind(found, seen.asked("after"), SHOWN, bus_feed.decision_key)
        made: list[list[Child]] = [
            [
                widgets.moment(one.at_ms),
                one.who,
                one.on_behalf_of,
                one.what,
                one.target,
                widgets.badge(one.outcome.value),
                one.details.get("door", ""),
                one.why,
            ]
            for one in some
        ]
        return join(
            widgets.table(
                ["When", "Who", "For", "What", "Target", "Outcome", "Door", "Why"],
                made,
                label="The audit",
                none="Nothing was done yet that fits.",
            ),
            widgets.pages(seen, next_, total=len(found), shown=len(made)),
        )

    return page.DashboardPage(
        "Audit",
        (page.PageSection("rows", "Decisions", rows, ("audit",), 5.0),),
        lead="Who decided or did what, to what, and what became of it: by this page, by REST, by the command "
        "line, and by managers themselves. The latest are shown; the stream keeps a year.",
        head=widgets.search(
            "/audit",
            widgets.field("Who", "who", who),
            widgets.field("What", "what", what, placeholder="apply"),
            widgets.field("Target holds", "target", target),
        ),
    )


def logins(seen: page.PageRequest) -> page.DashboardPage:
    actions.require_role(seen.person, sessions.WebRole.ADMIN, "see who may log in")

    async def rows() -> Markup:
        found = await asyncio.to_thread(rest.listed, seen.known)
        made: list[list[Child]] = [
            [
                one["name"],
                one["role"],
                widgets.moment(one["created_at"] * 1000),
                widgets.moment((one["expires_at"] or 0) * 1000),
                widgets.action_button(
                    seen,
                    "remove-login",
                    "Remove",
                    name=one["name"],
                    sure=f"Let {one['name']} log in no more?",
                    look="danger",
                ),
            ]
            for one in found
        ]
        return widgets.table(["Name", "Role", "Set", "Expires", ""], made, label="Logins")

    form = widgets.action_button(
        seen,
        "set-login",
        "Let this person log in",
        widgets.field("Name", "name", required=True, auto="off"),
        widgets.field("Password", "password", kind="password", required=True, auto="new-password"),
        widgets.field("Role", "role", "viewer", options=[(one.value, one.value) for one in sessions.WebRole]),
    )
    return page.DashboardPage(
        "Logins",
        (page.PageSection("rows", "Who may log in", rows, (), 10.0),),
        lead="A viewer looks; an operator acts; an admin also changes brokers and logins.",
        foot=form,
    )
