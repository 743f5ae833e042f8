"""The HTTP routes of the dashboard: pages, their updates, login and forms."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import importlib.resources
import time
from collections.abc import AsyncIterator
from urllib.parse import parse_qsl, urlsplit

import markupsafe
from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.web import actions, problems, request_state
from muster.web.auth import oidc, sessions
from muster.web.components import page, plots, templates
from muster.web.pages import (
    access,
    alerts,
    contexts,
    fleet,
    forms,
    history,
    notification,
    queues,
    resources,
    system,
)
from muster.web.rest import event_stream

router = APIRouter()
log_events = log.EventLog("web")

#: The menu: headings with paths, labels and pages.
MENU: dict[str, dict[str, tuple[str, page.Build]]] = {
    "Fleet": {
        "/": ("Overview", fleet.overview),
        "/map": ("Map", fleet.machine_map),
        "/machines": ("Machines", fleet.machines),
        "/alerts": ("Alerts", alerts.alerts),
        "/history": ("History", history.history),
        "/sql": ("SQL", history.sql),
    },
    "Control": {
        "/resources": ("Resources", resources.resources),
        "/rollouts": ("Rollouts", resources.rollouts),
        "/managers": ("Managers", resources.managers),
        "/playground": ("Notification", notification.playground),
        "/events": ("Events", notification.events),
        "/contexts": ("Contexts", contexts.contexts),
        "/queues": ("Queues", queues.queues),
    },
    "System": {
        "/topology": ("Topology", system.topology),
        "/brokers": ("Brokers", system.brokers),
        "/pipeline": ("Pipeline", system.pipeline),
        "/report-delay": ("Report delay", system.report_delay),
        "/activity": ("Activity", system.activity),
    },
    "Access": {"/logins": ("Logins", access.logins), "/tokens": ("API tokens", access.tokens)},
}
#: Pages about one thing, which may not exist, with their places in the menu.
SUBJECTS: dict[str, tuple[str, page.Build]] = {
    "/zone": ("/machines", fleet.zone),
    "/group": ("/machines", fleet.group),
    "/machine": ("/machines", fleet.machine),
    "/loop": ("/alerts", notification.loop),
    "/resource": ("/resources", resources.resource),
    "/rollout": ("/rollouts", resources.rollout),
    "/event": ("/events", notification.event),
    "/contexts/details": ("/contexts", contexts.context),
    "/queue": ("/queues", queues.queue),
    "/message": ("/queues", queues.message),
}
PLACED = {path: (path, build) for entries in MENU.values() for path, (_, build) in entries.items()} | SUBJECTS
PLACED |= {"/apply": ("/resources", resources.apply), "/find": ("", system.find)}
PAGES: dict[str, page.Build] = {path: build for path, (_, build) in PLACED.items()}
STATIC = {  # the files by their names in the URL, with their types
    **{name: (name, "text/javascript") for name in ("muster.js", "charts.js", "map.js")},
    "muster.css": ("muster.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "uplot-1.6.32.js": ("uplot/uplot-1.6.32.js", "text/javascript"),
    "uplot-1.6.32.css": ("uplot/uplot-1.6.32.css", "text/css"),
}
FIRST_S = 0.25  # slower sections are sent after the page
LATER_S = 6.0  # even slower sections are left unchanged and retried
LOADING = markupsafe.Markup('<p class="hint">Loading…</p>')
LIVE_S = 1.0  # minimum interval between updates
FORM_MAX = 1 << 20
NOTE, NOTE_BYTES_MAX = "muster-note", 2_700  # browsers drop a cookie of more than 4 KB
CALLBACK = "/login/oidc/callback"
ATTEMPT = "muster-oidc"
THEME, THEMES = "muster-theme", ("auto", "light", "dark")


def _theme(request: Request) -> str:
    chosen = request.cookies.get(THEME, "auto")
    return chosen if chosen in THEMES else "auto"


def _view(
    request: Request, person: sessions.LoginSession, path: str, query: dict[str, str]
) -> page.PageRequest:
    web = request_state.state_of(request)
    call = request_state.RestCall(web, person)
    return page.PageRequest(call, path, query, web.logins.form_token(person))


async def _inside(
    request: page.PageRequest,
    made: page.DashboardPage,
    section: page.PageSection,
    within_s: float,
    missing: set[str] | None = None,
) -> markupsafe.Markup | None:
    """The content of a section, or an error message; None if it takes longer than ``within_s``. The id of a
    section whose subject does not exist is added to ``missing``.
    """
    loading = asyncio.ensure_future(section.load())
    loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if no request waits
    try:
        loaded = await asyncio.wait_for(asyncio.shield(loading), within_s)
        name = section.template or made.template
        values = {**made.values, "request": request, **loaded}
        return templates.block(name, section.block or section.id, **values)
    except TimeoutError:
        return None
    except errors.MusterError as error:
        if missing is not None and isinstance(error, errors.NotFound):
            missing.add(section.id)
        return templates.widget("problem", error.message, error.hint or "")
    except Exception as error:  # noqa: BLE001  (a bug in one section must not break the page)
        log_events.error("section-failed", section=section.id, error=error)
        return templates.widget(
            "problem", f"this section failed: {type(error).__name__}", "the log has details"
        )


async def _show(request: Request) -> Response:
    try:
        person = await request_state.cookie_session(request)
    except errors.Unauthorized:
        requested = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        where = page.link_to("/login", next=requested) if requested != "/" else "/login"
        return RedirectResponse(where, status_code=303)
    path = request.url.path
    query = dict(request.query_params)
    if request.method == "POST":  # a form that is too long for an address; it changes nothing
        query = await _form(request)
        request_state.check_csrf_token(request, person, query.pop("form", ""))
    page_request = _view(request, person, path, query)
    made = PAGES[path](page_request)
    missing: set[str] = set()
    tables = page_request.parameter("tables")  # for a browser without scripts, which gets no later ones
    within_s = LATER_S if tables or request.method == "POST" else FIRST_S
    contents = await asyncio.gather(
        *(_inside(page_request, made, section, within_s, missing) for section in made.sections)
    )
    sections = [
        (section, LOADING if inside is None else inside)
        for section, inside in zip(made.sections, contents, strict=True)
    ]
    note = _read_note(request)
    values = {"request": page_request, **made.values}
    around = {name: templates.block(made.template, name, **values) for name in ("head", "acts", "foot")}
    query.pop("page", "")
    shown = templates.render(
        "page.html",
        title=made.title,
        theme=_theme(request),
        domain=page_request.call.source.feed.domain,
        request=page_request,
        made=made,
        **around,
        sections=sections,
        menu=_menu(page_request),
        current=PLACED[path][0],
        note=note,
        live=page.link_to("/live", page=path, **query) if request.method == "GET" else "",
        charts=page.link_to(path, **{**query, "tables": ""}),
        tables=page.link_to(path, **{**query, "tables": "1"}),
        lasts=plots.LASTS,
    )
    response = HTMLResponse(shown, status_code=404 if missing and path in SUBJECTS else 200)
    if note:
        response.delete_cookie(NOTE)
    response.headers["Cache-Control"] = "no-store"
    return response


def _menu(request: page.PageRequest) -> list[tuple[str, list[tuple[str, str]]]]:
    """The headings with paths and labels, without what the role does not permit."""
    hidden = set() if request.administers else {"/logins"}
    hidden |= set() if request.may_act else {"/sql", "/events"}
    return [
        (heading, [(path, label) for path, (label, _) in entries.items() if path not in hidden])
        for heading, entries in MENU.items()
    ]


for _path in PAGES:
    router.add_api_route(_path, _show, methods=["GET", "POST"] if _path == "/apply" else ["GET"])


@router.get("/live")
async def live(request: Request) -> Response:
    """Server-sent events with changed sections: ``{id: markup}``."""
    person = await request_state.cookie_session(request)
    query = dict(request.query_params)
    path = query.pop("page", "")
    if path not in PAGES:
        raise errors.NotFound("there is no such page")
    page_request = _view(request, person, path, query)
    made = PAGES[path](page_request)
    source = page_request.call.source

    async def changes() -> AsyncIterator[bytes]:
        shown: dict[str, bytes] = {}
        due: dict[str, float] = {}
        turns: dict[str, int] = {}
        tags = sorted({name for section in made.sections for name in (*section.tags, "link")})
        with source.feed.changes_of(*tags) as touched:
            while True:
                touched.clear()
                now_s = time.monotonic()
                changed: dict[str, str] = {}
                looked: list[page.PageSection] = []
                for section in made.sections:
                    turn = sum(source.feed.cache.turn(name) for name in (*section.tags, "link"))
                    if turns.get(section.id) != turn or now_s >= due.get(section.id, 0.0):
                        turns[section.id], due[section.id] = turn, now_s + section.every_s
                        looked.append(section)
                contents = await asyncio.gather(
                    *(_inside(page_request, made, section, LATER_S) for section in looked)
                )
                for section, inside in zip(looked, contents, strict=True):
                    if inside is None:
                        continue
                    digest = hashlib.blake2b(inside.encode(), digest_size=16).digest()
                    if shown.get(section.id) != digest:
                        shown[section.id] = digest
                        changed[section.id] = str(inside)
                yield event_stream.event(
                    {"sections": changed, "connected": source.feed.link.is_up}, name="sections"
                )
                await asyncio.sleep(LIVE_S)
                wait_s = max(0.0, min(due.values(), default=now_s + 5.0) - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(touched.wait(), min(wait_s, 5.0))

    return event_stream.stream(request, person, changes)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in STATIC:
        raise errors.NotFound("there is no such file")
    path, kind = STATIC[name]
    data = await asyncio.to_thread(_static, path)
    return Response(data, media_type=kind, headers={"Cache-Control": "max-age=300"})


def _static(path: str) -> bytes:
    return (importlib.resources.files("muster.web") / "static" / path).read_bytes()


# Logging in and out


def _within(path: str) -> str:
    """A path of the dashboard, never the address of another site."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return "/"
    if parts.scheme or parts.netloc or not path.startswith("/") or path.startswith(("//", "/\\")):
        return "/"
    return path if parts.path in PAGES else "/"


