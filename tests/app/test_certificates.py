from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from muster.app import certificates, domain
from muster.core import errors
from muster.trust.permissions import roles


def served(port: int, bundle: Path) -> int:
    """The serial number of the certificate that a broker shows to its clients."""
    context = ssl.create_default_context(cafile=str(bundle))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        plain.recv(4096)  # the broker's greeting comes before TLS
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


async def test_a_certificate_that_is_due_is_renewed_and_served_without_a_restart(made):
    settings = made(bus__tls="on", trust__certificate_lifetime_s=3600)
    async with domain.Domain(settings) as running, await running.connect("a", roles.Role.USER) as bus:
        keeper = running.component(certificates.CertificateRenewer)
        bundle = certificates.bundle(settings)
        port = int(running.servers[0].rpartition(":")[2])
        (described,) = (await running.status())["brokers"]
        before = await asyncio.to_thread(served, port, bundle)
        certificates_file = certificates.broker_tls(settings).cert_file
        await asyncio.to_thread(certificates_file.unlink)  # as if it were due
        await keeper.check()
        assert await asyncio.to_thread(served, port, bundle) != before
        (now,) = (await running.status())["brokers"]
        assert now["pid"] == described["pid"]
        assert now["restarts"] == 0
        await bus.flush()


async def test_a_renewal_is_read_by_the_brokers_in_the_end(made, monkeypatch):
    settings = made(bus__tls="on")
    async with domain.Domain(settings) as running:
        keeper = running.component(certificates.CertificateRenewer)
        port, bundle = int(running.servers[0].rpartition(":")[2]), certificates.bundle(settings)
        before = await asyncio.to_thread(served, port, bundle)
        await asyncio.to_thread(certificates.broker_tls(settings).cert_file.unlink)
        reload = keeper._reload
        failed: list[bool] = []

        async def fails_once() -> None:
            if not failed:
                failed.append(True)
                raise errors.NotConnected("a broker does not run")
            await reload()

        monkeypatch.setattr(keeper, "_reload", fails_once)
        with pytest.raises(errors.NotConnected):
            await keeper.check()
        await keeper.check()
        assert await asyncio.to_thread(served, port, bundle) != before
