"""REST: watches as server-sent events, until the client disconnects or its login ends."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Header, Path, Request
from starlette.responses import StreamingResponse

from muster.core import errors, messages, subjects
from muster.inform import rows
from muster.manage import client
from muster.manage import protocol as manage_protocol
from muster.pipeline import protocol as pipeline_protocol
from muster.trust.permissions import roles
from muster.web import problems, request_state
from muster.web.auth import sessions
from muster.web.rest import base, route

router = route.RouteTable("watches")

WATCHES_MAX = 500  # concurrently open, pages included
OF_LOGIN_MAX = 100  # of one login: others can open theirs
BEAT_S = 15.0  # interval of comments, so that both sides notice a dead connection
NOTES_S = 1.0  # in which notes are sent that no line follows
LOOK_S = 5.0  # the login is checked at this interval and before each event
STREAM: dict[str, Any] = {
    "responses": {
        200: {
            "description": "An endless stream of events, one JSON document each.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        **base.PROBLEMS,
    },
    "response_class": StreamingResponse,
}
_WATCHED: dict[str, tuple[str, type[messages.WireMessage]]] = {
    "resources": (manage_protocol.STATES, manage_protocol.ResourceStateChange),
    "alerts": (pipeline_protocol.ALERTS, messages.Alert),
    "pipeline": (pipeline_protocol.PROGRESS, pipeline_protocol.BatchProgress),
    "activity": (messages.DECISIONS_SUBJECTS, messages.Decision),
    "budgets": (subjects.to_all("bus", "alert"), messages.Alert),
}


#: The number of open streams of each login.
open_streams: collections.Counter[str] = collections.Counter()


def check_slot(login: str) -> None:
    total, own = open_streams.total(), open_streams[login]
    if total >= WATCHES_MAX or own >= OF_LOGIN_MAX:
        raise errors.Overloaded(f"{total} watches are already open, {own} of {login}", retry_after_s=10.0)


@contextlib.contextmanager
def slot(login: str) -> Iterator[None]:
    check_slot(login)
    open_streams[login] += 1
    try:
        yield
    finally:
        open_streams[login] -= 1
        if not open_streams[login]:
            del open_streams[login]


def event(data: object, *, name: str = "", id: str = "") -> bytes:
    """Encode an event. JSON has no line breaks, so it is one line of data."""
    head = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def stream(
    request: Request, person: sessions.LoginSession, made: Callable[[], AsyncIterator[bytes]]
) -> StreamingResponse:
    async def body() -> AsyncIterator[bytes]:
        with slot(person.name):
            yield b": muster\n\n"
            async with contextlib.aclosing(_with_beats(made(), request, person)) as frames:
                async for data in frames:
                    yield data

    check_slot(person.name)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def _with_beats(frames: AsyncIterator[bytes], request: Request, person: sessions.LoginSession) -> Any:
    """The frames with comments in between, until the login ends or has another role.

    An error is sent as the last frame.
    """
    waiting: asyncio.Future[bytes] | None = None
    said_s = time.monotonic()
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait((waiting,), timeout=LOOK_S)
            try:
                if (await request_state.session_of(request)).role is not person.role:
                    return
                data = waiting.result() if done else b": beat\n\n"
            except StopAsyncIteration:
                return
            except errors.MusterError as error:
                yield event(problems.document(error), name="problem")
                return
            if done:
                waiting = None
            elif time.monotonic() - said_s < BEAT_S:
                continue
            said_s = time.monotonic()
            yield data
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await frames.aclose()  # type: ignore[attr-defined]


@router.get("/watch/{what}", summary="Watch changes", **STREAM)
async def watch(
    request: Request,
    call: request_state.Call,
    what: Literal["resources", "alerts", "pipeline", "activity", "budgets"],
) -> StreamingResponse:
    bus = call.source.feed.link.bus
    subject, kind = _WATCHED[what]

    async def changes() -> AsyncIterator[bytes]:
        async with await bus.subscribe(subject, max_pending=1024) as subscription:
            async for message in subscription:
                with contextlib.suppress(errors.InvalidInput, errors.LimitExceeded):
                    yield event(messages.decode(message.data, kind), name=what)

    return stream(request, call.person, changes)


@router.get("/watch-context/{key:text}", summary="Watch the changes of a context", **STREAM)
async def watch_context(
    request: Request,
    call: request_state.Call,
    key: Annotated[str, Path(min_length=1, max_length=512)],
    after_version: Annotated[int, base.Query(ge=0, le=(1 << 53) - 1)] = 0,
    last_event_id: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, description="Continue after this event.")
    ] = "",
) -> StreamingResponse:
    after = base.number(last_event_id) or after_version  # a browser that reconnects sends its last event

    async def changes() -> AsyncIterator[bytes]:
        async for change in call.source.inform.watch(call.person, key, after_version=after):
            yield event(rows.change_row(change), name="context", id=str(change.version))

    return stream(request, call.person, changes)


@router.get("/watch-logs", summary="Follow the logs of resources", **STREAM)
async def watch_logs(
    request: Request,
    call: request_state.Call,
    names: base.ResourceNames = [],  # noqa: B006
    where: base.Where = "",
    lines: Annotated[int, base.Query(ge=0, le=1_000, description="Of each resource, to begin with.")] = 0,
) -> StreamingResponse:
    """Those of the named resources, or of those that match `where`, now or later."""

    async def find(bus: Any) -> None:
        if bool(names) == bool(where):
            raise errors.InvalidInput("either names or an expression is required")
        await client.ManageClient(bus).get(*names, where=where)

    await call.run("logs", where or ", ".join(names), find)
    link = call.source.feed.link

    async def written() -> AsyncIterator[bytes]:
        bus = await link.as_person(call.person.name, roles.Role.OPERATOR)
        with link.using(bus):
            notes: list[str] = []
            stream = client.ManageClient(bus).log_lines(
                *names, where=where, lines=lines, follow=True, note=notes.append
            )
            async with contextlib.aclosing(stream):
                following: asyncio.Future[Any] | None = None
                try:
                    while True:
                        following = following or asyncio.ensure_future(anext(stream, None))
                        await asyncio.wait((following,), timeout=NOTES_S)
                        for note in notes:  # also while there are no lines
                            yield event({"note": note}, name="note")
                        notes.clear()
                        if following.done():
                            if (line := following.result()) is None:
                                return
                            yield event(line, name="line")
                            following = None
                finally:
                    if following is not None:
                        following.cancel()
                        await asyncio.gather(following, return_exceptions=True)

    return stream(request, call.person, written)
