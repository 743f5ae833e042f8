"""A write whose reply was lost is repeated and executed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.bus.rpc import requests
from muster.core import errors
from muster.inform import client, protocol
from muster.inform import settings as settings_
from muster.inform.node import node as node_node

pytestmark = pytest.mark.virtual_time

SETTINGS = msgspec.structs.replace(settings_.DEFAULT, timeout_s=1.0, replicas=2)


@dataclass
class Pair:
    """``p`` is the primary of ``k``. Alice sends to ``q``, Bob to ``p``."""

    p: node_node.InformationNode
    q: node_node.InformationNode
    alice: client.InformClient
    bob: client.InformClient
    version: int


@pytest.fixture
async def pair(simulated_network) -> AsyncIterator[Pair]:
    net = simulated_network
    p, q = [
        await node_node.start(await net.connect(name), settings=SETTINGS, now_ns=net.now_ns) for name in "pq"
    ]
    for node in (p, q):
        await node.maintenance.discover()
    await asyncio.sleep(0.1)
    alice = client.InformClient(await net.connect("alice"), node="q")
    bob = client.InformClient(await net.connect("bob"), node="p")
    written = await bob.put("k", b"start", ack="replicated")
    assert (written.primary, written.replicas) == ("p", 2)
    yield Pair(p, q, alice, bob, written.version)
    await p.close()
    await q.close()


async def lose_answer(
    pair: Pair, write: Awaitable[protocol.WriteResult], between: int
) -> protocol.WriteResult:
    """The primary stores ``write`` and its answer is late; Bob writes, and Alice's node tries again."""
    real, log = pair.p.log.append, pair.p.log
    stored = asyncio.Event()

    async def late(position: asyncio.Future[int]) -> int:
        await position
        stored.set()
        # The turn of the key is free, the answer is not sent.
        pair.p.primary.locks.release("k")
        await asyncio.sleep(1.5)
        assert pair.p.primary.locks.try_acquire("k")
        return position.result()

    def append(record: protocol.ContextRecord, since: int) -> asyncio.Future[int]:
        if record.writer != "alice":
            return real(record, since)
        log.append = real  # type: ignore[method-assign]
        return asyncio.ensure_future(late(real(record, since)))

    log.append = append  # type: ignore[method-assign]
    first = asyncio.ensure_future(write)
    await stored.wait()
    await asyncio.sleep(0.01)
    for number in range(between):
        await pair.bob.put("k", b"bob %d" % number)
    return await first


Write = Callable[[Pair], Awaitable[protocol.WriteResult]]


@pytest.mark.parametrize(
    "write",
    [
        lambda pair: pair.alice.put("k", b"alice"),
        lambda pair: pair.alice.put("k", b"alice", expected_version=pair.version),
        lambda pair: pair.alice.delete("k"),
    ],
    ids=["put", "compare and set", "delete"],
)
async def test_a_repeated_write_leaves_what_came_after_it(pair: Pair, write: Write):
    written = await lose_answer(pair, write(pair), 1)
    changes = (await pair.bob.history("k")).changes
    assert [change.writer for change in changes] == ["bob", "alice", "bob"]
    assert written.version == changes[1].version
    assert (await pair.alice.get("k", max_staleness_s=0.0)).value == b"bob 0"


async def test_a_refusal_that_may_be_a_success_is_reported_as_unknown(pair: Pair):
    """The log keeps 16 versions: the first attempt's is gone."""
    with pytest.raises(errors.TimedOut, match="is unknown"):
        await lose_answer(pair, pair.alice.put("k", b"alice", expected_version=pair.version), 20)
    assert (await pair.bob.get("k", max_staleness_s=0.0)).value == b"bob 19"


async def test_a_put_without_a_key_makes_one_context_however_often_it_is_sent(pair: Pair):
    context = protocol.PutContext("", b"v", request="one")
    first = await pair.alice.write(context)
    again = await pair.bob.write(context)
    assert first.key != again.key, "an id is the writer's own"
    again = await pair.alice.write(msgspec.structs.replace(context, repeat=True))
    assert (again.key, again.version) == (first.key, first.version)


