"""The freshness of a read: any age, a maximum age, linearizable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest

from muster.bus import api
from muster.core import errors
from muster.inform import client, protocol
from muster.inform import settings as settings_
from muster.inform.node import node as node_node
from muster.inform.node import shared_rounds
from muster.testing.eventually import eventually

pytestmark = pytest.mark.virtual_time

ALONE = msgspec.structs.replace(settings_.DEFAULT, replicas=1)


async def test_a_linearizable_read_is_confirmed_by_the_log_however_young_the_copy_is(simulated_network):
    net = simulated_network
    async with await node_node.start(await net.connect("p"), now_ns=net.now_ns) as node:
        ann = client.InformClient(await net.connect("ann"))
        await ann.put("k", b"v")
        node.freshness.fresh_at_s = node.freshness.now_s()
        assert node.reader.local("k", 0.001) is not None
        assert node.reader.local("k", 0.0) is None
        requests: list[int] = []
        log_state = node.log.state

        async def count() -> api.StreamState:
            requests.append(1)
            return await log_state()

        node.log.state = count  # type: ignore[method-assign]
        assert (await node.reader.get(protocol.GetContext("k", 0.001), "ann")).value == b"v"
        assert requests == []
        assert (await node.reader.get(protocol.GetContext("k", 0.0), "ann")).value == b"v"
        assert requests == [1]


@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_linearizable_read_needs_no_task_and_is_confirmed_after_it_came(
    simulated_network, monkeypatch, replicas
):
    net = simulated_network
    async with await node_node.start(await net.connect("p"), replicas=replicas, now_ns=net.now_ns) as node:
        ann = client.InformClient(await net.connect("ann"))
        await ann.put("k", b"v")
        waiting: list[protocol.GetContext] = []
        get = node.reader.get

        async def counted(request: protocol.GetContext, identity: str) -> protocol.Context:
            waiting.append(request)
            return await get(request, identity)

        monkeypatch.setattr(node.reader, "get", counted)
        reads = await asyncio.gather(*(ann.get("k", max_staleness_s=0.0) for _ in range(3)))
        assert [read.value for read in reads] == [b"v"] * 3
        assert waiting == []
        assert node._confirming == 0
        with pytest.raises(errors.NotFound):
            await ann.get("none", max_staleness_s=0.0)
        assert waiting.pop().key == "none"


@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_linearizable_read_is_not_answered_while_the_log_is_not_received(simulated_network, replicas):
    """Of a node whose follower has stopped: it has replied to the request, and nothing is received."""
    net = simulated_network
    p, q = [
        await node_node.start(await net.connect(name), replicas=replicas, now_ns=net.now_ns) for name in "pq"
    ]
    for node in (p, q):
        await node.maintenance.discover()
    await asyncio.sleep(0.1)
    near = {
        name: client.InformClient(await net.connect(f"of-{name}"), node=name, timeout_s=5.0) for name in "pq"
    }
    await near["p"].put("k", b"1", ack="replicated")
    q._loops[1].cancel()
    await near["p"].put("k", b"2")
    with contextlib.suppress(errors.Unavailable):
        assert (await near["q"].get("k", max_staleness_s=0.0)).value == b"2"
    assert (await near["q"].get("k")).value == b"1", "it is still behind"
    await asyncio.sleep(2 * api.DURABLE_TIMEOUT_S)
    assert q._confirming == 0
    for node in (p, q):
        await node.close()


async def test_a_context_that_does_not_exist_is_reported_as_fast_as_the_log_replies(simulated_network):
    """No holder is waited for if this node holds all contexts that exist."""
    net = simulated_network
    async with await node_node.start(await net.connect("p"), now_ns=net.now_ns) as node:
        ann = client.InformClient(await net.connect("ann"))
        number = next(
            number
            for number in range(100_000)
            if protocol.bucket(f"other/{number}") == protocol.bucket("none")
        )
        await ann.put(f"other/{number}", b"v")  # so the node is asked for contexts of this topic
        await asyncio.sleep(1.0)
        for freshness_s in (None, 0.0):
            begun_s = asyncio.get_running_loop().time()
            with pytest.raises(errors.NotFound):
                await ann.get("none", max_staleness_s=freshness_s)
            assert asyncio.get_running_loop().time() - begun_s < node.settings.hedge_s / 2


async def test_a_read_that_names_an_age_gets_no_older_copy(simulated_network):
    """A copy whose follower is behind has its age; a younger one is had from the log."""
    net = simulated_network
    settings = settings_.DEFAULT
    p, q = [
        await node_node.start(await net.connect(name), settings=settings, now_ns=net.now_ns) for name in "pq"
    ]
    for node in (p, q):
        await node.maintenance.discover()
    await asyncio.sleep(0.1)
    near = {name: client.InformClient(await net.connect(f"of-{name}"), node=name) for name in "pq"}
    await near["p"].put("k", b"1", ack="replicated")
    for loop in q._loops:
        loop.cancel()  # q no longer receives the log
    await asyncio.sleep(5.0)
    await near["p"].put("k", b"2")
    old = await near["q"].get("k")
    assert (old.value, old.source) == (b"1", "q")
    assert old.age_s >= 4.0
    for max_age_s in (1.0, 0.0):
        fresh = await near["q"].get("k", max_staleness_s=max_age_s)
        assert fresh.value == b"2"
        assert fresh.age_s <= max(max_age_s, 1.0)
    for node in (p, q):
        await node.close()


async def test_linearizable_reads_at_one_time_share_a_question_to_the_log(simulated_network):
    net = simulated_network
    async with await node_node.start(await net.connect("p"), now_ns=net.now_ns) as node:
        ann = client.InformClient(await net.connect("ann"))
        await ann.put("k", b"v")
        requests: list[int] = []
        log_state = node.log.state

        async def count() -> api.StreamState:
            requests.append(1)
            await asyncio.sleep(0.01)
            return await log_state()

        node.log.state = count  # type: ignore[method-assign]
        reads = [node.reader.get(protocol.GetContext("k", 0.0), "ann") for _ in range(100)]
        assert {context.value for context in await asyncio.gather(*reads)} == {b"v"}
        assert len(requests) <= 2


class Question:
    """Each answer is given by hand."""

    def __init__(self) -> None:
        self.sent: list[asyncio.Future[int]] = []
        self.rounds = shared_rounds.SharedRounds(self._ask)

    async def _ask(self) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.sent.append(future)
        return await future

    async def call(self) -> asyncio.Future[int]:
        result = asyncio.shield(self.rounds.next())
        await asyncio.sleep(0.01)
        return result


async def test_no_caller_gets_the_answer_to_a_question_sent_before_it_came():
    question = Question()
    first = await question.call()
    second, third = await question.call(), await question.call()
    assert len(question.sent) == 1
    question.sent[0].set_result(1)
    assert await first == 1
    await asyncio.sleep(0.01)
    assert not second.done()
    question.sent[1].set_result(2)
    assert (await second, await third) == (2, 2)
    assert len(question.sent) == 2


async def test_a_caller_that_gives_up_takes_no_answer_from_the_others():
    question = Question()
    first, second = await question.call(), None
    second = await question.call()
    first.cancel()
    question.sent[0].set_result(1)
    await asyncio.sleep(0.01)
    question.sent[1].set_result(2)
    assert await second == 2


async def test_a_failure_reaches_all_callers_of_a_shared_request():
    question = Question()
    first, second = await question.call(), await question.call()
    question.sent[0].set_exception(errors.TimedOut("no answer"))
    with pytest.raises(errors.TimedOut):
        await first
    await asyncio.sleep(0.01)
    question.sent[1].set_result(2)
    assert await second == 2


async def test_requests_that_wait_when_a_node_closes_are_refused():
    question = Question()
    first, second = await question.call(), await question.call()
    await question.rounds.close()
    late = await question.call()  # such as a read that was refused, and is tried again
    for task in (first, second, late):
        with pytest.raises(errors.Unavailable):
            await task
    assert len(question.sent) == 1


async def test_the_age_of_a_temporary_copy_counts_from_when_its_node_read_the_log(simulated_network):
    """However long the request to hold it was under way."""
    net = simulated_network
    p, q = [
        await node_node.start(await net.connect(name), settings=ALONE, now_ns=net.now_ns) for name in "pq"
    ]
    ann = client.InformClient(await net.connect("ann"), node="p")
    await ann.put("k", b"1")
    request = p.bus.request

    async def slow(*arguments: Any, **options: Any) -> api.Message:
        await asyncio.sleep(5.0)
        return await request(*arguments, **options)

    with pytest.MonkeyPatch.context() as late:
        late.setattr(p.bus, "request", slow)
        replicating = asyncio.ensure_future(p.maintenance._replicate("k", "q"))
        await asyncio.sleep(2.0)
        await ann.put("k", b"2")
        await replicating
    actual = q.reader.local("k", max_staleness_s=1.0)
    assert actual is not None
    assert (actual.value, actual.replica_kind) == (b"2", "temporary")
    for node in (p, q):
        await node.close()


# Clocks of nodes that differ.


@pytest.mark.virtual_time
@pytest.mark.parametrize("ahead_s", [3600, -3600])
async def test_a_lease_ends_for_all_nodes_at_once_with_wrong_clocks(simulated_network, ahead_s):
    net = simulated_network

    def wrong_ns() -> int:
        return int(net.now_ns() + ahead_s * 1_000_000_000)

    both = msgspec.structs.replace(ALONE, replicas=2)
    p = await node_node.start(await net.connect("p"), settings=both, now_ns=wrong_ns)
    q = await node_node.start(await net.connect("q"), settings=both, now_ns=net.now_ns)
    await eventually(lambda: bool(p.directory.nodes and q.directory.nodes))
    bus = await net.connect("ann")
    written = await client.InformClient(bus, node="p").put("k", b"v", lease_s=60.0, ack="replicated")
    assert (written.primary, written.replicas) == ("p", 2)
    await p.close()  # it can end the lease no more
    ann = client.InformClient(bus, node="q")
    await asyncio.sleep(50.0)
    read = await ann.get("k")
    assert read.value == b"v"
    assert 0 < read.lease_left_s < 11
    await asyncio.sleep(11.0)
    with pytest.raises(errors.NotFound):
        await ann.get("k")
    await q.close()


# The end of a lease, which nodes judge by their own estimates of the log's time.

EARLY_NS = 3_000_000_000  # with a slow network; a few milliseconds are enough


class Pair(NamedTuple):
    """The primary of a context and another holder.

    Neither ends leases by itself, and requests to all holders are lost on the way to the primary.
    """

    p: node_node.InformationNode
    q: node_node.InformationNode
    version: int

    async def reasons(self) -> list[str]:
        return [entry.record.reason for entry in (await self.q.records.versions("k"))[0]]


@pytest.fixture
async def ending(simulated_network) -> AsyncIterator[Pair]:
    """A lease ends in two seconds."""
    net = simulated_network
    both = msgspec.structs.replace(ALONE, replicas=2)
    p, q = [await node_node.start(await net.connect(name), settings=both, now_ns=net.now_ns) for name in "pq"]
    await eventually(lambda: bool(p.directory.nodes and q.directory.nodes))
    for node in (p, q):
        node._loops[-3].cancel()
    put = protocol.PutContext("k", b"v", lease_s=9.0, ack="replicated")
    written = await p.writer.write(put, "ann")
    replica = q.replicas.index["k"]
    assert (replica.holders, replica.version) == (("p", "q"), written.version)
    await asyncio.sleep((replica.expires_at_ns - p.freshness.log_now_ns()) / 1e9 - 2.0)
    for topic in p._topics.values():
        await topic.close()
    yield Pair(p, q, written.version)
    for node in (p, q):
        await node.close()


def _advance(monkeypatch: pytest.MonkeyPatch, node: node_node.InformationNode) -> None:
    now_ns = node.freshness.log_now_ns
    monkeypatch.setattr(node.freshness, "log_now_ns", lambda: now_ns() + EARLY_NS)


async def test_a_linearizable_read_finds_a_lease_over_only_if_its_primary_does(ending: Pair, monkeypatch):
    with monkeypatch.context() as early:
        _advance(early, ending.q)
        assert (await ending.q.reader.get(protocol.GetContext("k", 0.0), "bob")).value == b"v"
        assert await ending.reasons() == ["put"]
    for node in (ending.p, ending.q):
        _advance(monkeypatch, node)
    with pytest.raises(errors.NotFound):
        await ending.q.reader.get(protocol.GetContext("k", 0.0), "bob")
    with pytest.raises(errors.Conflict, match="has the version 0"):
        await ending.p.writer.write(protocol.PutContext("k", b"2", expected_version=ending.version), "ann")
    assert await ending.reasons() == ["put", "expire"]


@pytest.mark.parametrize(
    "rejected",
    [protocol.PutContext("k", b"2", expected_version=1), protocol.DeleteContext("k")],
    ids=["put", "delete"],
)
async def test_no_read_finds_a_context_after_a_write_found_its_lease_over(
    ending: Pair, monkeypatch, rejected
):
    _advance(monkeypatch, ending.p)
    if isinstance(rejected, protocol.PutContext):
        rejected = msgspec.structs.replace(rejected, expected_version=ending.version)
    with pytest.raises((errors.Conflict, errors.NotFound)):
        await ending.p.writer.write(rejected, "ann")
    with pytest.raises(errors.NotFound):
        await ending.q.reader.get(protocol.GetContext("k", 0.0), "bob")
    assert await ending.reasons() == ["put", "expire"]


async def test_a_renewal_before_the_recorded_end_of_a_lease_counts(ending: Pair, monkeypatch):
    """The reader has judged the lease as over when the primary renews it."""
    _advance(monkeypatch, ending.q)
    request = ending.q.links.request

    async def renewed_first(node: str, kind: str, message: Any, result: type) -> Any:
        put = protocol.PutContext("k", b"2", lease_s=9.0, expected_version=ending.version)
        await ending.p.writer.write(put, "ann")
        return await request(node, kind, message, result)

    monkeypatch.setattr(ending.q.links, "request", renewed_first)
    assert (await ending.q.reader.get(protocol.GetContext("k", 0.0), "bob")).value == b"2"
    assert await ending.reasons() == ["put", "put"]


async def test_a_lease_ends_without_its_primary_and_for_watchers(ending: Pair, simulated_network):
    simulated_network.unplug("p")
    watched = asyncio.ensure_future(
        ending.q.reader.changes(protocol.WaitForChanges("k", ending.version, wait_s=20.0), "bob")
    )
    await asyncio.sleep(2.1)
    reads = [ending.q.reader.get(protocol.GetContext("k", 0.0), "bob") for _ in range(20)]
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {errors.NotFound}
    assert [change.reason for change in (await watched).changes] == ["expire"]
    assert await ending.reasons() == ["put", "expire"]
    last = await ending.q.records.current("k")
    assert last is not None
    assert (last.record.stamped_by, last.record.holders) == ("q", ("q", "p"))


async def test_reads_that_need_not_be_linearizable_write_nothing(ending: Pair, monkeypatch):
    """A domain whose log is full answers them."""
    _advance(monkeypatch, ending.q)
    for max_age_s in (None, 3.0):
        with pytest.raises(errors.NotFound):
            await ending.q.reader.get(protocol.GetContext("k", max_age_s), "bob")
    assert await ending.reasons() == ["put"]
    assert (await ending.p.reader.get(protocol.GetContext("k", 0.0), "bob")).value == b"v"
