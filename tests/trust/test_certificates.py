import asyncio
import contextlib
import json
import pathlib
import ssl
import stat
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.trust import certificates
from tests.trust import servers

DAY_S = certificates.DAY_S
HOSTS = ["127.0.0.1", "::1", "localhost"]


class CertificateClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return CertificateClock(1_800_000_000.0)


@pytest.fixture
def made(tmp_path, clock):
    return certificates.CertificateStore.create(
        tmp_path / "tls", "north", lifetime_s=3650 * DAY_S, clock=clock
    )


def serial(path: pathlib.Path) -> int:
    return x509.load_pem_x509_certificates(path.read_bytes())[0].serial_number


def test_a_certificate_names_its_hosts(made, clock):
    assert made.ensure("broker-1", [*HOSTS, "broker.example"])
    path = made.pair("broker-1").path
    leaf = x509.load_pem_x509_certificates(path.read_bytes())[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(map(str, names.get_values_for_type(x509.IPAddress))) == {"127.0.0.1", "::1"}
    assert set(names.get_values_for_type(x509.DNSName)) == {"localhost", "broker.example"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.bundle.stat().st_mode) == 0o644
    assert b"PRIVATE" not in made.bundle.read_bytes()


def test_renewal_is_when_a_third_of_its_life_is_left(made, clock):
    made.ensure("b", HOSTS, lifetime_s=90 * DAY_S)
    path = made.pair("b").path
    first = serial(path)
    clock.now += 59 * DAY_S
    assert not made.ensure("b", HOSTS, lifetime_s=90 * DAY_S)
    assert serial(path) == first
    clock.now += 2 * DAY_S
    assert made.ensure("b", HOSTS, lifetime_s=90 * DAY_S)
    assert serial(path) != first
    assert not made.ensure("b", HOSTS)
    assert made.ensure("b", [*HOSTS, "new.example"])  # other hosts: another certificate


@pytest.mark.parametrize(
    ("days_passed", "warning"),
    [(0, None), (59, None), (60.5, 30), (82, 30), (83.5, 7), (89.5, 1), (90, 0), (500, 0)],
)
def test_warnings_at_30_7_and_1_days(made, clock, days_passed, warning):
    made.ensure("b", HOSTS, lifetime_s=90 * DAY_S)
    clock.now += days_passed * DAY_S
    state = {each.name: each for each in made.report()}["b"]
    assert state.warning_days == warning
    assert state.days_left == pytest.approx(90 - days_passed, abs=0.01)
    assert state.due == (days_passed > 60)


def test_a_certificate_does_not_outlive_its_authority(made, clock):
    clock.now += 3640 * DAY_S
    made.ensure("b", HOSTS)
    states = {each.name: each for each in made.report()}
    assert states["b"].expires_at == states["ca"].expires_at
    assert states["ca"].due
    clock.now += 11 * DAY_S
    with pytest.raises(errors.Refused, match="expired"):
        made.ensure("c", HOSTS)
    with pytest.raises(errors.Refused, match="expired"):
        made.ensure("b", HOSTS)


def test_an_authority_that_has_expired_is_replaced(made, clock):
    made.ensure("b", HOSTS)
    clock.now += 3651 * DAY_S
    made.rotate(lifetime_s=3650 * DAY_S)
    assert made.ensure("b", HOSTS)
    assert not any(each.due or each.warning_days is not None for each in made.report())
    (authority,) = x509.load_pem_x509_certificates(made.bundle.read_bytes())
    (held,) = x509.load_pem_x509_certificates(made.pair("b").path.read_bytes())
    held.verify_directly_issued_by(authority)


def test_what_was_made_while_the_clock_was_ahead_is_renewed(made, clock):
    clock.now += 400 * DAY_S
    made.ensure("b", HOSTS)
    clock.now -= 400 * DAY_S
    assert [each.due for each in made.report() if each.name == "b"] == [True]
    assert made.ensure("b", HOSTS)
    assert not made.ensure("b", HOSTS)


def test_an_authority_of_the_same_name_is_another_one(made, clock, tmp_path):
    made.ensure("b", HOSTS)
    (tmp_path / "tls" / "ca.pem").unlink()
    again = certificates.CertificateStore.create(
        tmp_path / "tls", "north", lifetime_s=3650 * DAY_S, clock=clock
    )
    assert again.ensure("b", HOSTS)
    assert not again.ensure("b", HOSTS)


def test_old_authorities_leave_the_bundle_when_they_expire(tmp_path, clock):
    made = certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=10 * DAY_S, clock=clock)
    for count in (2, 3, 3, 3):
        clock.now += 4 * DAY_S
        made.rotate(lifetime_s=10 * DAY_S)
        assert len(x509.load_pem_x509_certificates(made.bundle.read_bytes())) == count


