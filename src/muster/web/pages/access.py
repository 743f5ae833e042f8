"""The pages of logins and API tokens."""

from __future__ import annotations

from muster.web import actions
from muster.web.auth import logins as logins_
from muster.web.auth import scopes, sessions
from muster.web.auth import tokens as tokens_
from muster.web.components import page

TEMPLATE = "access.html"


def logins(request: page.PageRequest) -> page.DashboardPage:
    actions.require_role(request.person, sessions.WebRole.ADMIN, "list logins")

    async def rows() -> page.Values:
        return {"listed": await request.get("/logins"), "columns": logins_.LOGINS}

    return page.DashboardPage(
        "Logins",
        TEMPLATE,
        (page.PageSection("logins", "Logins", rows, (), 10.0),),
        lead="A viewer reads; an operator also runs operations; an admin also changes brokers and logins.",
        values={
            "kind": "login",
            "roles": [(role.value,) * 2 for role in sessions.WebRole],
        },
    )


def tokens(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> page.Values:
        return {"listed": await request.get("/tokens"), "columns": tokens_.TOKENS}

    permitted = [(role.value,) * 2 for role in sessions.WebRole if request.person.role.covers(role)]
    return page.DashboardPage(
        "API tokens",
        TEMPLATE,
        (page.PageSection("tokens", "API tokens", rows, (), 10.0),),
        lead="Programs use the REST API with a token. Its text is shown once, when it is created.",
        values={"kind": "token", "roles": permitted, "areas": ", ".join(scopes.AREAS)},
    )
