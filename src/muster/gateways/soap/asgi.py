"""SOAP endpoints as an ASGI application, mounted in a web application or served alone.

The client is authenticated before its message is read.  Every read is bounded in bytes and time, the number
of concurrent requests is bounded in total and for each client, and clients without a login have a budget.

In Starlette or FastAPI: ``for path in app.paths: router.routes.append(Route(path, app))`` (a ``Mount`` would
redirect ``/wsman`` to ``/wsman/``, which SOAP clients do not follow).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from muster.bus.http import server
from muster.core import errors
from muster.core.net import hosts
from muster.gateways.soap import client_budget, endpoint

BODY_TIMEOUT_S = 20.0
CONCURRENT_MAX = 128

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SoapApplication:
    """``forwarded_header``: the header in which a proxy states the client's address; empty: there is no
    proxy.
    """

    def __init__(
        self,
        endpoints: Mapping[str, endpoint.SoapEndpoint],
        *,
        concurrent_max: int = CONCURRENT_MAX,
        forwarded_header: str = "",
        budgets: client_budget.ClientBudgets | None = None,
    ) -> None:
        """``endpoints`` by path, such as ``/wsman``."""
        self._endpoints = dict(endpoints)
        self._concurrent_max = concurrent_max
        self._forwarded_header = forwarded_header.lower()
        self._budgets = budgets or client_budget.ClientBudgets()
        self._running = 0

    @property
    def paths(self) -> Sequence[str]:
        return list(self._endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise errors.InvalidInput(f"this application supports only http, not {scope['type']}")
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        address = (scope.get("client") or ("-",))[0]
        if self._forwarded_header:
            address = hosts.forwarded_for(address, headers.get(self._forwarded_header, ""))
        if self._running >= self._concurrent_max:
            full = errors.Overloaded("too many requests at once", retry_after_s=1.0)
            await _respond(send, endpoint.busy(full))
            return
        try:
            with self._budgets.request(address):
                self._running += 1
                try:
                    response = await self._response(scope, headers, address, receive)
                finally:
                    self._running -= 1
        except errors.Overloaded as error:
            response = endpoint.busy(error, HTTPStatus.TOO_MANY_REQUESTS)
        await _respond(send, response, head_only=scope["method"] == "HEAD")

    async def _response(
        self, scope: Scope, headers: Mapping[str, str], address: str, receive: Receive
    ) -> server.HttpResponse:
        path = scope["path"].rstrip("/")
        inside = path.removeprefix(scope.get("root_path", ""))  # if it is mounted below another path
        target = self._endpoints.get(path) or self._endpoints.get(inside)
        if target is None:
            there = " ".join(self._endpoints)
            return server.HttpResponse(
                HTTPStatus.NOT_FOUND, f"no endpoint at this path; the endpoints are: {there}\n".encode()
            )
        request = endpoint.SoapHttpRequest(
            scope["method"],
            path,
            scope.get("query_string", b"").decode("latin-1"),
            headers,
            location=_location(scope, headers),
            address=address,
        )
        admitted = await target.admit(request)
        if isinstance(admitted, server.HttpResponse):
            return admitted
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._body(receive, target, admitted)
        except TimeoutError:
            return server.HttpResponse(HTTPStatus.REQUEST_TIMEOUT, b"timeout while reading the message\n")
        if body is None:
            return target.too_large(headers, admitted)
        if admitted.is_anonymous:
            self._budgets.spend(address, len(body))
        return await target.process(dataclasses.replace(request, body=body), admitted)

    async def _body(
        self, receive: Receive, target: endpoint.SoapEndpoint, admitted: endpoint.AdmittedRequest
    ) -> bytes | None:
        """None if it is longer than the client may send; the rest is discarded."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            body += message.get("body", b"")
            if len(body) > admitted.limits.bytes and not await target.admit_large(bytes(body), admitted):
                return None
            if not message.get("more_body"):
                return bytes(body)


def _location(scope: Scope, headers: Mapping[str, str]) -> str:
    host = headers.get("host", "")
    if not host:
        name, port = scope.get("server") or ("127.0.0.1", None)
        host = f"{name}:{port}" if port else str(name)
    return f"{scope.get('scheme', 'http')}://{host}{scope['path']}"


async def _respond(send: Send, response: server.HttpResponse, *, head_only: bool = False) -> None:
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
