"""The SOAP endpoints as a component.

Clients log in with a name and password of the domain; each has its own bus connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from muster.app.components import component, supervised
from muster.app.components import context as context_
from muster.app.gateways import caller_connections
from muster.app.operations import audit
from muster.app.supervisor import endpoints
from muster.core import errors
from muster.core.telemetry import metrics
from muster.gateways.soap import asgi, settings
from muster.gateways.uddi import endpoints as uddi_endpoints
from muster.gateways.uddi import registry
from muster.gateways.wscontext import handler
from muster.gateways.wsman import endpoint as wsman_endpoint
from muster.inform import activities
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.trust.login import password_checker, passwords


class SoapGateways:
    """All SOAP endpoints on one bus: ``application`` to mount or serve, `close` at the end."""

    def __init__(
        self,
        connect: caller_connections.Connect,
        known: passwords.PasswordStore,
        *,
        callbacks: Sequence[str] = (),
        measure: metrics.Metrics,
        on_failure: password_checker.OnFailure | None = None,
        forwarded_header: str = "",
    ) -> None:
        self._connections = caller_connections.CallerConnections(connect)
        self._logins = password_checker.PasswordChecker(known, on_failure=on_failure)
        self._wsman = wsman_endpoint.WsManEndpoint(
            self._fleet, callbacks=callbacks, is_current=self._logins.stands, measure=measure
        )
        self._context = handler.WsContextHandler(self._activities, callbacks=callbacks, measure=measure)
        self._uddi = uddi_endpoints.UddiEndpoints(
            registry.UddiRegistry(self._connections.connect),
            self._logins.check,
            is_current=self._logins.stands,
            measure=measure,
        )
        self.application = asgi.SoapApplication(
            {
                "/wsman": self._wsman.soap_endpoint(self._logins.check),
                **self._context.endpoints(self._logins.check),
                **self._uddi.endpoints(),
            },
            forwarded_header=forwarded_header,
        )

    async def close(self) -> None:
        await self._wsman.close()
        await self._connections.close()

    @contextlib.asynccontextmanager
    async def _fleet(self, caller: passwords.PasswordLogin) -> AsyncIterator[manage_client.ManageClient]:
        async with self._connections.connect(caller.name, caller.role) as bus:
            yield manage_client.ManageClient(bus)

    @contextlib.asynccontextmanager
    async def _activities(self, caller: passwords.PasswordLogin) -> AsyncIterator[activities.Activities]:
        async with self._connections.connect(caller.name, caller.role) as bus:
            yield activities.Activities(inform_client.InformClient(bus), time.time_ns)


class SoapComponent:
    """The server itself, in any process."""

    name = "soap"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, soap_settings: settings.SoapSettings) -> None:
        self._settings = soap_settings
        self._stack = contextlib.AsyncExitStack()
        self._listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return "" if self._listener is None else endpoint(self._settings).url(self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        check(self._settings)
        from muster.gateways.soap import server

        self._listener = await asyncio.to_thread(context.listen, endpoint(self._settings))
        self._stack.callback(self._listener.close)
        failed = await self._stack.enter_async_context(audit.FailedLogins(context.folder.root, self.name))
        opened = SoapGateways(
            context.access.connect_login,
            context.trust.passwords(),
            callbacks=self._settings.callbacks,
            measure=context.metrics,
            on_failure=failed,
            forwarded_header=self._settings.forwarded_header,
        )
        self._stack.push_async_callback(opened.close)
        await self._stack.enter_async_context(
            server.SoapServer(
                opened.application,
                listener=self._listener,
                certificate=self._settings.certificate or None,
                key=self._settings.key or None,
                behind_proxy=bool(self._settings.forwarded_header),
            )
        )

    async def stop(self) -> None:
        await self._stack.aclose()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth(facts=facts_of(self.url))


def supervised_soap(soap_settings: settings.SoapSettings) -> supervised.SupervisedComponent:
    """With the domain: a process of its own."""
    return supervised.SupervisedComponent(
        supervised.Supervision(
            "soap",
            check=lambda: check(soap_settings),
            endpoint=endpoint(soap_settings),
            facts=facts_of,
        )
    )


def check(soap_settings: settings.SoapSettings) -> None:
    """Raises `errors.Refused` if passwords would be sent unencrypted, or an error if a package is missing."""
    if importlib.util.find_spec("uvicorn") is None:
        raise errors.MissingDependency(
            "the SOAP endpoints need uvicorn, which is not installed",
            hint="pip install 'muster-fabric[soap]'",
        )
    endpoints.require_encryption(soap_settings.host, soap_settings.certificate, "soap.certificate")


def endpoint(soap_settings: settings.SoapSettings) -> endpoints.Endpoint:
    scheme = "https" if soap_settings.certificate else "http"
    return endpoints.Endpoint(scheme, soap_settings.host, soap_settings.port)


def facts_of(url: str) -> dict[str, Any]:
    return {"soap": [{"endpoint": path, "url": f"{url}{path}"} for path in PATHS]}


PATHS = ("/wsman", "/context", "/contextmanager", "/uddi")
