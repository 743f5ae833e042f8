"""One person leaves room for the others: long reads take turns, watches are counted by login."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.core import errors
from muster.message import listings, protocol
from muster.monitor import live_view
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.data import connections, history_reader, read_model, rows, turns
from muster.web.data.measurements import latest_reports
from muster.web.rest import charts as charts_rest
from muster.web.rest import event_stream
from muster.web.rest import reports as reports_rest
from tests.web.test_identity import NoDomain


async def test_many_searches_of_the_history_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    ended = threading.Event()

    def read_page(root: str, query: Any, limit: int, cursor: str) -> tuple[list[Any], None]:
        began.append(cursor)
        ended.wait(30)
        return [], None

    monkeypatch.setattr(history_reader, "read_page", read_page)
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    searches = [
        asyncio.create_task(source.history("nodes", "", from_ms=None, to_ms=None, cursor=str(number)))
        for number in range(40)
    ]
    try:
        await eventually(lambda: len(began) >= turns.LONG_AT_ONCE)
        async with asyncio.timeout(20):
            await asyncio.to_thread(int)  # such as the check of a login
        assert len(began) == turns.LONG_AT_ONCE
    finally:
        ended.set()
        await asyncio.gather(*searches)
        await source.feed.cache.close()
    assert len(began) == len(searches)


async def test_the_reports_of_a_large_fleet_are_computed_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[int] = set()

    def noted(*_: Any, **__: Any) -> None:
        threads.add(threading.get_ident())

    for module, name in ((live_view, "node"), (latest_reports, "_members"), (latest_reports, "_summary")):
        monkeypatch.setattr(module, name, noted)
    reports = latest_reports.LatestReports()
    await reports.node("web-1")
    await reports.members("group", "web")
    await reports.summary()
    assert threads
    assert threading.get_ident() not in threads


async def test_one_computation_serves_all_who_list_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    computed, release = 0, asyncio.Event()

    async def summary() -> rows.MachineSummary:
        nonlocal computed
        computed += 1
        await release.wait()
        return rows.MachineSummary(groups=[rows.GroupRow(group="web")])

    monkeypatch.setattr(source.feed.machines, "summary", summary)
    call: Any = types.SimpleNamespace(source=source)
    requests = [asyncio.create_task(reports_rest.groups(call)) for _ in range(20)]
    await asyncio.sleep(0)
    release.set()
    assert [row.group for rows_ in await asyncio.gather(*requests) for row in rows_] == ["web"] * 20
    assert computed == 1
    await source.feed.cache.close()


@pytest.mark.virtual_time
async def test_a_turn_is_not_awaited_for_ever() -> None:
    work = turns.WorkTurns(1, "searches")
    async with work.turn():
        with pytest.raises(errors.Overloaded, match="too many searches"):
            async with work.turn():
                pass
    async with work.turn():
        pass


def test_a_login_cannot_take_all_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "OF_LOGIN_MAX", 2)
    monkeypatch.setattr(event_stream, "WATCHES_MAX", 3)
    slot = event_stream.slot
    with slot("vic"), slot("vic"):
        with pytest.raises(errors.Overloaded, match="2 of vic"):
            slot("vic").__enter__()
        with slot("ann"), pytest.raises(errors.Overloaded, match="3 watches are already open"):
            slot("olga").__enter__()
    assert not event_stream.open_streams


async def test_a_stream_ends_when_its_login_has_another_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page was rendered, and a log read, with the rights that the login had at the beginning."""
    person = sessions.LoginSession(
        id="1", name="olga", role=sessions.WebRole.OPERATOR, kind=sessions.TokenKind.COOKIE, born=0, until=1
    )
    now = person

    async def session_of(_: Any) -> sessions.LoginSession:
        return now

    async def frames() -> AsyncIterator[bytes]:
        for number in range(3):
            yield str(number).encode()

    monkeypatch.setattr(request_state, "session_of", session_of)
    seen: list[bytes] = []
    async for frame in event_stream._with_beats(frames(), None, person):  # type: ignore[arg-type]
        seen.append(frame)
        now = msgspec.structs.replace(person, role=sessions.WebRole.VIEWER)
    assert seen == [b"0"]


