"""The certificates of a domain's brokers: created before the first start, renewed in time without a
restart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from muster.app.brokers import addresses
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.machines import membership
from muster.bus.brokers import config
from muster.core import errors, units
from muster.core.settings import domain
from muster.trust import certificates

PERIOD_S = 3600.0
NAME = "brokers"  # one certificate for all brokers of this machine


def folder(settings: domain.BaseSettings) -> Path:
    return settings.domain.folder / "certs"


def ensure_authority(settings: domain.BaseSettings) -> None:
    """Create the domain's certificate authority if it does not exist. Blocks."""
    if not (folder(settings) / "ca.pem").exists():
        certificates.CertificateStore.create(
            folder(settings), settings.domain.name, lifetime_s=settings.trust.ca_lifetime_s
        )


def ensure(settings: domain.BaseSettings) -> bool:
    """Create or renew the authority and the brokers' certificate; returns whether they changed. On a machine
    that joined, the authority is elsewhere (`muster.app.machines.follower`). Blocks."""
    if membership.is_joined(settings.domain.folder):
        return False
    ensure_authority(settings)
    held = open_store(settings)
    if held.authority_status(renew_at=settings.trust.renew_at).due:
        held.rotate(lifetime_s=settings.trust.ca_lifetime_s)
    return held.ensure(
        NAME,
        addresses.certified(settings.bus),
        lifetime_s=settings.trust.certificate_lifetime_s,
        renew_at=settings.trust.renew_at,
    )


def broker_tls(settings: domain.BaseSettings) -> config.BrokerTls:
    pair = open_store(settings).pair(NAME)
    return config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=pair.bundle)


def bundle(settings: domain.BaseSettings) -> Path:
    """The certificates with which clients verify brokers."""
    return open_store(settings).bundle


def ca_file(settings: domain.BaseSettings) -> str:
    """The bundle; empty if the brokers use no certificates of the domain. Blocks."""
    own = not settings.bus.servers and settings.bus.uses_tls
    return str(bundle(settings)) if own or membership.is_joined(settings.domain.folder) else ""


def pin(settings: domain.BaseSettings) -> str:
    """The fingerprint of the brokers' certificate. Blocks."""
    return certificates.pin(open_store(settings).pair(NAME).path.read_bytes())


def client_tls(settings: domain.BaseSettings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(bundle(settings)))


def report(settings: domain.BaseSettings) -> list[certificates.CertificateStatus]:
    """The remaining lifetime of each certificate. Blocks."""
    return open_store(settings).report(renew_at=settings.trust.renew_at)


def warning(report: list[certificates.CertificateStatus]) -> str:
    """Which certificates expire soon; empty if none does."""
    left_s = {
        status.name: max(0.0, status.days_left) * certificates.DAY_S
        for status in report
        if status.warning_days is not None
    }
    return ", ".join(f"{name} expires in {units.rounded_duration(left)}" for name, left in left_s.items())


def open_store(settings: domain.BaseSettings) -> certificates.CertificateStore:
    return certificates.CertificateStore(folder(settings), settings.domain.name)


class CertificateRenewer:
    """The component that renews certificates, reloads the brokers, and warns before the expiry."""

    name = "certificates"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, reload: Callable[[], Awaitable[None]], *, period_s: float = PERIOD_S) -> None:
        self._reload = reload
        self._period_s = period_s
        self._context: context_.ComponentContext
        self._unread = False  # whether a broker may still use the previous certificate
        self._report: list[certificates.CertificateStatus] = []

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        await self.check()
        context.tasks.loop("check", self._check_forever)

    async def stop(self) -> None:
        """The domain ends the task."""

    def health(self) -> component.ComponentHealth:
        rows = [
            {"name": certificate.name, "days_left": round(certificate.days_left, 1), "due": certificate.due}
            for certificate in self._report
        ]
        return component.ComponentHealth(reason=warning(self._report), facts={"certificates": rows})

    async def check(self) -> None:
        """Check and renew once."""
        context = self._context
        self._unread |= await asyncio.to_thread(ensure, context.settings)
        if self._unread:
            await self._reload()
            self._unread = False
            context.log.info("certificate-renewed")
        self._report = await asyncio.to_thread(report, context.settings)
        gauge = context.metrics.gauge(
            "certificate_remaining_seconds", "Remaining lifetime of each certificate.", ("name",)
        )
        for certificate in self._report:
            gauge.set(certificate.days_left * certificates.DAY_S, name=certificate.name)
            if certificate.warning_days is not None:
                context.log.warning(
                    "certificate-expires-soon", name=certificate.name, days_left=certificate.days_left
                )

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.check()
            except errors.MusterError as error:
                self._context.log.error("certificates-not-renewed", error=error)
