"""One real broker: it starts, opens its listeners, is reconfigured while it runs, and stops."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import errno
import os
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config, diagnosis, system_account
from muster.bus.client import client
from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust import certificates, keyring
from muster.trust.permissions import roles


@pytest.fixture
def settings(tmp_path):
    return config.BrokerConfig(name="one", directory=tmp_path / "one")


async def test_starts_on_free_ports_and_stops(settings):
    states: list[str] = []
    async with broker.Broker(settings, listener=lambda value: states.append(value.state.value)) as server:
        async with await client.connect([server.url]) as bus:
            assert bus.broker == "one"
        assert int(settings.pid_path.read_text()) == server.pid
    assert states == ["starting", "running", "stopped"]
    with pytest.raises(errors.NotConnected):
        await client.connect([server.url])


@pytest.mark.parametrize(
    "name", ["a b", 'quo"te', "$HOME", "back\\slash", "{brace}", "#hash", "Grüße 北京", "it's"]
)
async def test_runs_in_a_folder_of_any_name(settings, tmp_path, name):
    async with broker.Broker(dataclasses.replace(settings, directory=tmp_path / name)) as server:
        assert (await server.monitoring_page("varz"))["jetstream"]["config"]["store_dir"] == str(
            tmp_path / name / "store" / "jetstream"
        )


async def test_a_system_secret_of_any_characters_opens_the_system_account(settings):
    secret = 'p@ss/w:rd "$x" {}#北'
    async with broker.Broker(dataclasses.replace(settings, system_secret=secret)) as server:
        access = system_account.SystemAccess(password=secret)
        (answer,) = await system_account.gather([server.address], access, "$SYS.REQ.SERVER.PING", enough=1)
        assert answer["server"]["name"] == "one"
        with pytest.raises(errors.Unauthorized):
            await system_account.gather(
                [server.address],
                system_account.SystemAccess(password="wrong"),
                "$SYS.REQ.SERVER.PING",
                enough=1,
            )


async def test_its_files_are_for_its_user_only(settings):
    async with broker.Broker(settings) as server:
        for path in (server.config.config_path, server.config.log_path, server.config.output_path):
            assert path.stat().st_mode & 0o777 == 0o600, path
        assert server.config.directory.stat().st_mode & 0o777 == 0o700


async def test_it_cannot_be_started_twice(settings):
    async with broker.Broker(settings) as server:
        with pytest.raises(errors.Conflict, match="running already"):
            await server.start()


async def test_a_broker_that_was_killed_starts_again_with_what_it_acknowledged(settings):
    server = broker.Broker(settings)
    await server.start()
    async with await client.connect([server.url]) as bus:
        stream = await bus.stream(api.StreamSettings("s", subjects=("s",)))
        await stream.publish("s", b"kept")
    await server.kill()
    async with server, await client.connect([server.url]) as bus:
        assert (await (await bus.open_stream("s")).get(1)).data == b"kept"


async def test_stopping_with_a_drain_sends_clients_away_first(settings):
    server = broker.Broker(settings)
    await server.start()
    async with await client.connect([server.url]) as bus:
        began_s = time.monotonic()
        await server.stop(drain_s=30)
        assert time.monotonic() - began_s < 25  # it ended when its only client was gone, not when time was up
        await eventually(lambda: bus.state is not api.ConnectionState.CONNECTED)
    assert "Entering lame duck mode" in server.config.log_path.read_text()


# Listeners


async def test_websocket_answers(settings):
    async with broker.Broker(dataclasses.replace(settings, websocket=config.BrokerListener())) as server:
        assert server.websocket_url
        assert server.config.websocket
        reader, writer = await asyncio.open_connection("127.0.0.1", server.config.websocket.port)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        async with asyncio.timeout(30):
            assert b" 101 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_mqtt_answers(settings):
    async with broker.Broker(dataclasses.replace(settings, mqtt=config.BrokerListener())) as server:
        assert server.config.mqtt
        reader, writer = await asyncio.open_connection("127.0.0.1", server.config.mqtt.port)
        body = b"\x00\x04MQTT\x04\x02\x00\x3c\x00\x04test"
        writer.write(bytes([0x10, len(body)]) + body)
        async with asyncio.timeout(30):
            assert await reader.readexactly(4) == b"\x20\x02\x00\x00"  # accepted
        writer.close()
        await writer.wait_closed()


# Changes while it runs


async def test_limits_change_while_it_runs_and_clients_stay(settings):
    async with broker.Broker(settings) as server, await client.connect([server.url]) as bus:
        await server.apply(dataclasses.replace(server.config, payload_bytes_max=2000))
        assert (await server.monitoring_page("varz"))["max_payload"] == 2000
        await bus.flush()
        assert bus.statistics().reconnects == 0


async def test_a_setting_that_needs_a_restart_is_refused_and_the_old_one_stays(settings):
    async with broker.Broker(settings) as server:
        text = server.config.config_path.read_text()
        with pytest.raises(diagnosis.BrokerFailed, match="rejected its new configuration") as caught:
            await server.apply(dataclasses.replace(server.config, name="two"))
        assert caught.value.fault is diagnosis.BrokerFault.RELOAD_REFUSED
        assert server.name == "one"
        assert server.config.config_path.read_text() == text
        assert (await server.health()).ok


async def test_a_change_whose_outcome_is_not_known_is_undone(settings, monkeypatch):
    async with broker.Broker(settings) as server:
        monkeypatch.setattr(broker, "RELOAD_TIMEOUT_S", 0.5)
        pages, read_page = [], server.monitoring_page

        async def deaf(page: str) -> dict[str, Any]:
            pages.append(page)
            if len(pages) > 1:
                raise errors.TimedOut("no answer")
            return await read_page(page)

        monkeypatch.setattr(server, "monitoring_page", deaf)
        with pytest.raises(errors.TimedOut):
            await server.apply(dataclasses.replace(server.config, payload_bytes_max=2000))

        async def as_before() -> bool:
            return bool((await read_page("varz"))["max_payload"] == settings.payload_bytes_max)

        assert server.config.payload_bytes_max == settings.payload_bytes_max
        await eventually(as_before)


async def test_a_monitor_that_is_slow_once_does_not_fail_a_change(settings, monkeypatch):
    async with broker.Broker(settings) as server:
        pages, read_page = [], server.monitoring_page

        async def slow(page: str) -> dict[str, Any]:
            pages.append(page)
            if len(pages) == 2:
                raise errors.TimedOut("no answer")
            return await read_page(page)

        monkeypatch.setattr(server, "monitoring_page", slow)
        await server.apply(dataclasses.replace(server.config, payload_bytes_max=2000))
        assert (await read_page("varz"))["max_payload"] == server.config.payload_bytes_max == 2000


async def test_supervision_outlives_a_lack_of_file_descriptors(settings, monkeypatch):
    async with broker.Broker(settings) as server:
        pipe = os.pipe
        failed: list[bool] = []

        def scarce() -> tuple[int, int]:
            if not failed:
                failed.append(True)
                raise OSError(errno.EMFILE, "Too many open files")
            return pipe()

        monkeypatch.setattr(os, "pipe", scarce)
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        await eventually(lambda: server.restarts == 1)
        assert (failed, server.state) == ([True], broker.BrokerState.RUNNING)


async def test_a_restart_keeps_its_ports_and_may_open_another_listener(settings):
    async with broker.Broker(settings) as server:
        url, pid = server.url, server.pid
        await server.restart(dataclasses.replace(server.config, websocket=config.BrokerListener()))
        assert (server.url, server.websocket_url is not None) == (url, True)
        assert server.pid != pid


# TLS


@pytest.fixture
def authority(tmp_path):
    made = certificates.CertificateStore.create(tmp_path / "certs", "acme", lifetime_s=certificates.DAY_S)
    made.ensure("broker", ["127.0.0.1", "localhost"])
    return made


def tls_of(made: certificates.CertificateStore) -> config.BrokerTls:
    pair = made.pair("broker")
    return config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=made.bundle)


async def trusting(bundle: Path) -> ssl.SSLContext:
    return await asyncio.to_thread(ssl.create_default_context, cafile=str(bundle))


async def served(port: int, bundle: Path) -> int:
    """The serial number of the certificate that a client is shown now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await reader.readline()  # the greeting is in plain text, and asks for TLS
    await writer.start_tls(await trusting(bundle), server_hostname="127.0.0.1")
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return int(shown["serialNumber"], 16)