async def test_names_of_temporary_queues_are_not_listed_as_charts_for_a_viewer() -> None:
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    for name in ("orders", "temporary:shop-1:1"):
        source.feed.samples.add("queue", name, 1.0, {"waiting": 1.0})
    for role, count in ((sessions.WebRole.VIEWER, 1), (sessions.WebRole.OPERATOR, 2)):
        person = sessions.LoginSession(
            id="1", name="vic", role=role, kind=sessions.TokenKind.COOKIE, born=0, until=1
        )
        call: Any = types.SimpleNamespace(source=source, person=person)
        assert len(await charts_rest.charted(call, "queue")) == count
    await source.feed.cache.close()


class PersonBus:
    """A connection that is there until it is closed."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.state = api.ConnectionState.CONNECTED

    async def close(self) -> None:
        self.state = api.ConnectionState.CLOSED


class PersonLocation:
    async def connect(self, identity: str, role: roles.Role) -> Any:
        return PersonBus(identity)

    async def place(self) -> None:
        return None


async def test_an_operation_keeps_its_connection_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PEOPLE_MAX", 2)
    monkeypatch.setattr(connections, "IDLE_S", -1.0)

    async def connected(_: api.Bus) -> None:
        pass

    links = connections.BusConnections(PersonLocation(), on_connected=connected, on_lost=lambda: None)
    links._bus = await PersonLocation().connect("web", roles.Role.WEB)
    used = await links.as_person("olga", roles.Role.OPERATOR)
    with links.using(used):
        others = [await links.as_person(name, roles.Role.VIEWER) for name in ("ann", "bob", "vic")]
        await links._forget_idle()
        assert {used.state} == {api.ConnectionState.CONNECTED}
        assert {bus.state for bus in others} == {api.ConnectionState.CLOSED}
        assert await links.as_person("olga", roles.Role.OPERATOR) is used
    await links._forget_idle()
    assert {used.state} == {api.ConnectionState.CLOSED}
    assert not links._used


async def test_a_connection_used_while_another_is_closed_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(_: api.Bus) -> None:
        pass

    links = connections.BusConnections(PersonLocation(), on_connected=connected, on_lost=lambda: None)
    links._bus = await PersonLocation().connect("web", roles.Role.WEB)
    first, second = [await links.as_person(name, roles.Role.VIEWER) for name in ("ann", "bob")]
    for who, (bus, used_s) in list(links._people.items()):
        links._people[who] = (bus, used_s - connections.IDLE_S - 1)
    close = first.close

    async def use_the_other() -> None:
        await links.as_person("bob", roles.Role.VIEWER)
        await close()

    monkeypatch.setattr(first, "close", use_the_other)
    await links._forget_idle()
    assert [bus.state for bus in (first, second)] == [
        api.ConnectionState.CLOSED,
        api.ConnectionState.CONNECTED,
    ]


async def test_a_viewer_sees_no_temporary_queues_through_the_web(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the bus a viewer may neither list nor browse them; the web process may."""
    source = read_model.ReadModel(NoDomain(), history="", domain="lab")
    names = ("orders", "dead-letters", "temporary:shop-1:1")

    async def reply(key: Any, request: protocol.DispatcherRequest) -> protocol.DispatcherReply:
        return protocol.DispatcherReply(
            queues=[listings.QueueRow(queue=name, depth=0, consumers=0) for name in names],
            scheduled=[
                listings.ScheduledRow(number=1, id=None, destination=f"queue:{name}", delivery_time_ms=1)
                for name in names
            ],
        )

    monkeypatch.setattr(source, "dispatcher", reply)
    for role, count in ((sessions.WebRole.VIEWER, 2), (sessions.WebRole.OPERATOR, 3)):
        person = sessions.LoginSession(
            id="1", name="vic", role=role, kind=sessions.TokenKind.COOKIE, born=0, until=1
        )
        assert [row.queue for row in await source.queues(person)] == list(names[:count])
        assert len(await source.scheduled(person, None)) == count
        for number, name in enumerate(names, 1):
            browsing = source.browse(person, name, selector=None, after=0, limit=1)
            if number <= count:
                assert await browsing == ([], None)
            else:
                with pytest.raises(errors.Forbidden, match="may not browse"):
                    await browsing
