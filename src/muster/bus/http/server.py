"""A little HTTP/1.0, for health pages, broker monitors, the locator and a sensor's doors: one request to a
connection, GET and POST, no redirect ever followed.

This is not a web server.  It answers small questions of trusted or anonymous askers without a dependency,
with every read bounded in bytes and time, so that a stranger who connects and says nothing, or too much,
costs one socket for a few seconds.  The REST interface and the dashboard stand on a real server.
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
from typing import Any, Self, cast

from muster.core import errors
from muster.core.net import http1

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 256
UNREAD_BYTES_MAX = 64 * 1024 * 1024  # of a request, read and dropped after the answer


@dataclasses.dataclass(frozen=True, slots=True)
class HttpRequest:
    path: str
    query: Mapping[str, str]  # the last value, where a name is given twice
    headers: Mapping[str, str]  # names in lower case
    peer: str  # the address that asks
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
            raise errors.InvalidInput(f"the answer is not JSON: {self.body[:80]!r}") from error


Handler = Callable[[HttpRequest], Awaitable[HttpResponse] | HttpResponse]


def text(body: str, status: int = 200) -> HttpResponse:
    return HttpResponse(status, body.encode())


def json_response(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(status, json.dumps(value).encode() + b"\n", "application/json")


class HttpServer:
    """A listening responder. Made by `serve`; closes with `close` or at the end of its ``async with``."""

    def __init__(
        self,
        pages: Mapping[str, Handler],
        doors: Mapping[str, Handler],
        on_refused: Callable[[str], None],
        body_bytes_max: int,
        connections_max: int,
    ) -> None:
        self._routes = {"GET": dict(pages), "HEAD": dict(pages), "POST": dict(doors)}
        self._on_refused = on_refused
        self._body_bytes_max = body_bytes_max
        self._connections_max = connections_max
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        # Without `ssl` here: handshakes are done below, where they are counted and have a deadline.
        try:
            self._server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise errors.Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="name another port, or 0 for a free one",
            ) from error
        self._tls = tls
        self.scheme = "https" if tls else "http"
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > self._connections_max:
                self._on_refused("connections")
            else:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await self._serve(reader, writer)
        except asyncio.CancelledError:  # by `close`: the stream protocol would report it as a fault
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()  # does nothing to a connection that was closed in order

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._tls is not None:
            cast("asyncio.Transport", writer.transport).pause_reading()  # the handshake is not for `reader`
            await writer.start_tls(self._tls, ssl_handshake_timeout=REQUEST_TIMEOUT_S)
        writer.write(await self._answer(reader, writer))
        await writer.drain()
        # What the client has not sent yet is read as well: closing earlier would reset the connection, and
        # the answer could be lost with it.
        if writer.can_write_eof():
            writer.write_eof()
            unread = UNREAD_BYTES_MAX
            while unread > 0 and (piece := await reader.read(65_536)):
                unread -= len(piece)
        writer.close()
        await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
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
            return _encode(self._nothing_there(request.path))
        try:
            if method == "POST":
                request = dataclasses.replace(request, body=await self._body(request, reader, writer))
            answer = handler(request)
            response = answer if isinstance(answer, HttpResponse) else await answer
        except errors.MusterError as error:
            self._on_refused(error.code)
            response = text(f"{error.message}\n", _status(error))
        except Exception:  # a bug in a page must not look like a dead process
            log.exception("the page %s failed", request.path)
            response = text("this page has a fault; the log says more\n", 500)
        return _encode(response, head_only=method == "HEAD")

    def _nothing_there(self, path: str) -> HttpResponse:
        allowed = [method for method, routes in self._routes.items() if path in routes]
        if allowed:
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(allowed)})
        known = " ".join(sorted({path for routes in self._routes.values() for path in routes}))
        return text(f"nothing at {path}; there is: {known}\n", HTTPStatus.NOT_FOUND)

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
        return await reader.readexactly(length)


def _status(error: errors.MusterError) -> HTTPStatus:
    if isinstance(error, errors.LimitExceeded):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return (
        HTTPStatus.BAD_REQUEST if isinstance(error, errors.InvalidInput) else HTTPStatus.SERVICE_UNAVAILABLE
    )


async def serve(
    pages: Mapping[str, Handler],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    doors: Mapping[str, Handler] | None = None,
    on_refused: Callable[[str], None] = lambda reason: None,
    tls: ssl.SSLContext | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    connections_max: int = CONNECTIONS_MAX,
) -> HttpServer:
    """Answer GET and HEAD at the exact paths of ``pages``, and POST at those of ``doors``.

    ``port`` 0 takes a free one; `Server.port` tells which. ``on_refused`` hears the reason for each request
    that is turned away.
    """
    server = HttpServer(pages, doors or {}, on_refused, body_bytes_max, connections_max)
    await server._listen(host, port, tls)
    return server


async def get(
    url: str,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
) -> HttpResponse:
    """One GET. Any status is an answer; `errors.Unavailable` means there was none."""
    return await _ask("GET", url, {}, b"", timeout_s, body_bytes_max, tls)


async def post(
    url: str,
    body: bytes,
    *,
    headers: Mapping[str, str],
    timeout_s: float = REQUEST_TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
) -> HttpResponse:
    """One POST. Any status is an answer; `errors.Unavailable` means there was none."""
    length = {"Content-Length": str(len(body))}
    return await _ask("POST", url, {**headers, **length}, body, timeout_s, body_bytes_max, tls)


async def _ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    timeout_s: float,
    body_bytes_max: int,
    tls: ssl.SSLContext | None,
) -> HttpResponse:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.InvalidInput(f"{url!r} is not an http:// or https:// address")
    secure = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80), ssl=secure, limit=HEAD_BYTES_MAX
            )
            # HTTP/1.0, so that the answer is never chunked: it ends where its length says, or with the
            # socket.
            fields = {"Host": parts.netloc, **headers}
            lines = [f"{method} {target} HTTP/1.0", *(f"{name}: {value}" for name, value in fields.items())]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body)
            await writer.drain()
            return await _read_response(reader, body_bytes_max)
    except TimeoutError as error:
        raise errors.TimedOut(f"{url} did not answer in {timeout_s:g} s") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise errors.Unavailable(f"{url} does not answer: {error}") from error
    except ValueError as error:
        raise errors.InvalidInput(f"{url!r} did not give an HTTP answer: {error}") from error
    finally:
        if writer is not None:
            writer.close()


def parse_request(head: bytes, peer: str) -> tuple[str, HttpRequest] | HttpResponse:
    """The method and the request, or the refusal to send."""
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
    return method, HttpRequest(urllib.parse.unquote(parts.path), query, _headers(rest), peer)


async def _read_response(reader: asyncio.StreamReader, body_bytes_max: int) -> HttpResponse:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = first.split(" ")
    if not version.startswith("HTTP/"):
        raise ValueError(first)
    headers = _headers(rest)
    if "content-length" in headers:
        length = int(headers["content-length"])
        _check_size(length, body_bytes_max)
        body = await reader.readexactly(length)
    else:
        body = b""
        while chunk := await reader.read(65_536):
            body += chunk
            _check_size(len(body), body_bytes_max)
    return HttpResponse(int(status), body, headers.get("content-type", ""), headers)


def _check_size(length: int, body_bytes_max: int) -> None:
    if length > body_bytes_max:
        raise errors.LimitExceeded(f"the answer is longer than {body_bytes_max} bytes")


def _headers(lines: list[str]) -> dict[str, str]:
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
