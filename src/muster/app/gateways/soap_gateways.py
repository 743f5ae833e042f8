"""All SOAP endpoints on the bus, each request with the connection of its caller."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from muster.app.gateways import caller_connections
from muster.core.telemetry import metrics
from muster.gateways.soap import asgi
from muster.gateways.uddi import endpoints, registry
from muster.gateways.wscontext import handler
from muster.gateways.wsman import endpoint
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
        self._wsman = endpoint.WsManEndpoint(
            self._fleet, callbacks=callbacks, is_current=self._logins.stands, measure=measure
        )
        self._context = handler.WsContextHandler(self._activities, callbacks=callbacks, measure=measure)
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
