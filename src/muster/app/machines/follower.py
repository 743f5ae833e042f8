"""Keeps a machine that joined up to date: identities, revocations, the other machines, its certificate.

It asks the machine that signs accounts every second. While that does not reply, the last known state stays in
use; brokers refuse revoked credentials in any case, because they receive revocations themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from muster.app import certificates, identities
from muster.app.components import bootstrap_client, component
from muster.app.components import context as context_
from muster.app.machines import membership, roles
from muster.core import errors
from muster.trust import certificates as certificates_
from muster.trust import machine_keys

PERIOD_S = 1.0
TIMEOUT_S = 5.0
LOST_S = 15.0  # without a reply


class MachineFollower:
    name = "machines"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(
        self,
        machines: membership.MachineList,
        changed: Callable[[membership.MachineList], Awaitable[None]],
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        """``changed`` is called with the first list, and repeated with each that differs until it succeeds;
        ``reload`` when there is a new certificate."""
        self._machines = machines
        self._followed: membership.MachineList | None = None
        self._changed = changed
        self._reload = reload
        self._after = -1
        self._heard_at_s = 0.0
        self._context: context_.ComponentContext

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        self._passwords = context.trust.passwords()
        self._heard_at_s = asyncio.get_running_loop().time()
        context.tasks.loop("machines", self._follow)

    async def stop(self) -> None:
        """The domain ends the task."""

    def health(self) -> component.ComponentHealth:
        age_s = asyncio.get_running_loop().time() - self._heard_at_s
        facts = {"machines": self._machines.machines}
        if age_s < LOST_S:
            return component.ComponentHealth(reason=self._machines.unreplicated(), facts=facts)
        return component.ComponentHealth(
            reason=f"the machine that signs accounts has not replied for {age_s:.0f} s: new identities are "
            "unknown here",
            facts=facts,
        )

    async def _follow(self) -> None:
        client = bootstrap_client.BootstrapClient(self._context.bus, timeout_s=TIMEOUT_S)
        while True:
            with contextlib.suppress(errors.Unavailable):
                while await self._update(client):
                    pass
                self._heard_at_s = asyncio.get_running_loop().time()
            await asyncio.sleep(PERIOD_S)

    async def _update(self, client: bootstrap_client.BootstrapClient) -> bool:
        """Whether there may be more."""
        settings = self._context.settings
        key = await asyncio.to_thread(self._due_key)
        certificate_key = "" if key is None else key.public
        has_gateway = roles.MachineRole.GATEWAY in self._machines.here.roles
        logins = await asyncio.to_thread(self._passwords.digest) if has_gateway else ""
        signs = certificate_key or logins
        page = await client.directory(
            self._machines.own,
            self._after,
            certificate_key=certificate_key,
            proof=await asyncio.to_thread(self._sign, certificate_key, logins) if signs else "",
            report=self._context.report,
            logins=logins,
        )
        if page.logins is not None:
            await asyncio.to_thread(self._passwords.adopt, page.logins)
        await asyncio.to_thread(
            machine_keys.adopt, settings.keys_folder, settings.domain.name, page.documents
        )
        store = certificates.open_store(settings)
        await asyncio.to_thread(store.adopt_bundle, page.bundle)
        if key is not None and page.certificate:
            await asyncio.to_thread(store.adopt, certificates.NAME, key, page.certificate)
            await self._reload()
            self._context.log.info("certificate-renewed")
        if page.machines != self._followed:
            await asyncio.to_thread(membership.store, settings.domain.folder, page.machines)
            self._machines = page.machines
            await self._changed(page.machines)
            self._followed = page.machines
        is_more, self._after = page.documents.after != self._after, page.documents.after
        return is_more

    def _sign(self, *words: str) -> str:
        """Blocks."""
        own = self._context.trust.credentials(identities.SELF)
        return machine_keys.signed(own.seed, bootstrap_client.DIRECTORY, self._machines.own, *words)

    def _due_key(self) -> certificates_.CertificateKey | None:
        """A key for a new certificate, if the present one is due. Blocks."""
        settings = self._context.settings
        here = self._machines.here
        if not here.broker and roles.MachineRole.GATEWAY not in here.roles:
            return None
        store = certificates.open_store(settings)
        if not store.is_due(certificates.NAME, renew_at=settings.trust.renew_at):
            return None
        return certificates_.CertificateKey()
