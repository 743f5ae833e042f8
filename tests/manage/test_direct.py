"""An agent and its managers with direct connections: without a broker (section 3.4 of the paper), over TLS,
and beside one."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus import api
from muster.bus.client import credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, frames, listener
from muster.bus.rpc import client as rpc
from muster.core import errors, health, messages, subjects
from muster.core.net import tls
from muster.manage import protocol
from muster.manage.agent import agent
from muster.manage.manager import agent_routes, manager
from muster.testing.eventually import eventually
from muster.trust import certificates, keyring, peer_admission
from muster.trust.permissions import roles


@pytest.fixture
async def direct(fleet, tmp_path):
    """Two managers that listen, and what an agent needs to connect to them."""
    made = certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=86400.0)
    made.ensure("manager", ["127.0.0.1", "localhost"])
    server_tls = tls.for_server(made.pair("manager").path)
    fleet.tls = ssl.create_default_context(cafile=str(made.bundle))
    fleet.trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for name, role in (("host-b", roles.Role.AGENT), ("eve", roles.Role.USER)):
        fleet.trust.issue(name, role)
    await fleet.registry(open_key=fleet.trust.key_of_secrets)
    fleet.listeners, fleet.managers, fleet.buses = {}, {}, {}
    for name in ("manager-1", "manager-2"):
        fleet.trust.issue(name, roles.Role.MANAGER)
        bus = direct_bus.DirectBus(await fleet.connect(name), name, agent_routes.agent_of)
        admission = peer_admission.PeerAdmission(tmp_path / "keys", of_roles=(roles.Role.AGENT,))
        creds = functools.partial(fleet.trust.credentials, name)
        listening = listener.DirectListener(bus, admission, creds, tls=server_tls)
        await fleet.stack.enter_async_context(listening)
        await fleet.stack.enter_async_context(agent_routes.AgentForwarding(bus))
        made_manager = manager.Manager(bus.as_bus(), name=name, tick_s=0.05, direct=listening.address)
        await fleet.stack.enter_async_context(made_manager)
        fleet.listeners[name], fleet.managers[name], fleet.buses[name] = listening, made_manager, bus
    return fleet


@contextlib.asynccontextmanager
async def connected(
    fleet: Any, identity: str = "host-b", bus: api.Bus | None = None
) -> AsyncIterator[tuple[direct_bus.DirectBus, dialer.DirectDialer]]:
    """The transport of an agent; without a broker it knows the addresses of the managers."""
    made = direct_bus.DirectBus(bus, identity, agent_routes.manager_of)
    access = credential_source.PeerAccess(functools.partial(fleet.trust.credentials, identity), fleet.tls)
    async with dialer.DirectDialer(made, access) as dialing:
        if bus is None:
            for listening in fleet.listeners.values():
                dialing.keep(dialer.configured(listening.address.addresses[0], tls=True))
        yield made, dialing


def entry(name: str) -> dict[str, Any]:
    return {"name": name, "type": "memory", "agent": "host-b", "restart": {"delay_s": 0.01}}


async def test_it_is_managed_and_survives_its_manager(direct, tmp_path):
    async with (
        connected(direct) as (bus, _),
        agent.Agent(bus.as_bus(), tmp_path / "hosted", beat_s=0.2) as host,
    ):
        for number in range(4):
            await direct.client.create(entry(f"r{number}"))
        for number in range(4):
            await direct.client.wait(f"r{number}", "up")

        async def known():
            return {item.name for item in await direct.client.agents()} == {"host-b"}

        await eventually(known)
        assert await direct.client.execute("r1", "echo", {"text": "hi"}) == "hi"
        fallen: Any = host.hosted["r2"].adapter
        fallen.die("oops")
        await eventually(lambda: fallen.state is health.HealthState.UP)

        before = {row.name: row for row in await direct.client.get()}
        victim = before["r1"].manager
        await direct.managers[victim].abandon()

        async def moved():
            rows = await direct.client.get()
            return all(row.manager != victim and row.state == "up" for row in rows)

        await eventually(moved, timeout_s=30)
        assert await direct.client.execute("r1", "echo", {"text": "still"}) == "still"
        # Epochs fence over a direct connection as over the bus.
        late = protocol.Operation(
            id="late", verb=protocol.Verb.DELETE, resource="r1", epoch=before["r1"].epoch, manager=victim
        )
        answer = await direct.buses[victim].request(protocol.operation("host-b", "r1"), messages.encode(late))
        assert b"stale-epoch" in answer.data
        assert host.hosted["r1"].observed.exists


async def test_a_connection_that_breaks_is_made_again_and_what_was_asked_is_not_done_twice(direct, tmp_path):
    async with (
        connected(direct) as (bus, _),
        agent.Agent(bus.as_bus(), tmp_path / "hosted", beat_s=0.2) as host,
    ):
        await direct.client.create(entry("r"))
        row = await direct.client.wait("r", "up")
        links = direct.buses[row.manager].links
        subject = protocol.operation("host-b", "r")
        once = messages.encode(
            protocol.Operation(
                id="once", verb=protocol.Verb.EXECUTE, resource="r", epoch=row.epoch, operation="echo"
            )
        )
        link = links["host-b"]
        asking = asyncio.create_task(direct.buses[row.manager].request(subject, once))
        await asyncio.sleep(0)  # it is sent
        link.close()
        with pytest.raises(errors.TimedOut):  # it may have been done
            await asking
        await eventually(lambda: links.get("host-b") not in (None, link))
        answer = await direct.buses[row.manager].request(subject, once)
        assert b'"done"' in answer.data
        adapter: Any = host.hosted["r"].adapter
        assert adapter.done.count("echo") == 1
        await direct.client.wait("r", "up")


async def test_a_secret_comes_without_a_broker(direct, tmp_path):
    command = ["sh", "-c", 'printf %s "$KEY" > given; exec sleep 1000']
    config = {"command": command, "directory": str(tmp_path), "environment": {"KEY": {"secret": "store:key"}}}
    await direct.client.set_secret("key", "swordfish")
    async with connected(direct) as (bus, _), agent.Agent(bus.as_bus(), tmp_path / "hosted", beat_s=0.2):
        await direct.client.create({**entry("r"), "type": "process", "config": config})
        await direct.client.wait("r", "up")
        await eventually(lambda: (tmp_path / "given").exists() and (tmp_path / "given").read_text())
        assert (tmp_path / "given").read_text() == "swordfish"
        subject = protocol.vouch_subject("ann", "host-b", protocol.SECRET)
        with pytest.raises(errors.Forbidden):  # only a manager vouches for agents
            await rpc.call(direct.client._bus, subject, {"resource": "r", "name": "key", "key": ""})
        await direct.client.delete("r")
        await direct.client.wait_gone("r")


async def test_an_agent_beside_a_broker_connects_to_the_managers_that_claim(direct, tmp_path):
    """The claim has the address; the operations then take the connection, and the broker when it breaks."""
    async with (
        connected(direct, bus=await direct.connect("host-b")) as (bus, dialing),
        agent.Agent(bus.as_bus(), tmp_path / "hosted", beat_s=0.2, keep_peer=dialing.keep),
    ):
        await direct.client.create(entry("r"))
        row = await direct.client.wait("r", "up")
        links = direct.buses[row.manager].links
        await eventually(lambda: "host-b" in links and row.manager in bus.links)
        received = links["host-b"]._blocks
        assert await direct.client.execute("r", "echo", {"text": "hi"}) == "hi"
        assert links["host-b"]._blocks > received, "the reply came on the connection"
        await direct.listeners[row.manager].stop()
        assert await direct.client.execute("r", "echo", {"text": "still"}) == "still"
        assert (await direct.client.get())[0].state == "up"


async def test_a_manager_admits_agents_only_and_each_under_its_own_name(direct, tmp_path):
    received: list[api.Message] = []
    async with connected(direct, "eve") as (bus, dialing):
        with pytest.raises(errors.Unauthorized, match="role that does not connect here"):
            await dialing.use(direct.listeners["manager-1"].address)
        assert not bus.links
    async with connected(direct) as (bus, _):
        await eventually(lambda: len(bus.links) == 2)
        direct.buses["manager-1"].serve("muster.manage.from.*.beat.manager-1", received.append)
        await bus.publish("muster.manage.from.host-a.beat.manager-1", b"forged")
        await bus.publish("muster.manage.from.host-b.beat.manager-1", b"own")
        await eventually(lambda: received)
        assert [message.data for message in received] == [b"own"]


async def test_a_forged_address_in_a_claim_is_not_used(direct, tmp_path):
    """A manager may announce its own address only."""
    kept: list[frames.PeerAddress] = []
    bus = await direct.connect("host-b")
    async with agent.Agent(bus, tmp_path / "hosted", keep_peer=kept.append):
        address = direct.listeners["manager-2"].address
        for name in ("manager-1", "manager-2"):
            claim = protocol.ClaimRequest(manager=name, resources={}, direct=address)
            await rpc.exchange_once(
                await direct.connect(f"as-{name}"),
                protocol.claim("host-b"),
                messages.encode(claim),
                timeout_s=5,
            )
        assert kept == [address]


async def test_an_agent_without_a_broker_has_one_share_of_what_a_manager_forwards(direct):
    """The registry sees the manager as the sender, so the manager bounds what one agent sends."""
    direct.trust.issue("host-c", roles.Role.AGENT)
    forwarded = collections.Counter[str]()
    vouched = subjects.from_identity(protocol.PART, "manager-1", "vouch", "*")
    async with (
        await (await direct.connect("registry-0")).subscribe(
            vouched, handler=lambda message: forwarded.update((message.subject.rpartition(".")[2],))
        ),
        connected(direct) as (flooding, _),
        connected(direct, "host-c") as (other, _),
    ):
        await eventually(lambda: "manager-1" in flooding.links and "manager-1" in other.links)
        begun_s = time.monotonic()
        for made, number in ((flooding, 2_000), (other, 1)):
            hello = subjects.from_identity(protocol.PART, made.identity, protocol.HELLO)
            for _ in range(number):
                made.links["manager-1"].send(hello, b"")
        await eventually(lambda: forwarded["host-c"] == 1)
        took_s = time.monotonic() - begun_s
    assert 1 < forwarded["host-b"] <= 2 + (1 + took_s) * 500 / agent_routes.FORWARDED
    assert sum(direct.buses["manager-1"].refused.values()) == 2_000 - forwarded["host-b"]
