"""The frame of all pages, and the pages without a login. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import markupsafe

from muster.web.components import page as components_page
from muster.web.components import plots, templates

THEMES = ("auto", "light", "dark")


def section(
    request: components_page.PageRequest,
    made: components_page.DashboardPage,
    part: components_page.PageSection,
    loaded: components_page.Values,
) -> markupsafe.Markup:
    """The content of a section."""
    name = part.template or made.template
    return templates.block(name, part.block or part.id, **{**made.values, "request": request, **loaded})


def page(
    request: components_page.PageRequest,
    made: components_page.DashboardPage,
    sections: Sequence[tuple[components_page.PageSection, markupsafe.Markup]],
    *,
    domain: str,
    theme: str,
    menu: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    current: str,
    note: str,
    live: bool,
) -> str:
    values = {"request": request, **made.values}
    query: dict[str, Any] = {name: value for name, value in request.query.items() if name != "page"}
    return templates.render(
        "page.html",
        title=made.title,
        theme=theme,
        domain=domain,
        request=request,
        made=made,
        head=templates.block(made.template, "head", **values),
        acts=templates.block(made.template, "acts", **values),
        foot=templates.block(made.template, "foot", **values),
        sections=sections,
        menu=menu,
        current=current,
        note=note,
        live=components_page.link_to("/live", page=request.path, **query) if live else "",
        charts=components_page.link_to(request.path, **{**query, "tables": ""}),
        tables=components_page.link_to(request.path, **{**query, "tables": "1"}),
        lasts=plots.LASTS,
    )


def login(*, problem: str, theme: str, **values: Any) -> str:
    return templates.render("login.html", title="Log in", problem_=problem, theme=theme, **values)


def moved(to: str, *, theme: str) -> str:
    """A page that opens ``to`` at once."""
    return templates.render("moved.html", title="Logged in", theme=theme, refresh=to)


def failure(title: str, detail: str, hint: str, *, theme: str) -> str:
    return templates.render("failure.html", title=title, detail=detail, hint=hint, theme=theme)
