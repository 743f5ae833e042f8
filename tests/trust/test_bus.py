"""Muster's own connections under roles: what a service needs works, and a refusal reaches the caller."""

import asyncio
import os
import sys
import time

import pytest

from muster.bus import api, leases
from muster.bus.client import client
from muster.core import errors
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.trust import servers


@pytest.fixture
def trust(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for identity, role in (("c1", roles.Role.CHANNEL), ("a1", roles.Role.AGENT), ("m1", roles.Role.REGISTRY)):
        trust.issue(identity, role)
    return trust


async def test_a_service_keeps_its_streams_and_an_agent_reports_into_them(tmp_path, trust):
    async with servers.server(tmp_path, trust) as server:

        async def connect(identity: str) -> client.NatsBus:
            return await client.connect([server.url], creds=trust.credentials(identity))

        async with await connect("c1") as channel, await connect("a1") as agent:
            assert (channel.identity, agent.identity) == ("c1", "a1")
            settings = api.StreamSettings(name="reports", subjects=("muster.monitor.from.*.report",))
            stream = await channel.stream(settings)
            ack = await agent.request("muster.monitor.from.a1.report", b"load=1")
            assert b'"seq":1' in ack.data.replace(b" ", b"")
            assert [m.data async for m in stream.read(1)] == [b"load=1"]
            assert (await stream.get(1)).subject == "muster.monitor.from.a1.report"
            await stream.publish("muster.monitor.from.c1.report", b"merged")
            last = await stream.publish_batch(
                [api.OutgoingMessage("muster.monitor.from.c1.report", b"x")] * 3
            )
            assert last == 5
            async with stream.follow(1) as following:
                assert [(await anext(following)).sequence for _ in range(5)] == [1, 2, 3, 4, 5]
            await stream.purge(before=3)
            with pytest.raises(errors.Forbidden):
                await channel.streams()  # of all parts
            await channel.audit()
            await agent.audit()

            with pytest.raises(errors.MusterError):
                await agent.open_stream("reports")
            with pytest.raises(errors.Forbidden):
                await agent.subscribe("muster.monitor.from.*.>")


async def test_leases_work_under_a_role(tmp_path, trust):
    async with (
        servers.server(tmp_path, trust) as server,
        await client.connect([server.url], creds=trust.credentials("m1")) as manager,
    ):
        bucket = await manager.key_value(api.KeyValueSettings(bucket=roles.LEASES))
        revision = await bucket.create("manage.shard-1", b"m1", ttl_s=30)
        revision = await bucket.update("manage.shard-1", b"m1", revision=revision, ttl_s=30)
        entry = await bucket.get("manage.shard-1")
        assert entry is not None
        assert entry.revision == revision
        assert await bucket.keys() == ["manage.shard-1"]
        await bucket.delete("manage.shard-1", revision=revision)


HOLDER = """
import asyncio, pathlib, sys
from muster.bus import leases
from muster.bus.client import client
from muster.trust import credentials

async def hold():
    bus = await client.connect([sys.argv[1]], creds=credentials.Credentials.load(pathlib.Path(sys.argv[2])))
    await (await leases.Leases.open(bus, ttl_s=60)).acquire("manage.registry")
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold())
"""


async def test_a_dead_holders_lease_is_taken_at_once(tmp_path, trust):
    """The brokers' account reports the closed connection to the domain: no client waits for the expiry."""
    trust.issue("m2", roles.Role.REGISTRY)
    async with servers.server(tmp_path, trust) as server:
        holder = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            HOLDER,
            server.url,
            str(trust.credentials_path("m1")),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert holder.stdout
            assert await holder.stdout.readline() == b"held\n"
            async with (
                await client.connect([server.url], creds=trust.credentials("m2")) as bus,
                await leases.Leases.open(bus, ttl_s=60) as all_leases,
            ):
                assert (await all_leases.holder("manage.registry") or ("", 0))[0] == "m1"
                waiting = asyncio.ensure_future(all_leases.acquire("manage.registry", timeout_s=30))
                await asyncio.sleep(0)
                holder.kill()
                lease = await waiting
                assert lease.held
        finally:
            if holder.returncode is None:
                holder.kill()
            await holder.communicate()


async def test_the_refusal_of_credentials_reaches_the_caller(tmp_path, trust):
    past = keyring.Keyring(trust.folder, "north", clock=lambda: time.time() - 1000)
    past.issue("old", roles.Role.AGENT, lifetime_s=10)
    async with servers.server(tmp_path, trust) as server:
        with pytest.raises(errors.Unauthorized):
            await client.connect([server.url], creds=trust.credentials("old"))
