"""The domain's locator as a component: it selects brokers for clients (`muster.bus.locator.server`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from muster.app import certificates, identities
from muster.app.components import component
from muster.app.components import context as context_
from muster.bus.brokers import system_account
from muster.bus.locator import server
from muster.core.net import tls as tls_
from muster.trust import certificates as certificates_


class LocatorComponent:
    name = "locator"
    depends_on: Sequence[str] = ()
    vital = False  # clients with a broker's address need no locator

    def __init__(
        self, servers: Callable[[], Sequence[str]], gateways: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._servers = servers
        self._gateways = gateways
        self._locator: server.Locator | None = None

    @property
    def url(self) -> str | None:
        return None if self._locator is None else self._locator.url

    async def start(self, context: context_.ComponentContext) -> None:
        settings = context.settings
        creds = await asyncio.to_thread(identities.system_credentials, context.trust)
        brokers_tls = certificates.broker_tls(settings) if settings.bus.uses_tls else None
        tls = None
        if brokers_tls is not None:
            files = brokers_tls.cert_file, brokers_tls.key_file
            tls = await asyncio.to_thread(tls_.for_server, *files)
            served = tls_.RenewableTls(tls, *files)
            context.tasks.loop("certificate", functools.partial(certificates_.keep_current, served))
        made = server.Locator(
            self._servers(),
            access=system_account.SystemAccess(credentials=creds, tls=brokers_tls),
            host=settings.bus.host,
            port=settings.bus.locator_port,
            tls=tls,
            later=self._servers,
            gateways=self._gateways,
        )
        await made.start()
        self._locator = made

    async def stop(self) -> None:
        if self._locator is not None:
            await self._locator.stop()
            self._locator = None

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()