@router.get("/login")
async def login_form(request: Request, next: str = "/") -> Response:
    return await _login_page(request, next)


async def _login_page(
    request: Request, next_: str, error: errors.MusterError | None = None, name: str = ""
) -> Response:
    web = request_state.state_of(request)
    made = templates.render(
        "login.html",
        title="Log in",
        theme=_theme(request),
        domain=web.source.feed.domain,
        next_=_within(next_),
        problem_=error.message if error else "",
        hint=(error.hint or "") if error else "",
        has_no_logins=await web.logins.is_empty(),
        name=name,
        provider=web.logins.provider is not None,
    )
    status = problems.status_of(error) if error else 200
    return HTMLResponse(made, status_code=status, headers={"Cache-Control": "no-store"})


async def _form(request: Request) -> dict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise errors.InvalidInput("forms must be sent as application/x-www-form-urlencoded")
    data = await request.body()
    if len(data) > FORM_MAX:
        raise errors.LimitExceeded(f"a form of more than {FORM_MAX} bytes")
    try:
        return dict(parse_qsl(data.decode("ascii"), keep_blank_values=True, max_num_fields=100))
    except (UnicodeDecodeError, ValueError) as error:
        raise errors.InvalidInput("the form is malformed") from error


@router.post("/login")
async def login(request: Request) -> Response:
    origin = request.headers.get("origin")
    if origin is None:
        raise errors.Forbidden(
            "the login form is not from the dashboard", hint="programs use POST /api/v1/tokens"
        )
    web = request_state.state_of(request)
    actions.address.set(request_state.address_of(request))
    fields = await _form(request)
    name, next_ = fields.get("name", ""), fields.get("next", "/")
    try:
        session = await web.logins.check_password(
            name, fields.get("password", ""), request_state.address_of(request)
        )
    except (errors.Unauthorized, errors.Forbidden, errors.Overloaded) as error:
        if isinstance(error, errors.Forbidden):  # failed logins are recorded by the password check
            await _record_login(web, name or "-", error)
        return await _login_page(request, next_, error, name)
    return await _logged_in(web, session, RedirectResponse(_within(next_), status_code=303), origin)