async def test_a_request_id_means_another_write_for_another_key(pair: Pair):
    refused = protocol.PutContext("first", b"1", expected_version=7, request="r")
    for write in (refused, msgspec.structs.replace(refused, repeat=True)):
        with pytest.raises(errors.Conflict):
            await pair.alice.write(write)
    assert (await pair.alice.write(protocol.PutContext("second", b"2", request="r"))).key == "second"
    puts = [protocol.PutContext(key, key.encode(), ack="replicated", request="s") for key in ("x", "y")]
    written = await asyncio.gather(*map(pair.alice.write, puts))
    assert [result.key for result in written] == ["x", "y"], "they are executed at the same time"
    assert [(await pair.bob.get(key, max_staleness_s=0)).value for key in ("x", "y")] == [b"x", b"y"]


async def test_a_primary_that_answers_is_not_deposed(pair: Pair):
    """A node with slow storage that reports it."""

    async def publish(*_: Any, **__: Any) -> int:
        raise errors.TimedOut("the log did not acknowledge")

    pair.p.log._stream.publish = publish  # type: ignore[method-assign]
    with pytest.raises(errors.TimedOut, match="may be stored yet"):
        await pair.alice.put("k", b"alice")
    assert pair.q.replicas.index["k"].holders == ("p", "q")
    assert pair.q.directory.nodes == ["p"]


async def test_an_attempt_still_under_way_is_not_stored_after_its_repeat_was_refused(
    pair: Pair, simulated_network
):
    """Alice's node waits for the primary's answer; her repeat is refused; Bob makes the write possible."""
    context = protocol.PutContext("k", b"alice", expected_version=0, request="one")
    real, answers_lost = simulated_network.route, True

    def route(node: str, subject: str, *rest: Any) -> int:
        is_lost = answers_lost and node == "p" and subject.startswith("_") and ".q." in subject
        return 1 if is_lost else real(node, subject, *rest)

    simulated_network.route = route
    first = asyncio.ensure_future(pair.alice.write(context))
    await asyncio.sleep(0.1)
    other = client.InformClient(pair.alice._bus, node="p")
    with pytest.raises(errors.Conflict):
        await other.write(msgspec.structs.replace(context, repeat=True))
    await pair.bob.delete("k")
    answers_lost = False
    with pytest.raises(errors.Conflict):
        await first
    assert [change.writer for change in (await pair.bob.history("k")).changes] == ["bob", "bob"]


@pytest.mark.parametrize("via", ["p", "q"])
async def test_a_write_whose_page_may_be_stored_has_timed_out(pair: Pair, via: str):
    """`errors.Unavailable` of another kind would mean that it was not stored."""
    stream, publish = pair.p.log._stream, pair.p.log._stream.publish
    asks = {"p": pair.bob, "q": pair.alice}[via]

    async def stored_without_acknowledgement(*arguments: Any, **options: Any) -> int:
        await publish(*arguments, **options)
        stream.publish = publish  # type: ignore[method-assign]
        pair.p.log._sent = None  # the page is received later than the error
        raise errors.TimedOut("the log did not acknowledge")

    stream.publish = stored_without_acknowledgement  # type: ignore[method-assign]
    pair.p._loops[1].cancel()  # follows the log
    with pytest.raises(errors.TimedOut):
        await asks.put("k", b"new", ack="replicated")
    assert (await pair.alice.get("k", max_staleness_s=0.0)).value == b"new"


async def test_a_read_that_neither_a_holder_nor_the_log_answers_has_timed_out(pair: Pair, simulated_network):
    """The context is there: it must not be called absent."""
    net = simulated_network
    async with await node_node.start(await net.connect("r"), settings=SETTINGS, now_ns=net.now_ns):
        net.cut("r", "carol")
        carol = client.InformClient(await net.connect("carol"), node="r")
        with pytest.raises(errors.TimedOut, match="no reply from a holder or the log"):
            await carol.get("k")
        net.heal()


