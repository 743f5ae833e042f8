"""Routes that list all rows of one kind, page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from muster.web import request_state
from muster.web.auth import sessions
from muster.web.rest import base

Read = TypeVar(
    "Read", bound=Callable[[request_state.WebState, sessions.LoginSession], Awaitable[Sequence[Any]]]
)


def listing(
    router: APIRouter, path: str, summary: str, row: type[msgspec.Struct], key: Callable[[Any], base.Key]
) -> Callable[[Read], Read]:
    """Add a route for the rows that the decorated function returns; ``key`` is unique and sorts them."""

    def add(read: Read) -> Read:
        async def page(
            web: request_state.Web,
            person: request_state.Person,
            limit: base.Limit = base.LIMIT,
            cursor: base.Cursor = "",
        ) -> Response:
            return base.paginate(await read(web, person), cursor, limit, key)

        router.get(path, summary=summary, name=read.__name__, **base.answers(base.items(base.kind(row))))(
            page
        )
        return read

    return add
