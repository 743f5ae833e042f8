"""Information nodes in a domain with its permissions, through the command and as users."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.app.components import information_nodes as part
from muster.bus import api
from muster.bus.direct import link, nearest
from muster.core import errors, health
from muster.core.settings import loader
from muster.inform import client, protocol, service_entries
from muster.testing.eventually import eventually
from muster.trust import identity_roles, keyring
from muster.trust.permissions import roles
from tests.cli import driver


def load_settings(tmp_path: Path, **more: object) -> app_settings.Settings:
    flags = {
        "domain.data_dir": str(tmp_path),
        "manage.enabled": False,
        "inform.nodes": 2,
        "inform.processes": False,
        "inform.refresh_s": "300ms",
        **more,
    }
    return loader.load(app_settings.Settings, flags=flags)


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_users_of_a_domain_share_contexts_and_viewers_only_read(tmp_path):
    made = load_settings(tmp_path)
    async with domain.Domain(made, components=factories.components(made)) as running:
        nodes = running.component(part.InformationNodesComponent).nodes
        await eventually(lambda: all(len(node.directory.nodes) == 1 for node in nodes))
        async with (
            await running.connect("ann", roles.Role.USER) as ann,
            await running.connect("vic", roles.Role.VIEWER) as vic,
            await running.connect("agent", roles.Role.AGENT) as agent,
        ):
            written = await client.InformClient(ann).put("k", b"v", attributes={"a": 1}, ack="replicated")
            assert (written.replicas, written.status) == (2, "normal")
            viewer = client.InformClient(vic, timeout_s=2.0)
            assert (await viewer.get("k")).writer == "ann"
            assert [context.key for context in (await viewer.find("a = 1")).contexts] == ["k"]
            replicas = (await viewer.where("k")).replicas
            assert {replica.replica_kind for replica in replicas} == {"primary", "permanent"}
            with pytest.raises(errors.MusterError):
                await viewer.put("k", b"forged")
            assert (await client.InformClient(agent).get("k", max_staleness_s=0)).value == b"v"
            with pytest.raises(errors.MusterError):  # not under the name of another identity
                await vic.request(
                    protocol.request_subject("ann", "put"),
                    protocol.encode(protocol.PutContext("k", b"forged")),
                    timeout_s=1.0,
                )
            assert (await viewer.get("k", max_staleness_s=0)).value == b"v"


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_node_has_a_process_of_its_own_which_is_replaced(tmp_path):
    """So searches do not delay the leases, the dispatcher and the notifier of the domain."""
    made = load_settings(tmp_path, **{"inform.nodes": 1, "inform.processes": True})
    async with domain.Domain(made, components=factories.components(made)) as running:
        (process,) = running.component(part.InformationNodesComponent).processes
        pid = process.child.pid
        assert pid not in (None, os.getpid())
        async with await running.connect("ann", roles.Role.USER) as ann:
            contexts = client.InformClient(ann)
            await contexts.put("k", b"v")
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: process.child.pid not in (None, pid) and process.ready.is_set())
            assert (await contexts.get("k")).value == b"v"
        await eventually(lambda: process.health().state is health.HealthState.UP)


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_clients_connect_to_a_node_directly_with_their_rights(tmp_path):
    """After some requests; a node that is killed or an identity that is revoked ends the connection."""
    made = load_settings(tmp_path, **{"inform.nodes": 1, "inform.processes": True})
    async with domain.Domain(made, components=factories.components(made)) as running:
        (process,) = running.component(part.InformationNodesComponent).processes
        async with (
            await running.connect("ann", roles.Role.USER) as ann,
            await running.connect("vic", roles.Role.VIEWER) as vic,
        ):
            contexts, viewer = client.InformClient(ann), client.InformClient(vic)
            await contexts.put("k", b"v")
            for reader, bus in ((contexts, ann), (viewer, vic)):
                assert await _link(reader, bus) == process.name
                assert (await reader.get("k", max_staleness_s=0)).value == b"v"
            assert (await contexts.put("k", b"w")).status in ("normal", "updated")
            with pytest.raises(errors.Forbidden):
                await viewer.put("k", b"forged")
            assert (await viewer.get("k", max_staleness_s=0)).value == b"w"
            revoked = _links(vic)[process.name]
            await asyncio.to_thread(keyring.Keyring.open(made.keys_folder).revoke, "vic")
            # By the node, or with the connection to the broker: whichever notices the revocation first.
            await asyncio.wait_for(revoked.ended, 10)
            pid = process.child.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await contexts.get("k")).value == b"w"
            await eventually(lambda: process.child.pid not in (None, pid) and process.ready.is_set())
            assert await _link(contexts, ann) == process.name


def _links(bus: api.Bus) -> dict[str, link.DirectLink]:
    return cast(nearest.NearestBus, nearest.of(bus, protocol.PART, str)).links


async def _link(contexts: client.InformClient, bus: api.Bus) -> str:
    """The node that the client is connected to, after some reads."""
    links = _links(bus)

    async def linked() -> bool:
        await contexts.get("k")
        return bool(links)

    await eventually(linked, timeout_s=30)
    return next(iter(links))


def test_a_role_that_was_revoked_or_changed_has_no_rights_any_more(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "lab")
    role_of = identity_roles.IdentityRoles(trust)
    assert role_of("olga") is None
    trust.issue("olga", roles.Role.OPERATOR)
    trust.issue("ann", roles.Role.USER)
    assert (role_of("olga"), role_of("ann")) == ("operator", "user")
    trust.revoke("olga")
    assert (role_of("olga"), role_of("ann")) == (None, "user")
    trust.issue("olga", roles.Role.VIEWER)
    assert role_of("olga") == "viewer"


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_rules_keep_others_out_by_identity_role_and_ownership(tmp_path):
    rules = [
        {"keys": "ops/*", "read": ["role:operator", "ann"], "write": ["role:operator"]},
        {"keys": "own/*", "write": ["owner"]},
    ]
    made = load_settings(tmp_path, **{"inform.rules": rules})
    async with (
        domain.Domain(made, components=factories.components(made)) as running,
        await running.connect("ann", roles.Role.USER) as ann,
        await running.connect("bob", roles.Role.USER) as bob,
        await running.connect("olga", roles.Role.OPERATOR) as olga,
    ):
        by_ann, by_bob, by_olga = (
            client.InformClient(ann),
            client.InformClient(bob),
            client.InformClient(olga),
        )
        await by_olga.put("ops/1", b"secret", attributes={"kind": "ops"})
        assert (await by_ann.get("ops/1")).value == b"secret"
        for refused in (
            by_ann.put("ops/1", b"x"),
            by_ann.delete("ops/1"),
            by_bob.get("ops/1"),
            by_bob.history("ops/1"),
            by_bob.where("ops/1"),
        ):
            with pytest.raises(errors.Forbidden):
                await refused
        assert (await by_bob.find("kind = 'ops'")).contexts == []
        entry = await service_entries.ServiceEntries(by_ann).save(service_entries.ServiceEntry(name="maps"))
        with pytest.raises(errors.Forbidden):  # without a rule of the settings' own
            await service_entries.ServiceEntries(by_bob).delete(entry.id)
        await service_entries.ServiceEntries(by_olga).delete(entry.id)
        await by_ann.put("own/1", b"ann's")
        with pytest.raises(errors.Forbidden):
            await by_bob.put("own/1", b"mine now")
        await by_ann.delete("own/1")
        await by_bob.put("own/1", b"free again")


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_node_beside_the_domain_keeps_its_rules_and_its_log(tmp_path, start_process):
    """A client does not know which node serves it."""
    text = """[inform]
