"""What the routes share: responses, pagination, ETags and OpenAPI schemas."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Header, Path, Query
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette import convertors
from starlette.responses import Response

from muster.core import errors
from muster.core.formats import complete
from muster.web import problems

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
LIMIT = 50
LIMIT_MAX = 200

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Maximum number of items in a response.")]
Cursor = Annotated[
    str, Query(max_length=4096, description="`next` of the previous response; empty: from the beginning.")
]
Where = Annotated[str, Query(max_length=4096, description="A predicate that selects items. Empty: all.")]
ResourceName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$", description="Name of a resource.")]
ResourceNames = Annotated[
    list[str], Query(max_length=500, alias="name", description="Names of resources; may be repeated.")
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=100,
        description="Only if the ETag still matches; `*`: only if it exists.",
    ),
]

_PROBLEM = {
    "description": "A problem document (RFC 9457).",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "Description of the error."},
        "code": {"type": "string", "description": "Kind of error, for programs."},
        "hint": {"type": "string", "description": "Suggested remedy."},
        "position": {"type": "integer", "description": "For a predicate: position of the error."},
        "actual": {"type": "integer", "description": "For a conflict: the current version."},
    },
}
PROBLEMS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 409, 412, 413, 415, 429, 500, 501, 503, 504), _PROBLEM
)


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


def parsed(kind: type[B], **values: Any) -> B:
    """A body with these values; `errors.InvalidInput` if they do not fit."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise errors.InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class _Text(convertors.PathConvertor):
    """Matches the rest of a path. Starlette's own converter ends at a line break, which a key may contain."""

    regex = r"[\s\S]*"


convertors.register_url_convertor("text", _Text())

_kinds: dict[str, type[msgspec.Struct]] = {}


def items(of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a page of a list."""
    return {
        "type": "object",
        "required": ["items"],
        "properties": {
            "items": {"type": "array", "items": dict(of or {"type": "object"})},
            "next": {
                "type": ["string", "null"],
                "description": "Cursor of the next page; null at the end.",
            },
            "total": {"type": "integer"},
        },
    }


def kind(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a type."""
    _kinds[struct.__name__] = _as_object(struct)
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _as_object(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same fields as a JSON object, for a message that is an array on the wire."""
    if not struct.__struct_config__.array_like:
        return struct
    fields: list[tuple[str, Any]] = []
    for field in msgspec.structs.fields(struct):
        is_struct = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        fields.append((field.name, _as_object(field.type) if is_struct else field.type))
    return msgspec.defstruct(struct.__name__, fields, namespace={"__doc__": struct.__doc__})


def components() -> dict[str, Any]:
    """The schemas of the types of responses, in which every field is present."""
    _, definitions = msgspec.json.schema_components(
        list(_kinds.values()), ref_template="#/components/schemas/{name}"
    )
    for definition in definitions.values():
        if "properties" in definition:
            definition["required"] = list(definition["properties"])
    return {**definitions, "Problem": PROBLEM_SCHEMA}


def answers(schema: Mapping[str, Any] | None, *, status: int = 200, headers: bool = False) -> dict[str, Any]:
    """The ``responses`` of a route."""
    good: dict[str, Any] = {"description": "Done."}
    if schema is not None:
        good["content"] = {"application/json": {"schema": dict(schema)}}
    if headers:
        good["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "Version of the object."}}
    return {"responses": {status: good, **PROBLEMS}, "status_code": status, "response_class": Response}


def reply(value: object, *, status: int = 200, version: int | None = None) -> Response:
    headers = {} if version is None else {"ETag": f'"{version}"'}
    return Response(
        msgspec.json.encode(complete.builtins(value)),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


def page(rows: Sequence[object], next_: str | int | None = None, *, total: int | None = None) -> Response:
    document: dict[str, object] = {"items": rows, "next": None if next_ is None else str(next_)}
    if total is not None:
        document["total"] = total
    return reply(document)


Key = tuple[str | int, ...]


def paginate(rows: Sequence[Any], cursor: str, limit: int, key: Callable[[Any], Key]) -> Response:
    """A page of a complete list, sorted by the unique ``key``.

    The cursor is the key of the last row of the previous page, not a position: inserted or deleted rows do
    not cause repeated or skipped rows.
    """
    ordered = sorted(rows, key=key)
    start = 0
    if cursor:
        try:
            last = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=="), type=Key)
            start = bisect.bisect_right(ordered, last, key=key)
        except (ValueError, TypeError, msgspec.MsgspecError, RecursionError):  # a cursor of another list
            raise _no_cursor(cursor) from None
    selected = ordered[start : start + limit]
    more = start + limit < len(ordered)
    return page(selected, _cursor(key(selected[-1])) if selected and more else None, total=len(ordered))


def _cursor(key: Key) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode()


def behind(
    rows: Sequence[T], cursor: str, limit: int, name: Callable[[T], str]
) -> tuple[list[T], str | None]:
    """A page of a list in the order of arrival, and the cursor of the next page.

    The cursor is the unique name of the last row shown.  If that row is no longer stored, no older row is.
    """
    start = 0
    if cursor:
        start = next((at + 1 for at, row in enumerate(rows) if name(row) == cursor), len(rows))
    selected = list(rows[start : start + limit])
    return selected, name(selected[-1]) if selected and start + limit < len(rows) else None


def number(cursor: str) -> int:
    if not cursor:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise _no_cursor(cursor)
    return int(cursor)


def _no_cursor(cursor: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"{cursor[:40]!r} is not a cursor of this list", hint="use the value of `next` unchanged"
    )


def if_match(if_match: str | None) -> int | str | None:
    """The version in ``If-Match``; ``*``: any version; None: no header."""
    if if_match is None:
        return None
    text = if_match.strip()
    if text == "*":
        return text
    digits = text.removeprefix("W/").strip('"')
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise problems.PreconditionFailed(f"{if_match[:40]!r} is not a valid ETag")
    return int(digits)


async def conditional(work: Awaitable[T], if_match: str | None) -> T:
    """Convert a conflict to a failed precondition if there was a precondition."""
    try:
        return await work
    except errors.Conflict as error:
        if if_match is None or type(error) is not errors.Conflict:
            raise
        raise problems.PreconditionFailed(error.message, actual=error.actual) from error
    except errors.NotFound as error:
        if if_match is None:
            raise
        raise problems.PreconditionFailed(error.message) from error
