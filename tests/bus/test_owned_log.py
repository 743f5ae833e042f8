"""Owned logs on a real broker and on the simulated one: appends, fencing, replay, repetition, trimming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from muster.bus import api
from muster.bus.log import journal, owned_log, pages
from muster.bus.memory import network
from muster.bus.streams import snapshots
from muster.core import errors
from muster.testing import fixtures
from muster.testing.eventually import eventually
from tests.bus import keyed_state

STREAM = api.StreamSettings("logs", subjects=("log.>",), max_bytes=1 << 30, max_age_s=0, allow_delete=True)
NAME = "log.registry"

Opened = tuple[owned_log.OwnedLog, keyed_state.KeyedState]
Open = Callable[..., Awaitable[Opened]]


@pytest.fixture(params=["broker", "simulated"])
async def stream(
    request: pytest.FixtureRequest,
    connect: fixtures.Connect,
    simulated_network: network.SimulatedNetwork,
) -> AsyncIterator[api.Stream]:
    if request.param == "broker":
        yield await (await connect("a")).stream(STREAM)
    else:
        async with await simulated_network.connect("a") as bus:
            yield await bus.stream(STREAM)


@pytest.fixture
async def opened(stream: api.Stream) -> AsyncIterator[Open]:
    logs: list[owned_log.OwnedLog] = []

    async def make(epoch: int = 0, **options: object) -> Opened:
        state = keyed_state.KeyedState()
        log = owned_log.OwnedLog(stream, NAME, state, **options)  # type: ignore[arg-type]
        logs.append(log)
        await log.start()
        if epoch:
            await log.own(epoch)
        return log, state

    yield make
    for log in logs:
        await log.stop()


def content(state: keyed_state.KeyedState) -> dict[bytes, bytes]:
    return {key: record.value for key, record in state.records.items()}


async def test_what_was_appended_is_read_again(opened: Open):
    log, state = await opened(1)
    first = await log.append([(b"a", b"1"), (b"b", b"2")])
    second = await log.append([(b"a", None), (b"c", b"3")])
    assert second > first
    assert content(state) == {b"b": b"2", b"c": b"3"}
    assert state.records[b"b"].version == first
    _, other = await opened()
    assert other.records == state.records


async def test_a_follower_applies_pages_and_takes_over(opened: Open):
    log, state = await opened(1)
    standby, copy = await opened()
    await log.append([(b"a", b"1")])
    await eventually(lambda: content(copy) == {b"a": b"1"})
    await eventually(lambda: standby.age_s < 2)
    with pytest.raises(owned_log.NotOwner):
        await standby.append([(b"a", b"2")])
    with pytest.raises(owned_log.NotOwner):
        await standby.own(1)
    await standby.own(2)
    assert log.is_owned, "it does not know yet"
    with pytest.raises(owned_log.NotOwner):
        await log.append([(b"a", b"stale")])
    with pytest.raises(owned_log.NotOwner):
        await log.confirm()
    assert log.lost.is_set()
    await standby.append([(b"b", b"3")])
    await standby.confirm()
    assert content(copy) == {b"a": b"1", b"b": b"3"}
    await eventually(lambda: content(state) == content(copy))
    await log.own(3)
    await log.append([(b"c", b"4")])


async def test_a_request_is_executed_once(opened: Open):
    now_ms = 1_000_000
    log, state = await opened(1, now_ms=lambda: now_ms)
    both = await asyncio.gather(*(log.append([(b"n", b"1")], request="r1") for _ in range(2)))
    assert both[0] == both[1]
    assert isinstance(both[1], api.Duplicate)
    other, copy = await opened(2, now_ms=lambda: now_ms)
    again = await other.append([(b"n", b"2")], request="r1")
    assert (again, type(again)) == (both[0], api.Duplicate)
    assert content(copy) == {b"n": b"1"}
    now_ms += journal.WINDOW_MS + 1
    assert await other.append([(b"n", b"2")], request="r1") > both[0]
    assert content(state) == {b"n": b"1"}


async def test_concurrent_appends_share_pages(opened: Open, stream: api.Stream):
    log, state = await opened(1)
    before = (await stream.state()).messages
    positions = await asyncio.gather(*(log.append([(b"%d" % n, b"x")]) for n in range(200)))
    assert len(set(positions)) == 200
    assert (await stream.state()).messages - before <= 3
    assert {record.version for record in state.records.values()} == set(positions)


@pytest.mark.parametrize("size", [pages.PAGE_BYTES // 2, 3 * pages.PAGE_BYTES])
async def test_large_values_and_transactions_are_whole(opened: Open, stream: api.Stream, size: int):
    log, state = await opened(1)
    small = asyncio.gather(*(log.append([(b"small", b"%d" % n)]) for n in range(3)))
    changes = [(b"%d" % n, b"x" * size) for n in range(3)]
    await log.append(changes, request="large")
    await small
    _, copy = await opened()
    assert content(copy) == content(state) == {b"small": b"2", **dict(changes)}
    owner, copy = await opened(2)
    assert isinstance(await owner.append(changes, request="large"), api.Duplicate)
    for key, _ in changes:
        await owner.append([(key, None)])
    assert content(copy) == {b"small": b"2"}


async def test_a_body_without_its_page_is_collected(opened: Open, stream: api.Stream):
    await opened(1)
    await stream.publish(f"{NAME}.body", b"of an owner that ended before its page")
    log, _ = await opened(2)
    assert await stream.last_for(f"{NAME}.body") is None
    await log.append([(b"a", b"x" * 2 * pages.PAGE_BYTES)])
    _, copy = await opened(3)
    assert len(copy.records[b"a"].value) == 2 * pages.PAGE_BYTES


async def test_a_log_stays_small_and_keeps_versions(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 30_000)
    monkeypatch.setattr(journal, "TRIM_BATCH_BYTES", 5_000)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 4)
    log, state = await opened(1)
    standby, copy = await opened()
    kept = await log.append([(b"kept", b"k" * 1000)], request="kept")
    await log.append([(b"gone", b"g" * 1000)])
    await log.append([(b"gone", None)])
    for n in range(300):
        await log.append([(b"hot %d" % (n % 5), b"%d" % n * 200)])
    assert log.stored_bytes < 60_000
    assert state.records[b"kept"].version == kept
    assert pages.sequence_of(state.records[b"kept"].position) > pages.sequence_of(kept)
    late, again = await opened()
    assert content(again) == content(state)
    assert {key: record.version for key, record in again.records.items()} == {
        key: record.version for key, record in state.records.items()
    }
    assert late.stored_bytes < 2 * log.stored_bytes, "pages were removed"
    await eventually(lambda: content(copy) == content(state))
    await standby.own(2)
    assert await standby.append([(b"kept", b"2")], request="kept") == kept


async def test_a_follower_that_missed_trimmed_pages_reads_again(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 3_000)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 1)
    await stream.publish("log.other", b"keeps the first sequence of the stream")
    log, state = await opened(1)
    await log.append([(b"gone", b"1")])
    standby, copy = await opened()
    assert standby._following is not None
    standby._following.cancel()
    await asyncio.wait([standby._following])
    await log.append([(b"gone", None)])
    for n in range(50):
        await log.append([(b"hot", b"%d" % n * 200)])
    await standby.own(2)
    assert content(copy) == content(state)
    assert b"gone" not in copy.records


async def test_a_full_log_accepts_deletions(opened: Open):
    log, state = await opened(1, bytes_max=20_000, reserve_bytes=5_000)
    for n in range(12):
        await log.append([(b"%d" % n, b"x" * 1000)])
    with pytest.raises(errors.LimitExceeded, match="no room"):
        await log.append([(b"12", b"x" * 1000)])
    await log.append([(b"0", None)])
    assert len(state.records) == 11


async def test_trimmed_pages_do_not_fill_the_stream(connect: fixtures.Connect):
    """However few they are, if they are large."""
    value = b"x" * (3 * pages.PAGE_BYTES)
    max_bytes = 16 * len(value)
    settings = api.StreamSettings(
        "small", ("small.>",), max_bytes=max_bytes, max_age_s=0, on_full=api.FullPolicy.REFUSE
    )
    stream = await (await connect("a")).stream(settings)
    log = owned_log.OwnedLog(stream, "small.log", keyed_state.KeyedState(), bytes_max=max_bytes * 3 // 4)
    await log.start()
    await log.own(1)
    for _ in range(40):
        await log.append([(b"key", value)])
    await log.stop()


async def test_ids_of_requests_are_not_trimmed_again_and_again(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    """They are live: a large transaction must not wait for a log that cannot become smaller."""
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 10_000)
    log, _ = await opened(1)
    for n in range(60):
        await log.append([(b"a", b"%d" % n)], request=f"r{n}".ljust(500, "x"))
    before = (await stream.state()).last_sequence
    await asyncio.wait_for(log.append([(b"b", b"x" * (pages.PAGE_BYTES + 1))]), 5)
    await log.append([(b"c", b"1")])
    assert (await stream.state()).last_sequence - before < 8


async def test_a_large_transaction_waits_for_little_trimming(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 1_000)
    monkeypatch.setattr(journal, "TRIM_FACTOR", 0.5)  # the log is never small enough
    monkeypatch.setattr(journal, "TRIM_BATCH_BYTES", 10_000)
    log, _ = await opened(1)
    for n in range(30):
        await log.append([(b"k%d" % n, b"x" * 10_000)])
    await asyncio.wait_for(log.append([(b"large", b"x" * (pages.PAGE_BYTES + 1))]), 20)
    await log.append([(b"c", b"1")])
    _, state = await opened()
    assert len(state.records) == 32


async def test_a_page_has_room_for_the_ids_of_its_requests(opened: Open):
    log, state = await opened(1)
    appends = [log.append([(b"%d" % n, None)], request=f"{n:0200}") for n in range(8_000)]
    positions = await asyncio.gather(*appends)
    assert len(set(positions)) == 8_000
    assert isinstance(await log.append([(b"1", b"again")], request=f"{1:0200}"), api.Duplicate)
    assert not state.records


async def test_an_ownership_is_confirmed_after_one_that_ended_during_the_question(opened: Open):
    log, _ = await opened(1)
    await opened(2)
    refused = [asyncio.ensure_future(log.append([(b"a", b"1")]))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    refused.append(asyncio.ensure_future(log.confirm()))
    for each in refused:
        with pytest.raises(owned_log.NotOwner):
            await each
    await log.own(3)
    await log.confirm()


async def test_who_gave_up_to_become_owner_follows_on(opened: Open):
    log, state = await opened(1)
    standby, copy = await opened()
    owning = asyncio.ensure_future(standby.own(2))
    await asyncio.sleep(0)
    owning.cancel()
    await asyncio.gather(owning, return_exceptions=True)
    await log.append([(b"a", b"1")])
    await eventually(lambda: content(copy) == content(state))


async def test_an_append_in_doubt_ends_the_ownership(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    log, state = await opened(1)
    publish = type(stream).publish
    stored = 0

    async def unanswered(self: api.Stream, *arguments: object, **options: object) -> int:
        nonlocal stored
        stored = await publish(self, *arguments, **options)  # type: ignore[arg-type]
        raise errors.TimedOut("no acknowledgement")

    monkeypatch.setattr(type(stream), "publish", unanswered)
    with pytest.raises(errors.TimedOut, match="may have been stored"):
        await log.append([(b"a", b"1")])
    monkeypatch.undo()
    assert not log.is_owned
    await eventually(lambda: content(state) == {b"a": b"1"})
    await log.own(2)
    await log.append([(b"b", b"2")])
    assert content(state) == {b"a": b"1", b"b": b"2"}


async def test_a_damaged_page_is_reported(opened: Open, stream: api.Stream):
    log, _ = await opened(1)
    await stream.publish(f"{NAME}.page", pages.encode(pages.OwnedPage("log", 1, 1))[:-2])
    with pytest.raises(errors.MusterError):
        await log.append([(b"a", b"1")])
    assert not log.is_owned
    with pytest.raises(errors.InvalidInput, match="not a page"):
        await opened()


FOREIGN = [b"", b"report", b'{"stream":"reports", "seq":7}', b"x" * 5_000]


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_a_message_that_is_no_page_costs_neither_the_ownership_nor_a_record(
    opened: Open, stream: api.Stream, foreign: bytes
):
    """The broker sends its replies wherever a client names, also into a log."""
    await stream.publish(f"{NAME}.page", foreign)
    log, state = await opened(1)
    standby, copy = await opened()
    for number in range(3):
        for _ in range(number):
            await stream.publish(f"{NAME}.page", foreign)
        await log.append([(b"%d" % number, b"1")], request=f"r{number}")
        await log.confirm()
    await stream.publish(f"{NAME}.page", foreign)
    assert log.is_owned
    await eventually(lambda: copy.records == state.records)
    await eventually(lambda: standby.age_s < 2)
    await standby.own(2)
    with pytest.raises(owned_log.NotOwner):
        await log.append([(b"stale", b"1")])
    await standby.append([(b"3", b"1")])
    _, again = await opened()
    assert sorted(content(again)) == [b"0", b"1", b"2", b"3"]
    assert isinstance(await standby.append([(b"1", b"2")], request="r1"), api.Duplicate)


async def test_messages_that_are_no_pages_are_trimmed(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 3_000)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 1)
    log, state = await opened(1)
    await log.append([(b"a", b"1")])
    for number in range(20):
        await stream.publish(f"{NAME}.page", b"x" * 2_000)
        await log.append([(b"b", b"%d" % number)])
    for _ in range(30):
        await log.append([(b"b", b"last")])
    assert log.stored_bytes < 6_000
    assert (await stream.state()).bytes < 10_000
    assert content(state) == {b"a": b"1", b"b": b"last"}
    _, copy = await opened()
    assert copy.records == state.records


async def test_a_standby_forgets_what_the_owner_has_trimmed(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 20_000)
    monkeypatch.setattr(journal, "REQUESTS_MAX", 10)
    log, _ = await opened(1, bytes_max=100_000, reserve_bytes=1_000)
    standby, _ = await opened(bytes_max=100_000, reserve_bytes=1_000)
    for number in range(40):
        await log.append([(b"key", b"x" * 5_000)], request=str(number))
    await eventually(lambda: standby.position == log.position)
    assert standby.stored_bytes < 40_000
    assert len(standby._journal.requests) <= 10
    await standby.own(2)
    await standby.append([(b"key", b"y")])


async def test_a_log_is_trimmed_before_its_budget_is_used_up(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 1_000)
    log, _ = await opened(1, bytes_max=100_000, reserve_bytes=1_000)
    for number in range(60):
        await log.append([(b"%d" % (number % 10), b"x" * 5_000)])
    assert log.stored_bytes < 100_000


async def test_a_state_that_refuses_a_record_never_skips_it(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    log, state = await opened(1)
    await log.append([(b"a", b"1")])
    standby, copy = await opened()
    apply, refused = keyed_state.KeyedState.apply, []

    def refuse(self: keyed_state.KeyedState, record: pages.OwnedRecord, version: int, position: int) -> None:
        if record.key == b"new":
            refused.append(self)
            raise ValueError("of a later version")
        apply(self, record, version, position)

    monkeypatch.setattr(keyed_state.KeyedState, "apply", refuse)
    with pytest.raises(errors.TimedOut, match="may have been stored"):
        await log.append([(b"b", b"2"), (b"new", b"3"), (b"c", b"4")])
    assert not log.is_owned
    await eventually(lambda: {id(state), id(copy)} <= {id(each) for each in refused})
    with pytest.raises(ValueError, match="later version"):
        await standby.own(2)
    assert b"c" not in copy.records
    monkeypatch.undo()
    await standby.own(2)
    await standby.append([(b"d", b"5")])
    assert content(copy) == {b"a": b"1", b"b": b"2", b"new": b"3", b"c": b"4", b"d": b"5"}
    await eventually(lambda: content(state) == content(copy), timeout_s=30)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_owner_that_resigns_follows_its_successor(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch, cancelled: bool
):
    log, state = await opened(1)
    publish, go_on = type(stream).publish, asyncio.Event()

    async def slow(self: api.Stream, *arguments: object, **options: object) -> int:
        await go_on.wait()
        return await publish(self, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "publish", slow)
        under_way = asyncio.create_task(log.append([(b"a", b"1")]))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(log.append([(b"b", b"2")]))
        resigning = asyncio.create_task(log.resign())
        await asyncio.sleep(0)
        with pytest.raises(owned_log.NotOwner):
            await log.append([(b"c", b"3")])
        if cancelled:
            resigning.cancel()
            await asyncio.wait([resigning])
        go_on.set()
        await asyncio.wait([resigning, under_way])
    await under_way
    with pytest.raises(owned_log.NotOwner):
        await asyncio.wait_for(waiting, 5)
    other, copy = await opened(2)
    await other.append([(b"d", b"4")])
    await eventually(lambda: content(state) == content(copy) == {b"a": b"1", b"d": b"4"})
    await log.own(3)
    await log.append([(b"e", b"5")])


async def test_who_could_not_become_owner_follows_on(opened: Open):
    log, state = await opened(2)
    standby, copy = await opened()
    with pytest.raises(owned_log.NotOwner):
        await standby.own(1)
    await log.append([(b"a", b"1")])
    await eventually(lambda: copy.records == state.records)


async def test_an_append_during_the_stop_is_in_doubt(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    log, _ = await opened(1)
    sent = asyncio.Event()

    async def unanswered(self: api.Stream, *arguments: object, **options: object) -> int:
        sent.set()
        return await asyncio.Future()

    monkeypatch.setattr(type(stream), "publish", unanswered)
    appending = asyncio.create_task(log.append([(b"a", b"1")]))
    await sent.wait()
    await log.stop()
    with pytest.raises(errors.TimedOut):
        await asyncio.wait_for(appending, 5)


@pytest.mark.parametrize("trims", [False, True])
async def test_a_large_append_to_a_full_stream_is_refused_and_the_log_stays_owned(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch, trims: bool
):
    log, _ = await opened(1)
    for _ in range(20):
        await log.append([(b"a", b"x" * 1000)])
    await log.append([(b"b", b"1")])
    if trims:
        monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 1)
    with monkeypatch.context() as patch:

        async def full(*_: object, **options: object) -> int:
            raise errors.LimitExceeded("the stream is full")

        patch.setattr(type(stream), "publish", full)
        with pytest.raises(errors.LimitExceeded):
            await asyncio.wait_for(log.append([(b"c", b"x" * (pages.PAGE_BYTES + 1))]), 5)
    await log.append([(b"d", b"1")])


async def test_a_refusal_after_the_page_was_trimmed_is_in_doubt(
    opened: Open, stream: api.Stream, monkeypatch: pytest.MonkeyPatch
):
    """An attempt may have been stored, and its page trimmed by the next owner before the repetition."""
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 3_000)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 1)
    await stream.publish("log.other", b"keeps the first sequence of the stream")
    log, _ = await opened(1)
    publish = type(stream).publish

    async def overtaken(self: api.Stream, *arguments: object, **options: object) -> int:
        monkeypatch.undo()
        monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 3_000)
        monkeypatch.setattr(owned_log, "PURGE_PAGES", 1)
        await publish(self, *arguments, **options)  # type: ignore[arg-type]
        other, _ = await opened(2)
        for n in range(50):
            await other.append([(b"hot", b"%d" % n * 200)])
        return await publish(self, *arguments, **{**options, "message_id": None})  # type: ignore[arg-type]

    monkeypatch.setattr(type(stream), "publish", overtaken)
    with pytest.raises(errors.TimedOut, match="may have been stored"):
        await log.append([(b"a", b"1")])


@pytest.mark.parametrize(("lost", "place"), [("page", 0), ("page", 1), ("body", 1)])
async def test_a_lost_part_is_reported(opened: Open, stream: api.Stream, lost: str, place: int):
    """A broker treats a damaged message as missing: reading again would not find it either."""
    log, _ = await opened(1)
    await log.append([(b"a", b"1")])
    await log.append([(b"b", b"x" * (pages.PAGE_BYTES + 1))])
    await log.append([(b"c", b"1")])
    await log.stop()
    stored = [message.sequence async for message in stream.read(1, subject=f"{NAME}.{lost}")]
    await stream.delete(stored[place])
    with pytest.raises(owned_log.LogDamaged, match="lost"):
        await asyncio.wait_for(opened(), 5)


async def test_a_log_that_an_earlier_version_has_trimmed_is_not_damaged(opened: Open, stream: api.Stream):
    """Its last page named the first one, which was removed once that page was stored."""
    log, _ = await opened(1)
    first = await log.append([(b"a", b"1")])
    await log.stop()
    (fence, before) = [message.sequence async for message in stream.read(1, subject=f"{NAME}.page")]
    page = pages.decode((await stream.get(before)).data)
    record = pages.OwnedRecord(b"a", b"1", first)
    fields = [page.log, 1, before, [record], [], [], fence, ""]
    last = await stream.publish(f"{NAME}.page", msgspec.msgpack.encode(fields))
    await stream.purge(subject=f"{NAME}.page", before=int(last))
    log, state = await opened(2)
    assert content(state) == {b"a": b"1"}
    await log.append([(b"b", b"2")])
    _, state = await opened()
    assert content(state) == {b"a": b"1", b"b": b"2"}


async def test_an_owner_follows_nothing_after_a_cancelled_resignation(opened: Open):
    """What was being stored then ends the former ownership later."""
    log, _ = await opened(1)
    appending = asyncio.ensure_future(log.append([(b"a", b"1")]))
    await asyncio.sleep(0)
    resigning = asyncio.ensure_future(log.resign())
    await asyncio.sleep(0)
    resigning.cancel()
    await log.own(2)
    assert log.is_owned
    assert log._following is None
    await asyncio.gather(resigning, appending, return_exceptions=True)


async def test_bodies_of_refused_appends_do_not_fill_the_stream(connect: fixtures.Connect):
    bus = await connect("a")
    settings = api.StreamSettings(
        "logs", ("log.>",), max_bytes=3 << 20, max_age_s=0, on_full=api.FullPolicy.REFUSE
    )
    stream = await bus.stream(settings)
    log = owned_log.OwnedLog(stream, NAME, keyed_state.KeyedState())
    await log.start()
    await log.own(1)
    await log.append([(b"first", b"x" * (pages.PAGE_BYTES + 1))])  # its body is before the others
    for _ in range(3):
        with pytest.raises(errors.LimitExceeded):
            await log.append([(b"large", b"x" * (4 << 20))])
    assert (await stream.state()).bytes < 2 * pages.PAGE_BYTES
    await log.append([(b"large", b"x" * (1 << 20))])
    await log.stop()


async def test_a_standby_recognises_requests_whatever_its_clock_says(opened: Open):
    log, _ = await opened(1)
    await log.append([(b"a", b"1")], request="r1")
    standby, _ = await opened(now_ms=lambda: 10 * journal.WINDOW_MS)
    assert standby.executed("r1") is not None
    await standby.own(2)
    assert isinstance(await standby.append([(b"a", b"2")], request="r1"), api.Duplicate)


async def test_a_standby_reads_a_restored_log_again(connect: fixtures.Connect):
    """Sequences after the backup are assigned a second time: its pages are not those that it has read."""
    bus = await connect("a")
    stream = await bus.stream(STREAM)
    states = [keyed_state.KeyedState() for _ in range(3)]
    former, standby, later = (owned_log.OwnedLog(stream, NAME, state) for state in states)
    await former.start()
    await former.own(1)
    await former.append([(b"a", b"1")])
    snapshot = snapshots.StreamSnapshot(bus, "logs")
    pieces = [piece async for piece in snapshot]
    for number in range(5):
        await former.append([(b"lost", b"%d" % number)])
    await standby.start()
    assert content(states[1]) == {b"a": b"1", b"lost": b"4"}
    await former.stop()
    await bus.delete_stream("logs")

    async def again() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    await snapshots.restore(bus, snapshot.config, snapshot.state, again())
    await later.start()
    await later.own(2)
    for number in range(10):
        await later.append([(b"b", b"%d" % number)])
    await eventually(lambda: content(states[1]) == {b"a": b"1", b"b": b"9"})
    await standby.own(3)
    with pytest.raises(owned_log.NotOwner):
        await later.append([(b"b", b"x")])
    await standby.append([(b"c", b"1")])
    await eventually(lambda: content(states[2]) == content(states[1]))
    await standby.stop()
    await later.stop()


async def test_an_owner_goes_on_after_the_end_of_its_log_was_lost(
    simulated_network: network.SimulatedNetwork,
):
    """As by a broker that syncs at intervals, after a power cut."""
    async with await simulated_network.connect("a") as bus:
        log = owned_log.OwnedLog(await bus.stream(STREAM), NAME, state := keyed_state.KeyedState())
        await log.start()
        await log.own(1)
        for number in range(5):
            await log.append([(b"a", b"%d" % number)])
        stored = simulated_network.logs["logs"]
        for _ in range(3):
            stored.remove(stored.last)
            stored.last -= 1
        with pytest.raises(errors.TimedOut):
            await log.append([(b"a", b"x")])
        await log.own(2)
        assert content(state) == {b"a": b"1"}
        await log.append([(b"a", b"y")])
        await log.stop()
