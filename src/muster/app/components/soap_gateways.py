"""The SOAP endpoints, and the component that runs them in a separate process.

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

import msgspec

from muster.app import caller_connections
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import module_process, server_process
from muster.core import errors, health
from muster.core.settings import domain
from muster.core.telemetry import metrics
from muster.gateways.soap import asgi, settings
from muster.gateways.uddi import endpoints, registry
from muster.gateways.wscontext import handler as wscontext_handler
from muster.gateways.wsman import endpoint as wsman_endpoint
from muster.inform import activities
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.trust.login import password_checker, passwords

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        self._context = wscontext_handler.WsContextHandler(
            self._activities, callbacks=callbacks, measure=measure
        )
        self._uddi = endpoints.UddiEndpoints(
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


def check(soap_settings: settings.SoapSettings) -> None:
    """Raises `errors.Refused` if passwords would be sent unencrypted, or an error if a package is missing."""
    if importlib.util.find_spec("uvicorn") is None:
        raise errors.MissingDependency(
            "the SOAP endpoints need uvicorn, which is not installed",
            hint="pip install 'muster-fabric[soap]'",
        )
    if not soap_settings.certificate and soap_settings.host not in LOOPBACK:
        raise errors.Refused(
            f"passwords would be sent unencrypted on {soap_settings.host}",
            hint="configure a certificate and its key",
        )


def listen(soap_settings: settings.SoapSettings) -> socket.socket:
    return server_process.listen(
        soap_settings.host, soap_settings.port, hint="choose another port, or 0 for a free one"
    )


def url_of(soap_settings: settings.SoapSettings, listener: socket.socket) -> str:
    return server_process.url("https" if soap_settings.certificate else "http", soap_settings.host, listener)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a SOAP process."""

    settings: settings.SoapSettings
    listener: int  # an open socket
    root: str  # the domain's folder
    keys: str
    health: domain.HealthSettings
    log_level: str = "info"


class SoapComponent:
    """The SOAP endpoints in a separate process."""

    name = "soap"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, all_settings: Any) -> None:
        self._all_settings = all_settings
        self._settings: settings.SoapSettings = all_settings.soap
        self._listener: socket.socket | None = None
        self._process = module_process.ModuleProcess(
            "soap", "muster.app.supervisor.soap_process", log_share=8
        )

    @property
    def url(self) -> str:
        return "" if self._listener is None else url_of(self._settings, self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        await asyncio.to_thread(check, self._settings)
        self._listener = await asyncio.to_thread(listen, self._settings)
        task = Task(
            settings=self._settings,
            listener=self._listener.fileno(),
            root=str(context.folder.root),
            keys=str(self._all_settings.keys_folder),
            health=msgspec.structs.replace(self._all_settings.health, port=0),
            log_level=self._all_settings.log.level,
        )
        self._process.start(context, config=msgspec.json.encode(task), pass_fds=(self._listener.fileno(),))

    async def stop(self) -> None:
        await self._process.stop()
        if self._listener is not None:
            self._listener.close()

    def health(self) -> component.ComponentHealth:
        if self._listener is None:
            return component.ComponentHealth(health.HealthState.STARTING)
        facts = {"soap": [{"endpoint": path, "url": f"{self.url}{path}"} for path in PATHS]}
        report = self._process.health()
        if report.state in (health.HealthState.UP, health.HealthState.STARTING):  # connections wait for it
            return component.ComponentHealth(facts=facts)
        looping = self._process.is_crash_looping
        state = health.HealthState.FAILED if looping else health.HealthState.LATE
        return component.ComponentHealth(state, report.reason, facts)


PATHS = ("/wsman", "/context", "/contextmanager", "/uddi")
