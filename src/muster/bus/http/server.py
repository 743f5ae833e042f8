"""A small HTTP/1.0 server for health endpoints, the locator and a sensor's intake: GET and POST, one request
to a connection.

It needs no dependency, and every read is bounded in bytes and time: a client that sends nothing, or too much,
costs one socket for a few seconds.  The REST interface and the dashboard use `muster.bus.http.asgi_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

from muster.core import errors, lifecycle
from muster.core.net import connection_limits, http1

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 256
UNREAD_BYTES_MAX = 64 * 1024 * 1024  # of a request, read and discarded after the response


@dataclasses.dataclass(frozen=True, slots=True)
class HttpRequest:
    path: str
    query: Mapping[str, str]  # the last value, where a name occurs twice
    headers: Mapping[str, str]  # names in lower case
    peer: str  # the address of the client
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise errors.InvalidInput(f"the response is not JSON: {self.body[:80]!r}") from error


Handler = Callable[[HttpRequest], Awaitable[HttpResponse] | HttpResponse]


def text(body: str, status: int = 200) -> HttpResponse:
    return HttpResponse(status, body.encode())


def json_response(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(status, json.dumps(value).encode() + b"\n", "application/json")


class HttpServer(lifecycle.ClosingContext):
    """A listening server, returned by `serve`; `close` or the end of its ``async with`` closes it."""

    def __init__(
        self,
        get_routes: Mapping[str, Handler],
        post_routes: Mapping[str, Handler],
        on_refused: Callable[[str], None],
        body_bytes_max: int,
        limits: connection_limits.ConnectionLimits,
    ) -> None:
        self._routes = {"GET": dict(get_routes), "HEAD": dict(get_routes), "POST": dict(post_routes)}
        self._on_refused = on_refused
        self._body_bytes_max = body_bytes_max
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self.scheme = "http"
        self.host = ""
        self.port = 0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        # Without `ssl` here: `_serve` does the handshakes, where they are counted and have a deadline.
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise errors.Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="configure another port, or 0 for a free one",
            ) from error
        self._tls = tls
        self.scheme = "https" if tls else "http"
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if not self._limits.add(task, str((writer.get_extra_info("peername") or ("",))[0])):
                self._on_refused("connections")
            else:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await self._serve(reader, writer)
        except asyncio.CancelledError:  # by `close`: the stream protocol would log it as an error
            pass
        finally:
            self._tasks.discard(task)
            self._limits.discard(task)
            writer.transport.abort()  # no effect on a connection that is closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._tls is not None:
            cast("asyncio.Transport", writer.transport).pause_reading()  # the handshake is not for `reader`
            await writer.start_tls(self._tls, ssl_handshake_timeout=REQUEST_TIMEOUT_S)
        writer.write(await self._handle(reader, writer))
        await writer.drain()
        # Read what the client still sends: closing earlier would reset the connection, and the response
        # could be lost.
        if writer.can_write_eof():
            writer.write_eof()
            unread = UNREAD_BYTES_MAX
            while unread > 0 and (piece := await reader.read(65_536)):
                unread -= len(piece)
        writer.close()
        await writer.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            self._on_refused("too-large")
            return _encode(text("request too large\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        parsed = parse_request(head, str(writer.get_extra_info("peername", ("",))[0]))
        if isinstance(parsed, HttpResponse):
            self._on_refused("malformed")
            return _encode(parsed)
        method, request = parsed
        handler = self._routes.get(method, {}).get(request.path)
        if handler is None:
            return _encode(self._not_found(request.path))
        try:
            if method == "POST":
                request = dataclasses.replace(request, body=await self._body(request, reader, writer))
            result = handler(request)
            response = result if isinstance(result, HttpResponse) else await result
        except errors.MusterError as error:
            self._on_refused(error.code)
            response = text(f"{error.message}\n", _status(error))
        except Exception:  # a bug in a handler must not look like a dead process
            log.exception("the handler of %s failed", request.path)
            response = text("internal error; see the log\n", 500)
        return _encode(response, head_only=method == "HEAD")

    def _not_found(self, path: str) -> HttpResponse:
        allowed = [method for method, routes in self._routes.items() if path in routes]
        if allowed:
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(allowed)})
        paths = " ".join(sorted({path for routes in self._routes.values() for path in routes}))
        return text(f"{path} not found; available: {paths}\n", HTTPStatus.NOT_FOUND)

    async def _body(
        self, request: HttpRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        try:
            length = int(request.headers["content-length"])
        except (KeyError, ValueError):
            raise errors.InvalidInput("the request has no Content-Length") from None
        if not 0 <= length <= self._body_bytes_max:
            raise errors.LimitExceeded(f"a body of {length} bytes is over {self._body_bytes_max}")
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            received = len(error.partial)
            raise errors.InvalidInput(f"the body ended after {received} of {length} bytes") from error
        except OSError as error:
            raise errors.Unavailable("the client closed the connection") from error


def _status(error: errors.MusterError) -> HTTPStatus:
    if isinstance(error, errors.LimitExceeded):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return (
        HTTPStatus.BAD_REQUEST if isinstance(error, errors.InvalidInput) else HTTPStatus.SERVICE_UNAVAILABLE
    )


async def serve(
    get_routes: Mapping[str, Handler],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    post_routes: Mapping[str, Handler] | None = None,
    on_refused: Callable[[str], None] = lambda reason: None,
    tls: ssl.SSLContext | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    connections_max: int = CONNECTIONS_MAX,
    of_address_max: int | None = None,
) -> HttpServer:
    """Serve GET and HEAD at the exact paths of ``get_routes``, and POST at those of ``post_routes``.

    ``port`` 0 takes a free port: see `HttpServer.port`. ``on_refused`` is called with the reason of each
    rejected request. ``of_address_max`` bounds the connections of one client address.
    """
    limits = connection_limits.ConnectionLimits(connections_max, of_address_max)
    server = HttpServer(get_routes, post_routes or {}, on_refused, body_bytes_max, limits)
    await server._listen(host, port, tls)
    return server


def parse_request(head: bytes, peer: str) -> tuple[str, HttpRequest] | HttpResponse:
    """The method and the request, or the error response."""
    try:
        http1.read_head(head)
        first, *rest = head.decode("ascii").split("\r\n")
        method, target, version = first.split(" ")
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            raise ValueError(first)
        parts = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
    except (http1.MalformedHttp, ValueError):  # UnicodeDecodeError is one
        return text("not an HTTP request\n", HTTPStatus.BAD_REQUEST)
    return method, HttpRequest(urllib.parse.unquote(parts.path), query, parse_headers(rest), peer)


def parse_headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _encode(response: HttpResponse, *, head_only: bool = False) -> bytes:
    fields = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **response.headers,
    }
    lines = [f"HTTP/1.0 {int(response.status)} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (b"" if head_only else response.body)
