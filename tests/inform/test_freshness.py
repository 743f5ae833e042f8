"""The freshness of a read: any age, a maximum age, linearizable."""

from __future__ import annotations

import asyncio
from typing import Any

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
        node.state.fresh_at_s = node.state.now_s()
        assert node.reader.local("k", 0.001) is not None
        assert node.reader.local("k", 0.0) is None
        requests: list[int] = []
        log_state = node.state.log.state

        async def count() -> api.StreamState:
            requests.append(1)
            return await log_state()

        node.state.log.state = count  # type: ignore[method-assign]
        assert (await node.reader.get(protocol.GetContext("k", 0.001), "ann")).value == b"v"
        assert requests == []
        assert (await node.reader.get(protocol.GetContext("k", 0.0), "ann")).value == b"v"
        assert requests == [1]


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
        loop.cancel()  # q hears nothing of the log any more
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
        log_state = node.state.log.state

        async def count() -> api.StreamState:
            requests.append(1)
            await asyncio.sleep(0.01)
            return await log_state()

        node.state.log.state = count  # type: ignore[method-assign]
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

    async def call(self) -> asyncio.Task[int]:
        task = asyncio.ensure_future(self.rounds.result())
        await asyncio.sleep(0.01)
        return task


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
    for task in (first, second):
        with pytest.raises(errors.Unavailable):
            await task


async def test_the_age_of_a_temporary_copy_counts_from_when_its_node_read_the_log(simulated_network):
    """However long the request to hold it was under way."""
    net = simulated_network
    p, q = [
        await node_node.start(await net.connect(name), settings=ALONE, now_ns=net.now_ns) for name in "pq"
    ]
    ann = client.InformClient(await net.connect("ann"), node="p")
    await ann.put("k", b"1")
    request = p.state.bus.request

    async def slow(*arguments: Any, **options: Any) -> api.Message:
        await asyncio.sleep(5.0)
        return await request(*arguments, **options)

    with pytest.MonkeyPatch.context() as late:
        late.setattr(p.state.bus, "request", slow)
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
    await eventually(lambda: bool(p.state.directory.nodes and q.state.directory.nodes))
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
