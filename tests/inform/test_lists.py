"""Lists that grow with the fleet are answered in parts, and what a request holds in memory is bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.bus.rpc import server
from muster.core import errors
from muster.inform import client, protocol
from muster.inform import settings as settings_
from muster.inform.node import maintenance, node, search
from muster.inform.node.replicas import peers
from muster.testing.eventually import eventually

pytestmark = pytest.mark.virtual_time

SETTINGS = msgspec.structs.replace(settings_.DEFAULT, timeout_s=1.0, replicas=1)
OTHERS = 35


@dataclass
class ListedFleet:
    """A real node ``p`` and a client ``ann``; further nodes exist only as messages."""

    net: Any
    p: node.InformationNode
    ann: client.InformClient

    def hear_of(self, count: int = OTHERS) -> list[str]:
        names = [f"n{number:06}" for number in range(count)]
        for name in names:
            information = protocol.ServerInformation(name, protocol.NodeLoad(1, 2.0, 0.9))
            self.p.directory.observe(information, self.p.freshness.now_s())
        return names


@pytest.fixture
async def fleet(simulated_network) -> AsyncIterator[ListedFleet]:
    net = simulated_network
    async with await node.start(await net.connect("p"), settings=SETTINGS, now_ns=net.now_ns) as p:
        yield ListedFleet(net, p, client.InformClient(await net.connect("ann")))


async def test_all_nodes_are_listed_a_page_at_a_time(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(protocol, "PAGE_NODES", 10)
    names = fleet.hear_of()
    page = await fleet.p._nodes(None, protocol.Nodes())  # type: ignore[arg-type]
    assert ([view.node for view in page.items], page.next, page.source) == (names[:10], names[9], "p")
    views = await fleet.ann.nodes()
    assert [view.node for view in views] == [*names, "p"]
    assert views[-1].proximity_ms == 0.0


async def test_the_pages_of_a_list_of_nodes_come_from_one_node(fleet: ListedFleet, monkeypatch):
    """Each node measures the others from its own place."""
    monkeypatch.setattr(protocol, "PAGE_NODES", 2)
    fleet.hear_of()
    net = fleet.net
    async with await node.start(await net.connect("q"), settings=SETTINGS, now_ns=net.now_ns):
        for _ in range(5):
            views = await fleet.ann.nodes()
            assert len([view for view in views if view.proximity_ms == 0.0]) == 1


async def test_all_replicas_are_listed_a_page_at_a_time(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(server, "PAGE_BYTES", 400)
    names = fleet.hear_of()
    await fleet.ann.put("k", b"v")

    async def answer(message: api.Message) -> None:
        for name in names:
            view = protocol.ReplicaInfo(name, "temporary", 1, 0.5, {})
            await message.respond(protocol.reply([view], view.node))

    await (await fleet.net.connect("others")).subscribe(protocol.to_all("where"), handler=answer)
    page = await fleet.p.reader.where(protocol.Where("k"), "ann")
    assert 1 < len(page.replicas) < 20
    assert [view.node for view in page.replicas] == ["p", *names][: len(page.replicas)]
    result = await fleet.ann.where("k")
    assert [view.node for view in result.replicas] == ["p", *names]
    assert result.replicas[0].replica_kind == "primary"
    assert (result.silent, result.silent_more) == ([], 0)


async def test_a_list_of_replicas_names_the_nodes_that_did_not_reply(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(protocol, "SILENT_MAX", 10)
    names = fleet.hear_of()
    await fleet.ann.put("k", b"v")
    result = await fleet.ann.where("k")
    assert [view.node for view in result.replicas] == ["p"]
    assert (result.silent, result.silent_more) == (names[:10], 25)
    assert result.silent_text == "n000000, n000001, n000002, n000003, n000004 and 30 more"


async def test_the_origins_of_requests_are_named_up_to_a_bound(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(protocol, "DEMAND_MAX", 3)
    await fleet.ann.put("k", b"v")
    for number in range(6):
        for _ in range(number + 1):
            fleet.p.demand.add("k", f"n{number}")
    (view,) = (await fleet.ann.where("k")).replicas
    assert (view.demand, view.demand_others) == ({"n5": 6, "n4": 5, "n3": 4}, 3 + 2 + 1)


async def test_silent_nodes_are_named_up_to_a_bound_and_the_rest_is_counted(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(protocol, "SILENT_MAX", 10)
    names = fleet.hear_of()
    for number in range(4):
        await fleet.p.writer.write(protocol.PutContext(f"k{number}", b"v"), "ann")
    matches = await fleet.p.search.find(protocol.FindContexts("TRUE"), "ann")
    assert (matches.silent, matches.silent_more) == (names[:10], 25)
    assert matches.silent_text == "n000000, n000001, n000002, n000003, n000004 and 30 more"
    monkeypatch.setattr(protocol, "REPLY_BYTES_MAX", 300)  # so that a search takes several requests
    monkeypatch.setattr(search, "NODE_BYTES_MIN", 1)
    requests: list[protocol.FindContexts] = []
    find = fleet.p.search.find

    async def count(request: protocol.FindContexts, identity: str) -> protocol.FindResult:
        requests.append(request)
        return await find(request, identity)

    monkeypatch.setattr(fleet.p.search, "find", count)
    matches = await fleet.ann.find("TRUE")
    assert [context.key for context in matches.contexts] == ["k0", "k1", "k2", "k3"]
    assert len(requests) > 1
    assert max(len(request.without) for request in requests) == 10
    assert len(matches.silent) + matches.silent_more == OTHERS


async def test_the_answers_of_many_nodes_share_the_memory_for_one_search(fleet: ListedFleet, monkeypatch):
    for number in range(8):
        await fleet.ann.put(f"k{number}", b"v" * 1_000)
    requests: list[protocol.FindContexts] = []
    find_here = fleet.p.search.find_here

    async def note(request: protocol.FindContexts) -> protocol.PartialFindResult:
        requests.append(request)
        return await find_here(request)

    monkeypatch.setattr(fleet.p.search, "find_here", note)
    await fleet.ann.find("TRUE")
    fleet.hear_of()
    monkeypatch.setattr(search, "REPLIES_BYTES_MAX", 3_000 * (OTHERS + 1))
    monkeypatch.setattr(search, "NODE_BYTES_MIN", 1_000)
    matches = await fleet.p.search.find(protocol.FindContexts("TRUE"), "ann")
    assert [request.bytes_max for request in requests] == [protocol.REPLY_BYTES_MAX, 3_000]
    assert ([context.key for context in matches.contexts], matches.reached) == (["k0", "k1"], "k1")
    assert len((await fleet.ann.find("TRUE")).contexts) == 8


async def test_one_request_looks_up_a_bounded_number_of_moved_contexts(fleet: ListedFleet, monkeypatch):
    """However many nodes name such keys: what is left is the next request's."""
    net = fleet.net
    async with await node.start(await net.connect("q"), settings=SETTINGS, now_ns=net.now_ns) as q:
        await q.maintenance.discover()
        await asyncio.sleep(0.1)
        keys = [f"k{number}" for number in range(8)]
        for key in keys:
            await fleet.p.writer.write(protocol.PutContext(key, b"v"), "ann")
        await asyncio.sleep(0.1)
        for number, key in enumerate(keys):  # both gave some up a moment ago, and no node has them now
            copy = fleet.p.replicas.index[key]
            fleet.p.records.drop(key)
            (fleet.p, q)[number % 2].records.moved[key] = fleet.p.freshness.now_s(), copy
        monkeypatch.setattr(search, "MOVED_MAX", 3)
        looked_up: list[int] = []
        real = search.ContextSearch._moved

        async def moved(self: search.ContextSearch, plan: Any, values: Any) -> list[protocol.Context]:
            looked_up.append(len(values))
            return await real(self, plan, values)

        monkeypatch.setattr(search.ContextSearch, "_moved", moved)
        matches = await fleet.ann.find("TRUE")
        assert [context.key for context in matches.contexts] == keys
        assert max(looked_up) <= 3