async def test_certificates_are_replaced_without_a_restart(settings, authority):
    async with broker.Broker(dataclasses.replace(settings, tls=tls_of(authority))) as server:
        assert server.url.startswith("tls://")
        client_tls = await trusting(authority.bundle)
        async with await client.connect([server.url], tls=client_tls) as bus:
            before = await served(server.config.port, authority.bundle)
            assert authority.ensure("broker", ["127.0.0.1", "localhost", "::1"])
            await server.reload()
            assert await served(server.config.port, authority.bundle) != before
            await bus.flush()
            assert bus.statistics().reconnects == 0


# Trust


@pytest.fixture
def trust(tmp_path):
    return keyring.Keyring.create(tmp_path / "keys", "acme")


def operator_trust(made: keyring.Keyring, resolver: config.AccountResolver) -> config.OperatorTrust:
    known = made.broker()
    return config.OperatorTrust(
        operator_jwt=known.operator_jwt,
        system_account=known.system_account,
        accounts=known.accounts,
        resolver=resolver,
    )


@pytest.mark.parametrize("resolver", list(config.AccountResolver))
async def test_with_an_operator_only_its_users_may_connect(settings, trust, resolver):
    trust.issue("agent-1", roles.Role.AGENT)
    trusting = dataclasses.replace(settings, trust=operator_trust(trust, resolver))
    async with broker.Broker(trusting) as server:
        async with await client.connect([server.url], creds=trust.credentials("agent-1")) as bus:
            assert bus.identity == "agent-1"
        with pytest.raises(errors.Unauthorized):
            await client.connect([server.url])


