"""The page of logins."""

from __future__ import annotations

import asyncio

from muster.web import actions
from muster.web.auth import sessions
from muster.web.components import page, widgets
from muster.web.components.html import Child, Markup
from muster.web.rest import access


def logins(request: page.PageRequest) -> page.DashboardPage:
    actions.require_role(request.person, sessions.WebRole.ADMIN, "list logins")

    async def rows() -> Markup:
        listed = await asyncio.to_thread(access.listed, request.web)
        made: list[list[Child]] = [
            [
                login.name,
                login.role,
                widgets.moment(login.created_at * 1000),
                widgets.moment((login.expires_at or 0) * 1000),
                widgets.action_button(
                    request,
                    "remove-login",
                    "Remove",
                    name=login.name,
                    sure=f"Revoke the login of {login.name}?",
                    look="danger",
                ),
            ]
            for login in listed
        ]
        return widgets.table(["Name", "Role", "Set", "Expires", ""], made, label="Logins")

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
