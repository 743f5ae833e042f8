"""Other registries beside our own: a real etcd where Debian has one, another UDDI, and one that is down."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator

import pytest

from benchmarks import etcd as etcd_peer
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config
from muster.bus.client import client as muster_client
from muster.bus.http import server as http_server
from muster.core import errors
from muster.gateways.soap import asgi
from muster.gateways.soap import server as soap_server
from muster.gateways.uddi import endpoints, registry
from muster.inform import client, service_entries
from muster.inform.mounts import base, etcd
from muster.inform.mounts import registry as mounts_registry
from muster.inform.node import node
from muster.trust.login import passwords
from tests.inform import conftest


async def login(name: str, password: str, _: str) -> passwords.PasswordLogin:
    del name, password
    raise errors.Unauthorized("no publisher is allowed")


@contextlib.asynccontextmanager
async def other_uddi(contexts_bus: api.Bus) -> AsyncIterator[str]:
    """The inquiry port of a registry."""

    @contextlib.asynccontextmanager
    async def visit(_: str, __: str) -> AsyncIterator[api.Bus]:
        yield contexts_bus

    made = endpoints.UddiEndpoints(registry.UddiRegistry(visit), login)
    async with soap_server.SoapServer(asgi.SoapApplication(made.endpoints())) as server:
        yield f"{server.url}/uddi/inquiry"


async def test_another_uddi_registry_is_searched_beside_our_own(start_node, inform, tmp_path):
    elsewhere = config.BrokerConfig(name="elsewhere", directory=tmp_path / "elsewhere")
    async with (
        brokers.Broker(elsewhere) as running,
        await muster_client.connect((running.url,), identity="their-node") as their_bus,
        await node.start(their_bus, settings=conftest.QUICK),
        other_uddi(their_bus) as url,
    ):
        theirs = client.InformClient(their_bus)
        saved = await service_entries.ServiceEntries(theirs).save(
            service_entries.ServiceEntry(
                name="plotter", access=("http://127.0.0.1:1/p",), metadata={"floor": 2}
            )
        )
        await start_node(
            "n1", mounts=(mounts_registry.MountSettings(name="lab", kind="uddi", url=url), _down())
        )
        await inform.put("desk/7", b"ours", attributes={"floor": 2})
        matches = await inform.find("floor = 2")
        key = f"mount/lab/uddi:{saved.id}"
        assert [(context.key, context.source, context.replica_kind) for context in matches.contexts] == [
            ("desk/7", "n1", "primary"),
            (key, "lab", "mounted"),
        ]
        assert set(matches.failed) == {"down"}, "a mount that is down is named, and the search succeeds"
        (entry,) = await service_entries.ServiceEntries(inform).find("name = 'plotter'")
        assert entry.access == ("http://127.0.0.1:1/p",)
        read = await inform.get(key)
        assert b"plotter" in read.value
        with pytest.raises(errors.NotFound):
            await inform.get("mount/lab/uddi:no:such")
        with pytest.raises(errors.NotFound, match="no mount"):
            await inform.get("mount/none/x")
        with pytest.raises(errors.Refused, match="read-only"):
            await inform.put(key, b"x")
        with pytest.raises(errors.Unavailable):
            await inform.get("mount/down/x")


def _down() -> mounts_registry.MountSettings:
    return mounts_registry.MountSettings(name="down", kind="etcd", url="http://127.0.0.1:9")


async def test_an_etcd_is_searched_by_what_its_values_say(start_node, inform, tmp_path):
    binary = await asyncio.to_thread(etcd_peer.find)
    if binary is None:
        pytest.skip("no etcd here")
    async with etcd_peer.running(pathlib.Path(binary), tmp_path / "etcd") as (port,):
        for key, value in (
            ("/services/web", json.dumps({"port": 80, "tags": ["edge"]}).encode()),
            ("/services/raw", b"\xff\x00"),
            ("/other", json.dumps({"port": 80}).encode()),
        ):
            await asyncio.to_thread(etcd_peer.put, port, key, value)
        url = f"http://127.0.0.1:{port}"
        await start_node(
            "n1",
            mounts=(mounts_registry.MountSettings(name="old", kind="etcd", url=url, prefix="/services/"),),
        )
        matches = await inform.find("port = 80")
        assert [(context.key, context.source) for context in matches.contexts] == [
            ("mount/old//services/web", "old")
        ]
        assert matches.contexts[0].version > 0
        assert [context.key for context in (await inform.find("key LIKE 'mount/old/%'")).contexts] == [
            "mount/old//services/raw",
            "mount/old//services/web",
        ]
        assert (await inform.get("mount/old//services/raw")).value == b"\xff\x00"
        with pytest.raises(errors.NotFound):
            await inform.get("mount/old//other")


async def test_an_invalid_reply_of_a_mount_is_reported(start_node, inform):
    async with await http_server.serve({"/": lambda _: http_server.text("hello")}) as server:
        mounts = (
            mounts_registry.MountSettings(name="a", kind="etcd", url=server.url),
            mounts_registry.MountSettings(name="b", kind="uddi", url=server.url),
        )
        await start_node("n1", mounts=mounts)
        await inform.put("k", b"v", attributes={"a": 1})
        matches = await inform.find("a = 1")
        assert [context.key for context in matches.contexts] == ["k"]
        assert set(matches.failed) == {"a", "b"}


async def test_one_value_that_cannot_travel_hides_nothing_else(start_node, inform):
    def packed(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    values = {
        "deep": "[" * 100_000,
        "half": r'{"name": "\ud800", "floor": 2}',
        "large": "x" * 1_200_000,  # etcd accepts 1.5 MB
        "long": json.dumps({"number": 10**30, "floor": 2}),
        "plain": '{"floor": 2}',
    }
    kvs = [{"key": packed(key), "value": packed(value)} for key, value in values.items()]
    deep, far = "[" * 100_000, {"kvs": [{"key": packed("k"), "mod_revision": str(10**30)}]}
    answers = {
        "/good": http_server.json_response({"kvs": kvs}),
        "/deep": http_server.text(deep),
        "/far": http_server.json_response(far),
    }
    doors = {f"{path}/v3/kv/range": lambda _, value=answer: value for path, answer in answers.items()}
    async with await http_server.serve({}, post_routes=doors) as server:
        mounts = [
            mounts_registry.MountSettings(name=path[1:], kind="etcd", url=server.url + path)
            for path in answers
        ]
        await start_node("n1", mounts=tuple(mounts))
        await inform.put("ours", b"v", attributes={"floor": 2})
        matches = await inform.find("floor = 2 OR key LIKE 'mount/%'")
        assert [context.key for context in matches.contexts] == [
            *(f"mount/good/{key}" for key in values if key != "large"),
            "ours",
        ]
        assert set(matches.failed) == {"deep", "far"}
        assert matches.cut == ["good"]
        assert matches.contexts[1].attributes["floor"] == 2


async def test_a_fault_in_a_back_end_is_no_reason_to_find_nothing(start_node, inform, monkeypatch):
    async def entries(_: object) -> None:
        raise ZeroDivisionError("by its author")

    monkeypatch.setattr(etcd.EtcdMount, "entries", entries)
    await start_node("n1", mounts=(_down(),))
    await inform.put("k", b"v", attributes={"a": 1})
    matches = await inform.find("a = 1")
    assert [context.key for context in matches.contexts] == ["k"]
    assert matches.failed == {"down": "ZeroDivisionError: by its author"}


async def test_an_entry_that_no_reply_holds_is_named():
    class Large:
        async def entry(self, key: str) -> base.MountedEntry:
            return base.MountedEntry(key, b"x" * 1_000_000, {"text": "x" * 500_000})

    mounted = base.MountedRegistry("other", Large())  # type: ignore[arg-type]
    with pytest.raises(errors.LimitExceeded, match="'mount/other/k' has 15"):
        await mounted.get("mount/other/k")


def test_a_mount_reports_its_error():
    for wrong in ({"kind": "ldap"}, {"url": "ftp://x"}, {"name": "a b"}):
        with pytest.raises(errors.InvalidInput):
            mounts_registry.MountSettings(
                **{"name": "m", "kind": "etcd", "url": "http://127.0.0.1:1", **wrong}
            )