async def test_a_revocation_is_pushed_to_a_running_broker_over_the_system_account(settings, trust):
    trust.issue("agent-1", roles.Role.AGENT)
    trust.issue("pusher", roles.Role.SYSTEM)
    creds = trust.credentials("agent-1")
    trusting = dataclasses.replace(settings, trust=operator_trust(trust, config.AccountResolver.FULL))
    async with broker.Broker(trusting) as server, await client.connect([server.url], creds=creds) as bus:
        trust.revoke("agent-1")
        access = system_account.SystemAccess(credentials=trust.credentials("pusher", domain=keyring.SYSTEM))
        subject, document = trust.claims_update()
        await system_account.request([server.address], access, subject, document)
        await eventually(lambda: bus.state is not api.ConnectionState.CONNECTED)
    # What was pushed outlives the broker, though its settings still hold the older document.
    async with broker.Broker(trusting) as server:
        with pytest.raises(errors.Unauthorized):
            await client.connect([server.url], creds=creds)


async def test_a_broker_that_was_down_knows_revocations_before_it_accepts_clients(settings, trust):
    trust.issue("agent-1", roles.Role.AGENT)
    creds = trust.credentials("agent-1")

    def current() -> config.OperatorTrust:
        return operator_trust(trust, config.AccountResolver.FULL)

    async with broker.Broker(dataclasses.replace(settings, trust=current()), trust=current) as server:
        async with await client.connect([server.url], creds=creds):
            pass
        trust.revoke("agent-1")  # no command sends it to the broker
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        await eventually(lambda: server.restarts == 1)
        with pytest.raises(errors.Unauthorized):
            await client.connect([server.url], creds=creds)


async def test_with_accounts_in_memory_a_revocation_is_a_reload(settings, trust):
    trust.issue("agent-1", roles.Role.AGENT)
    creds = trust.credentials("agent-1")
    trusting = dataclasses.replace(settings, trust=operator_trust(trust, config.AccountResolver.MEMORY))
    async with broker.Broker(trusting) as server:
        async with await client.connect([server.url], creds=creds) as bus:
            trust.revoke("agent-1")
            now = operator_trust(trust, config.AccountResolver.MEMORY)
            await server.apply(dataclasses.replace(server.config, trust=now))
            await eventually(lambda: bus.state is not api.ConnectionState.CONNECTED)
        with pytest.raises(errors.Unauthorized):
            await client.connect([server.url], creds=creds)
