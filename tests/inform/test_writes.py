"""The rules of writes: refusals, records in the log, the primary, and replies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.inform import access_rules, protocol
from muster.inform import settings as settings_
from muster.inform.node import node as node_node
from muster.inform.node import primary as node_primary
from muster.inform.node import write_attempts
from muster.inform.node.log import context_log, page_order
from muster.inform.node.replicas import links, records
from muster.testing.eventually import eventually

pytestmark = pytest.mark.virtual_time

SETTINGS = msgspec.structs.replace(settings_.DEFAULT, timeout_s=1.0, replicas=1)
CENTURY_S = 3_153_600_000
Start = Callable[..., Awaitable[node_node.InformationNode]]


@pytest.fixture
async def start(simulated_network) -> AsyncIterator[Start]:
    """Nodes that know each other; they end with the test."""
    net = simulated_network
    nodes: list[node_node.InformationNode] = []

    async def started(name: str = "p", **changes: Any) -> node_node.InformationNode:
        settings = msgspec.structs.replace(SETTINGS, **changes)
        nodes.append(await node_node.start(await net.connect(name), settings=settings, now_ns=net.now_ns))
        for node in nodes:
            await node.maintenance.discover()
        await asyncio.sleep(0.1)
        return nodes[-1]

    yield started
    for node in nodes:
        await node.close()


@pytest.fixture
async def alone(start: Start) -> node_node.InformationNode:
    return await start("p")


def put(key: str = "k", value: bytes = b"v", **more: Any) -> protocol.PutContext:
    return protocol.PutContext(key, value, **more)


async def entries(node: node_node.InformationNode, key: str = "k") -> list[context_log.ContextLogEntry]:
    versions, _ = await node.records.versions(key)
    return [entry for entry in versions if entry.record.reason != "refuse"]


async def record(node: node_node.InformationNode, key: str = "k") -> protocol.ContextRecord:
    entry = await node.records.current(key)
    assert entry is not None
    return entry.record


def is_free(node: node_node.InformationNode, key: str = "k") -> bool:
    """Whether the key may be written now."""
    if not node.primary.locks.try_acquire(key):
        return False
    node.primary.locks.release(key)
    return True


def attributes_of_bytes(size: int) -> protocol.Attributes:
    header = len(protocol.encode({"a": "x" * 1000})) - 1000
    return {"a": "x" * (size - header)}


# Valid requests.


@pytest.mark.parametrize(
    ("write", "error", "reason"),
    [
        (put(request="x" * 65), errors.InvalidInput, "at most 64 characters"),
        (put("mount/other/k"), errors.Refused, "read-only"),
        (protocol.DeleteContext("mount/other/k"), errors.Refused, "read-only"),
        (protocol.DeleteContext(""), errors.InvalidInput, "key of 0 bytes"),
        (put("x" * 513), errors.InvalidInput, "key of 513 bytes"),
        (put(value=bytes((1 << 20) + 1)), errors.LimitExceeded, "the maximum is 1048576"),
        (put(attributes=attributes_of_bytes((16 << 10) + 1)), errors.LimitExceeded, "more than 16384 bytes"),
        (put(lease_s=-1.0), errors.InvalidInput, "a lease of"),
        (put(lease_s=0.000_9), errors.InvalidInput, "a lease of"),
        (put(lease_s=CENTURY_S + 1.0), errors.InvalidInput, "a lease of"),
        (put(lease_s=float("nan")), errors.InvalidInput, "a lease of"),
    ],
)
async def test_a_write_beyond_a_limit_is_refused_and_nothing_is_stored(alone, write, error, reason):
    for attempt in (alone.writer.begin, alone.writer.write):
        with pytest.raises(error, match=reason):
            await attempt(write, "ann")
    assert alone.log.applied == 0


@pytest.mark.parametrize(
    "write",
    [
        put(request="x" * 64),
        put("x" * 512),
        put(value=bytes(1 << 20)),
        put(attributes=attributes_of_bytes(16 << 10)),
        put(lease_s=0.001),
        put(lease_s=float(CENTURY_S)),
    ],
    ids=lambda requests: f"{len(requests.key)}-{len(requests.value)}-{requests.lease_s}",
)
async def test_a_write_at_a_limit_is_accepted(alone, write):
    assert (await alone.writer.write(write, "ann")).version == 1 << 20


async def test_a_context_without_a_key_gets_a_random_uuid(alone):
    written = await alone.writer.write(put(""), "ann")
    assert uuid.UUID(written.key).version == 4
    assert (await alone.writer.write(put(""), "ann")).key != written.key


async def test_the_log_records_requests_and_callers(alone, simulated_network):
    context = put(attributes={"colour": "red"}, lease_s=1.5, request="r1")
    now_ns = simulated_network.now_ns()
    written, stored = alone.writer.begin(context, "ann")
    assert written == protocol.ContextRecord(
        "k",
        ("p",),
        written.stamp,
        "p",
        b"v",
        protocol.encode({"colour": "red"}),
        expires_at_ns=now_ns + 1_500_000_000,
        writer="ann",
        request="r1",
        reason="put",
        acknowledge=False,
    )
    await stored
    await alone.writer.write(protocol.DeleteContext("k", request="r2"), "bob")
    gone = await record(alone)
    assert (gone.value, gone.writer, gone.request, gone.reason) == (None, "bob", "r2", "delete")
    tombstone_s = (gone.expires_at_ns - now_ns) / 1e9
    assert (gone.holders, gone.stamped_by) == (("p",), "p")
    assert alone.settings.tombstone_s <= tombstone_s < alone.settings.tombstone_s + 1.0
    assert gone.stamp > written.stamp


async def test_without_attributes_and_a_lease_the_log_gets_none(alone):
    await alone.writer.write(put(), "ann")
    stored = await record(alone)
    assert (stored.attributes, stored.expires_at_ns) == (b"", 0)


# Versions, requests and rights.


async def test_the_expected_version_is_that_of_the_last_write_or_0_where_nothing_is(alone):
    write = alone.writer.write
    with pytest.raises(errors.Conflict, match="has the version 0, not 7"):
        await write(put(expected_version=7), "ann")
    first = await write(put(expected_version=0), "ann")
    with pytest.raises(errors.Conflict) as conflict:
        await write(put(expected_version=0), "ann")
    assert conflict.value.actual == first.version
    second = await write(put(expected_version=first.version), "ann")
    with pytest.raises(errors.Conflict):
        await write(protocol.DeleteContext("k", first.version), "ann")
    await write(protocol.DeleteContext("k", second.version), "ann")
    with pytest.raises(errors.Conflict, match="has the version 0"):
        await write(put(expected_version=second.version), "ann")
    assert (await write(put(expected_version=0), "ann")).version > second.version


async def test_what_is_not_there_cannot_be_deleted(alone):
    for _ in range(2):
        with pytest.raises(errors.NotFound, match="no context 'k'"):
            await alone.writer.write(protocol.DeleteContext("k"), "ann")
        await alone.writer.write(put(), "ann")
        await alone.writer.write(protocol.DeleteContext("k"), "ann")


async def test_a_context_whose_lease_has_ended_is_not_there(alone):
    await alone.writer.write(put(lease_s=1.0), "ann")
    await asyncio.sleep(0.9)
    with pytest.raises(errors.Conflict):
        await alone.writer.write(put(expected_version=0), "ann")
    alone._loops[-3].cancel()  # which says in the log that it has ended
    await asyncio.sleep(0.1)
    with pytest.raises(errors.NotFound):
        await alone.writer.write(protocol.DeleteContext("k"), "ann")
    await alone.writer.write(put(expected_version=0), "ann")


async def test_a_request_of_one_writer_is_carried_out_once(alone):
    first = await alone.writer.write(put(request="r"), "ann")
    again = await alone.writer.write(put(value=b"other", request="r"), "ann")
    assert again == first
    assert (first.primary, first.replicas, first.status) == ("p", 1, "normal")
    other = await alone.writer.write(put(request="r"), "bob")
    assert other.version > first.version


async def test_write_permission_depends_on_the_owner(start: Start):
    node = await start("p", rules=(access_rules.AccessRule("k", write=("owner",)),))
    await node.writer.write(put(), "ann")
    for context in (put(), protocol.DeleteContext("k"), put(repeat=True, request="r")):
        with pytest.raises(errors.Forbidden, match="bob may not write"):
            await node.writer.write(context, "bob")
    await node.writer.write(protocol.DeleteContext("k"), "ann")
    await node.writer.write(put(), "bob")  # what is not there has no owner
    assert [entry.record.writer for entry in await entries(node)] == ["ann", "ann", "bob"]


async def test_stamps_of_a_context_only_grow_also_after_a_clock_that_was_ahead(alone):
    ahead = alone.records.clock.now(alone.primary.now_ns()).time + (3_600_000 << 16)
    stored = protocol.ContextRecord("k", ("p",), ahead, "x", b"v", writer="ann")
    await alone.log.append(stored, 0)
    await alone.writer.write(put(), "ann")
    last = await record(alone)
    assert (last.stamp, last.stamped_by) == (ahead + 1, "p")
    await alone.writer.write(put("other"), "ann")
    assert (await record(alone, "other")).stamp < ahead, "our own clock did not follow"


# A write at once.


async def test_a_write_at_once_holds_the_key_until_it_is_stored(alone):
    written, stored = alone.writer.begin(put(), "ann")
    assert alone.writer.begin(put(), "ann") is None
    assert alone.writer.begin(put("other"), "ann") is not None
    position = await stored
    assert (written.key, written.holders) == ("k", ("p",))
    assert is_free(alone)
    assert alone.replicas.index["k"].version == position


async def test_what_is_not_as_most_writes_are_is_not_begun_at_once(start: Start):
    node, other = await start("p", replicas=2), await start("q", replicas=1)
    begin = node.writer.begin
    assert begin(put(ack="replicated"), "ann") is None
    assert begin(put(repeat=True), "ann") is None
    await other.writer.write(put("elsewhere"), "ann")
    await node.freshness.refresh(1.0)
    assert begin(put("elsewhere"), "ann") is None
    assert begin(put("new"), "ann") is None, "it may be elsewhere"
    assert all(is_free(node, key) for key in ("k", "elsewhere", "new"))
    assert begin(protocol.DeleteContext("k"), "ann") is None


async def test_a_write_at_once_that_is_refused_or_done_already_frees_the_key(alone):
    written = await alone.writer.write(put(request="r"), "ann")
    assert alone.writer.begin(put(request="r"), "ann") is None
    assert is_free(alone)
    with pytest.raises(errors.Conflict):
        alone.writer.begin(put(expected_version=written.version + 1), "ann")
    assert is_free(alone)


# Pages.


async def test_what_waits_shares_a_page_and_a_page_is_under_way_at_a_time(alone, simulated_network):
    writes = [alone.writer.begin(put(f"k{number}"), "ann") for number in range(100)]
    positions = [await stored for _, stored in writes]
    assert [position >> 20 for position in positions] == [1] * 1 + [2] * 99 or len(
        {position >> 20 for position in positions}
    ) == 1
    assert positions == sorted(set(positions))
    messages = simulated_network.logs[protocol.STREAM].messages
    assert len(messages) <= 2


async def test_a_record_is_void_if_its_context_changed_since(start: Start):
    p, q = await start("p"), await start("q")
    since = p.log.applied
    first = p.log.append(protocol.ContextRecord("k", ("p",), 1, "p", b"1"), since)
    second = q.log.append(protocol.ContextRecord("k", ("q",), 1, "q", b"2"), since)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    (position,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
    (conflict,) = [outcome for outcome in outcomes if isinstance(outcome, errors.Conflict)]
    assert "has changed" in conflict.message
    for node in (p, q):
        await node.freshness.refresh(1.0)
        assert [entry.position for entry in await entries(node)] == [position]


async def test_what_a_fenced_node_decided_before_is_void(start: Start):
    p, q = await start("p", replicas=2), await start("q", replicas=2)
    await p.writer.write(put(), "ann")
    assert (await record(p)).holders == ("p", "q")
    base = p.primary.base_here("k")
    assert base is not None
    decided = p.primary.next_record(protocol.UpdateContext(put(value=b"late", request="r"), "ann"), base)
    await q.freshness.refresh(1.0)
    await q.writer.fence("p")
    await p.freshness.refresh(1.0)
    with pytest.raises(errors.Conflict):
        await p.log.append(decided, base.since)
    for node in (p, q):
        assert node.replicas.index["k"].holders == ("q", "p")
    assert (await p.writer.write(put(value=b"new"), "ann")).primary == "q"
    assert (await p.writer.write(put("other"), "ann")).primary == "p", (
        "it goes on with a page after the fence"
    )


async def test_of_two_processes_of_one_node_the_second_appends(start: Start, simulated_network):
    first, second = await start("p"), await start("p")
    await second.writer.write(put(), "ann")
    first._loops[1].cancel()  # as a process that was frozen
    stale = first.log.append(protocol.ContextRecord("k", ("p",), 1, "p", b"stale"), 0)
    await asyncio.sleep(0.5)
    assert not stale.done() or isinstance(stale.exception(), errors.MusterError)
    assert (await record(second)).value == b"v"
    assert len(await entries(second)) == 1
    stale.cancel()


async def test_a_record_of_a_page_with_an_early_basis_is_void():
    order = page_order.PageOrder()
    one = protocol.ContextRecord("k", ("p",), 1, "p", b"1")
    for sequence in range(1, 3 * page_order.WINDOW):
        other = msgspec.structs.replace(one, key=f"k{sequence}")
        assert order.add(sequence, protocol.ContextLogPage(sequence - 1, [other])) == [True]
    assert order.add(sequence + 1, protocol.ContextLogPage(sequence - page_order.WINDOW, [one])) == [False]
    assert order.add(sequence + 2, protocol.ContextLogPage(sequence + 1, [one, one])) == [True, False]
    assert len(order._last) <= page_order.WINDOW + 2


# Copies.


@pytest.mark.parametrize(("ack", "expected"), [("logged", (1, "updated")), ("replicated", (2, "normal"))])
async def test_a_write_reports_the_number_of_confirmed_replicas(start: Start, ack, expected):
    node, _ = await start("p", replicas=2), await start("q", replicas=2)
    written = await node.writer.write(put(ack=ack, request="r"), "ann")
    assert (written.replicas, written.status) == expected
    assert (await record(node)).acknowledge is (ack == "replicated")
    assert node.primary._applied == {}
    again = await node.writer.write(put(ack=ack, request="r"), "ann")
    assert again == msgspec.structs.replace(written, replicas=1, status="updated")


async def test_a_copy_that_does_not_acknowledge_is_not_counted(start: Start, simulated_network):
    node, other, third = [await start(name, replicas=3) for name in ("p", "q", "r")]
    await node.writer.write(put(), "ann")
    holders = (await record(node)).holders
    assert sorted(holders) == ["p", "q", "r"]
    assert holders[0] == "p"
    third._loops[1].cancel()  # follows the log
    began_s = asyncio.get_running_loop().time()
    written = await node.writer.write(put(ack="replicated"), "ann")
    assert (written.replicas, written.status) == (2, "updated")
    assert 1.0 <= asyncio.get_running_loop().time() - began_s < 1.1
    assert other.replicas.index["k"].version == written.version


async def test_a_context_with_one_copy_waits_for_no_other(alone):
    written = await alone.writer.write(put(ack="replicated"), "ann")
    assert (written.replicas, written.status) == (1, "normal")
    assert not (await record(alone)).acknowledge


def test_only_the_missing_acknowledgements_of_that_record_count():
    writer = node_primary.PrimaryWriter.__new__(node_primary.PrimaryWriter)
    writer.node = "p"
    writer._applied = {}
    stored = protocol.ContextRecord("k", ("p", "q", "r"), 7, "p")
    done = writer._expect(stored)
    for applied in (protocol.ReplicaApplied("q", "k", 6), protocol.ReplicaApplied("q", "other", 7)):
        writer.applied(applied)
    writer.applied(protocol.ReplicaApplied("q", "k", 7))
    assert not done.is_set()
    writer.applied(protocol.ReplicaApplied("r", "k", 7))
    assert done.is_set()


# Other nodes.


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", ["put", "compare", "delete"])
async def test_a_node_without_a_replica_forwards_the_write_to_the_primary(
    start: Start, kind, known, monkeypatch
):
    primary, asked_node = await start("p"), await start("r")
    first = await primary.writer.write(put(), "ann")
    await asyncio.sleep(0.1)
    if not known:
        asked_node.records.holder_hints.clear()
    writes: dict[str, protocol.PutContext | protocol.DeleteContext] = {
        "put": put(value=b"new"),
        "compare": put(value=b"new", expected_version=first.version),
        "delete": protocol.DeleteContext("k"),
    }
    written = await asked_node.writer.write(writes[kind], "ann")
    assert (written.primary, (await record(primary)).value) == ("p", None if kind == "delete" else b"new")
    assert len(await entries(primary)) == 2
    if kind != "delete":
        assert await asked_node.writer._holders("k") == ("p",)


async def test_a_primary_that_is_known_is_asked_without_asking_the_log(start: Start, monkeypatch):
    primary, asked_node = await start("p"), await start("r")
    await primary.writer.write(put(), "ann")
    await asyncio.sleep(0.1)
    looked = []

    async def last(key: str) -> None:
        looked.append(key)

    monkeypatch.setattr(asked_node.records, "current", last)
    assert (await asked_node.writer.write(put(value=b"new"), "ann")).primary == "p"
    assert looked == []


async def test_where_contexts_are_is_remembered_up_to_a_bound(alone, monkeypatch):
    monkeypatch.setattr(records, "HINTS_MAX", 3)
    for number in range(5):
        assert alone.records.remember_holders(str(number), ("q", "r")) == ("q", "r")
        assert len(alone.records.holder_hints) <= 3
    assert sorted(alone.records.holder_hints) == ["3", "4"]


async def test_a_primary_that_has_moved_is_found_in_the_log(start: Start, monkeypatch):
    old, new, asked_node = [await start(name) for name in ("p", "q", "r")]
    await old.writer.write(put(), "ann")
    await old.primary.place("k", ("q",), before=("p",))
    await asyncio.sleep(0.1)
    asked_node.records.remember_holders("k", ("p",))
    assert (await asked_node.writer.write(put(value=b"new"), "ann")).primary == "q"
    assert new.replicas.index["k"].value == b"new"


async def test_a_primary_that_moves_all_the_time_is_given_up(start: Start, monkeypatch):
    node = await start("p")
    node.records.remember_holders("k", ("q",))
    requests: list[tuple[str, bool]] = []

    async def moved(to: str, kind: str, update: protocol.UpdateContext, answer: type) -> None:
        requests.append((to, update.write.repeat))
        raise protocol.PrimaryMoved("not the primary")

    async def holders(key: str) -> tuple[str, ...]:
        return ("q",)

    monkeypatch.setattr(node.links, "request", moved)
    monkeypatch.setattr(node.writer, "_holders", holders)
    with pytest.raises(errors.Unavailable, match="moved 8 times") as failure:
        await node.writer.write(put(), "ann")
    assert not isinstance(failure.value, errors.TimedOut), "it is certain that nothing was stored"
    assert requests == [("q", False)] * 8
    with pytest.raises(errors.TimedOut, match="moved 8 times"):
        await node.writer.write(put(repeat=True), "ann")


# A silent primary.


async def test_a_silent_primary_is_replaced_by_a_holder_and_the_copies_are_made_up(
    start: Start, simulated_network
):
    _, q, r = [await start(name, replicas=2) for name in ("p", "q", "r")]
    await q.log.append(protocol.ContextRecord("k", ("p", "q"), 1, "p", b"v", writer="ann"), 0)
    await asyncio.sleep(0.1)
    simulated_network.cut("p")
    written = await r.writer.write(put(value=b"new", request="r"), "ann")
    assert written.primary == "q"
    assert [each.record.reason for each in await entries(q)] == ["put", "put"]
    assert "p" not in r.directory.nodes
    await eventually(lambda: q.replicas.index["k"].holders == ("q", "r"), timeout_s=60)
    simulated_network.heal()


async def test_a_holder_that_is_asked_takes_over_itself_and_keeps_the_other_copies(
    start: Start, simulated_network
):
    _, q, _, _ = [await start(name, replicas=3) for name in ("p", "q", "r", "s")]
    await q.log.append(protocol.ContextRecord("k", ("p", "r", "q"), 1, "p", b"v", writer="ann"), 0)
    await asyncio.sleep(0.1)
    simulated_network.cut("p")
    written = await q.writer.write(put(value=b"new"), "ann")
    assert written.primary in ("q", "r")
    await eventually(lambda: set(q.replicas.index["k"].holders) == set("qrs"), timeout_s=60)
    simulated_network.heal()


async def test_a_context_whose_holders_are_all_silent_is_taken_from_the_log(start: Start, simulated_network):
    _, _, r = [await start(name, replicas=1) for name in ("p", "q", "r")]
    old = protocol.ContextRecord("k", ("p", "q"), 1, "p", b"v", writer="ann")
    first = await r.log.append(old, 0)
    await asyncio.sleep(0.1)
    simulated_network.cut("p", "q")
    written = await r.writer.write(put(value=b"new", expected_version=first), "ann")
    assert (written.primary, (await record(r)).holders[0]) == ("r", "r")
    assert r.replicas.index["k"].value == b"new"
    simulated_network.heal()


async def test_of_the_holders_the_best_placed_becomes_the_primary(start: Start):
    _, q, r, s = [await start(name, replicas=3) for name in ("p", "q", "r", "s")]
    await q.log.append(protocol.ContextRecord("k", ("p", "q", "r"), 1, "p", b"v", writer="ann"), 0)
    for node, load in ((q, 0.9), (r, 0.1)):
        node.directory.load = protocol.NodeLoad(ratio=load)
        await node.maintenance.discover()
    await asyncio.sleep(0.1)
    await s.maintenance.discover()
    await asyncio.sleep(0.1)
    await s.writer.fence("p")
    assert (await record(s)).holders == ("r", "q", "p")


async def test_copies_are_moved_only_from_where_they_were_thought_to_be(start: Start):
    p, _ = [await start(name) for name in ("p", "q")]
    await p.writer.write(put(), "ann")
    await p.primary.place("k", ("q",), before=("q",))
    assert (await record(p)).holders == ("p",)
    await p.primary.place("k", ("q", "p"), before=("p",))
    assert (await record(p)).holders == ("q", "p")
    await p.primary.place("k", ("p",), before=("q", "p"))
    assert (await record(p)).holders == ("q", "p"), "only its primary moves it"


@pytest.mark.parametrize("reads_by_lease", [True, False])
async def test_a_node_that_reads_by_lease_is_fenced_after_its_end(start: Start, reads_by_lease):
    p, q = [await start(name, replicas=2, reads_by_lease=reads_by_lease) for name in ("p", "q")]
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)
    now_s = asyncio.get_running_loop().time
    begun_s = now_s()
    await q.writer.fence("p")
    assert (now_s() - begun_s >= context_log.LEASE_S) == reads_by_lease


async def test_a_primary_with_a_lease_answers_linearizable_reads_from_memory(start: Start):
    p, q = [await start(name, replicas=2, reads_by_lease=True) for name in ("p", "q")]
    await p.writer.write(put(), "ann")
    await q.freshness.refresh(1.0)
    read = p.reader.local("k", 0.0)
    assert read is not None
    assert read.value == b"v"
    assert q.reader.local("k", 0.0) is None, "it is not the primary"
    await asyncio.sleep(context_log.LEASE_SAFE_S)
    assert p.reader.local("k", 0.0) is None
    pages = p.log.applied
    assert (await p.reader.get(protocol.GetContext("k", 0.0), "ann")).value == b"v"
    assert p.log.applied == pages + 1, "the log has confirmed it"
    assert p.reader.local("k", 0.0) is not None
    p.records.fence("p", [], pages + 2)
    assert p.reader.local("k", 0.0) is None


# The end of a lease.


async def test_the_end_of_a_lease_is_written_once_and_by_the_primary(start: Start, simulated_network):
    p, q = [await start(name, replicas=2) for name in ("p", "q")]
    for node in (p, q):
        node._loops[-3].cancel()  # ends what is due
    await p.writer.write(put(lease_s=1.0, request="r"), "ann")
    await p.writer.write(put("lasting"), "ann")
    stored = await record(p)
    await asyncio.sleep((stored.expires_at_ns - simulated_network.now_ns()) / 1e9 - 0.02)
    assert not await p.primary.end_lease("k"), "it has not ended"
    await asyncio.sleep(0.02)
    for node, key in ((q, "k"), (p, "never there")):
        with pytest.raises(protocol.PrimaryMoved):
            await node.primary.end_lease(key)
    assert not await p.primary.end_lease("lasting")
    assert len(await entries(p)) == 1
    assert [await p.primary.end_lease("k") for _ in range(2)] == [True, False]
    assert len(await entries(p)) == 2
    ended = await record(p)
    assert (ended.value, ended.reason, ended.writer, ended.holders) == (None, "expire", "ann", ("p", "q"))
    assert (ended.stamp > stored.stamp, ended.stamped_by) == (True, "p")
    assert ended.expires_at_ns > stored.expires_at_ns, "its tombstone ends"


async def test_a_lease_ends_at_its_moment_and_not_before(alone, monkeypatch):
    alone._loops[-3].cancel()
    await alone.writer.write(put(lease_s=1.0), "ann")
    ends_ns = (await record(alone)).expires_at_ns
    for now_ns, number in ((ends_ns - 1, 1), (ends_ns, 2)):
        monkeypatch.setattr(alone.freshness, "log_now_ns", lambda now_ns=now_ns: now_ns)
        await alone.primary.end_lease("k")
        assert len(await entries(alone)) == number


@pytest.mark.parametrize("ahead_s", [3600, -3600])
async def test_a_clock_that_is_set_neither_ends_nor_extends_a_lease(
    alone, simulated_network, monkeypatch, ahead_s
):
    alone._loops[-3].cancel()
    await alone.writer.write(put(lease_s=30.0), "ann")
    monkeypatch.setattr(alone.primary, "now_ns", lambda: simulated_network.now_ns() + ahead_s * 10**9)
    assert alone.reader.local("k") is not None
    assert not await alone.primary.end_lease("k"), "before the log was asked for its time again"
    await asyncio.sleep(31.0)
    assert alone.reader.local("k") is None
    assert await alone.primary.end_lease("k")


async def test_a_primary_writes_without_reading_the_log(alone, monkeypatch):
    await alone.writer.write(put(), "ann")
    monkeypatch.setattr(alone.records, "current", None)
    await alone.primary.update(protocol.UpdateContext(put(value=b"new"), "ann"))
    assert alone.replicas.index["k"].value == b"new"


# A repeat whose first attempt is not known to have been stored.


@pytest.mark.parametrize("others", [2, 3])
async def test_a_repeat_is_refused_only_if_the_log_shows_that_it_was_never_stored(start: Start, others):
    """The log keeps three records: what was before them is not known."""
    node = await start("p", history=3)
    for number in range(others):
        await node.writer.write(put(value=b"%d" % number), "ann")
    node.executed.since_s = node.freshness.now_s()  # as after a start with a view
    repeat = put(expected_version=0, request="r", repeat=True)
    if others < 3:
        with pytest.raises(errors.Conflict):
            await node.writer.write(repeat, "ann")
        assert (await node.records.versions("k"))[0][-1].record.reason == "refuse"
        assert (await record(node)).value == b"%d" % (others - 1)
    else:
        with pytest.raises(errors.TimedOut, match="its log is too short"):
            await node.writer.write(repeat, "ann")


async def test_a_refused_repeat_is_not_stored_later(start: Start):
    """Whichever node is the primary when another attempt comes."""
    p, q = [await start(name, replicas=2) for name in ("p", "q")]
    first = await p.writer.write(put(), "ann")
    context = put(value=b"late", expected_version=first.version + 1, request="r", repeat=True)
    with pytest.raises(errors.Conflict):
        await p.writer.write(context, "ann")
    await q.freshness.refresh(1.0)
    await q.writer.fence("p")
    late = msgspec.structs.replace(context, expected_version=None)
    for repeat in (True, False):
        with pytest.raises(errors.Conflict, match="another attempt"):
            await q.writer.write(msgspec.structs.replace(late, repeat=repeat), "ann")
    assert (await record(q)).value == b"v"


async def test_a_repeat_of_a_stored_write_reports_its_version_and_the_copy_of_the_primary(alone):
    first = await alone.writer.write(put(expected_version=0, request="r"), "ann")
    await alone.writer.write(put(value=b"later"), "ann")
    repeated = await alone.writer.write(put(expected_version=0, request="r", repeat=True), "ann")
    assert (repeated.version, repeated.replicas) == (first.version, 1)
    assert (await record(alone)).value == b"later"


async def test_a_repeated_delete_of_what_has_never_been_there_uses_up_its_id(alone):
    delete = protocol.DeleteContext("k", request="r", repeat=True)
    with pytest.raises(errors.NotFound):
        await alone.writer.write(delete, "ann")
    ((entry,), _) = await alone.records.versions("k")
    assert (entry.record.reason, entry.record.value, entry.record.request) == ("refuse", None, "r")
    await alone.writer.write(put(), "ann")
    with pytest.raises(errors.Conflict, match="another attempt"):
        await alone.writer.write(msgspec.structs.replace(delete, repeat=False), "ann")


async def test_what_cannot_be_reached_is_unknown_only_if_something_may_have_been_stored(alone, monkeypatch):
    async def unreachable(*_: Any, **__: Any) -> None:
        raise errors.NotConnected("the connection is gone")

    monkeypatch.setattr(alone.log, "append", unreachable)
    with pytest.raises(errors.NotConnected):
        await alone.writer.write(put(), "ann")
    with pytest.raises(errors.TimedOut, match="may have been written: the connection is gone"):
        await alone.writer.write(put(repeat=True), "ann")


async def test_a_context_that_always_changes_first_has_timed_out(alone, monkeypatch):
    attempts = []

    async def refused(*_: Any, **__: Any) -> None:
        attempts.append(1)
        raise errors.Conflict("another record stands there")

    monkeypatch.setattr(alone.log, "append", refused)
    with pytest.raises(errors.TimedOut, match="too many concurrent writes") as failure:
        await alone.writer.write(put(), "ann")
    assert failure.value.retry_after_s == 0.1
    assert len(attempts) == 8
    assert is_free(alone)


async def test_an_update_for_another_node_is_not_carried_out(alone):
    for holders in ((), ("q", "p")):
        with pytest.raises(protocol.PrimaryMoved, match="p is not the primary of 'k'"):
            await alone.primary.update(protocol.UpdateContext(put(), "ann", holders))
    assert await alone.records.current("k") is None


async def test_a_context_that_is_gone_from_the_log_is_no_longer_held(alone):
    await alone.writer.write(put(), "ann")
    await alone.writer.write(protocol.DeleteContext("k"), "ann")
    await alone.primary.forget("k", alone.replicas.index["k"])
    assert await alone.records.current("k") is None
    assert await alone.records.versions("k") == ([], False)
    assert "k" not in alone.replicas.index


async def test_a_silent_node_is_not_a_primary_that_refuses(start: Start, monkeypatch):
    node = await start("p")
    node.records.remember_holders("k", ("q",))
    sent: list[bool] = []

    async def silent(to: str, kind: str, update: protocol.UpdateContext, answer: type) -> None:
        sent.append(update.write.repeat)
        raise links.Silent(f"{to} does not answer")

    monkeypatch.setattr(node.links, "request", silent)
    first = await node.log.append(protocol.ContextRecord("k", ("q",), 1, "q", b"v", writer="ann"), 0)
    written = await node.writer.write(put(value=b"new", expected_version=first), "ann")
    assert sent == [False]
    assert (written.primary, written.version > first) == ("p", True)


# A request that arrives twice


async def test_a_write_that_was_rejected_is_not_executed_by_a_second_request(alone):
    deletion = protocol.DeleteContext("k", request="d")
    for _ in range(2):
        with pytest.raises(errors.NotFound):
            await alone.writer.write(deletion, "ann")
        await alone.writer.write(put(), "ann")
    update = protocol.UpdateContext(protocol.DeleteContext("k", request="e", expected_version=77), "ann")
    with pytest.raises(errors.Conflict):
        await alone.primary.update(update)
    later = msgspec.structs.replace(
        update, write=msgspec.structs.replace(update.write, expected_version=None)
    )
    with pytest.raises(errors.Conflict):
        await alone.primary.update(later)


async def test_requests_with_one_id_share_an_attempt_and_another_follows_an_unknown_outcome():
    attempts, go, count = write_attempts.WriteAttempts(), asyncio.Event(), 0
    result = protocol.WriteResult("k", 1, "s", "n", 1, "normal")

    async def attempt() -> protocol.WriteResult:
        nonlocal count
        count += 1
        await go.wait()
        if count == 1:
            raise errors.TimedOut("no reply")
        return result

    async def both() -> list[object]:
        go.clear()
        run = [asyncio.ensure_future(attempts.run("ann", put(request="r"), attempt)) for _ in range(2)]
        await asyncio.sleep(0)
        assert attempts.has("ann", put(request="r"))
        go.set()
        return await asyncio.gather(*run, return_exceptions=True)

    assert [type(outcome) for outcome in await both()] == [errors.TimedOut] * 2
    assert (count, attempts.has("ann", put(request="r"))) == (1, False)
    assert await both() == [result] * 2
    assert count == 2

    go.clear()
    cancelled, waiting = (
        asyncio.ensure_future(attempts.run("ann", put(request="r"), attempt)) for _ in range(2)
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await waiting == result, "the end of one caller does not concern the other"
    assert count == 3


async def test_a_bounded_number_of_rejections_is_remembered(monkeypatch):
    monkeypatch.setattr(write_attempts, "REJECTED_MAX", 3)
    attempts = write_attempts.WriteAttempts()

    async def reject() -> protocol.WriteResult:
        raise errors.NotFound("no context")

    for number in range(5):
        with pytest.raises(errors.NotFound):
            await attempts.run("ann", put(request=str(number)), reject)
    remembered = [attempts.has("ann", put(request=str(number))) for number in range(5)]
    assert remembered == [False, False, True, True, True]
