"""A gateway on a machine that joined checks logins itself, and acts with documents of the first machine."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from muster.app import domain, home
from muster.app import settings as app_settings
from muster.app.components import web
from muster.app.gateways import amqp
from muster.app.machines import join_client
from muster.bus import api
from muster.bus.http import client as http_client
from muster.core import errors, health
from muster.core.settings import loader
from muster.testing.eventually import eventually
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.app import test_three_machines

JSON = {"Content-Type": "application/json"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.may_block(reason="it reads files")]


async def test_a_client_of_a_gateway_on_another_machine_acts_as_itself_until_it_is_revoked(tmp_path: Path):
    machines = test_three_machines.Machines(tmp_path)
    await machines.init()
    trust, place = machines.keyring(), home.Home(tmp_path / "d")
    trust.passwords().set("alice", roles.Role.USER, "correct horse")
    trust.passwords().set("olga", roles.Role.OPERATOR, "correct horse")
    try:
        token = await machines.token("gateway")
        await join_client.join(place, token, machines.choices("d"), waiting=print)
        flags = {"health.enabled": False, "amqp.processes": 1, "web.port": 0}
        settings = loader.load(app_settings.Settings, file=place.settings_file, flags=flags)
        own = keyring.Keyring.open(settings.keys_folder)
        gateway = amqp.AmqpComponent(settings)
        dashboard = web.WebComponent(settings)
        async with domain.Domain(settings, components=[gateway, dashboard]) as running:
            assert gateway.health().state is health.HealthState.UP
            assert gateway.url == f"amqps://{machines.address('d')}:5671"
            at_first = machines.running["a"]
            await eventually(lambda: at_first._gateways() == (gateway.url,), timeout_s=30)
            await eventually(lambda: own.passwords().names() == ["alice", "olga"], timeout_s=10)
            assert own.passwords().check("alice", "correct horse").role is roles.Role.USER
            with pytest.raises(errors.Unauthorized):
                own.passwords().check("alice", "wrong horse")
            trusted = ssl.create_default_context(cafile=str(tmp_path / "d/fleet/certs/bundle.pem"))
            _, writer = await asyncio.open_connection(machines.address("d"), 5671, ssl=trusted)
            writer.close()

            rest = f"{dashboard.url}/api/v1"
            login = json.dumps({"name": "olga", "password": "correct horse"}).encode()
            created = await http_client.post(f"{rest}/tokens", login, headers=JSON)
            bearer = {"Authorization": f"Bearer {created.json()['token']}"}
            shown = await http_client.request("GET", f"{rest}/agents", headers=bearer)
            assert shown.json()["items"] == [], "the registry answers, to a document for olga"

            access = running._access
            async with await access.connect_login("alice", roles.Role.USER) as first:
                assert first.identity == "alice"
                await first.publish("topic.orders", b"1")
            async with await access.connect_login("alice", roles.Role.VIEWER) as second:
                assert second.identity == "alice"
            held = await access.connect_login("alice", roles.Role.USER)
            async with held:
                assert not list(settings.keys_folder.rglob("*/signing.seed"))
                revoked = await machines.cli("creds", "revoke", "alice")
                assert revoked.code == 0, revoked.err
                await eventually(lambda: held.state is not api.ConnectionState.CONNECTED, timeout_s=10)
            await eventually(lambda: own.show("alice").status == "revoked", timeout_s=10)
            with pytest.raises(errors.Unauthorized):
                await access.connect_login("alice", roles.Role.USER)
    finally:
        await machines.stop("a")
