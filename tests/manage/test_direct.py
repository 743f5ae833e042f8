"""An agent and its managers without a broker between them (section 3.4 of the paper), over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from typing import Any

import pytest

from muster.app.supervisor import worker
from muster.bus import api
from muster.bus.memory import network
from muster.bus.rpc import client as rpc
from muster.core import errors, health, messages
from muster.core.net import tls
from muster.manage import protocol
from muster.manage.agent import agent
from muster.manage.direct import endpoint, frames, links
from muster.manage.manager import manager
from muster.testing.eventually import eventually, throughout
from muster.trust import certificates, keyring
from muster.trust.permissions import roles


@pytest.fixture
async def lines(fleet, tmp_path):
    """Two managers that listen, and what an agent needs to dial them."""
    made = certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=86400.0)
    made.ensure("manager", ["127.0.0.1", "localhost"])
    pair = made.pair("manager")
    fleet.server_tls = tls.for_server(pair.path)
    fleet.tls = ssl.create_default_context(cafile=str(made.bundle))
    fleet.trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for name, role in (("host-b", roles.Role.AGENT), ("eve", roles.Role.USER)):
        fleet.trust.issue(name, role)
    await fleet.registry(open_key=fleet.trust.key_of_secrets)
    fleet.doors, fleet.managers = {}, {}
    for name in ("manager-1", "manager-2"):
        bus = await fleet.connect(name)
        door = endpoint.DirectEndpoint(
            bus, worker.DirectLinkAuthenticator(tmp_path / "keys"), tls=fleet.server_tls
        )
        await fleet.stack.enter_async_context(door)
        boss = manager.Manager(door.transport, name=name, tick_s=0.05)
        await fleet.stack.enter_async_context(boss)
        fleet.doors[name], fleet.managers[name] = door, boss
    return fleet


@contextlib.asynccontextmanager
async def dialled(fleet: Any, identity: str = "host-b", **more: Any) -> Any:
    creds = more.pop("creds", None) or fleet.trust.credentials(identity)
    addresses = [f"127.0.0.1:{door.port}" for door in fleet.doors.values()]
    async with links.AgentLinks(creds, addresses, tls=more.pop("tls", fleet.tls)) as link_set:
        yield link_set


def entry(name: str) -> dict[str, Any]:
    return {"name": name, "type": "memory", "agent": "host-b", "restart": {"delay_s": 0.01}}


async def test_it_is_managed_and_survives_its_manager(lines, tmp_path):
    async with dialled(lines) as link_set, agent.Agent(link_set, tmp_path / "hosted", beat_s=0.2) as host:
        for number in range(4):
            await lines.client.create(entry(f"r{number}"))
        for number in range(4):
            await lines.client.wait(f"r{number}", "up")

        async def known():
            return {item.name for item in await lines.client.agents()} == {"host-b"}

        await eventually(known)
        assert await lines.client.execute("r1", "echo", {"text": "hi"}) == "hi"
        fallen: Any = host.hosted["r2"].adapter
        fallen.die("oops")
        await eventually(lambda: fallen.state is health.HealthState.UP)

        before = {row.name: row for row in await lines.client.get()}
        victim = before["r1"].manager
        await lines.managers[victim].abandon()

        async def moved():
            rows = await lines.client.get()
            return all(row.manager != victim and row.state == "up" for row in rows)

        await eventually(moved, timeout_s=30)
        assert await lines.client.execute("r1", "echo", {"text": "still"}) == "still"
        # Epochs fence over a line as over the bus.
        late = protocol.Operation(
            id="late", verb=protocol.Verb.DELETE, resource="r1", epoch=before["r1"].epoch, manager=victim
        )
        link = lines.doors[victim].links["host-b"]
        answer = await link.request(protocol.operation("host-b", "r1"), messages.encode(late), 5)
        assert b"stale-epoch" in answer.data
        assert host.hosted["r1"].observed.exists


async def test_a_line_that_breaks_is_dialled_again_and_what_was_asked_is_not_done_twice(lines, tmp_path):
    async with dialled(lines) as link_set, agent.Agent(link_set, tmp_path / "hosted", beat_s=0.2) as host:
        await lines.client.create(entry("r"))
        row = await lines.client.wait("r", "up")
        door = lines.doors[row.manager]
        subject = protocol.operation("host-b", "r")
        once = messages.encode(
            protocol.Operation(
                id="once", verb=protocol.Verb.EXECUTE, resource="r", epoch=row.epoch, operation="echo"
            )
        )
        link = door.links["host-b"]
        asking = asyncio.create_task(link.request(subject, once, 5))
        await asyncio.sleep(0)  # it is sent
        link.close()
        with pytest.raises(errors.TimedOut):  # it may have been done
            await asking
        await eventually(lambda: door.links.get("host-b") not in (None, link))
        answer = await door.links["host-b"].request(subject, once, 5)
        assert b'"done"' in answer.data
        adapter: Any = host.hosted["r"].adapter
        assert adapter.done.count("echo") == 1
        await lines.client.wait("r", "up")


async def test_a_secret_comes_by_the_line(lines, tmp_path):
    command = ["sh", "-c", 'printf %s "$KEY" > given; exec sleep 1000']
    config = {"command": command, "directory": str(tmp_path), "environment": {"KEY": {"secret": "store:key"}}}
    await lines.client.set_secret("key", "swordfish")
    async with dialled(lines) as link_set, agent.Agent(link_set, tmp_path / "hosted", beat_s=0.2):
        await lines.client.create({**entry("r"), "type": "process", "config": config})
        await lines.client.wait("r", "up")
        await eventually(lambda: (tmp_path / "given").exists() and (tmp_path / "given").read_text())
        assert (tmp_path / "given").read_text() == "swordfish"
        subject = protocol.vouch_subject("ann", "host-b", protocol.SECRET)
        with pytest.raises(errors.Forbidden):  # only a manager vouches for agents
            await rpc.call(lines.client._bus, subject, {"resource": "r", "name": "key", "key": ""})
        await lines.client.delete("r")
        await lines.client.wait_gone("r")


async def test_an_unauthenticated_client_cannot_send_a_large_frame():
    async def check(*_: Any) -> str:
        raise errors.Unauthorized("nobody")

    bus = await network.SimulatedNetwork(1).connect("manager-1")
    async with endpoint.DirectEndpoint(bus, check) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write((frames.HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big"))
        async with asyncio.timeout(frames.HANDSHAKE_S / 2):
            assert b"manager-1" in await reader.read(), "it has closed the connection after its challenge"
        writer.close()


async def test_unauthenticated_clients_are_refused(lines, tmp_path):
    other = keyring.Keyring.create(tmp_path / "elsewhere", "north")
    other.issue("host-b", roles.Role.AGENT)
    stolen = _Stolen(lines.trust.credentials("host-b").user_jwt)
    for creds in (lines.trust.credentials("eve"), other.credentials("host-b"), stolen):
        async with dialled(lines, creds=creds) as link_set:
            await throughout(functools.partial(_has_none, link_set), for_s=0.5)
    async with dialled(lines, tls=ssl.create_default_context()) as link_set:  # trusts none of our identities
        await throughout(functools.partial(_has_none, link_set), for_s=0.5)
    assert not any(door.links for door in lines.doors.values())


def _has_none(link_set: links.AgentLinks) -> bool:
    return not link_set.links


class _Stolen:
    """The document of another, without its key."""

    identity = "host-b"
    sees_connections = False

    def __init__(self, document: str) -> None:
        self.user_jwt = document

    def answer(self, nonce: str) -> bytes:
        return b"bm90IGEgc2lnbmF0dXJl"


async def test_an_agent_publishes_only_as_itself_and_a_revoked_one_is_disconnected(lines, tmp_path):
    received: list[api.Message] = []
    async with dialled(lines) as link_set:
        await eventually(lambda: len(link_set.links) == 2)
        door = lines.doors["manager-1"]
        door.listen("muster.manage.from.*.beat.manager-1", received.append)
        await link_set.publish("muster.manage.from.host-a.beat.manager-1", b"forged")
        await link_set.publish("muster.manage.from.host-b.beat.manager-1", b"own")
        await eventually(lambda: received)
        assert [message.data for message in received] == [b"own"]
        await asyncio.to_thread(lines.trust.revoke, "host-b")
        with contextlib.suppress(errors.Unavailable):
            await link_set.request(protocol.hello("host-b"), b"{}", timeout_s=1)
        await eventually(lambda: not door.links or not lines.doors["manager-2"].links)