async def _logged_in(
    web: request_state.WebState, session: sessions.LoginSession, response: Response, address: str
) -> Response:
    """``address``: of the dashboard, as the browser knows it."""
    await _record_login(web, session.name)
    response.set_cookie(
        request_state.COOKIE,
        web.logins.seal(session),
        max_age=int(session.until - time.time()),
        httponly=True,
        samesite="strict",
        secure=_is_secure(web, address),
    )
    return response


def _is_secure(web: request_state.WebState, address: str) -> bool:
    """Whether browsers use TLS: with this process, or with a proxy in front of it."""
    return bool(web.settings.cert) or address.startswith("https:")


async def _record_login(
    web: request_state.WebState, name: str, error: errors.MusterError | None = None
) -> None:
    outcome = messages.DecisionOutcome.REFUSED if error else messages.DecisionOutcome.DONE
    why = error.message if error else ""
    await web.actions.record(name, "login", name, why, outcome, kind=sessions.TokenKind.COOKIE)


@router.get("/login/oidc")
async def begin_oidc(request: Request, next: str = "/") -> Response:
    """Send the browser to the identity provider."""
    web = request_state.state_of(request)
    base_url = web.settings.oidc.url or f"{'https' if web.settings.cert else 'http'}://{request.url.netloc}"
    try:
        address, text = await web.logins.begin_oidc(f"{base_url.rstrip('/')}{CALLBACK}", _within(next))
    except errors.Unavailable as error:
        return await _login_page(request, next, error)
    response = RedirectResponse(address, status_code=303)
    response.set_cookie(  # lax: the provider sends the browser back from another site
        ATTEMPT,
        text,
        max_age=oidc.ATTEMPT_S,
        path=CALLBACK,
        httponly=True,
        samesite="lax",
        secure=base_url.startswith("https:"),
    )
    return response


