"""The dashboard over HTTP: pages, the events that keep them live, logging in, and what their forms do."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import importlib.resources
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.web import actions, problems, request_state
from muster.web.auth import sessions
from muster.web.components import html, layout, page, widgets
from muster.web.pages import (
    alerts,
    audit,
    brokers,
    contexts,
    forms,
    overview,
    pipeline,
    playground,
    queues,
    reports,
    resources,
)
from muster.web.rest import event_stream

router = APIRouter()
log_events = log.EventLog("web")

PAGES: dict[str, page.Build] = {
    "/": overview.overview,
    "/tree": reports.tree,
    "/group": reports.group,
    "/node": reports.node,
    "/alerts": alerts.alerts,
    "/history": pipeline.history,
    "/resources": resources.resources,
    "/resource": resources.resource,
    "/managers": resources.managers,
    "/playground": playground.playground,
    "/contexts": contexts.contexts,
    "/contexts/one": contexts.context,
    "/queues": queues.queues,
    "/queue": queues.queue,
    "/brokers": brokers.brokers,
    "/pipeline": pipeline.progress,
    "/capacity": pipeline.capacity,
    "/audit": audit.audit,
    "/logins": audit.logins,
}
STATIC = {"muster.css": "text/css", "muster.js": "text/javascript", "icon.svg": "image/svg+xml"}
FIRST_S = 0.25  # what takes longer comes after the page
LATER_S = 6.0  # what takes longer still is left as it is, and tried again
LOADING = html.tag("p", "Loading…", cls="hint")
LIVE_S = 1.0  # the shortest time between two looks at what changed
FORM_MAX = 1 << 20
NOTE = "muster-note"
THEME = "muster-theme"


def _theme(request: Request) -> str:
    chosen = request.cookies.get(THEME, "auto")
    return chosen if chosen in layout.THEMES else "auto"


def _view(
    request: Request, person: sessions.LoginSession, path: str, query: dict[str, str]
) -> page.PageRequest:
    known = request_state.state_of(request)
    return page.PageRequest(known, person, path, query, known.logins.form_token(person))


async def _inside(one: page.PageSection, within_s: float) -> html.Markup | None:
    """A section's content, or what is wrong with it; None where that takes longer."""
    making = asyncio.ensure_future(one.make())
    try:
        return await asyncio.wait_for(asyncio.shield(making), within_s)
    except TimeoutError:
        making.add_done_callback(lambda done: done.cancelled() or done.exception())
        return None
    except errors.MusterError as error:
        return widgets.problem(error.message, error.hint)
    except Exception as error:  # noqa: BLE001  (one section with a bug of ours must not take the page)
        log_events.error("section-failed", section=one.id, error=error)
        return widgets.problem(f"This could not be shown: {type(error).__name__}.", "The log says more.")


async def _show(request: Request) -> Response:
    try:
        person = await request_state.cookie_session(request)
    except errors.Unauthorized:
        asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        where = page.link_to("/login", next=asked) if asked != "/" else "/login"
        return RedirectResponse(where, status_code=303)
    path = request.url.path
    seen = _view(request, person, path, dict(request.query_params))
    made = PAGES[path](seen)
    contents = await asyncio.gather(*(_inside(one, FIRST_S) for one in made.sections))
    sections = [
        layout.section(one, LOADING if inside is None else inside)
        for one, inside in zip(made.sections, contents, strict=True)
    ]
    note = _read_note(request)
    response = HTMLResponse(layout.page(seen, made, sections, theme=_theme(request), note=note))
    if note:
        response.delete_cookie(NOTE)
    response.headers["Cache-Control"] = "no-store"
    return response


for _path in PAGES:
    router.add_api_route(_path, _show, methods=["GET"])


@router.get("/live")
async def live(request: Request) -> Response:
    """Sections of a page as they change: ``{id: markup}``."""
    person = await request_state.cookie_session(request)
    query = dict(request.query_params)
    path = query.pop("page", "")
    if path not in PAGES:
        raise errors.NotFound("there is no such page")
    seen = _view(request, person, path, query)
    made = PAGES[path](seen)
    source = seen.known.source

    async def changes() -> AsyncIterator[bytes]:
        shown: dict[str, bytes] = {}
        due: dict[str, float] = {}
        turns: dict[str, int] = {}
        tags = sorted({name for one in made.sections for name in (*one.tags, "link")})
        with source.hearing(*tags) as touched:
            while True:
                touched.clear()
                now_s = time.monotonic()
                changed: dict[str, str] = {}
                looked: list[page.PageSection] = []
                for one in made.sections:
                    turn = sum(source.cache.turn(name) for name in (*one.tags, "link"))
                    if turns.get(one.id) != turn or now_s >= due.get(one.id, 0.0):
                        turns[one.id], due[one.id] = turn, now_s + one.every_s
                        looked.append(one)
                contents = await asyncio.gather(*(_inside(one, LATER_S) for one in looked))
                for one, inside in zip(looked, contents, strict=True):
                    if inside is None:
                        continue
                    digest = hashlib.blake2b(inside.encode(), digest_size=16).digest()
                    if shown.get(one.id) != digest:
                        shown[one.id] = digest
                        changed[one.id] = str(inside)
                yield event_stream.event(
                    {"sections": changed, "connected": source.link.is_up}, name="sections"
                )
                await asyncio.sleep(LIVE_S)
                wait_s = max(0.0, min(due.values(), default=now_s + 5.0) - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(touched.wait(), min(wait_s, 5.0))

    return event_stream.stream(request, changes)


@router.get("/static/{name}")
async def static(name: str) -> Response:
    if name not in STATIC:
        raise errors.NotFound("there is no such file")
    data = await asyncio.to_thread(_static, name)
    return Response(data, media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})


