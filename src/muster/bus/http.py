"""A little HTTP/1.0, for health pages, broker monitors and the locator: one request to a connection; served
is GET only, asked also POST (no redirect is ever followed).

This is not a web server.  It answers small questions of trusted or anonymous askers without a dependency,
with every read bounded in bytes and time, so that a stranger who connects and says nothing, or too much,
costs one socket for a few seconds.  The REST interface and the dashboard stand on a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

from muster.core import errors

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16_384
BODY_BYTES_MAX = 64 * 1024 * 1024
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: Mapping[str, str]  # the last value, where a name is given twice
    headers: Mapping[str, str]  # names in lower case
    peer: str  # the address that asks


@dataclass(frozen=True, slots=True)
class Response:
    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise errors.InvalidInput(f"the answer is not JSON: {self.body[:80]!r}") from error


Handler = Callable[[Request], Awaitable[Response] | Response]


def text(body: str, status: int = 200) -> Response:
    return Response(status, body.encode())


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode() + b"\n", "application/json")


class Server:
    """A listening responder. Made by `serve`; closes with `close` or at the end of its ``async with``."""

    def __init__(self, routes: Mapping[str, Handler]) -> None:
        self._routes = dict(routes)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.scheme = "http"
        self.host = ""
        self.port = 0
        self.refused = 0  # askers turned away because CONNECTIONS_MAX were being answered

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
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=HEAD_BYTES_MAX, ssl=tls
            )
        except OSError as error:
            raise errors.Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                hint="name another port, or 0 for a free one",
            ) from error
        self.scheme = "https" if tls else "http"
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > CONNECTIONS_MAX:
                self.refused += 1
            else:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        writer.write(await self._answer(reader, writer))
                        await writer.drain()
        except asyncio.CancelledError:  # by `close`: the stream protocol would report it as a fault
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _encode(text("request too large\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        parsed = parse_request(head, str(writer.get_extra_info("peername", ("",))[0]))
        if isinstance(parsed, Response):
            return _encode(parsed)
        method, request = parsed
        handler = self._routes.get(request.path)
        if handler is None:
            known = " ".join(sorted(self._routes))
            return _encode(text(f"nothing at {request.path}; there is: {known}\n", 404))
        try:
            answer = handler(request)
            response = answer if isinstance(answer, Response) else await answer
        except errors.MusterError as error:
            response = text(f"{error.message}\n", 400 if isinstance(error, errors.InvalidInput) else 503)
        except Exception:  # a bug in a page must not look like a dead process
            log.exception("the page %s failed", request.path)
            response = text("this page has a fault; the log says more\n", 500)
        return _encode(response, head_only=method == "HEAD")


async def serve(
    routes: Mapping[str, Handler],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Answer GET and HEAD at these exact paths. ``port`` 0 takes a free one; `Server.port` tells which."""
    server = Server(routes)
    await server._listen(host, port, tls)
    return server


async def get(
    url: str,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
) -> Response:
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
) -> Response:
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
) -> Response:
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
            lines = [f"{method} {target} HTTP/1.0", *(f"{name}: {one}" for name, one in fields.items())]
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


def parse_request(head: bytes, peer: str) -> tuple[str, Request] | Response:
    """The method and the request, or the refusal to send."""
    try:
        first, *rest = head.decode("ascii").split("\r\n")
        method, target, version = first.split(" ")
        if not version.startswith("HTTP/1.") or not target.startswith("/"):
            raise ValueError(first)
        parts = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
    except ValueError:  # UnicodeDecodeError is one
        return text("not an HTTP request\n", HTTPStatus.BAD_REQUEST)
    if method not in ("GET", "HEAD"):
        return Response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET, HEAD"})
    return method, Request(urllib.parse.unquote(parts.path), query, _headers(rest), peer)


async def _read_response(reader: asyncio.StreamReader, body_bytes_max: int) -> Response:
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
    return Response(int(status), body, headers.get("content-type", ""), headers)


def _check_size(length: int, body_bytes_max: int) -> None:
    if length > body_bytes_max:
        raise errors.LimitExceeded(f"the answer is longer than {body_bytes_max} bytes")


def _headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _encode(response: Response, *, head_only: bool = False) -> bytes:
    fields = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **response.headers,
    }
    lines = [f"HTTP/1.0 {int(response.status)} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (b"" if head_only else response.body)