async def test_full_replication_names_a_bounded_number_of_holders(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(peers, "HOLDERS_MAX", 4)
    fleet.hear_of()
    monkeypatch.setattr(
        fleet.p.directory, "_settings", msgspec.structs.replace(SETTINGS, full_replication=True)
    )
    await fleet.p.writer.write(protocol.PutContext("k", b"v"), "ann")
    entry = await fleet.p.records.current("k")
    assert entry is not None
    assert len(entry.record.holders) == 4


async def test_upkeep_of_many_contexts_takes_few_tasks():
    before, most, done = len(asyncio.all_tasks()), 0, 0

    async def work() -> None:
        nonlocal most, done
        most = max(most, len(asyncio.all_tasks()) - before)
        await asyncio.sleep(0.001)
        done += 1

    assert await maintenance._all([work] * 1_000)
    assert (most, done) == (maintenance.CONCURRENT_MAX, 1_000)


async def test_contexts_expire_in_batches_and_a_failed_batch_ends_the_round(fleet: ListedFleet, monkeypatch):
    """A log that does not reply does not get a request for every context that is due."""
    monkeypatch.setattr(maintenance, "CHUNK", 10)
    keys = [f"k{number}" for number in range(35)]
    for key in keys:
        await fleet.p.writer.write(protocol.PutContext(key, b"v", lease_s=1.0), "ann")
    expire, replies = fleet.p.primary.end_lease, False
    attempts: Counter[float] = Counter()  # by the time, which does not advance during a round

    async def count(key: str) -> bool:
        attempts[fleet.p.freshness.now_s()] += 1
        if not replies:
            raise errors.Unavailable("the log does not reply")
        return await expire(key)

    monkeypatch.setattr(fleet.p.primary, "end_lease", count)
    await eventually(lambda: len(attempts) >= 3, timeout_s=30)
    assert max(attempts.values()) == 10
    assert fleet.p.maintenance.moved["expired"] == 0
    replies = True

    async def expired() -> bool:
        entries = [await fleet.p.records.current(key) for key in keys]
        return all(entry is not None and entry.record.reason == "expire" for entry in entries)

    await eventually(expired, timeout_s=30)
    assert fleet.p.maintenance.moved["expired"] == len(keys)


async def test_expiry_takes_one_request_for_each_context(fleet: ListedFleet, monkeypatch):
    monkeypatch.setattr(maintenance, "CHUNK", 10)
    for number in range(35):
        await fleet.p.writer.write(protocol.PutContext(f"k{number}", b"v", lease_s=1.0), "ann")
    log, requests = fleet.p.log, Counter[str]()
    append, current = log.append, fleet.p.records.current

    def count_appends(record: protocol.ContextRecord, since: int) -> asyncio.Future[int]:
        requests["append"] += 1
        return append(record, since)

    async def count_reads(key: str) -> Any:
        requests["read"] += 1
        return await current(key)

    monkeypatch.setattr(log, "append", count_appends)
    monkeypatch.setattr(fleet.p.records, "current", count_reads)
    await eventually(lambda: fleet.p.maintenance.moved["expired"] == 35, timeout_s=30)
    assert requests == {"append": 35}