@router.get(CALLBACK)
async def finish_oidc(request: Request, state: str = "", code: str = "", error: str = "") -> Response:
    """The identity provider sends the browser here, with a code or an error."""
    web = request_state.state_of(request)
    actions.address.set(request_state.address_of(request))
    try:
        if error:
            raise errors.Unauthorized(f"the identity provider refused the login: {error[:200]}")
        session, next_ = await web.logins.finish_oidc(
            request.cookies.get(ATTEMPT, ""),
            state=state,
            code=code,
            address=request_state.address_of(request),
        )
    except errors.MusterError as problem:
        if isinstance(problem, errors.Forbidden):
            await _record_login(web, "-", problem)
        return await _login_page(request, "/", problem)
    # A redirect would still belong to the navigation from the provider's site, for which browsers do not send
    # a strict cookie; the refresh is a navigation of our own.
    moved = templates.render("moved.html", title="Logged in", theme=_theme(request), refresh=_within(next_))
    made = await _logged_in(web, session, HTMLResponse(moved), web.settings.oidc.url)
    made.delete_cookie(ATTEMPT, path=CALLBACK)
    made.headers["Cache-Control"] = "no-store"
    return made


@router.post("/logout")
async def logout(request: Request) -> Response:
    session = await request_state.cookie_session(request)
    request_state.check_csrf_token(request, session, (await _form(request)).get("form", ""))
    await request_state.state_of(request).logins.end(session)
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(request_state.COOKIE)
    response.headers["Clear-Site-Data"] = '"cache"'
    return response


# Forms


@router.post("/do/{act}")
async def submit_form(request: Request, act: str) -> Response:
    session = await request_state.cookie_session(request)
    fields = await _form(request)
    request_state.check_csrf_token(request, session, fields.pop("form", ""))
    back = _within(fields.pop("back", "/"))
    web = request_state.state_of(request)
    try:
        result = await forms.run_form(request_state.RestCall(web, session), act, fields)
    except errors.MusterError as error:
        result = f"Failed: {error.message}" + (f" ({error.hint})" if error.hint else "")
    response = RedirectResponse(back, status_code=303)
    text = base64.urlsafe_b64encode(result.encode()[:NOTE_BYTES_MAX]).decode()
    secure = _is_secure(web, request.headers.get("origin", ""))  # the note may have the text of a token
    response.set_cookie(NOTE, text, max_age=30, httponly=True, samesite="strict", secure=secure)
    return response


def _read_note(request: Request) -> str:
    try:
        return base64.urlsafe_b64decode(request.cookies.get(NOTE, "").encode()).decode(errors="ignore")
    except (binascii.Error, ValueError):
        return ""


async def failed(request: Request, error: errors.MusterError) -> Response:
    """An error page; for scripts, a problem document."""
    if request.url.path == "/live":
        return Response(status_code=problems.status_of(error), headers=problems.headers(error))
    if isinstance(error, errors.Unauthorized):
        return RedirectResponse("/login", status_code=303)
    title = error.code.replace("-", " ").capitalize()
    made = templates.render(
        "failure.html", title=title, detail=error.message, hint=error.hint or "", theme=_theme(request)
    )
    return HTMLResponse(made, status_code=problems.status_of(error))