@pytest.mark.parametrize("name", ["ca", "bundle", "a/b", "", "../x"])
def test_a_name_that_is_taken_or_wrong(made, name):
    with pytest.raises(errors.InvalidInput):
        made.ensure(name, HOSTS)


@pytest.mark.parametrize("host", ["", "a b", "http://x", "a@b", "x" * 300, "é" * 70, "a..b"])
def test_a_host_that_is_none(made, host):
    with pytest.raises(errors.InvalidInput):
        made.ensure("b", [host])
    with pytest.raises(errors.InvalidInput):
        made.ensure("b", [])


@given(host=st.text(max_size=80))
def test_hostile_hosts_give_only_our_error(host):
    with contextlib.suppress(errors.InvalidInput):
        certificates._host(host)


def test_a_lost_or_damaged_authority_is_named(made, tmp_path):
    with pytest.raises(errors.AlreadyExists):
        certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=DAY_S)
    (tmp_path / "tls" / "ca.pem").write_text("rubbish")
    with pytest.raises(errors.InvalidInput, match=r"ca\.pem is damaged"):
        made.ensure("b", HOSTS)
    (tmp_path / "tls" / "ca.pem").unlink()
    with pytest.raises(errors.NotFound, match=r"ca\.pem"):
        made.ensure("b", HOSTS)
    with pytest.raises(errors.NotFound):
        certificates.CertificateStore(tmp_path / "none", "north").ensure("b", HOSTS)


# -- with a broker


def tls(pair: certificates.CertificatePair) -> dict[str, Any]:
    return {"cert_file": str(pair.path), "key_file": str(pair.path), "ca_file": str(pair.bundle)}


class TlsConnection:
    """TLS over a broker's port: it sends INFO in clear text first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def serial(self) -> int:
        encoded = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(encoded).serial_number

    async def ping(self) -> bytes:
        self._writer.write(b"PING\r\n")
        while (line := await self._reader.readline()).startswith((b"INFO", b"+OK")):
            pass
        return line


@contextlib.asynccontextmanager
async def connection(server, bundle, *, own=None):
    context = ssl.create_default_context(cadata=bundle)
    if own:
        context.load_cert_chain(own.path)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["client"])
    try:
        info = json.loads((await reader.readline()).split(b" ", 1)[1])
        assert info["tls_required"]
        await writer.start_tls(context, server_hostname="127.0.0.1")
        writer.write(b'CONNECT {"verbose":false}\r\n')
        yield TlsConnection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@pytest.fixture
def current(tmp_path):
    return certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=3650 * DAY_S)


async def reload(server: servers.SignedServer) -> None:
    server.reload()
    await server.line("Reloaded server configuration")


async def test_a_renewed_certificate_is_served_after_a_reload_and_connections_stay(current, tmp_path):
    current.ensure("broker", HOSTS)
    pair = current.pair("broker")
    bundle = pair.bundle.read_text()
    async with servers.server(tmp_path, tls=tls(pair)) as server:
        async with connection(server, bundle) as early:
            assert await early.ping() == b"PONG\r\n"
            assert early.serial == serial(pair.path)
            assert current.ensure("broker", ["127.0.0.1"])
            await reload(server)
            async with connection(server, bundle) as late:
                assert await late.ping() == b"PONG\r\n"
                assert late.serial == serial(pair.path) != early.serial
            assert await early.ping() == b"PONG\r\n"  # it stayed
        stranger = certificates.CertificateStore.create(tmp_path / "other", "north", lifetime_s=DAY_S)
        with pytest.raises(ssl.SSLCertVerificationError):
            async with connection(server, stranger.bundle.read_text()):
                pass


async def test_authorities_change_without_a_common_moment(current, tmp_path):
    """Twice, and a client that knows only the first authority still finds its way."""
    current.ensure("broker", HOSTS)
    current.ensure("client", ["client.example"])
    pair = current.pair("broker")
    first = pair.bundle.read_text()
    old_client = certificates.CertificatePair(tmp_path / "old-client.pem", pair.bundle)
    old_client.path.write_bytes(current.pair("client").path.read_bytes())
    async with servers.server(tmp_path, tls=tls(pair) | {"verify": True}) as server:
        for _ in range(2):
            before = serial(pair.path)
            current.rotate(lifetime_s=3650 * DAY_S)
            assert current.ensure("broker", HOSTS)
            assert current.ensure("client", ["client.example"])
            assert serial(pair.path) != before
            await reload(server)
            for bundle in (first, pair.bundle.read_text()):
                for own in (old_client, current.pair("client")):
                    async with connection(server, bundle, own=own) as made:
                        assert await made.ping() == b"PONG\r\n"
                        assert made.serial == serial(pair.path)