def _static(name: str) -> bytes:
    return (importlib.resources.files("muster.web") / "static" / name).read_bytes()


# Logging in and out


def _within(path: str) -> str:
    """A path of ours: never the address of another site."""
    parts = urlsplit(path)
    if parts.scheme or parts.netloc or not path.startswith("/") or path.startswith(("//", "/\\")):
        return "/"
    return path if parts.path in PAGES else "/"


@router.get("/login")
async def login_form(request: Request, next: str = "/") -> Response:
    return await _login_page(request, next)


async def _login_page(
    request: Request, next_: str, error: errors.MusterError | None = None, name: str = ""
) -> Response:
    known = request_state.state_of(request)
    made = layout.login(
        domain=known.source.domain,
        next_=_within(next_),
        problem=error.message if error else "",
        hint=(error.hint or "") if error else "",
        theme=_theme(request),
        nobody=await known.logins.is_empty(),
        name=name,
    )
    status = problems.status_of(error) if error else 200
    return HTMLResponse(made, status_code=status, headers={"Cache-Control": "no-store"})


async def _form(request: Request) -> dict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise errors.InvalidInput("forms are sent as application/x-www-form-urlencoded")
    data = await request.body()
    if len(data) > FORM_MAX:
        raise errors.LimitExceeded(f"a form of more than {FORM_MAX} bytes")
    try:
        return dict(parse_qsl(data.decode("ascii"), keep_blank_values=True, max_num_fields=100))
    except (UnicodeDecodeError, ValueError) as error:
        raise errors.InvalidInput("the form cannot be read") from error


@router.post("/login")
async def login(request: Request) -> Response:
    if request.headers.get("origin") is None:
        raise errors.Forbidden("logins come from our own page", hint="programs use POST /api/v1/tokens")
    known = request_state.state_of(request)
    actions.address.set(request_state.address_of(request))
    given = await _form(request)
    name, next_ = given.get("name", ""), given.get("next", "/")
    try:
        text, session = await known.logins.begin(
            name, given.get("password", ""), request_state.address_of(request), sessions.TokenKind.COOKIE
        )
    except (errors.Unauthorized, errors.Forbidden, errors.Overloaded) as error:
        if isinstance(error, errors.Forbidden):  # a wrong password is recorded where it is checked
            await known.desk.record(
                name or "-",
                "login",
                name or "-",
                error.message,
                messages.DecisionOutcome.REFUSED,
                kind=sessions.TokenKind.COOKIE,
            )
        return await _login_page(request, next_, error, name)
    await known.desk.record(
        name, "login", name, "", messages.DecisionOutcome.DONE, kind=sessions.TokenKind.COOKIE
    )
    response = RedirectResponse(_within(next_), status_code=303)
    response.set_cookie(
        request_state.COOKIE,
        text,
        max_age=int(session.until - time.time()),
        httponly=True,
        samesite="strict",
        secure=bool(known.settings.cert),
    )
    return response


@router.post("/logout")
async def logout(request: Request) -> Response:
    session = await request_state.cookie_session(request)
    request_state.check_csrf_token(request, session, (await _form(request)).get("form", ""))
    await request_state.state_of(request).logins.end(session)
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(request_state.COOKIE)
    response.headers["Clear-Site-Data"] = '"cache"'
    return response


# What forms do


@router.post("/do/{act}")
async def submit_form(request: Request, act: str) -> Response:
    session = await request_state.cookie_session(request)
    given = await _form(request)
    request_state.check_csrf_token(request, session, given.pop("form", ""))
    back = _within(given.pop("back", "/"))
    try:
        said = await forms.run_form(request_state.state_of(request), session, act, given)
    except errors.MusterError as error:
        said = f"Not done: {error.message}" + (f" ({error.hint})" if error.hint else "")
    response = RedirectResponse(back, status_code=303)
    text = base64.urlsafe_b64encode(said[:1500].encode()).decode()
    response.set_cookie(NOTE, text, max_age=30, httponly=True, samesite="strict")
    return response


def _read_note(request: Request) -> str:
    try:
        return base64.urlsafe_b64decode(request.cookies.get(NOTE, "").encode()).decode()
    except (binascii.Error, ValueError):
        return ""


async def failed(request: Request, error: errors.MusterError) -> Response:
    """A page that says what is wrong; for the script and for forms, the same as a problem document."""
    if request.url.path == "/live":
        return Response(status_code=problems.status_of(error), headers=problems.headers(error))
    if isinstance(error, errors.Unauthorized):
        return RedirectResponse("/login", status_code=303)
    made: Any = layout.failure(
        error.code.replace("-", " ").capitalize(), error.message, error.hint or "", theme=_theme(request)
    )
    return HTMLResponse(made, status_code=problems.status_of(error))
