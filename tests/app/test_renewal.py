"""A machine that joined renews its credentials, and its connection outlives them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from muster import connection
from muster.app import domain, enrolment, identities
from muster.app.components import bootstrap_client, management
from muster.bus.client import client
from muster.cli.resources import agent as agent_command
from muster.core import errors, files
from muster.manage import settings as manage_settings
from muster.testing.eventually import eventually
from muster.trust import credentials
from muster.trust.permissions import roles


async def test_a_machine_stays_connected_and_comes_back_after_its_document_expired(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent_command, "RENEWAL_PAUSE_S", 0.2)
    part = management.ManagementComponent(
        manage_settings.ManageSettings(registries=1, managers=0, agent=False)
    )
    folder = tmp_path / "machine"
    async with (
        domain.Domain(made(trust__agent_lifetime_s=2.0), components=[part]) as running,
        await running.connect("admin", roles.Role.OPERATOR) as admin,
    ):
        made_token = await bootstrap_client.BootstrapClient(admin).token("host-b")
        token = enrolment.EnrolmentToken.parse(made_token.token)
        joining, key = credentials.Credentials.parse(token.creds), enrolment.machine_key(folder)
        async with await connection.connect(token.servers, creds=joining) as bus:
            answer = await bootstrap_client.BootstrapClient(bus).enrol(key.public, name=token.name)
        later = credentials.Credentials(answer.joining, joining.seed)
        where = {"servers": list(token.servers), "ca": "", "locator": "", "proxy": None}

        def write() -> None:
            enrolment.write_credentials(folder, key, answer.jwt, later)
            files.write(folder / "domain.json", msgspec.json.encode(where))

        def read() -> credentials.Credentials:
            return credentials.Credentials.load(folder / enrolment.CREDENTIALS)

        await asyncio.to_thread(write)
        first = await asyncio.to_thread(read)
        await eventually(lambda: time.time() > first.claims.exp + 1.5)  # it was switched off
        with pytest.raises(errors.Unauthorized):
            await client.connect(token.servers, creds=first)
        await agent_command.keep_credentials(folder, None, at_once=True)
        renewal = asyncio.create_task(agent_command.keep_credentials(folder, None))
        try:
            async with await agent_command._connect(folder, None, None) as machine:
                second = await asyncio.to_thread(read)
                await eventually(lambda: time.time() > second.claims.exp + 0.5)
                await eventually(lambda: machine.statistics().reconnects >= 1)
                await machine.flush()
                await asyncio.to_thread(running.trust.revoke, "host-b")
                await identities.publish_accounts(running.trust, running.servers)

                async def refused() -> bool:
                    try:
                        async with await client.connect(token.servers, creds=read):
                            return False
                    except errors.Unauthorized:
                        return True

                await eventually(refused)
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        with pytest.raises(errors.Forbidden, match="spent"):
            await bootstrap_client.renew(folder, lambda creds: connection.connect(token.servers, creds=creds))
