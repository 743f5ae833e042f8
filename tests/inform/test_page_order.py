"""Pages that arrive late, of another process, or of a trimmed log; and reads by lease meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.core import errors
from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.node import maintenance, primary
from muster.inform.node import node as node_node
from muster.inform.node.log import page_order, view
from muster.inform.node.replicas import links
from muster.testing.eventually import eventually
from tests.inform import test_former_records

pytestmark = pytest.mark.virtual_time

SETTINGS = msgspec.structs.replace(settings_.DEFAULT, timeout_s=1.0, replicas=2)
ALONE = msgspec.structs.replace(SETTINGS, replicas=1)
LEASE = msgspec.structs.replace(SETTINGS, reads_by_lease=True)
Start = Callable[..., Awaitable[node_node.InformationNode]]


@pytest.fixture
async def start(simulated_network) -> AsyncIterator[Start]:
    net, nodes = simulated_network, list[node_node.InformationNode]()

    async def started(name: str, settings: Any = SETTINGS, **more: Any) -> node_node.InformationNode:
        nodes.append(
            await node_node.start(await net.connect(name), settings=settings, now_ns=net.now_ns, **more)
        )
        for node in nodes:
            await node.maintenance.discover()
        await asyncio.sleep(0.1)
        return nodes[-1]

    yield started
    for node in nodes:
        await node.close()


def put(key: str = "k", value: bytes = b"v", **more: Any) -> protocol.PutContext:
    return protocol.PutContext(key, value, **more)


def get(key: str = "k") -> protocol.GetContext:
    return protocol.GetContext(key, 0.0)


def record(key: str, value: bytes | None, holder: str = "p", **more: Any) -> protocol.ContextRecord:
    return protocol.ContextRecord(key, (holder,), 1 << 16, holder, value, **more)


# Trimmed logs.


async def test_pages_after_former_records_that_are_all_gone_count(start: Start, simulated_network):
    operator = await simulated_network.connect("operator")
    stream = await test_former_records.fill(operator)
    await stream.purge()
    n1 = await start("p")
    await n1.writer.write(put(), "ann")
    n2 = await start("q")
    assert (await n2.reader.get(get(), "ann")).value == b"v"


def test_a_page_is_ignored_if_what_decides_about_it_is_trimmed():
    """Its context was deleted in what is trimmed, so the page is void for nodes that read all."""
    pages = {
        10: protocol.ContextLogPage(9, [record("k", b"1")]),
        11: protocol.ContextLogPage(10, [record("k", None, reason="delete")]),
        12: protocol.ContextLogPage(10, [record("k", b"stale")]),
        13: protocol.ContextLogPage(10, [record("other", b"1")]),
        14: protocol.ContextLogPage(12, [record("other", b"2")]),
        15: protocol.ContextLogPage(14, [record("other", b"3")]),
    }

    def counted(first: int) -> dict[int, list[bool]]:
        order = page_order.PageOrder()
        order.begin(first - 1)
        return {sequence: order.add(sequence, page) for sequence, page in pages.items() if sequence >= first}

    assert counted(10) == {10: [True], 11: [True], 12: [False], 13: [True], 14: [False], 15: [True]}
    assert counted(12) == {12: [False], 13: [False], 14: [False], 15: [True]}


async def test_a_node_that_lost_the_log_while_it_began_decides_like_the_others(start: Start, monkeypatch):
    p, q = await start("p"), await start("q")
    for number in range(8):
        await p.writer.write(put(f"k{number}"), "ann")
    await q.freshness.refresh(1.0)
    read, attempts = q.log.read, list[int]()

    async def interrupted(first: int, last: int) -> AsyncIterator[api.StoredMessage]:
        attempts.append(first)
        async for message in read(first, last):
            if len(attempts) == 1 and message.sequence > 2:
                raise errors.Unavailable("no leader")
            yield message

    monkeypatch.setattr(q.log, "read", interrupted)
    q.log.order.clear()
    with pytest.raises(errors.Unavailable):
        await q.follower._start()
    await q.follower._start()
    assert len(attempts) == 2
    assert q.log.order.changed_at(record("k7", b"")) == p.log.order.changed_at(record("k7", b""))


async def test_a_node_that_is_behind_a_trimmed_log_is_not_up_to_date(start: Start, simulated_network):
    p, q = await start("p"), await start("q")
    for number in range(5):
        await p.writer.write(put(value=b"%d" % number), "ann")
    await q.freshness.refresh(1.0)
    for loop in q._loops:
        loop.cancel()  # q no longer receives the log
    await asyncio.sleep(0)
    for _ in range(3):
        await p.writer.write(protocol.DeleteContext("k") if "k" in p.replicas.index else put(), "ann")
        await p.writer.write(put(), "ann")
    await p.log.purge(p.log.applied + 1)
    with pytest.raises(errors.Unavailable):
        await q.freshness.refresh(1.0)


async def test_a_deletion_that_is_copied_ends_when_it_would_have_ended(start: Start):
    node = await start("p", msgspec.structs.replace(ALONE, tombstone_s=100.0))
    await node.writer.write(put(), "ann")
    await node.writer.write(protocol.DeleteContext("k"), "ann")
    for _ in range(6):
        await asyncio.sleep(15.0)
        entry = await node.records.current("k")
        assert entry is not None
        await node.log.append(primary.placed(entry, entry.record.holders), node.log.applied)
    await asyncio.sleep(15.0)
    assert await node.records.current("k") is None


# Fences.


async def test_a_copy_from_before_a_fence_does_not_bring_the_fenced_primary_back(start: Start):
    p, q = await start("p"), await start("q")
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)
    entry, since = await q.records.current("k"), q.log.applied
    assert entry is not None
    copy = primary.placed(entry, entry.record.holders)
    await q.writer.fence("p")
    with pytest.raises(errors.Conflict):
        await q.log.append(copy, since)
    order = page_order.PageOrder()
    fence = protocol.ContextLogPage(1, fence=[protocol.FenceCandidate("q", 0.0, 0.0, "z")])
    assert order.add(2, fence, "p") == []
    assert order.add(3, protocol.ContextLogPage(1, [copy])) == [False], (
        "written by a node that had no fence yet"
    )
    assert order.add(4, protocol.ContextLogPage(2, [copy])) == [False], "the first copy is a change"
    assert order.add(5, protocol.ContextLogPage(4, [copy])) == [True]


async def test_a_fence_that_comes_first_fails_no_linearizable_read_or_refusal(start: Start, monkeypatch):
    p, q = await start("p", replicas=3), await start("q", replicas=3)
    await q.writer.write(put(), "ann")
    await p.freshness.refresh(1.0)
    publish = p.log._stream.publish
    fenced: list[int] = []

    async def second(*rest: Any, **options: Any) -> int:
        if not fenced:
            live = [protocol.FenceCandidate("q", 0.0, 0.0, "z")]
            while not await q.log.fence("p", live):
                continue
            fenced.append(1)
        return await publish(*rest, **options)

    monkeypatch.setattr(p.log._stream, "publish", second)
    assert (await p.reader.get(get(), "ann")).value == b"v"
    assert fenced.pop()
    with pytest.raises(errors.Conflict, match="has the version 0, not 7"):
        await p.writer.write(put("new", expected_version=7), "ann")
    assert fenced


async def test_a_lease_that_is_over_is_not_taken_for_one_that_lasts_if_a_warning_comes_first(
    start: Start, monkeypatch
):
    p, q = await start("p", ALONE), await start("q", ALONE)
    p._loops[-3].cancel()  # ends what is due
    await p.writer.write(put(lease_s=1.0), "ann")
    await asyncio.sleep(1.5)
    publish, warned = p.log._stream.publish, list[int]()

    async def second(*rest: Any, **options: Any) -> int:
        if not warned:
            warned.append(await q.log.warn("p"))
        return await publish(*rest, **options)

    monkeypatch.setattr(p.log._stream, "publish", second)
    with pytest.raises(errors.NotFound):
        await q.reader._confirmed(get())
    assert warned


async def test_a_lease_that_is_over_ends_also_if_no_holder_is_left_of_its_context(start: Start):
    """A fence has made a node without a replica the primary; until it adopts the context, it decides."""
    p, q = await start("p", ALONE), await start("q", ALONE)
    q._loops[-3].cancel()  # ends what is due
    await p.writer.write(put(lease_s=1.0), "ann")
    await q.freshness.refresh(1.0)
    p._loops[-3].cancel()
    await asyncio.sleep(1.5)
    assert await q.log.fence("p", [protocol.FenceCandidate("q", 0.0, 0.0, "z")])
    for node in (q, p):
        with pytest.raises(errors.NotFound):
            await node.reader._confirmed(get())
    with pytest.raises(protocol.PrimaryMoved):
        await p.primary.end_lease("k")


async def test_a_node_that_is_only_slow_is_warned_and_not_fenced(start: Start, monkeypatch):
    """It is connected, and answers the warning with a page; the write is refused."""
    p, q = await start("p"), await start("q")
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)

    async def hangs(_: Any) -> None:
        await asyncio.Future()

    monkeypatch.setattr(p.primary, "update", hangs)
    for _ in range(2):
        with pytest.raises(errors.TimedOut, match="p does not reply to q, and still appends"):
            await q.writer.write(put(value=b"2"), "ann")
    monkeypatch.undo()
    assert (await q.writer.write(put(value=b"3"), "ann")).primary == "p"
    assert not q.records.fences


async def test_a_node_whose_broker_is_cut_off_from_this_one_is_warned_and_not_fenced(
    start: Start, monkeypatch
):
    """The own broker reports that nobody subscribes; both reach the leader of the log."""
    p, q = await start("p", replicas=3), await start("q", replicas=3)
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)

    async def cut_off(*_: Any, **__: Any) -> None:
        silent = links.Silent("no subscriber")
        silent.is_gone = True
        raise silent

    monkeypatch.setattr(q.links, "request", cut_off)
    with pytest.raises(errors.TimedOut, match="p does not reply to q, and still appends"):
        await q.writer.write(put(value=b"2"), "ann")
    assert not q.records.fences


async def test_a_node_that_does_not_answer_the_warnings_of_two_others_is_fenced_once(
    start: Start, simulated_network
):
    p, q, r = await start("p"), await start("q"), await start("r")
    await p.writer.write(put(), "ann")
    for node in (q, r):
        await node.freshness.refresh(1.0)
    simulated_network.unplug("p")  # its broker does not know it yet
    begun_s = asyncio.get_running_loop().time()
    written = await asyncio.gather(*(node.writer.write(put(), "ann") for node in (q, r)))
    assert asyncio.get_running_loop().time() - begun_s < 10.0
    assert {write.primary for write in written} <= {"q", "r"}
    assert [fence.node for fence in q.records.fences] == ["p"]
    simulated_network.heal()
    await asyncio.sleep(5.0)
    assert (await p.search.find_here(protocol.FindContexts("key = 'k'"))).moved == ["k"]
    assert (await p.writer.write(put(value=b"3"), "ann")).primary == written[0].primary
    assert p.failure() is None


async def test_a_node_that_only_appends_is_not_fenced_and_stops_no_repairs(start: Start, monkeypatch):
    p, q = await start("p"), await start("q")
    await p.writer.write(put(), "ann")
    for loop in p._loops[2:]:  # it announces nothing
        loop.cancel()
    repaired: list[int] = []

    async def repair() -> None:
        repaired.append(len(q.directory.nodes))

    monkeypatch.setattr(q.maintenance, "repair", repair)
    q.directory.remove("p")
    q.maintenance._lost.add("p")
    q.maintenance._steady_since_s = -1_000.0
    await q.maintenance.probe()
    assert repaired
    assert not q.records.fences
    assert q.maintenance._lost == {"p"}


async def test_a_warning_of_which_its_writer_was_stopped_is_given_again(start: Start):
    p, q = await start("p"), await start("q")
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)
    for loop in p._loops:
        loop.cancel()
    first = await q.log.warn("p")
    assert await q.log.warn("p") == first
    await asyncio.sleep(60.0)
    assert await q.log.warn("p") > first
    assert not await q.log.fence("p", []), "it has time to append"


async def test_trimming_leaves_room_for_what_clients_write(start: Start, monkeypatch):
    """Records that are written again wait in the log a few at a time."""
    p = await start("p", ALONE)
    p._loops[-1].cancel()  # trims at times of its own
    for _ in range(5):
        for number in range(200):
            await p.writer.write(put(f"k{number}", bytes(100)), "ann")
    await p._view_writer.save()
    p.maintenance.trim_bytes_min = 1
    monkeypatch.setattr(maintenance, "TRIM_AT_ONCE", 8)
    append, waiting = p.log.append, list[int]()

    def counted(*arguments: Any) -> asyncio.Future[int]:
        stored = append(*arguments)
        waiting.append(len(p.log._waiting))
        return stored

    monkeypatch.setattr(p.log, "append", counted)
    await p.maintenance.trim()
    assert len(waiting) > 8
    assert max(waiting) <= 8


async def test_what_is_live_is_measured_again_after_a_minute_or_if_the_log_has_grown(
    start: Start, monkeypatch
):
    p = await start("p", ALONE)
    p._loops[-1].cancel()
    monkeypatch.setattr(view, "MEASURED", 3)
    for number in range(10):
        await p.writer.write(put(f"k{number}", bytes(100)), "ann")
    await p._view_writer.save()
    whole = sum(len(protocol.encode(each.record)) for each in await p.records.view.oldest(100, 1 << 20))
    measure, measured = p.records.view.live_bytes, list[int]()

    async def counted() -> int:
        measured.append(await measure())
        return measured[-1]

    monkeypatch.setattr(p.records.view, "live_bytes", counted)
    p.maintenance.trim_bytes_min = 1
    for _ in range(3):
        await p.maintenance.trim()
    assert measured == [whole]
    for _ in range(10):
        await p.writer.write(put("k1", bytes(100)), "ann")
    await p.maintenance.trim()
    await asyncio.sleep(maintenance.MEASURE_S + 1.0)
    await p.maintenance.trim()
    assert len(measured) == 3


async def test_the_view_is_written_twice_a_second_however_many_writes_come(start: Start, monkeypatch):
    p = await start("p", ALONE)
    now_s, save, saves = asyncio.get_running_loop().time, p.records.view.save, list[float]()

    async def counted(*arguments: Any) -> None:
        saves.append(now_s())
        await asyncio.sleep(0.02)  # meanwhile others are written
        await save(*arguments)

    monkeypatch.setattr(p.records.view, "save", counted)
    until_s = now_s() + 5.0
    while now_s() < until_s:
        await p.writer.write(put(), "ann")
    assert 5 <= len(saves) <= 11


# Processes, and pages whose fate is not known.


async def test_two_pages_without_records_are_told_apart(start: Start, simulated_network, monkeypatch):
    """The first is stored, and its acknowledgement is lost: it does not confirm what is asked after it."""
    net = simulated_network
    p, q = await start("p"), await start("q")
    await q.writer.write(put("x", b"1"), "ann")
    await p.freshness.refresh(1.0)
    p._loops[1].cancel()  # it receives nothing for a while
    publish = p.log._stream.publish

    async def lost(*rest: Any, **options: Any) -> int:
        await publish(*rest, **options)
        raise errors.TimedOut("no acknowledgement")

    monkeypatch.setattr(p.log._stream, "publish", lost)
    with pytest.raises(errors.TimedOut):
        await p.log.confirm()
    log = net.logs[protocol.STREAM]
    late = log.messages[log.last]
    await q.writer.write(put("x", b"2"), "ann")

    async def never(*_: Any, **__: Any) -> int:
        return await asyncio.Future()

    monkeypatch.setattr(p.log._stream, "publish", never)
    confirming = asyncio.create_task(p.log.confirm())
    await asyncio.sleep(0.1)
    p.follower.apply(late)
    await asyncio.sleep(0.1)
    assert not confirming.done()
    confirming.cancel()


async def test_of_two_processes_of_one_node_the_first_appends_nothing_after_the_second(start: Start):
    first = await start("p")
    await first.writer.write(put(value=b"1"), "ann")
    second = await start("p")
    await first.writer.write(put(value=b"2"), "ann")
    assert first.failure() is None, "the second has not appended yet"
    await second.writer.write(put(value=b"3"), "ann")
    await first.freshness.refresh(1.0)
    for act in (first.writer.write(put(value=b"4"), "ann"), first.log.confirm()):
        with pytest.raises(errors.Unavailable, match="another process"):
            await act
    assert "another process runs" in (first.failure() or "")
    assert (await second.reader.get(get(), "ann")).value == b"3"
    assert second.failure() is None


@pytest.mark.parametrize("damage", ["shortened", "replaced"])
async def test_a_node_reads_a_log_again_that_is_not_the_one_it_has_applied(
    start: Start, simulated_network, damage: str
):
    """The disk of the broker lost what it had acknowledged, or the stream was made again."""
    node = await start("p")
    for number in range(3):
        await node.writer.write(put(value=b"%d" % number), "ann")
    await node.writer.write(put("last"), "ann")
    log = simulated_network.logs[protocol.STREAM]
    log.remove(log.last)
    log.last -= 1
    if damage == "replaced":
        log.created_ns += 1
    waiting = asyncio.create_task(node.writer.write(put("new"), "ann"))
    with contextlib.suppress(errors.TimedOut):
        await waiting
    await asyncio.sleep(5.0)
    assert "last" not in node.replicas.index
    assert (await node.reader.get(get(), "ann")).value == b"2"
    assert (await node.writer.write(put("new", b"2"), "ann")).version
    assert (await node.reader.get(get("new"), "ann")).value == b"2"
    assert node.failure() is None


async def test_a_new_process_writes_after_the_lease_of_the_former_one(start: Start, simulated_network):
    """Also after a lease that the former process, which is frozen then, takes while the new one starts."""
    first = await start("p", LEASE)
    await first.writer.write(put(value=b"1"), "ann")
    second = await start("p", LEASE)
    await first.writer.write(put("other"), "ann")
    first._loops[1].cancel()  # it receives no pages any more
    writing = asyncio.create_task(second.writer.write(put(value=b"2"), "ann"))
    await eventually(writing.done, timeout_s=30)
    assert first.reader.local("k").value == b"1"  # type: ignore[union-attr]
    assert first.reader.local("k", 0.0) is None
    assert second.reader.local("k", 0.0).value == b"2"  # type: ignore[union-attr]


async def test_a_page_that_is_stored_and_not_received_ends_reads_by_lease(start: Start, monkeypatch):
    p, q = await start("p", LEASE), await start("q", LEASE)
    await p.writer.write(put(value=b"1"), "ann")
    p._loops[1].cancel()  # it receives no pages any more
    await q.writer.write(put("other"), "ann")  # so that the next one is not applied at once
    with pytest.raises(errors.TimedOut):
        await (p.writer.begin(put(value=b"2"), "ann") or pytest.fail("it is not the primary"))[1]
    assert p.reader.local("k").value == b"1"  # type: ignore[union-attr]
    assert p.reader.local("k", 0.0) is None


async def test_a_node_that_closes_ends_the_page_under_way(start: Start, simulated_network):
    node = await start("p")
    simulated_network.cut("p")
    waiting = node.log.append(record("k", b"v"), node.log.applied)
    await asyncio.sleep(0.01)
    await node.log.close()
    with pytest.raises(errors.TimedOut, match="closing"):
        await waiting


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_read_by_lease_is_not_older_than_what_others_have_read(
    start: Start, simulated_network, monkeypatch, is_given_up: bool
):
    """The page is stored, and its node does not know it yet; or has given up its acknowledgement."""
    p, q = await start("p", LEASE), await start("q", LEASE)
    await p.writer.write(put(value=b"1"), "ann")
    await p.writer.write(put("other"), "ann")
    p._loops[1].cancel()  # it receives no pages for a while
    publish, given_up = p.log._stream.publish, asyncio.Event()

    async def late(*rest: Any, **options: Any) -> int:
        await publish(*rest, **options)
        await given_up.wait()
        raise errors.TimedOut("no acknowledgement")

    monkeypatch.setattr(p.log._stream, "publish", late)
    _, stored = p.writer.begin(put(value=b"2"), "ann") or pytest.fail("it is not the primary")
    if is_given_up:
        given_up.set()
        with pytest.raises(errors.TimedOut):
            await stored
    else:
        await eventually(lambda: simulated_network.logs[protocol.STREAM].last == q.log.applied == 3)
        stored.cancel()  # its caller is gone; the page is under way
        assert p.reader.local("other", 0.0) is not None
    assert (await q.reader.get(get(), "ann")).value == b"2"
    assert p.reader.local("k").value == b"1"  # type: ignore[union-attr]
    assert p.reader.local("k", 0.0) is None