history = 40
refresh_s = "300ms"
[[inform.rules]]
keys = "ops/*"
read = ["role:operator"]
write = ["role:operator"]
"""
    place = await asyncio.to_thread(driver.init, tmp_path / "home", settings=text)
    made = loader.load(app_settings.Settings, file=place / "muster.toml")
    async with (
        domain.Domain(made, components=[part.InformationNodesComponent(made.inform)]) as running,
        await running.connect("bob", roles.Role.USER) as bob,
        await running.connect("olga", roles.Role.OPERATOR) as olga,
    ):
        child = await start_process(
            *driver.command_line("run", "inform", "--name", "beside"),
            env={"MUSTER_HOME": str(place), "NO_COLOR": "1"},
        )
        await child.line("is up", timeout_s=60)
        by_bob, by_olga = client.InformClient(bob, node="beside"), client.InformClient(olga, node="beside")
        for number in range(20):
            await by_olga.put("ops/1", b"%d" % number)
        assert len((await by_olga.history("ops/1")).changes) == 20, (
            "the log keeps what the domain's settings say"
        )
        for refused in (by_bob.get("ops/1"), by_bob.put("ops/1", b"x"), by_bob.put("ops/2", b"x")):
            with pytest.raises(errors.Forbidden):
                await refused
        entry = await service_entries.ServiceEntries(by_olga).save(service_entries.ServiceEntry(name="maps"))
        with pytest.raises(errors.Forbidden):
            await service_entries.ServiceEntries(by_bob).delete(entry.id)
        await child.terminate()


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_the_command(broker, start_node, tmp_path):
    await start_node("n1")

    def muster(*arguments: str, stdin: str = "") -> driver.Answer:
        return driver.quick(
            "inform", *arguments, "--server", broker.url, "-o", "json", home=tmp_path, stdin=stdin
        )

    async def run(*arguments: str, stdin: str = "") -> driver.Answer:
        return await asyncio.to_thread(lambda: muster(*arguments, stdin=stdin))

    put = await run("put", "p/1", "<p/>", "-a", "floor=2", "-a", 'tags=["a"]')
    assert put.code == 0, put.err
    assert (await run("get", "p/1")).json()["attributes"] == {"floor": 2, "tags": ["a"]}
    assigned = (await run("put", "-", stdin="from stdin")).json()["key"]
    assert (await run("get", assigned)).json()["value"] == "from stdin"
    assert [row["key"] for row in (await run("find", "floor = 2")).json()] == ["p/1"]
    assert (await run("where", "p/1")).json()[0]["replica_kind"] == "primary"
    assert (await run("nodes")).json()[0]["node"] == "n1"
    assert (await run("put", "p/1", "x", "--if-version", "0")).code == errors.Conflict.exit_code
    await run("delete", "p/1")
    assert (await run("get", "p/1")).code == errors.NotFound.exit_code
    assert [row["reason"] for row in (await run("history", "p/1")).json()] == ["put", "delete"]
    watched = (await run("watch", "p/1", "--count", "2")).out.splitlines()
    assert len(watched) == 2


@pytest.mark.may_block(reason="a command is run as a function")
async def test_sessions_services_and_histories_by_command(broker, start_node, tmp_path):
    await start_node("n1")

    async def run(*arguments: str) -> driver.Answer:
        return await asyncio.to_thread(
            driver.quick, "inform", *arguments, "--server", broker.url, "-o", "json", home=tmp_path
        )

    outer = (await run("session", "begin", "--timeout", "600")).json()["id"]
    inner = (await run("session", "begin", "--parent", outer)).json()["id"]
    assert (await run("session", "contents", inner, "step 1")).code == 0
    assert "step 1" in (await run("session", "contents", inner)).out
    pending = await run("session", "complete", outer)
    assert (pending.code != 0, "complete them first" in pending.err) == (True, True)
    assert (await run("session", "complete", inner)).code == 0
    assert (await run("session", "complete", outer)).code == 0
    assert (await run("session", "status", outer)).json()["status"] == "COMPLETED"
    unknown = await run("session", "status", "never-begun")
    assert (unknown.code, "does not exist" in unknown.err) == (errors.NotFound.exit_code, True)

    saved = await run(
        "service", "save", "maps", "--access", "http://127.0.0.1:1/m", "-a", "lon=8.5", "-a", "lat=47"
    )
    id_ = saved.json()["id"]
    assert (await run("service", "show", id_)).json()["access"] == ["http://127.0.0.1:1/m"]
    near = await run("service", "find", "name = 'maps'", "--box", "8", "46", "9", "48")
    assert [row["id"] for row in near.json()] == [id_]
    assert (await run("service", "find", "", "--box", "9", "46", "10", "48")).json() == []
    assert (await run("service", "delete", id_)).code == 0

    for value in ("one", "two"):
        await run("put", "h", value)
    assert [row["value"] for row in (await run("history", "h")).json()] == ["one", "two"]
    watched = (await run("watch", "h", "--count", "2")).out
    assert ("one" in watched, "two" in watched) == (True, True)
    assert (await run("delete", "h")).code == 0
    assert (await run("get", "h")).code != 0
