"""The SOAP endpoints as a component.

Clients log in with a name and password of the domain; each has its own bus connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Sequence
from typing import Any

from muster.app.components import component, supervised
from muster.app.components import context as context_
from muster.app.operations import audit
from muster.app.supervisor import endpoints
from muster.core import errors
from muster.gateways.soap import settings


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
        from muster.app.gateways import soap_gateways
        from muster.gateways.soap import server

        self._listener = await asyncio.to_thread(context.listen, endpoint(self._settings))
        self._stack.callback(self._listener.close)
        failed = await self._stack.enter_async_context(audit.FailedLogins(context.folder.root, self.name))
        opened = soap_gateways.SoapGateways(
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
