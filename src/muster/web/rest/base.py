"""What the routes share: answers, pages of them, ETags, and what the OpenAPI document says of it."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Header, Path, Query
from starlette import convertors
from starlette.responses import Response

from muster.core import errors
from muster.web import problems

T = TypeVar("T")
LIMIT = 50
LIMIT_MAX = 200

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="The most items in one answer.")]
Cursor = Annotated[
    str, Query(max_length=4096, description="`next` of the answer before; empty: from the beginning.")
]
Where = Annotated[
    str, Query(max_length=4096, description="A predicate: only items of which it is true. Empty: all.")
]
TimeMs = Annotated[int, Query(ge=0, le=(1 << 53) - 1, description="Milliseconds since 1970.")]
ResourceName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$", description="A resource's name.")]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=100,
        description="Only if this is still its ETag; `*`: only if it is there.",
    ),
]

_PROBLEM = {
    "description": "A problem: what is wrong, and what would be right.",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong."},
        "code": {"type": "string", "description": "The kind of error, for programs."},
        "hint": {"type": "string", "description": "What would be right."},
        "position": {"type": "integer", "description": "Of a predicate: the character at fault."},
        "actual": {"type": "integer", "description": "Of a conflict: the version that is there."},
    },
}
PROBLEMS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 409, 412, 413, 415, 429, 500, 501, 503, 504), _PROBLEM
)


class _Text(convertors.PathConvertor):
    """Of a path, all that is left: Starlette's own ends at a line break, and a key may hold one."""

    regex = r"[\s\S]*"


convertors.register_url_convertor("text", _Text())

_kinds: dict[str, type[msgspec.Struct]] = {}


def items(of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of one page of many."""
    return {
        "type": "object",
        "required": ["items"],
        "properties": {
            "items": {"type": "array", "items": dict(of or {"type": "object"})},
            "next": {
                "type": ["string", "null"],
                "description": "The cursor of the following page; null: there is none.",
            },
            "total": {"type": "integer"},
        },
    }


def kind(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of one of our messages, as the message's own type has it."""
    _kinds[struct.__name__] = struct
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def row(**fields: str) -> dict[str, Any]:
    """The schema of plain facts: names and their JSON types; ``"string?"`` may be null."""
    made: dict[str, Any] = {}
    for name, told in fields.items():
        made[name] = {"type": [told[:-1], "null"] if told.endswith("?") else told}
    return {"type": "object", "properties": made}


def components() -> dict[str, Any]:
    _, found = msgspec.json.schema_components(
        list(_kinds.values()), ref_template="#/components/schemas/{name}"
    )
    return {**found, "Problem": PROBLEM_SCHEMA}


def answers(schema: Mapping[str, Any] | None, *, status: int = 200, headers: bool = False) -> dict[str, Any]:
    """The ``responses`` of a route."""
    good: dict[str, Any] = {"description": "Done."}
    if schema is not None:
        good["content"] = {"application/json": {"schema": dict(schema)}}
    if headers:
        good["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "Its version."}}
    return {"responses": {status: good, **PROBLEMS}, "status_code": status, "response_class": Response}


def router(tag: str) -> APIRouter:
    return APIRouter(tags=[tag])


def reply(value: object, *, status: int = 200, version: int | None = None) -> Response:
    headers = {} if version is None else {"ETag": f'"{version}"'}
    return Response(
        msgspec.json.encode(value), status_code=status, media_type="application/json", headers=headers
    )


def page(found: Sequence[object], next_: str | int | None = None, *, total: int | None = None) -> Response:
    told: dict[str, object] = {"items": found, "next": None if next_ is None else str(next_)}
    if total is not None:
        told["total"] = total
    return reply(told)


Key = tuple[str | int, ...]


def paginate(found: Sequence[Any], cursor: str, limit: int, key: Callable[[Any], Key]) -> Response:
    """One page of a list that is all here, in the order of ``key``, which is unique.

    The cursor is the key of the last row of the page before, not a position: rows that come or go between two
    pages make none appear twice or be left out.
    """
    ordered = sorted(found, key=key)
    start = 0
    if cursor:
        try:
            last = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=="), type=Key)
            start = bisect.bisect_right(ordered, last, key=key)
        except (ValueError, TypeError, msgspec.MsgspecError):  # of another list
            raise _no_cursor(cursor) from None
    some = ordered[start : start + limit]
    more = start + limit < len(ordered)
    return page(some, _cursor(key(some[-1])) if some and more else None, total=len(ordered))


def _cursor(key: Key) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode()


def behind(
    found: Sequence[T], cursor: str, limit: int, name: Callable[[T], str]
) -> tuple[list[T], str | None]:
    """One page of a list in the order in which its rows came, and the cursor of the next.

    The cursor is the unique name of the last row shown.  Once that row is no longer kept, no older one is.
    """
    start = 0
    if cursor:
        start = next((at + 1 for at, row in enumerate(found) if name(row) == cursor), len(found))
    some = list(found[start : start + limit])
    return some, name(some[-1]) if some and start + limit < len(found) else None


def number(cursor: str) -> int:
    if not cursor:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise _no_cursor(cursor)
    return int(cursor)


def _no_cursor(cursor: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"{cursor[:40]!r} is no cursor of this list", hint="use `next` as it came")


def if_match(if_match: str | None) -> int | str | None:
    """The version that ``If-Match`` names; ``*``: any; None: it was not sent."""
    if if_match is None:
        return None
    text = if_match.strip()
    if text == "*":
        return text
    digits = text.removeprefix("W/").strip('"')
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise problems.PreconditionFailed(f"{if_match[:40]!r} is not the ETag of anything here")
    return int(digits)
