"""Checks on every request: host name, origin and size.

Browsers attach the session cookie to requests of any page, so requests that do not come from the dashboard's
own pages are rejected before they are processed: by the host name (also a foreign name that resolves to
loopback, against DNS rebinding), and by the origin.  Programs send no origin; they need a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.core import errors
from muster.web import problems

BODY_MAX = 8 << 20
SAFE = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'; manifest-src 'self'"
)
HEADERS = {
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
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def is_cross_site(method: str, headers: dict[str, str]) -> str:
    """The reason why a request that changes something is cross-site; empty if it is not."""
    if method in SAFE:
        return ""
    site = headers.get("sec-fetch-site")
    if site not in (None, "same-origin", "none"):
        return f"cross-site request ({site[:40]})"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        return f"cross-origin request from {origin[:100]}"
    return ""


class RequestGuard:
    def __init__(self, app: ASGIApp, *, names: Iterable[str], tls: bool) -> None:
        self._app = app
        self._names = frozenset((*LOOPBACK, *(name.lower() for name in names)))
        more = {"strict-transport-security": "max-age=31536000"} if tls else {}
        self._headers = [(name.encode(), value.encode()) for name, value in {**HEADERS, **more}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        started, refused, taken = False, False, 0
        too_large = errors.LimitExceeded(f"a request of more than {BODY_MAX} bytes")

        async def answer(message: Message) -> None:
            nonlocal started, refused
            if taken > BODY_MAX and not started:
                started = refused = True  # replaces the response of the application
                await _refuse(too_large, send)
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

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > BODY_MAX:
                raise too_large
            return message

        try:
            self._check(scope, headers)
            await self._app(scope, bounded, answer)
        except errors.MusterError as error:
            if refused:
                return
            if started:
                raise
            await _refuse(error, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        if host_name(headers.get("host", "")) not in self._names:
            raise errors.InvalidInput(
                f"the host name {headers.get('host', '')[:100]!r} is not served",
                hint="add the name to the setting web.names",
            )
        why = is_cross_site(scope["method"], headers)
        if why:
            raise errors.Forbidden(f"the request was refused: {why}")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > BODY_MAX:
            raise errors.LimitExceeded(f"a request of more than {BODY_MAX} bytes")


async def _refuse(error: errors.MusterError, send: Any) -> None:
    body = json.dumps(problems.document(error)).encode()
    await send(
        {
            "type": "http.response.start",
            "status": problems.status_of(error),
            "headers": [
                (b"content-type", problems.MEDIA_TYPE.encode()),
                (b"content-length", str(len(body)).encode()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})
