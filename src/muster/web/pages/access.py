"""The pages of logins and API tokens."""

from __future__ import annotations

import asyncio

from muster.web import actions
from muster.web.auth import scopes, sessions
from muster.web.components import page, records, widgets
from muster.web.components.html import Markup
from muster.web.rest import access


def logins(request: page.PageRequest) -> page.DashboardPage:
    actions.require_role(request.person, sessions.WebRole.ADMIN, "list logins")

    async def rows() -> Markup:
        listed = await asyncio.to_thread(access.listed, request.web)
        return records.table(
            listed,
            ("name", "role", "created_at", "expires_at"),
            cells={
                "": lambda login: widgets.action_button(
                    request,
                    "remove-login",
                    "Remove",
                    name=login.name,
                    sure=f"Revoke the login of {login.name}?",
                    look="danger",
                )
            },
            label="Logins",
        )

    form = widgets.action_button(
        request,
        "set-login",
        "Create or change a login",
        widgets.field("Name", "name", required=True, auto="off"),
        widgets.field("Password", "password", kind="password", required=True, auto="new-password"),
        widgets.field(
            "Role", "role", "viewer", options=[(role.value, role.value) for role in sessions.WebRole]
        ),
    )
    return page.DashboardPage(
        "Logins",
        (page.PageSection("rows", "Logins", rows, (), 10.0),),
        lead="A viewer reads; an operator also runs operations; an admin also changes brokers and logins.",
        foot=form,
    )


def tokens(request: page.PageRequest) -> page.DashboardPage:
    async def rows() -> Markup:
        return records.table(
            [token.row for token in await access.tokens_of(request.web, request.person)],
            ("id", "description", "owner", "role", "scopes", "created_at", "expires_at"),
            cells={
                "scopes": lambda token: ", ".join(token.scopes) or "all",
                "": lambda token: widgets.action_button(
                    request,
                    "revoke-token",
                    "Revoke",
                    id=token.id,
                    sure=f"Revoke the token {token.id}?",
                    look="danger",
                ),
            },
            label="API tokens",
            none="There are no API tokens.",
        )

    permitted = [role.value for role in sessions.WebRole if request.person.role.covers(role)]
    form = widgets.action_button(
        request,
        "create-token",
        "Create a token",
        widgets.field("Description", "description", required=True, auto="off"),
        widgets.field("Role", "role", "viewer", options=[(role, role) for role in permitted]),
        widgets.field(
            "Scopes",
            "scopes",
            auto="off",
            hint=f"Empty: all. Or AREA or AREA:read, of {', '.join(scopes.AREAS)}",
        ),
        widgets.field("Lifetime", "lifetime", "30d", auto="off"),
    )
    return page.DashboardPage(
        "API tokens",
        (page.PageSection("rows", "API tokens", rows, (), 10.0),),
        lead="Programs use the REST API with a token. Its text is shown once, when it is created.",
        foot=form,
    )
