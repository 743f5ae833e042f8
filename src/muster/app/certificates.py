"""The certificates of a domain's brokers: made before the first start, renewed in time, without a restart."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus.brokers import config
from muster.bus.locator import server
from muster.core import errors
from muster.core.settings import domain
from muster.trust import certificates

PERIOD_S = 3600.0
NAME = "brokers"  # one certificate serves all brokers of this machine


def folder(settings: domain.BaseSettings) -> Path:
    return settings.domain.folder / "certs"


def ensure_authority(settings: domain.BaseSettings) -> None:
    """Make the domain's certificate authority if it has none. Blocks."""
    if not (folder(settings) / "ca.pem").exists():
        certificates.CertificateStore.create(
            folder(settings), settings.domain.name, lifetime_s=settings.trust.ca_lifetime_s
        )


def ensure(settings: domain.BaseSettings) -> bool:
    """Make or renew the authority and the brokers' certificate; whether that changed. Blocks."""
    ensure_authority(settings)
    held = _open(settings)
    if held.authority_status(renew_at=settings.trust.renew_at).due:
        held.rotate(lifetime_s=settings.trust.ca_lifetime_s)
    return held.ensure(
        NAME,
        hosts(settings.bus.host),
        lifetime_s=settings.trust.certificate_lifetime_s,
        renew_at=settings.trust.renew_at,
    )


def hosts(listening_on: str) -> list[str]:
    """The names and addresses under which brokers that listen there may be reached."""
    named = [listening_on]
    if listening_on in server.EVERYWHERE:
        named = [socket.gethostname(), *_addresses(socket.gethostname())]
    return list(dict.fromkeys([*named, "localhost", "127.0.0.1", "::1"]))


def _addresses(name: str) -> list[str]:
    """Those that other machines may use."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return []
    parsed = sorted(map(ipaddress.ip_address, (one for one in found if "%" not in one)), key=str)
    return [str(one) for one in parsed if not one.is_loopback]


def broker_tls(settings: domain.BaseSettings) -> config.BrokerTls:
    pair = _open(settings).pair(NAME)
    return config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=pair.bundle)


def bundle(settings: domain.BaseSettings) -> Path:
    """What clients verify brokers against."""
    return _open(settings).bundle


def client_tls(settings: domain.BaseSettings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(bundle(settings)))


def report(settings: domain.BaseSettings) -> list[certificates.CertificateStatus]:
    """How long each still lives. Blocks."""
    return _open(settings).report(renew_at=settings.trust.renew_at)


def _open(settings: domain.BaseSettings) -> certificates.CertificateStore:
    return certificates.CertificateStore(folder(settings), settings.domain.name)


class CertificateRenewer:
    """The part that renews them, has the brokers read them again, and warns in time."""

    name = "certificates"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, reload: Callable[[], Awaitable[None]], *, period_s: float = PERIOD_S) -> None:
        self._reload = reload
        self._period_s = period_s
        self._context: context_.ComponentContext
        self._unread = False  # whether some broker may not have read the present certificate
        self._report: list[certificates.CertificateStatus] = []

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        await self.look()
        context.spawn(self._look_always())

    async def stop(self) -> None:
        """Nothing to end but the task, which the domain ends."""

    def health(self) -> component.ComponentHealth:
        rows = [
            {"name": one.name, "days_left": round(one.days_left, 1), "due": one.due} for one in self._report
        ]
        warned = [one for one in self._report if one.warning_days is not None]
        reason = ", ".join(f"{one.name} ends in {max(0.0, one.days_left):.1f} days" for one in warned)
        return component.ComponentHealth(reason=reason, facts={"certificates": rows})

    async def look(self) -> None:
        """Once, now."""
        context = self._context
        self._unread |= await asyncio.to_thread(ensure, context.settings)
        if self._unread:
            await self._reload()
            self._unread = False
            context.log.info("certificate-renewed")
        self._report = await asyncio.to_thread(report, context.settings)
        gauge = context.metrics.gauge(
            "certificate_remaining_seconds", "How long each certificate still lives.", ("name",)
        )
        for one in self._report:
            gauge.set(one.days_left * certificates.DAY_S, name=one.name)
            if one.warning_days is not None:
                context.log.warning("certificate-ends-soon", name=one.name, days_left=one.days_left)

    async def _look_always(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.look()
            except errors.MusterError as error:
                self._context.log.error("certificates-not-renewed", error=error)
