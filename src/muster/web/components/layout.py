"""The frame of all pages, and the login page. Pure."""

from __future__ import annotations

from muster.web.components import html, widgets
from muster.web.components import page as components_page
from muster.web.components.html import Markup, join, tag

#: The menu: headings with paths and titles.
MENU: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Fleet",
        (
            ("/", "Overview"),
            ("/tree", "Reports"),
            ("/alerts", "Alerts"),
            ("/history", "History"),
            ("/sql", "SQL"),
        ),
    ),
    (
        "Control",
        (
            ("/resources", "Resources"),
            ("/managers", "Managers"),
            ("/playground", "Notification"),
            ("/contexts", "Contexts"),
            ("/queues", "Queues"),
        ),
    ),
    (
        "System",
        (
            ("/brokers", "Brokers"),
            ("/pipeline", "Pipeline"),
            ("/capacity", "Staleness"),
            ("/activity", "Activity"),
        ),
    ),
)
THEMES = ("auto", "light", "dark")


def document(title: str, body: Markup, *, theme: str, live: str = "", refresh: str = "") -> str:
    """``live``: the URL of the event stream with updates. ``refresh``: the URL to open at once."""
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="refresh", content=f"0;url={refresh}") if refresh else None,
        tag("title", f"{title} · Muster"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark" if theme == "auto" else theme),
        tag("link", rel="stylesheet", href="/static/muster.css"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        tag("script", Markup(""), src="/static/muster.js", defer=True),
    )
    html_ = tag(
        "html", tag("head", head), tag("body", body, data_live=live or None), lang="en", data_theme=theme
    )
    return f"<!doctype html>\n{html_}"


def page(
    request: components_page.PageRequest,
    made: components_page.DashboardPage,
    sections: list[Markup],
    *,
    theme: str,
    note: str,
) -> str:
    access = (*((("/logins", "Logins"),) if request.administers else ()), ("/tokens", "API tokens"))
    menu_groups = (*MENU, ("Access", access))
    paths = {path for _, entries in menu_groups for path, _ in entries}
    current = request.path if request.path in paths else _parent(request.path)
    groups = [
        tag(
            "div",
            tag("h2", heading),
            tag(
                "ul",
                *(
                    tag("li", tag("a", label, href=path, aria_current="page" if path == current else None))
                    for path, label in entries
                ),
            ),
        )
        for heading, entries in menu_groups
    ]
    brand = tag(
        "a", tag("b", "Muster"), " ", tag("span", request.web.source.feed.domain), href="/", cls="brand"
    )
    who = tag(
        "div",
        tag("span", request.person.name, " ", tag("span", request.person.role.value, cls="badge calm")),
        tag(
            "form",
            tag("input", type="hidden", name="form", value=request.form_token),
            tag("button", "Log out", type="submit", cls="quiet"),
            method="post",
            action="/logout",
        ),
        cls="who",
    )
    status = tag(
        "div",
        tag("span", "live", id="live-state", cls="badge calm", role="status"),
        tag("button", "Theme", type="button", id="theme", cls="quiet", hidden=True),
        cls="status",
    )
    nav = tag("nav", *groups, aria_label="Main")
    menu = tag("details", tag("summary", "Menu"), nav, cls="menu", open=True, id="menu")
    header = tag("header", brand, status, menu, who)
    top = join(
        tag("h1", made.title),
        tag("p", made.lead, cls="lead") if made.lead else None,
        tag("div", note, cls="notice", role="status") if note else None,
    )
    main = tag(
        "main",
        top,
        made.head,
        tag("div", *sections, cls="sections"),
        made.foot,
        tag("p", "Times are UTC. The glossary is docs/glossary.md.", cls="hint times"),
        id="main",
        tabindex=-1,
    )
    body = join(tag("a", "Skip to the content", href="#main", cls="skip"), header, main)
    return document(
        made.title,
        body,
        theme=theme,
        live=components_page.link_to("/live", page=request.path, **_nested(request)),
    )


def _parent(path: str) -> str:
    return {
        "/group": "/tree",
        "/node": "/tree",
        "/resource": "/resources",
        "/contexts/details": "/contexts",
        "/queue": "/queues",
    }.get(path, "")


def _nested(request: components_page.PageRequest) -> dict[str, str]:
    return {name: value for name, value in request.query.items() if name != "page"}


def section(part: components_page.PageSection, inside: Markup) -> Markup:
    return tag(
        "section",
        tag("h2", part.title, id=f"{part.id}-title") if part.title else None,
        tag("div", inside, id=part.id, cls="live"),
        cls="card wide" if part.wide else "card",
        aria_labelledby=f"{part.id}-title" if part.title else None,
    )


def login(
    *,
    domain: str,
    next_: str,
    problem: str,
    hint: str,
    theme: str,
    has_no_logins: bool,
    name: str = "",
    provider: bool = False,
) -> str:
    fields = join(
        widgets.field("Name", "name", name, required=True, auto="username"),
        widgets.field("Password", "password", kind="password", required=True, auto="current-password"),
    )
    advice: html.Child = None
    if has_no_logins:
        advice = widgets.empty(
            "There are no logins yet.", join("Run ", tag("code", "muster web password"), ".")
        )
    body = tag(
        "main",
        tag("h1", "Muster"),
        tag("p", f"Domain {domain}", cls="lead"),
        advice,
        tag(
            "div",
            tag("p", problem),
            tag("p", hint, cls="hint") if hint else None,
            cls="problem",
            role="alert",
        )
        if problem
        else None,
        tag(
            "form",
            tag("input", type="hidden", name="next", value=next_),
            fields,
            tag("button", "Log in", type="submit"),
            method="post",
            action="/login",
        ),
        tag(
            "p",
            tag("a", "Log in with single sign-on", href=components_page.link_to("/login/oidc", next=next_)),
            cls="provider",
        )
        if provider
        else None,
        cls="login",
        id="main",
    )
    return document("Log in", body, theme=theme)


def moved(to: str, *, theme: str) -> str:
    """A page that opens ``to`` at once."""
    body = tag("main", tag("p", tag("a", "Continue", href=to)), cls="login", id="main")
    return document("Logged in", body, theme=theme, refresh=to)


def failure(title: str, detail: str, hint: str, *, theme: str) -> str:
    body = tag(
        "main",
        tag("h1", title),
        widgets.problem(detail, hint),
        tag("p", tag("a", "Go to the overview", href="/")),
        cls="login",
        id="main",
    )
    return document(title, body, theme=theme)
