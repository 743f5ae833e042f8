"""REST: the search for anything by a part of its name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import Query

from muster.core import errors
from muster.notify import protocol
from muster.web import request_state
from muster.web.rest import alerts, contexts, notifications, queues, resources, route

router = route.RouteTable("reports")
EACH_MAX = 10


#: The page of the dashboard and its parameter, by the kind of thing.
PAGES = {
    "group": ("/group", "name"),
    "zone": ("/zone", "name"),
    "machine": ("/machine", "name"),
    "resource": ("/resource", "name"),
    "context": ("/contexts/details", "key"),
    "queue": ("/queue", "name"),
    "alert": ("/alerts", "text"),
    "receiver": ("/playground", "receiver"),
}


class FoundThing(msgspec.Struct, frozen=True, kw_only=True):
    """Something whose name contains the text. ``about``: its state or place; ``page``: of the dashboard."""

    kind: str
    name: str
    about: str = ""
    page: str = ""


class FoundThings(msgspec.Struct, frozen=True, kw_only=True):
    """At most ten of each kind. ``missing``: the kinds that could not be searched, with the reason."""

    items: list[FoundThing]
    missing: dict[str, str] = {}


@router.of("GET /find", "Find machines, resources, contexts, queues, alerts and receivers by name")
async def find(
    call: request_state.Call, q: Annotated[str, Query(max_length=250, description="A part of a name.")]
) -> FoundThings:
    text = q.strip()
    things = FoundThings(items=[])
    if not text:
        return things
    like = like_literal(text)
    searches = {
        "machine": call.source.feed.machines.named(text, EACH_MAX),
        "resource": resources.resources(call, where=f"name LIKE {like}", limit=EACH_MAX),
        "context": contexts.contexts(call, where=f"key LIKE {like}", limit=EACH_MAX),
        "queue": queues.queues(call),
        "alert": alerts.alerts(call),
        "receiver": notifications.receivers(call, prefix=protocol.ANYWHERE + text, limit=EACH_MAX),
    }
    answers = await asyncio.gather(*searches.values(), return_exceptions=True)
    for kind, answer in zip(searches, answers, strict=True):
        match answer:
            case errors.MusterError():
                things.missing[kind] = answer.message
            case BaseException():
                raise answer
            case _:
                rows: Any = answer if isinstance(answer, list) else answer.items  # type: ignore[attr-defined]
                things.items.extend(_found(kind, rows, text.lower()))
    return things


def _found(kind: str, rows: Sequence[Any], text: str) -> list[FoundThing]:
    """The rows of a list as things. Queues and alerts were not searched: those with ``text`` are chosen."""
    match kind:
        case "machine":  # groups and zones too
            named = [(own, name, state) for own, name, state in rows]
        case "resource":
            named = [(kind, row.name, row.state) for row in rows]
        case "context":
            named = [(kind, row.key, f"version {row.version}") for row in rows]
        case "queue":
            named = [(kind, row.queue, f"{row.depth:,} waiting") for row in rows if text in row.queue.lower()]
            named = named[:EACH_MAX]
        case "alert":
            named = [(kind, f"{row.rule} {row.about}", row.state.value) for row in rows]
            named = [thing for thing in named if text in thing[1].lower()][:EACH_MAX]
        case _:
            named = [(kind, row.receiver, row.policy) for row in rows]
    return [FoundThing(kind=own, name=name, about=about, page=_page(own, name)) for own, name, about in named]


def _page(kind: str, name: str) -> str:
    path, parameter = PAGES[kind]
    return f"{path}?{urlencode({parameter: name.partition(' ')[0] if kind == 'alert' else name})}"


def like_literal(text: str) -> str:
    """A literal of LIKE for names that contain the text."""
    escaped = "".join(f"\\{letter}" if letter in "%_\\" else letter for letter in text)
    return "'%" + escaped.replace("'", "''") + "%' ESCAPE '\\'"
