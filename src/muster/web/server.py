"""The ASGI application of the REST API and the pages, and its server."""

from __future__ import annotations

import asyncio
import functools
import socket
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import muster
from muster.bus.http import asgi_server
from muster.core import errors
from muster.core.net import tls
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import certificates, keyring
from muster.web import actions, guard, problems, request_state, settings
from muster.web.auth import logins
from muster.web.data import connections, read_model
from muster.web.pages import routes
from muster.web.rest import (
    access,
    activity,
    alerts,
    base,
    charts,
    contexts,
    event_stream,
    find,
    notifications,
    queues,
    reports,
    resources,
)

API = request_state.API
ROUTERS = (
    charts,
    reports,
    resources,
    alerts,
    contexts,
    notifications,
    queues,
    activity,
    access,
    event_stream,
    find,
)
STOP_S = 2
CONNECTIONS_MAX = 1000
OF_ADDRESS_MAX = 250
log_events = log.EventLog("web")


class Counted:
    """Counts requests, and responses by their status."""

    def __init__(self, app: ASGIApp, measure: metrics.Metrics) -> None:
        self._app = app
        self._requests = measure.counter("web_requests", "HTTP requests to REST and the dashboard.")
        self._responses = measure.counter("web_responses", "HTTP responses, by status.", ("status",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses.add(1, status=str(message["status"]))
            await send(message)

        self._requests.add(1)
        await self._app(scope, receive, counting)


def build(web: request_state.WebState) -> ASGIApp:
    app = rest_application()
    app.state.muster = web
    app.include_router(routes.router, include_in_schema=False)
    app.add_exception_handler(errors.MusterError, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _broken)
    settings_ = web.settings
    return guard.RequestGuard(
        app,
        names=(settings_.host, *settings_.names),
        tls=bool(settings_.cert),
        is_known=functools.partial(request_state.is_known, web),
    )


def rest_application() -> FastAPI:
    """The REST API without the pages, and its OpenAPI document."""
    app = FastAPI(
        title="Muster",
        version=muster.__version__,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    for module in ROUTERS:
        app.include_router(module.router, prefix=API)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _is_api(request: Request) -> bool:
    return request.url.path.startswith(f"{API}/") or request.url.path == API


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.MusterError)
    if not _is_api(request):
        return await routes.failed(request, error)
    return problems.response(error)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:10]]
    return await _problem(request, errors.InvalidInput("; ".join(faults)))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not _is_api(request) and error.status_code == 404:
        return await routes.failed(request, errors.NotFound(f"there is no page {request.url.path[:200]}"))
    document = {
        "type": "about:blank",
        "title": str(error.detail).lower(),
        "status": error.status_code,
        "detail": str(error.detail),
        "code": "http",
    }
    return JSONResponse(
        document, status_code=error.status_code, media_type=problems.MEDIA_TYPE, headers=error.headers
    )


async def _broken(request: Request, error: Exception) -> Response:
    log_events.error("request-failed", path=request.url.path, error=error)
    return await _problem(request, errors.InvariantViolation(f"{type(error).__name__} in this process"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        summary = (muster.__doc__ or "").partition("\n")[0]
        made = get_openapi(title=app.title, version=app.version, routes=app.routes, summary=summary)
        parts = made.setdefault("components", {})
        parts["schemas"] = {**parts.get("schemas", {}), **base.components()}
        parts["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"bearer": []}]
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # invalid input is 400, as a problem document
        app.openapi_schema = made
    return app.openapi_schema


async def serve(
    web_settings: settings.WebSettings,
    *,
    location: connections.DomainLocation,
    trust: keyring.Keyring,
    domain: str,
    folder: Path,
    history: str,
    listener: socket.socket,
    stop: asyncio.Event,
    measure: metrics.Metrics,
) -> None:
    """Serve on ``listener`` until ``stop`` is set."""
    kept = read_model.ReadModel(location, history=history, domain=domain)
    runner = actions.ActionRunner(kept.feed)

    failures = measure.counter("web_failed_logins", "Logins with a wrong name or password.")

    async def failed(name: str, address: str) -> None:
        failures.add(1)
        await runner.failed_login(name, address)

    web = request_state.WebState(
        settings=web_settings,
        source=kept,
        actions=runner,
        logins=logins.LoginService(trust.passwords(), folder, web_settings, on_failure=failed),
        trust=trust,
    )
    await web.logins.open()
    config = uvicorn.Config(
        Counted(build(web), measure),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        proxy_headers=False,  # only the header `web.forwarded_header` is trusted
        ssl_certfile=web_settings.cert or None,
        ssl_keyfile=web_settings.key or None,
        ws="none",
        http=asgi_server.AsgiProtocol,
    )
    await asyncio.to_thread(config.load)
    server = asgi_server.AsgiServer(
        config,
        connections_max=CONNECTIONS_MAX,
        of_address_max=None
        if web_settings.forwarded_header
        else OF_ADDRESS_MAX,  # behind a proxy all clients have its address
    )
    supervisor = tasks.TaskSupervisor("web")
    if config.ssl is not None:
        served = tls.RenewableTls(config.ssl, web_settings.cert, web_settings.key or None)
        supervisor.loop("certificate", functools.partial(certificates.keep_current, served))
    supervisor.loop("source", kept.feed.run)
    serving = supervisor.spawn("server", server.serve(sockets=[listener]))
    stopping = supervisor.spawn("stop", stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await web.actions.close()
        await supervisor.close()
        await kept.feed.cache.close()
