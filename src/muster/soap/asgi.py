"""Doors as an ASGI application, to be mounted in a web application or served alone.

Every read is bounded in bytes and time, and so many requests at once are worked on and no more: a stranger
who sends slowly, or forever, costs one of them for a while.

In Starlette or FastAPI: ``for path in app.paths: router.routes.append(Route(path, app))`` (a ``Mount`` would
redirect ``/wsman`` to ``/wsman/``, which SOAP clients do not follow).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from muster.core import errors
from muster.soap import door

BODY_TIMEOUT_S = 20.0
CONCURRENT_MAX = 128
DRAIN_BYTES_MAX = 16 << 20  # of a body that is too long: read away, so that the answer is heard

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application:
    def __init__(self, doors: Mapping[str, door.Door], *, concurrent_max: int = CONCURRENT_MAX) -> None:
        """``doors`` by path, such as ``/wsman``."""
        self._doors = dict(doors)
        self._concurrent_max = concurrent_max
        self._running = 0

    @property
    def paths(self) -> Sequence[str]:
        return list(self._doors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise errors.InvalidInput(f"this application answers http only, not {scope['type']}")
        if self._running >= self._concurrent_max:
            response = door.Response(
                HTTPStatus.SERVICE_UNAVAILABLE, b"too many requests at once\n", headers={"Retry-After": "1"}
            )
            await _respond(send, response)
            return
        self._running += 1
        try:
            response = await self._response(scope, receive)
        finally:
            self._running -= 1
        await _respond(send, response, head_only=scope["method"] == "HEAD")

    async def _response(self, scope: Scope, receive: Receive) -> door.Response:
        path = scope["path"].rstrip("/")
        inside = path.removeprefix(scope.get("root_path", ""))  # where it is mounted below another path
        found = self._doors.get(path) or self._doors.get(inside)
        if found is None:
            there = " ".join(self._doors)
            return door.Response(HTTPStatus.NOT_FOUND, f"nothing here; there is: {there}\n".encode())
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _body(receive, found.limits.bytes)
        except TimeoutError:
            return door.Response(HTTPStatus.REQUEST_TIMEOUT, b"the message did not come to its end\n")
        if body is None:
            return found.too_large(headers)
        return await found.respond(
            door.Request(
                scope["method"],
                path,
                scope.get("query_string", b"").decode("latin-1"),
                headers,
                body,
                _location(scope, headers),
            )
        )


def _location(scope: Scope, headers: Mapping[str, str]) -> str:
    host = headers.get("host", "")
    if not host:
        name, port = scope.get("server") or ("127.0.0.1", None)
        host = f"{name}:{port}" if port else str(name)
    return f"{scope.get('scheme', 'http')}://{host}{scope['path']}"


async def _body(receive: Receive, bytes_max: int) -> bytes | None:
    """None: it is longer."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        piece = message.get("body", b"")
        size += len(piece)
        if size <= bytes_max:
            pieces.append(piece)
        if not message.get("more_body") or size > max(bytes_max, DRAIN_BYTES_MAX):
            return b"".join(pieces) if size <= bytes_max else None


async def _respond(send: Send, response: door.Response, *, head_only: bool = False) -> None:
    fields = {
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **{name.lower(): value for name, value in response.headers.items()},
    }
    await send(
        {
            "type": "http.response.start",
            "status": int(response.status),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()],
        }
    )
    await send({"type": "http.response.body", "body": b"" if head_only else response.body})
