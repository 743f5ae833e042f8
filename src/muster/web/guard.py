"""Checks on every request: host name, origin, and the size and duration of its body.

Browsers attach the session cookie to requests of any page, so requests that do not come from the dashboard's
own pages are rejected before they are processed: by the host name (also a foreign name that resolves to
loopback, against DNS rebinding), and by the origin.  Programs send no origin; they need a token.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.core import errors
from muster.web import problems

BODY_MAX = 8 << 20
ANONYMOUS_BODY_MAX = 64 << 10  # without a login
BODY_S = 60.0  # in which it has to arrive
SAFE = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'; manifest-src 'self'"
)
HEADERS = {
    "cache-control": "no-store",  # what a person may see is not for the next user of a browser or proxy
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def host_name(host: str) -> str:
    """The host without the port, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        address, bracket, _ = name.partition("]")
        return address + bracket
    return name.partition(":")[0]


def is_cross_site(method: str, headers: dict[str, str]) -> str:
    """The reason why a request that changes something is cross-site; empty if it is not."""
    if method in SAFE:
        return ""
    site = headers.get("sec-fetch-site")
    if site not in (None, "same-origin", "none"):
        return f"cross-site request ({site[:40]})"
    origin = headers.get("origin")
    if origin is not None and _host_of(origin) != headers.get("host", "").lower():
        return f"cross-origin request from {origin[:100]}"
    return ""


def _host_of(origin: str) -> str | None:
    """The host and the port that an origin names; None if it is not an address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


class RequestGuard:
    """``is_known``: whether the headers prove a login. Others may send only a short body, such as a password:
    a body is stored before the application checks who sends it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Iterable[str],
        tls: bool,
        is_known: Callable[[Mapping[str, str]], Awaitable[bool]],
    ) -> None:
        self._app = app
        self._is_known = is_known
        self._names = frozenset((*LOOPBACK, *(name.lower() for name in names)))
        more = {"strict-transport-security": "max-age=31536000"} if tls else {}
        self._headers = [(name.encode(), value.encode()) for name, value in {**HEADERS, **more}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        started, refused = False, False
        body = RequestBody(receive, functools.partial(self._is_known, headers))

        async def answer(message: Message) -> None:
            nonlocal started, refused
            if body.refusal is not None and not started:
                started = refused = True  # replaces the response of the application
                await problems.response(body.refusal)(scope, receive, send)
            if refused:
                return
            if message["type"] == "http.response.start":
                started = True
                present = {name for name, _ in message.get("headers", ())}
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, value) for name, value in self._headers if name not in present),
                ]
            await send(message)

        try:
            self._check(scope, headers)
            await body.check(int(headers.get("content-length", "0")))
            await self._app(scope, body.read, answer)
        except errors.MusterError as error:
            if refused:
                return
            if started:
                raise
            await problems.response(error)(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if host_name(headers.get("host", "")) not in self._names:
            raise errors.InvalidInput(
                f"the host name {headers.get('host', '')[:100]!r} is not served",
                hint="add the name to the setting web.names",
            )
        why = is_cross_site(scope["method"], headers)
        if why:
            raise errors.Forbidden(f"the request was refused: {why}")
        if not headers.get("content-length", "0").isdecimal():
            raise errors.InvalidInput("the Content-Length is not a number")


class RequestBody:
    """Reads a body within limits of size and time; ``refusal``: the one that was exceeded."""

    def __init__(self, receive: Receive, is_known: Callable[[], Awaitable[bool]]) -> None:
        self._receive = receive
        self._is_known = is_known
        self._max = ANONYMOUS_BODY_MAX
        self._taken = 0
        self._until_s: float | None = asyncio.get_running_loop().time() + BODY_S  # None: it is complete
        self.refusal: errors.MusterError | None = None

    async def check(self, size: int) -> None:
        """`errors.LimitExceeded` or `errors.Unauthorized` if the client may not send so much."""
        if size > BODY_MAX:
            raise errors.LimitExceeded(f"a request of more than {BODY_MAX} bytes")
        if size > self._max:
            if not await self._is_known():
                raise errors.Unauthorized(
                    f"a request of more than {ANONYMOUS_BODY_MAX} bytes requires authentication",
                    hint="log in, or send a bearer token",
                )
            self._max = BODY_MAX

    async def read(self) -> Message:
        if self._until_s is None:
            return await self._receive()  # waits until the client disconnects
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
            self._taken += len(message.get("body", b""))
            await self.check(self._taken)
        except TimeoutError:
            self.refusal = errors.InvalidInput(f"the request did not arrive within {BODY_S:g} s")
            raise self.refusal from None
        except errors.MusterError as error:
            self.refusal = error
            raise
        if not message.get("more_body"):
            self._until_s = None
        return message
