"""Secrets in the store reach only the agent that needs them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from muster.bus.rpc import client as rpc
from muster.core import errors
from muster.manage import client, manifest, protocol, secrets
from muster.testing.eventually import eventually
from muster.trust import sealed_box

VALUE = "swordfish-and-chips"


def entry(folder: Any) -> dict[str, Any]:
    """A process that writes down what it was given."""
    return {
        "name": "db",
        "type": "process",
        "agent": "host-a",
        "config": {
            "command": ["sh", "-c", 'printf %s "$PASSWORD" > given; exec sleep 1000'],
            "directory": str(folder),
            "environment": {"PASSWORD": {"secret": "store:db-password"}},
        },
    }


@pytest.fixture
async def small(fleet):
    fleet.key = sealed_box.SealedBoxKey.create()
    fleet.reg = await fleet.registry(open_key=lambda: fleet.key)
    fleet.man = await fleet.manager()
    fleet.host = await fleet.agent()
    return fleet


async def test_it_reaches_the_process_and_is_seen_nowhere_else(small, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    crossed: list[bytes] = []
    sniffer = await small.connect("sniffer")  # receives everything, which no role may
    async with await sniffer.subscribe(">", handler=lambda value: crossed.append(value.data)):
        await sniffer.flush()
        assert (await small.client.set_secret("db-password", VALUE)).used_by == []
        await small.client.create(entry(tmp_path))
        await small.client.wait("db", "up")
        await eventually(lambda: (tmp_path / "given").exists() and (tmp_path / "given").read_text() == VALUE)
        reported = [
            await small.client.describe("db"),
            await small.client.get(),
            await small.client.secrets(),
            await small.client.observe("db"),
            [msgspec.to_builtins(decision) for decision in await small.client.decisions()],
        ]
    assert len(crossed) > 10
    assert not [element for element in crossed if VALUE.encode() in element]
    assert VALUE not in repr(reported)
    assert VALUE not in caplog.text
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "given"]
    assert kept
    assert not [path for path in kept if VALUE.encode() in path.read_bytes()]
    (item,) = reported[2]
    assert (item.name, item.by, item.used_by) == ("db-password", "ann", ["db"])
    audit = [
        (decision.who, decision.what, decision.target, decision.outcome.value)
        for decision in await small.client.decisions()
    ]
    assert ("ann", "secret-set", "db-password", "done") in audit
    assert ("host-a", "secret", "db-password", "done") in audit


async def test_only_the_agent_of_the_resource_gets_the_secret(small, tmp_path):
    await small.client.set_secret("db-password", VALUE)
    await small.client.set_secret("other", "x")
    await small.client.create(entry(tmp_path))
    await small.client.create({"name": "plain", "type": "memory", "agent": "host-b"})
    key = sealed_box.SealedBoxKey.create()

    async def ask(identity: str, **more: Any) -> Any:
        request_fields = {"resource": "db", "name": "db-password", "key": key.public, **more}
        bus = await small.connect(identity)
        on_behalf_of = request_fields.pop("on_behalf_of", "")
        subject = protocol.request(identity, protocol.SECRET)
        return await rpc.call(bus, subject, request_fields, on_behalf_of=on_behalf_of)

    for identity, more in (
        ("host-b", {}),  # another agent
        ("host-b", {"on_behalf_of": "host-a"}),
        ("host-b", {"resource": "plain"}),  # its own resource, which does not refer to it
        ("ann", {}),
        ("ann", {"on_behalf_of": "host-a"}),
        ("manager-1", {}),
        ("host-a", {"resource": "gone"}),
        ("host-a", {"name": "other"}),  # which its resource does not refer to
    ):
        with pytest.raises(errors.Forbidden):
            await ask(identity, **more)
    audit = [(decision.what, decision.outcome.value) for decision in await small.client.decisions()]
    assert audit.count(("secret", "refused")) == 8
    # The one who may gets a box for its key, about this very resource.
    box = (await ask("host-a"))["box"]
    assert key.open(box, secrets.delivery_context("host-a", "db", "db-password")).decode() == VALUE
    with pytest.raises(errors.InvalidInput):
        sealed_box.SealedBoxKey.create().open(box, secrets.delivery_context("host-a", "db", "db-password"))


async def test_one_that_is_missing_used_or_not_sealed_for_us_is_refused(small, tmp_path):
    with pytest.raises(errors.InvalidInput, match="not in the store"):
        await small.client.create(entry(tmp_path))
    await small.client.set_secret("db-password", VALUE)
    await small.client.create(entry(tmp_path))
    with pytest.raises(errors.Conflict, match="db refer"):
        await small.client.delete_secret("db-password")
    with pytest.raises(errors.NotFound):
        await small.client.delete_secret("nothing")
    bus = small.client._bus
    for name, box in (
        ("db-password", "bm90IGEgYm94"),
        (
            "db-password",
            sealed_box.seal(
                sealed_box.SealedBoxKey.create().public, b"x", secrets.storage_context("db-password")
            ),
        ),
        ("moved", sealed_box.seal(small.key.public, b"x", secrets.storage_context("db-password"))),
        ("bad name", "x"),
    ):
        with pytest.raises(errors.InvalidInput):
            await rpc.call(bus, protocol.request("ann", "secret-set"), {"name": name, "box": box})
    for value in ("", "x" * 100_000):
        with pytest.raises(errors.InvalidInput):
            await small.client.set_secret("db-password", value)
    await small.client.delete("db")
    await small.client.wait_gone("db")
    await small.client.delete_secret("db-password")
    assert await small.client.secrets() == []


async def test_no_reply_contains_the_value_of_a_secret(small):
    plain: dict[str, Any] = {"name": "a", "type": "process", "agent": "host-a"}
    plain["config"] = {"command": ["true"], "environment": {"DB_PASSWORD": VALUE}}
    with pytest.raises(manifest.ManifestError, match="must not contain"):
        await small.client.create(plain)
    with pytest.raises(
        errors.InvalidInput, match="contains the value of a secret"
    ) as caught:  # past the client's own check
        await rpc.call(small.client._bus, protocol.request("ann", "create"), {"entry": plain})
    assert VALUE not in str(caught.value)


async def test_a_new_value_is_taken_at_the_next_start_and_a_new_registry_has_it(small, tmp_path):
    await small.client.set_secret("db-password", "old")
    await small.client.create(entry(tmp_path))
    await small.client.wait("db", "up")
    arguments = tmp_path / "given"
    await eventually(lambda: arguments.exists() and arguments.read_text() == "old")
    assert (await small.client.set_secret("db-password", VALUE)).used_by == ["db"]
    second = await small.registry("registry-2", open_key=lambda: small.key)
    await small.reg.stop()
    await second.acting.wait()
    await small.client.execute("db", "restart")
    await eventually(lambda: arguments.read_text() == VALUE)


async def test_a_registry_without_a_key_keeps_none(fleet):
    await fleet.registry()
    with pytest.raises(errors.MissingDependency):
        await client.ManageClient(await fleet.connect("bob")).set_secret("x", VALUE)