async def test_every_repeated_request_is_marked(pair: Pair, monkeypatch):
    request = pair.alice._bus.request
    sent: list[bytes] = []

    async def lose_first_reply(
        subject: str, data: bytes, *, repeat: api.Repetition, **options: Any
    ) -> api.Message:
        assert repeat.data is not None
        sent.extend((data, repeat.data))
        await request(subject, data, **options)
        await pair.bob.put("k", b"bob")
        return await request(repeat.subject, repeat.data, **options)

    monkeypatch.setattr(pair.alice._bus, "request", lose_first_reply)
    written = await pair.alice.put("k", b"alice", expected_version=pair.version)
    assert [protocol.decode(put, protocol.PutContext).repeat for put in sent] == [False, True]
    assert [change.version for change in (await pair.bob.history("k")).changes][1] == written.version


async def test_a_delete_that_was_refused_is_not_carried_out_later(pair: Pair, simulated_network):
    """Nothing is there to be deleted; the first attempt comes to its primary after another client wrote."""
    context = protocol.DeleteContext("absent", request="one")
    with pytest.raises(errors.NotFound):
        await pair.alice.write(msgspec.structs.replace(context, repeat=True))
    assert (await pair.bob.history("absent")).changes == []
    written = await pair.bob.put("absent", b"bob", expected_version=0)
    primary = {"p": pair.p, "q": pair.q}[written.primary]
    with pytest.raises(errors.Conflict, match="was rejected"):
        await primary.primary.update(protocol.UpdateContext(context, "alice"))
    assert (await pair.alice.get("absent", max_staleness_s=0.0)).value == b"bob"
    assert [change.reason for change in (await pair.bob.history("absent")).changes] == ["put"]


async def test_only_a_repeated_delete_leaves_a_record_of_what_was_never_there(pair: Pair):
    with pytest.raises(errors.NotFound):
        await pair.alice.delete("absent")
    assert await pair.p.records.current("absent") is None


@pytest.fixture
async def late(simulated_network, monkeypatch) -> AsyncIterator[node_node.InformationNode]:
    """A node that admits few requests, and whose log stores writes without an acknowledgement in time."""
    monkeypatch.setattr(node_node, "IN_FLIGHT_MAX", 8)
    net = simulated_network
    async with await node_node.start(await net.connect("p"), settings=SETTINGS, now_ns=net.now_ns) as node:
        append = node.log.append

        def lose(record: protocol.ContextRecord, since: int) -> asyncio.Future[int]:
            unknown: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            append(record, since)
            asyncio.get_running_loop().call_later(1.0, unknown.set_exception, errors.TimedOut("no reply"))
            return unknown

        monkeypatch.setattr(node.log, "append", lose)
        yield node


async def test_writes_in_doubt_are_settled_however_many_there_are(late, simulated_network, monkeypatch):
    bob = client.InformClient(await simulated_network.connect("bob"), node="p")
    keys = [f"k{number}" for number in range(node_node.IN_FLIGHT_MAX)]
    results = await asyncio.gather(*(bob.put(key, b"1") for key in keys))
    monkeypatch.undo()
    for key, result in zip(keys, results, strict=True):
        assert (await bob.put(key, b"2")).version > result.version > 0


async def test_a_write_in_doubt_does_not_wait_for_its_own_repetition(late, simulated_network):
    bus = await simulated_network.connect("bob")
    subject = protocol.request_subject("bob", "put", "p")
    data, headers = protocol.encode(protocol.PutContext("k", b"1", request="r")), {requests.REQUEST_ID: "r"}
    first = asyncio.create_task(bus.request(subject, data, headers=headers, timeout_s=30))
    await asyncio.sleep(0.5)
    replies = await asyncio.gather(first, bus.request(subject, data, headers=headers, timeout_s=30))
    versions = {protocol.result_of(reply.data, protocol.WriteResult).version for reply in replies}
    assert len(versions) == 1


async def test_a_refused_repetition_leaves_a_write_in_doubt(simulated_network):
    """Its first attempt may still be stored."""
    attempts: list[Any] = []

    async def serve(message: Any) -> None:
        attempts.append(message)
        if len(attempts) == 2:
            refusal = errors.Overloaded("too many requests")
            await message.respond(protocol.InformCodec("x").error(refusal))

    node, alice = await simulated_network.connect("x"), await simulated_network.connect("alice")
    await node.subscribe(protocol.request_subject("alice", "put", "x"), handler=serve)
    with pytest.raises(errors.TimedOut, match="'k' may have been written: too many requests"):
        await client.InformClient(alice, node="x").put("k", b"1")
