"""Routes: a function that returns rows becomes an operation of the API, and so does one of a table.

    @router.of("GET /overview", "Summary of the fleet")
    async def overview(call: request_state.Call) -> rows.FleetOverview:
        return await call.source.overview()

    router.operation("POST /resources/{name}/drain", operations.DRAIN, name=base.ResourceName)

The annotation of the result is the schema of the response, and decides its form: an object; ``list``, which
is sorted by ``key`` and paginated; `RowPage`, which is paginated already; `Versioned`, with an ETag; None.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pydantic
from fastapi import APIRouter
from starlette.responses import Response

from muster.bus.rpc import operations
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.rest import base

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
Key = tuple[str, ...] | Callable[[Any], base.Key]  # the fields that sort a list, unique together

#: The function of each route and the type of its body, by its line: the pages of the dashboard call these.
ANSWERS: dict[str, tuple[Callable[..., Awaitable[Any]], type[pydantic.BaseModel] | None]] = {}


@dataclass(frozen=True, slots=True)
class RowPage(Generic[T]):
    """A part of a list, and the cursor of the next one."""

    items: Sequence[T]
    next: str | int | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """An object with its version."""

    value: T
    version: int


class RouteTable(APIRouter):
    """The routes of a section of the API. ``line``: the method and the path of a route."""

    def __init__(self, section: str) -> None:
        super().__init__(tags=[section])

    def of(
        self, line: str, summary: str, *, status: int | None = None, key: Key | None = None, **more: Any
    ) -> Callable[[F], F]:
        """Add a route for the decorated function."""

        def add(answer: F) -> F:
            signature = inspect.signature(answer, eval_str=True)
            more["description"] = inspect.cleandoc(answer.__doc__ or "")
            self._add(line, summary, answer.__name__, answer, signature, status, key, more)
            return answer

        return add

    def operation(
        self,
        line: str,
        declared: operations.ServiceOperation,
        *,
        as_: str = "",
        body: type[pydantic.BaseModel] | None = None,
        status: int | None = None,
        key: Key | None = None,
        needs: sessions.WebRole = sessions.WebRole.OPERATOR,
        fixed: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> Callable[..., Awaitable[Any]]:
        """Add the route of an operation: its request is ``parameters`` of path and query, and the ``body``.

        ``fixed``: what the route does not leave open.
        """

        async def answer(call: request_state.RestCall, **request: Any) -> Any:
            given = request.pop("body", None)
            request |= (given.model_dump() if given is not None else {}) | (fixed or {})
            if not declared.action:
                return await call.source.read(declared, **request)
            return await call.operate(declared, request, needs=needs)

        parameters = {"call": request_state.Call, **parameters}
        if body is not None:
            parameters["body"] = body
        signature = inspect.Signature(
            [_parameter(part, kind) for part, kind in parameters.items()],
            return_annotation=declared.returns,
        )
        self._add(line, declared.help, as_ or declared.method, answer, signature, status, key, {})
        return answer

    def _add(
        self,
        line: str,
        summary: str,
        name: str,
        answer: Callable[..., Awaitable[Any]],
        signature: inspect.Signature,
        status: int | None,
        key: Key | None,
        more: dict[str, Any],
    ) -> None:
        body = signature.parameters.get("body")
        ANSWERS[line] = answer, None if body is None else body.annotation
        form = signature.return_annotation
        status = status or (200 if form not in (None, type(None)) else 204)
        parameters = [part.replace(kind=part.KEYWORD_ONLY) for part in signature.parameters.values()]
        if key is not None:
            parameters += [
                _parameter("limit", base.Limit, base.LIMIT),
                _parameter("cursor", base.Cursor, ""),
            ]

        async def endpoint(**request: Any) -> Response:
            if key is None:
                return _respond(await answer(**request), status)
            cursor, limit = request.pop("cursor"), request.pop("limit")
            return base.paginate(await answer(**request), cursor, limit, _sorter(key))

        endpoint.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=Response
        )
        answers = base.answers(_schema(form), status=status, headers=typing.get_origin(form) is Versioned)
        method, path = line.split()
        summary = summary.removesuffix(".")
        self.add_api_route(path, endpoint, methods=[method], name=name, summary=summary, **answers, **more)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _sorter(key: Key) -> Callable[[Any], base.Key]:
    return key if callable(key) else lambda row: tuple(getattr(row, name) for name in key)


def _respond(result: Any, status: int) -> Response:
    match result:
        case None:
            return Response(status_code=status)
        case RowPage():
            return base.page(result.items, result.next, total=result.total)
        case Versioned():
            return base.reply(result.value, status=status, version=result.version)
    return base.reply(result, status=status)


def _schema(form: Any) -> dict[str, Any] | None:
    """The schema of a response, from the annotation of a result."""
    origin, inner = typing.get_origin(form), typing.get_args(form)
    if form in (None, type(None)):
        return None
    if origin is None:
        return base.kind(form)
    if origin is Versioned:
        return base.kind(inner[0])
    return base.items(base.kind(inner[0]) if isinstance(inner[0], type) else None)
