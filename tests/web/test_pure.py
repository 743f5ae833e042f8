"""What decides without a network: sessions, the cache, markup, who is foreign, who waits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import time
import types
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from muster.bus.brokers import control
from muster.core import errors, messages
from muster.core.reports import columns
from muster.manage import client as manage_client
from muster.manage import rows as manage_rows
from muster.monitor import client as monitor_client
from muster.monitor import protocol as monitor_protocol
from muster.notify import protocol as notify_protocol
from muster.notify import rows as notify_rows
from muster.pipeline.fleet import rollups
from muster.pipeline.history import search
from muster.simulate import fleet
from muster.trust.permissions import roles
from muster.web import actions, guard, problems, request_state
from muster.web.auth import sessions, signed_text
from muster.web.components import drawings, page, plots, templates, texts
from muster.web.data import bus_feed, cache, event_log, history_reader, read_model, recent, topology
from muster.web.data.measurements import alert_spans, fleet_map, latest_reports, recent_reports
from muster.web.data.measurements import charts as charts_data
from muster.web.pages import alerts as alerts_page
from muster.web.pages import contexts, forms, history, routes, system
from muster.web.pages import fleet as fleet_page
from muster.web.rest import base, find, notifications
from tests.pipeline import test_history, traffic

KEY = b"k" * 32


def session(**changes: object) -> sessions.LoginSession:
    made = sessions.LoginSession(
        id="s1",
        name="ann",
        role=sessions.WebRole.OPERATOR,
        kind=sessions.TokenKind.COOKIE,
        born=5,
        until=1000,
    )
    return msgspec.structs.replace(made, **changes)


# Sessions


def test_a_report_that_is_younger_than_the_worst_case_is_no_warning():
    looks = [system.compared_ages(*case)[1] for case in ((1.1, True), (1.83, False), (0.5, False))]
    assert looks == ["good", "good", "warn"]
    assert system.compared_ages(None, None) == ("–", "")


def test_a_session_comes_back_as_it_was_sealed():
    sealed = sessions.seal(session(), KEY)
    assert sessions.unseal(sealed, KEY, now_s=999) == session()


@pytest.mark.parametrize("text", ["", ".", "a.b", "é.é", "x" * 5000, "eyJ9.AAAA", "\x00.\x00"])
def test_a_token_with_another_seal_is_rejected(text):
    with pytest.raises(errors.Unauthorized):
        sessions.unseal(text, KEY, now_s=0)


def test_no_byte_of_a_sealed_session_can_be_changed():
    sealed = sessions.seal(session(), KEY)
    for place in range(len(sealed)):
        changed = sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
        try:
            login_session = sessions.unseal(changed, KEY, now_s=0)
        except errors.Unauthorized:
            continue
        assert login_session == session()  # the last bits of base 64 may be free


def test_an_expired_session_another_key_and_another_purpose_are_refused():
    sealed = sessions.seal(session(), KEY)
    for text, key, now_s in (
        (sealed, KEY, 1000),
        (sealed, b"other" * 8, 0),
        (signed_text.seal(session(), KEY, "oidc"), KEY, 0),
    ):
        with pytest.raises(errors.Unauthorized):
            sessions.unseal(text, key, now_s=now_s)


def test_roles_cover_those_below_and_gateways_logins_have_no_place():
    assert sessions.WebRole.ADMIN.covers(sessions.WebRole.OPERATOR)
    assert not sessions.WebRole.VIEWER.covers(sessions.WebRole.OPERATOR)
    assert sessions.role_of(roles.Role.OPERATOR, administers=True) is sessions.WebRole.ADMIN
    assert sessions.role_of(roles.Role.VIEWER, administers=True) is sessions.WebRole.VIEWER
    with pytest.raises(errors.Forbidden):
        sessions.role_of(roles.Role.USER, administers=True)


# The cache


async def test_equal_requests_share_one_computation():
    kept = cache.TaggedCache()
    made = 0
    release = asyncio.Event()

    async def make() -> int:
        nonlocal made
        made += 1
        await release.wait()
        return made

    asking = [asyncio.create_task(kept.get("k", "t", 10.0, make)) for _ in range(50)]
    await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*asking) == [1] * 50
    assert await kept.get("k", "t", 10.0, make) == 1
    kept.touch("other")
    assert await kept.get("k", "t", 10.0, make) == 1
    kept.touch("t")
    assert await kept.get("k", "t", 10.0, make) == 2


async def test_the_cache_is_bounded_and_keeps_failures_for_a_moment_only():
    now = 0.0
    kept = cache.TaggedCache(entries_max=10, now=lambda: now)

    async def fine() -> int:
        return 1

    async def fail() -> int:
        raise errors.Unavailable("away")

    for key in range(100):
        await kept.get(key, "t", 10.0, fine)
    assert len(kept) == 10
    with pytest.raises(errors.Unavailable):
        await kept.get("f", "t", 10.0, fail)
    before = kept.made
    with pytest.raises(errors.Unavailable):
        await kept.get("f", "t", 10.0, fail)
    assert kept.made == before
    now = cache.FAILED_S + 0.1
    with pytest.raises(errors.Unavailable):
        await kept.get("f", "t", 10.0, fail)
    assert kept.made == before + 1


async def test_the_cache_stores_neither_long_keys_nor_expired_results():
    now = 0.0
    kept = cache.TaggedCache(now=lambda: now)

    async def fine() -> int:
        return 1

    long = "x" * (1 << 20)
    for number in range(50):
        await kept.get(("who", long, number), "t", 10.0, fine)
    assert (len(kept), kept.made) == (50, 50)
    assert max(map(len, kept._entries)) < 100
    await kept.get(("who", long, 49), "t", 10.0, fine)
    assert kept.made == 50
    now = 11.0
    await kept.get("another", "t", 10.0, fine)
    assert len(kept) == 1


async def test_a_reader_after_a_write_is_not_served_by_a_fill_begun_before_it():
    kept = cache.TaggedCache()
    truth, running, most = "before", 0, 0
    begun, release = asyncio.Event(), asyncio.Event()

    async def make() -> str:
        nonlocal running, most
        begun.set()
        running += 1
        most = max(most, running)
        seen = truth
        await release.wait()
        running -= 1
        return seen

    early = asyncio.create_task(kept.get("k", "t", 10.0, make))
    await begun.wait()
    truth = "between"
    kept.touch("t")
    between = asyncio.create_task(kept.get("k", "t", 10.0, make))
    await asyncio.sleep(0)
    truth = "after"
    kept.touch("t")
    late = [asyncio.create_task(kept.get("k", "t", 10.0, make)) for _ in range(20)]
    await asyncio.sleep(0)
    release.set()
    assert await early == "before"
    assert await between in ("between", "after")
    assert await asyncio.gather(*late) == ["after"] * 20
    assert (most, kept.made) == (1, 2)


class NoLink:
    """The link of an act: its bus stores nothing, and is there."""

    identity = "web"

    def __init__(self) -> None:
        self.published: list[messages.Decision] = []
        self.bus = self

    async def as_person(self, name, role):
        return self

    def using(self, bus):
        return contextlib.nullcontext()

    async def open_stream(self, name):
        return self

    async def publish(self, subject, data, *, message_id):
        await asyncio.sleep(0)  # as a real one: the caller may be cancelled meanwhile
        self.published.append(messages.decode(data, messages.Decision))


def an_act() -> tuple[NoLink, actions.ActionRunner]:
    link = NoLink()
    return link, actions.ActionRunner(types.SimpleNamespace(link=link, cache=cache.TaggedCache()))  # type: ignore[arg-type]


OLGA = sessions.LoginSession(
    id="1", name="olga", role=sessions.WebRole.OPERATOR, kind=sessions.TokenKind.TOKEN, born=0, until=1
)


async def test_an_act_that_is_cancelled_while_it_is_carried_out_is_recorded_in_doubt():
    link, actions = an_act()
    sent = asyncio.Event()

    async def act(_bus):
        sent.set()
        await asyncio.Event().wait()

    doing = asyncio.create_task(actions.run(OLGA, "purge", "queue:q", act))
    await sent.wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    await actions.close()
    assert [(record.who, record.what, record.outcome) for record in link.published] == [
        ("olga", "purge", messages.DecisionOutcome.IN_DOUBT)
    ]


async def test_an_act_that_was_carried_out_is_recorded_although_its_request_is_cancelled_then():
    link, actions = an_act()
    done = asyncio.Event()

    async def act(_bus):
        done.set()

    doing = asyncio.create_task(actions.run(OLGA, "purge", "queue:q", act))
    await done.wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    await actions.close()
    assert [outcome.outcome for outcome in link.published] == [messages.DecisionOutcome.DONE]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.TimedOut("no answer"), messages.DecisionOutcome.IN_DOUBT),
        (errors.NotConnected("the connection is closed"), messages.DecisionOutcome.IN_DOUBT),
        (errors.Unavailable("nothing listens"), messages.DecisionOutcome.FAILED),
        (errors.Conflict("changed"), messages.DecisionOutcome.REFUSED),
        (TimeoutError("in our own code"), messages.DecisionOutcome.IN_DOUBT),
    ],
)
async def test_the_outcome_of_an_act_that_failed(error, outcome):
    link, actions = an_act()
    before = actions._feed.cache.turn("manage")

    async def act(_bus):
        raise error

    with pytest.raises(type(error)):
        await actions.run(OLGA, "apply", "web", act, touches="manage")
    assert [item.outcome for item in link.published] == [outcome]
    assert actions._feed.cache.turn("manage") > before  # it may have been carried out


async def test_a_cancelled_request_does_not_cancel_the_shared_computation():
    kept = cache.TaggedCache()
    release = asyncio.Event()

    async def make() -> str:
        await release.wait()
        return "answer"

    first = asyncio.create_task(kept.get("k", "t", 1.0, make))
    second = asyncio.create_task(kept.get("k", "t", 1.0, make))
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert await second == "answer"


# Lists in pages, and feeds


def shown(response) -> tuple[list[str], str | None]:
    decoded = msgspec.json.decode(response.body)
    return decoded["items"], decoded["next"]


def by_name(row: str) -> tuple[str]:
    return (row,)


def test_no_row_is_repeated_or_left_out_when_others_come_and_go_between_two_pages():
    rows = ["b", "d", "f", "h"]
    first, cursor = shown(base.paginate(rows, "", 2, by_name))
    assert first == ["b", "d"]
    rest, end = shown(base.paginate(["a", "b", "c", "f", "g", "h"], cursor or "", 4, by_name))
    assert (rest, end) == (["f", "g", "h"], None)


@pytest.mark.parametrize("cursor", ["2", "x", "%%", base._cursor((1, "a")), "W10"])
def test_a_cursor_of_another_list_is_refused(cursor):
    if cursor == "W10":  # []: before everything
        assert shown(base.paginate(["a"], cursor, 2, by_name)) == (["a"], None)
        return
    with pytest.raises(errors.InvalidInput, match="not a cursor"):
        base.paginate(["a"], cursor, 2, by_name)


def test_pages_of_a_list_that_grows_at_its_beginning():
    first, cursor = base.behind(["e", "d", "c", "b", "a"], "", 2, str)
    assert first == ["e", "d"]
    second, cursor = base.behind(["g", "f", "e", "d", "c", "b"], cursor or "", 2, str)
    assert second == ["c", "b"]
    assert cursor is None
    assert base.behind(["z", "y"], "gone", 2, str) == ([], None)


async def test_a_page_of_receivers_names_the_cursor_of_the_next_one():
    async def query(*_: Any) -> notify_rows.ReceiverList:
        return notify_rows.ReceiverList(count=300, receivers=[], next="web/b")

    feed = types.SimpleNamespace(query=query)
    web: Any = types.SimpleNamespace(source=types.SimpleNamespace(feed=feed))
    assert (await notifications.receivers(request_state.RestCall(web, OLGA))).next == "web/b"


def decision(
    number: int, outcome: messages.DecisionOutcome = messages.DecisionOutcome.DONE
) -> messages.Decision:
    return messages.Decision(
        id=f"{number:016x}", who="a", what="apply", target=f"t{number}", why="x", at_ms=1, outcome=outcome
    )


async def test_a_decision_during_a_read_of_the_history_appears_once_in_order(monkeypatch):
    made = bus_feed.BusFeed(None, domain="x")  # type: ignore[arg-type]
    made.decisions.add(decision(1))

    class HandlerBus:
        async def subscribe(self, subject, handler, max_pending):
            self.handler = handler

        async def hear(self, item):
            subject = "muster.manage.log.decision.apply"
            self.handler(types.SimpleNamespace(subject=subject, data=messages.encode(item)))

    class Manage:
        def __init__(self, bus):
            self.bus = bus

        async def decisions(self, last):
            await self.bus.hear(decision(3))  # the stream has it already
            await self.bus.hear(decision(4))
            decided = decision(2, messages.DecisionOutcome.DECIDED)
            return [decision(1), decided, decision(2), decision(3)]

    async def none(*_, **__):
        raise errors.NotFound("no reports")

    async def nothing(*_):
        for chunk in list[bytes]():
            yield chunk

    monkeypatch.setattr(manage_client, "ManageClient", Manage)
    monkeypatch.setattr(monitor_client, "recent", none)
    monkeypatch.setattr(monitor_client, "results", nothing)
    bus: Any = HandlerBus()
    await made._begin(bus)
    assert [item.target for item in made.decisions] == ["t1", "t2", "t2", "t3", "t4"]
    await made._begin(bus)  # connected again
    assert [item.target for item in made.decisions] == ["t1", "t2", "t2", "t3", "t4"]


def test_a_feed_keeps_the_latest():
    feed = recent.RecentItems(str, 3)
    for letter in "abcd":
        feed.add(letter)
    feed.add("d")
    assert list(feed) == ["b", "c", "d"]
    assert list(reversed(feed)) == ["d", "c", "b"]


# Markup

NASTY = "<script>alert(1)</script>\"'&"


def test_text_is_escaped_everywhere():
    lanes = {NASTY: [(1.0, 1.5, "bad", NASTY)]}
    agent = manage_rows.AgentRow(name=NASTY)
    made = [
        templates.widget("badge", NASTY),
        templates.widget("to", NASTY, "/node", name=NASTY),
        templates.table([agent], ("name",), label=NASTY),
        templates.widget("field", NASTY, "x", NASTY, placeholder=NASTY, hint=NASTY),
        templates.widget("field", "x", "x", NASTY, rows=3, choices=(NASTY,)),
        templates.widget("field", "x", "x", NASTY, options=[(NASTY, NASTY)]),
        templates.widget("problem", NASTY, f"`{NASTY}`"),
        templates.widget("empty", NASTY, NASTY),
        templates.widget("trail", NASTY, "/", NASTY),
        templates.widget("action", asked(), "x", NASTY, sure=NASTY, name=NASTY),
        templates.widget("shares", {NASTY: 3}, NASTY),
        templates.widget("timeline", drawings.timeline(lanes, from_s=0, to_s=2), NASTY),
        templates.widget("tiles", [templates.Tile(NASTY, NASTY, NASTY, NASTY, f"/x?y={NASTY}")]),
        templates.block(
            "chart.html",
            "chart",
            plots=[(plots.Plot("machine", NASTY, NASTY, NASTY), None)],
            title=NASTY,
            none_measured=NASTY,
        ),
    ]
    for markup in made:
        assert "<script" not in markup
        assert NASTY not in markup
        assert "&lt;script&gt;" in markup or "%3Cscript" in markup


def asked(role: sessions.WebRole = sessions.WebRole.OPERATOR, **query: str) -> page.PageRequest:
    call: Any = types.SimpleNamespace(person=session(role=role))
    return page.PageRequest(call, "/rollouts", query, "t")


def test_buttons_are_for_those_who_may_act():
    button = templates.widget("action", asked(), "restart", "Restart", name="a", sure="Really?")
    assert button.count("<input") == 3
    assert 'data-sure="Really?"' in button
    assert templates.widget("action", asked(sessions.WebRole.VIEWER), "restart", "Restart").strip() == ""


def test_a_list_is_paged_with_its_filter():
    shown = templates.widget("pages", asked(where="a < 1", after="k1"), "k2", 50, 3000)
    assert "50 of 3,000 shown" in shown
    assert re.findall('href="([^"]*)"', shown) == [
        "/rollouts?where=a+%3C+1",
        "/rollouts?where=a+%3C+1&amp;after=k2",
    ]
    assert templates.widget("pages", asked(), None, 0).strip() == ""


def test_charts_have_one_axis_of_time_and_leave_gaps():
    rows = [(float(at), {"load": float(at), "95 %": None}) for at in range(0, 60, 10)]
    made = charts_data.chart("Load", [*rows, (200.0, {"load": math.nan})], from_s=10, to_s=300, unit=" s")
    assert made.at_ms == [10_000, 20_000, 30_000, 40_000, 50_000, 55_000, 200_000]
    assert {line.name: line.values for line in made.lines} == {
        "load": [10, 20, 30, 40, 50, None, None],
        "95 %": [None] * 7,
    }
    assert charts_data.chart("Load", [], from_s=0, to_s=1).at_ms == []


def test_where_nothing_came_for_several_paces_there_is_a_gap():
    steady = [(float(at), {"x": 1.0}) for at in range(0, 60, 10)]
    assert charts_data.with_gaps(steady) == steady
    late = [*steady, (200.0, {"x": 9.0})]
    assert charts_data.with_gaps(late) == [*steady, (55.0, {}), (200.0, {"x": 9.0})]
    assert charts_data.with_gaps([]) == []


def test_many_points_become_means_of_steps():
    rows = [(float(at), {"x": float(at), "y": None}) for at in range(1000)]
    made = charts_data.chart("x", rows, from_s=0, to_s=1000, points=10)
    assert made.at_ms == list(range(0, 1_000_000, 100_000))
    assert made.lines[0].values == [49.5 + 100 * step for step in range(10)]
    assert made.lines[1].values == [None] * 10


def test_only_shares_are_shown_in_percent():
    assert charts_data.in_percent([(1.0, {"x": 0.25, "y": None})]) == [(1.0, {"x": 25.0, "y": None})]
    assert charts_data.in_percent([(1.0, {"x": 1.5})]) is None
    assert charts_data.in_percent([]) is None


def node_batch(at_ms: int, *machines: tuple[str, str, float, float | None]) -> Any:
    """A batch of reports: machine, group, CPU and the metric ``infected``."""
    return columns.to_batch(
        [
            messages.NodeReport(
                machine=machine,
                group=group,
                zone=group[:1],
                sequence=at_ms,
                at_ms=at_ms,
                period_s=5.0,
                metrics={"cpu_percent": cpu} | ({} if infected is None else {"infected": infected}),
                services=(messages.ServiceReport(name="web", metrics={"requests": cpu * 2}),),
            )
            for machine, group, cpu, infected in machines
        ]
    )


def test_recent_reports_give_the_series_of_a_machine_a_service_and_a_group():
    kept = recent_reports.KeptReports()
    for at_s in range(1, 301):  # some of them merged, some not
        kept.add(node_batch(at_s * 1000, ("a", "north", 10.0, 1.0), ("b", "north", 30.0, None)))
    first, second = kept.of_machine("a"), kept.of_machine("b")
    assert first.metric("cpu_percent") == [(float(at), {"cpu_percent": 10.0}) for at in range(1, 301)]
    assert first.metric("infected")[-1] == (300.0, {"infected": 1.0})
    assert second.metric("infected")[-1] == (300.0, {"infected": None})
    assert second.metric("zone")[-1] == (300.0, {"zone": None})  # a column that is no metric
    assert kept.of_machine("c").metric("cpu_percent") == []
    assert second.service("web")["requests"][0] == (1.0, {"requests": 60.0})
    rows = kept.members("zone", "n", "cpu_percent", 0.0, 100.0)
    assert [(at_s, values["mean"]) for at_s, values in rows] == [(0, 20), (100, 20), (200, 20), (300, 20)]
    assert kept.members("machine", "", "infected", 200.0, 100.0)[0] == (200.0, {"mean": 1.0, "95 %": 1.0})


def test_recent_reports_stay_within_their_budget():
    kept = recent_reports.KeptReports(bytes_max=200_000)
    for at_s in range(1, 2001):
        kept.add(node_batch(at_s * 1000, ("a", "north", 10.0, 1.0)))
    assert kept.size_bytes < 300_000
    rows = kept.of_machine("a").metric("cpu_percent")
    assert rows[-1][0] == 2000.0
    assert rows[0][0] > 1.0


def test_the_map_has_a_byte_of_each_machine_by_zone_and_group():
    table = pa.Table.from_batches(
        [node_batch(1000, ("b", "south", 50.0, 1.0), ("c", "north", 100.0, None), ("a", "south", 0.0, 0.5))]
    )
    layout = fleet_map.MapLayout(table)
    assert [(block.zone, block.group, block.count) for block in layout.blocks] == [
        ("n", "north", 1),
        ("s", "south", 2),
    ]
    assert layout.names == "c\na\nb"
    states = pa.chunked_array([["up", "stale", "failed"]])
    made = fleet_map.fleet_map(table, layout, states, "", "", ["infected"])
    assert [made.states[code] for code in base64.b64decode(made.values)] == ["stale", "failed", "up"]
    assert made.names == layout.names
    made = fleet_map.fleet_map(table, layout, states, "cpu_percent", layout.id, [])
    assert list(base64.b64decode(made.values)) == [fleet_map.NO_VALUE, 0, 127]
    assert (made.names, made.blocks, made.low, made.high, made.unit) == (None, None, 0.0, 100.0, " %")
    other = pa.Table.from_batches([node_batch(1000, ("d", "south", 1.0, 1.0), ("c", "north", 1.0, 0.0))])
    assert fleet_map.layout_key(table) != fleet_map.layout_key(other)
    assert fleet_map.MapLayout(other).id != layout.id


def alert_change(at_ms: int, state: str, about: str = "group:g", **more: Any) -> messages.Alert:
    return messages.Alert(
        rule="hot",
        about=about,
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState(state),
        since_ms=at_ms,
        at_ms=at_ms,
        condition="cpu_percent_mean > 20",
        **more,
    )


def test_the_changes_of_alerts_say_when_they_fired():
    changes = [
        alert_change(1, "pending"),
        alert_change(2, "firing"),
        alert_change(2, "firing"),
        alert_change(3, "acknowledged"),
        alert_change(4, "firing", "group:h"),
        alert_change(5, "resolved"),
        alert_change(6, "resolved", "group:never"),
    ]
    assert [(span.about, span.from_ms, span.to_ms, span.changes) for span in alert_spans.spans(changes)] == [
        ("group:h", 4, None, [(4, "firing")]),
        ("group:g", 2, 5, [(2, "firing"), (3, "acknowledged")]),
    ]


def test_an_event_is_followed_from_its_alert_to_its_operations():
    event = notify_protocol.AdmittedEvent(
        id="alert-7-1000-0", type="command", sender="responder/responder", at_ms=1001, address="load > 1"
    )
    decided = [
        notify_protocol.DecisionRecord(event=event, at_ms=1002, sequence=3, notifier="n-1", count=2),
        notify_protocol.DecisionRecord(event=event, at_ms=1003, sequence=3, notifier="n-2", count=1),
    ]
    row = event_log.row(decided)
    assert (row.alert, row.receivers, row.durable, row.at_ms) == (7, 3, True, 1001)

    def done(id: str) -> messages.Decision:
        details = {"id": f"responder/responder:{id}"}
        return messages.Decision(
            id="d", who="manager", what="exec", target="web-1", why="patch", at_ms=1010, details=details,
            outcome=messages.DecisionOutcome.FAILED,
        )  # fmt: skip

    steps = event_log.event_steps(decided, [done(event.id), done("another")])
    assert [(step.what, step.at_ms, step.outcome) for step in steps] == [
        ("event", 1001, ""),
        ("matched", 1002, ""),
        ("matched", 1003, ""),
        ("exec", 1010, "failed"),
    ]
    alert = event_log.alert_steps([(7, alert_change(1000, "firing"))])
    assert event_log.in_order([*steps, *alert])[0].outcome == "firing"


def test_the_rate_of_a_channel_counts_its_reports_and_not_the_machines_it_knows():
    feed = bus_feed.BusFeed(None, domain="d")  # type: ignore[arg-type]
    played = fleet.VirtualFleet(fleet.FleetPlan(machines=4, period_s=1.0))
    batch = played.batch(played.slots[0], 0, 1_790_000_000_000)
    data = columns.encode(batch, columns.BatchInfo(channel="c", machines=400))
    for _ in range(2):
        taken = feed.machines.take(data, at_s=1_790_000_001.0)
        assert taken is not None
        feed._count_arrival(*taken)
    assert [count for _, count in feed._arrived["c"]["reports"]] == [batch.num_rows] * 2


def test_alerts_are_listed_by_rule_in_the_order_of_their_first():
    listed = [alert_change(1, "firing"), alert_change(2, "pending", "group:x")]
    (rule,) = alerts_page.by_rule(listed, 5)
    assert (rule.open, len(rule.alerts), len(rule.rows)) == (1, 2, 2)
    quoted = msgspec.structs.replace(listed[0], rule="it's")
    values = {"hidden": 0, "judged": True, "filtered": False, "own": False}
    drawn = templates.block(
        alerts_page.TEMPLATE, "alerts", request=asked(), groups=alerts_page.by_rule([quoted], 5), **values
    )
    assert "rule = &#39;it&#39;&#39;s&#39;" in drawn
    assert 'value="acknowledge"' not in drawn
    assert ">Acknowledge<" in drawn


def test_the_numbers_of_a_rule_are_of_all_its_alerts_and_no_rule_hides_another():
    many = [alert_change(n + 1, "firing", f"group:{n}") for n in range(300)]
    listed = [*many, msgspec.structs.replace(many[0], rule="other")]
    groups = alerts_page.by_rule(listed, 50)
    assert [(group.open, len(group.rows)) for group in groups] == [(300, 50), (1, 1)]
    values = {"hidden": 0, "judged": True, "filtered": False, "own": False}
    drawn = templates.block(alerts_page.TEMPLATE, "alerts", request=asked(), groups=groups, **values)
    assert "300 alerts" in drawn
    assert ">Acknowledge 300 alerts<" in drawn
    assert "250 more" in drawn


def test_a_time_in_the_far_future_has_its_date():
    now_ms = int(time.time() * 1000)
    for days, length in ((0, 8), (-30, 16), (30, 16)):
        clock = texts.clock(now_ms + days * 86_400_000)
        assert clock is not None
        assert len(clock[0]) == length, days


def test_states_that_nothing_is_in_have_no_part_of_a_bar():
    assert drawings.shares({"up": 0}) == []
    assert [name for name, *_ in drawings.shares({"up": 3, "down": 0})] == ["up"]


def test_a_sentence_begins_with_a_capital_letter_unless_with_a_name():
    assert texts.sentence("no resource 'x'") == "No resource 'x'"
    assert texts.sentence("web-1 is not healthy") == "web-1 is not healthy"
    assert texts.sentence("") == ""


def test_a_plan_shows_values_as_they_are_written():
    step = manage_rows.PlanStep(
        wave=1, act="change", name="web", type="process", changes={"command": ("é", "a && <b>")}
    )
    drawn = templates.block("resources.html", "plan", request=asked(), steps=[step], text="x")
    assert "<del>&#34;é&#34;</del> → <ins>&#34;a &amp;&amp; &lt;b&gt;&#34;</ins>" in drawn


def test_a_query_may_have_any_names():
    assert page.link_to("/live", path="x", page="/") == "/live?path=x&page=%2F"


def test_zones_and_groups_do_not_push_machines_out_of_a_search():
    rows = [*(("zone", f"web-{n}", "") for n in range(10)), ("machine", "web-1", "up")]
    assert [thing.kind for thing in find._found("machine", rows, "web")].count("machine") == 1
    queues = [types.SimpleNamespace(queue=f"q-{n}", depth=0) for n in range(20)]
    assert len(find._found("queue", queues, "q-")) == find.EACH_MAX


def test_the_timeline_shows_silenced_and_acknowledged_times_in_their_colours():
    begin_ms = 1_000_000_000
    span = alert_spans.spans(
        [alert_change(begin_ms, "firing"), alert_change(begin_ms + 60_000, "acknowledged")]
    )
    now_s = begin_ms / 1000 + 120
    placed = drawings.timeline(alerts_page.timeline(span, now_s), from_s=now_s - 3600, to_s=now_s)
    drawn = templates.widget("timeline", placed, "Alerts")
    assert drawn.count('class="fill bad"') == drawn.count('class="fill busy"') == 1
    assert "hot of group:g: firing for 60 s" in drawn
    assert alerts_page.timeline(span[:0], 1.0) == {}
    ended = [msgspec.structs.replace(span[0], to_ms=begin_ms + 70_000)]
    assert alerts_page.timeline(ended, begin_ms / 1000 + 4000) == {}
    newer = [msgspec.structs.replace(span[0], about=f"node:{n}", severity="info") for n in range(50)]
    lanes = list(alerts_page.timeline([*newer, *span], now_s))
    assert (len(lanes), lanes[0]) == (alerts_page.LANES_MAX, "hot · g"), "critical ones are not pushed out"


@pytest.mark.parametrize(
    ("state", "buttons"),
    [("running", ["Pause", "Abort"]), ("paused", ["Continue", "Abort"]), ("done", ["Undo in web"])],
)
def test_a_rollout_has_the_buttons_of_its_state(state: str, buttons: list[str]):
    row = manage_rows.RolloutRow(
        id="r-1",
        at_ms=1,
        state=state,
        by="ann",
        operation="update",
        revision=2,
        wave=1,
        waves=3,
        groups=["web"],
    )
    values = {"active": manage_rows.ACTIVE_ROLLOUT, "looks": {}, "kind": "rollouts"}
    drawn = templates.block("resources.html", "rollouts", request=asked(), rollouts=[row], **values)
    assert re.findall(r"<button[^>]*>([^<]*)<", drawn) == buttons
    assert "Wave 1 of 3." in drawn


def test_a_search_takes_the_text_as_it_is():
    assert find.like_literal("50%_o'clock\\") == "'%50\\%\\_o''clock\\\\%' ESCAPE '\\'"


def test_the_topology_connects_channels_to_their_parents_and_the_rest_to_the_bus():
    producer = monitor_protocol.ReportProducer(
        name="c1", produces="node-reports/1", subject="s", parents=("c2",)
    )
    above = msgspec.structs.replace(producer, name="c2", level=2, parents=())
    link = control.LinkRow(id="1", kind="leaf", near="b1", far="elsewhere", up=False)
    made = topology.topology(
        brokers=[control.BrokerRow(name="b1", state="up", connections=3)],
        links=[link],
        producers=[producer, above],
        managers=[manage_rows.ManagerRow(name="m", expires_in_s=-1.0)],
        components=[
            control.ComponentRow(name="amqp", state="late"),
            control.ComponentRow(name="web", state="up"),
        ],
        machines=7,
    )
    assert [(part.id, part.state) for part in made.parts] == [
        ("broker b1", "up"),
        ("domain elsewhere", "up"),
        ("channel c1", "up"),
        ("channel c2", "up"),
        ("machines", "up"),
        ("manager m", "late"),
        ("gateway amqp", "late"),
    ]
    assert [(line.near, line.far, line.up) for line in made.links] == [
        ("broker b1", "domain elsewhere", False),
        ("channel c1", "channel c2", True),
        ("channel c2", "bus", True),
        ("machines", "channel c1", True),
        ("manager m", "bus", True),
        ("gateway amqp", "bus", True),
    ]
    drawn = templates.block("system.html", "topology", drawn=drawings.topology_places(made))
    assert drawn.count("<path") == 6
    assert "7 parts of the domain, 5 up" in drawn


def test_the_topology_of_many_parts_shows_those_that_are_not_up():
    managers = [
        manage_rows.ManagerRow(name=f"m{n:03}", expires_in_s=-1.0 if n == 77 else 1.0) for n in range(100)
    ]
    drawn = drawings.topology_places(topology.topology(managers=managers))
    shown = [part.name for part, *_ in drawn["parts"]]
    assert len(shown) == drawings.KIND_MAX + 1
    assert (shown[0], shown[-1]) == ("m077", "84 more")
    assert len(drawn["lines"]) == drawings.KIND_MAX


@pytest.mark.parametrize(
    ("condition", "value", "words"),
    [
        ("cpu_percent_mean > 20", 33.2, "CPU mean 33.2 % > 20 %"),
        ("own.infected_mean > 0.005", 0.01, "Infected mean 1 % > 0.5 %"),
        ("20 < cpu_percent", 21.0, "CPU 21 % > 20 %"),
        ("memory_used_bytes_p95 >= 2000000000 AND known > 3", None, "Memory used 95 % unknown >= 2.0 GB"),
        ("state = 'down'", None, "state = 'down'"),
        ("", 1.0, ""),
        ("cpu >", 1.0, "cpu >"),
    ],
)
def test_conditions_are_told_in_words(condition: str, value: float | None, words: str):
    assert alert_spans.in_words(condition, value) == words


def test_the_limit_of_a_rule_belongs_to_its_metric():
    assert alert_spans.limit_of("own.infected_mean > 0.005", "infected") == 0.005
    assert alert_spans.limit_of("cpu_percent > 90", "cpu_percent") == 90
    assert alert_spans.limit_of("cpu_percent > 90", "load_1m") is None


@pytest.mark.parametrize("now_s", [1000.0, 1003.0, 1009.9])
def test_the_rate_of_reports_that_arrive_in_bursts_is_steady(now_s: float):
    bursts = [(now_s // 10 * 10 - ago, 1000) for ago in range(100, -1, -10)]
    assert latest_reports.rate(bursts, now_s) == 100
    assert latest_reports.rate(bursts, now_s + 30) < 70, "they have stopped"
    assert latest_reports.rate(bursts, now_s + 300) == 0


def test_the_ages_of_single_seconds_are_merged():
    seconds = [latest_reports.ArrivalSecond(at, 10, at / 10, at / 10) for at in range(20)]
    assert latest_reports.merged(seconds, 10) == [
        latest_reports.ArrivalSecond(0, 100, 0.4, 0.9),
        latest_reports.ArrivalSecond(10, 100, 1.4, 1.9),
    ]
    few_are_old = [latest_reports.ArrivalSecond(at, 1 if at % 2 else 400, at % 2, 1.0) for at in range(10)]
    assert latest_reports.merged(few_are_old, 10)[0].p50_s == 0


# Login


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"host": "localhost:1"}, False),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, False),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, True),
        ({"host": "localhost:1", "origin": "https://evil.example"}, True),
        ({"host": "localhost:1", "origin": "null"}, True),
        ({"host": "localhost:1", "sec-fetch-site": "cross-site"}, True),
        ({"host": "localhost:1", "sec-fetch-site": "same-site"}, True),
        ({"host": "localhost:1", "sec-fetch-site": "same-origin"}, False),
    ],
)
def test_requests_of_other_sites_are_distinguished_from_pages_and_programs(headers, is_foreign):
    assert bool(guard.is_cross_site("POST", headers)) is is_foreign
    assert guard.is_cross_site("GET", headers) == ""


def test_a_host_is_compared_without_its_port():
    assert guard.host_name("LocalHost:80") == "localhost"
    assert guard.host_name("[::1]:80") == "[::1]"


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example/",
        "https://evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        "/do/purge",
        "",
        "x",
    ],
)
def test_after_a_login_one_lands_on_a_page_of_ours_only(path):
    assert routes._within(path) == "/"


def test_a_page_of_ours_is_gone_back_to_with_its_question():
    assert routes._within("/resources?where=a%20%3D%201") == "/resources?where=a%20%3D%201"
    assert page.link_to("/node", name="a&b", none=None) == "/node?name=a%26b"


def test_every_error_has_a_status_and_a_document():
    def tree(kind: type[errors.MusterError]) -> list[type[errors.MusterError]]:
        return [kind, *(item for below in kind.__subclasses__() for item in tree(below))]

    assert problems.status_of(errors.NotFound("x")) == 404
    assert problems.status_of(problems.PreconditionFailed("x")) == 412
    assert problems.status_of(errors.InvariantViolation("x")) == 500
    document = problems.document(errors.ParseError("bad", text="a b", position=2, hint="good"))
    assert document["status"] == 400
    assert (document["position"], document["hint"]) == (2, "good")
    assert problems.headers(errors.Overloaded("x", retry_after_s=3.4)) == {"Retry-After": "3"}


@pytest.mark.parametrize("text", ["x", "-1", "1" * 30, "٣", "1.0"])
def test_a_cursor_that_is_none_is_refused(text):
    with pytest.raises(errors.InvalidInput):
        base.number(text)


def test_an_etag_names_a_version():
    assert base.if_match('"12"') == 12
    assert base.if_match("*") == "*"
    assert base.if_match(None) is None
    with pytest.raises(problems.PreconditionFailed):
        base.if_match('"abc"')


def test_the_overview_names_alerts_that_are_silenced():
    def alert(state: messages.AlertState, severity: messages.Severity) -> messages.Alert:
        return messages.Alert(
            rule="hot", about="node:a", severity=severity, state=state, since_ms=1, at_ms=1, reason=""
        )

    critical, warning = messages.Severity.CRITICAL, messages.Severity.WARNING
    silenced = alert(messages.AlertState.SILENCED, critical)
    firing = alert(messages.AlertState.FIRING, warning)
    quiet = "1 silenced or acknowledged, critical"
    assert fleet_page.alert_figures([silenced], judged=True) == (0, quiet, "warn")
    assert fleet_page.alert_figures([firing, silenced], judged=True) == (1, f"none critical; {quiet}", "warn")
    many = [firing, alert(messages.AlertState.FIRING, critical)]
    assert fleet_page.alert_figures(many, judged=True) == (2, "1 critical", "bad")
    assert fleet_page.alert_figures([], judged=True) == (0, "no alerts", "good")
    assert fleet_page.alert_figures([], judged=False) == (0, "no rules are evaluated", "")


def test_the_overview_draws_what_only_this_fleet_reports():
    def charted(*metrics: str) -> list[str]:
        plotted = [plots.Plot("fleet", metric) for metric in metrics]
        return [plot.metric for plot in fleet_page.own_metrics(plotted)]

    assert charted("infected", "cpu_percent", "load_1m") == ["infected"]
    assert charted("cpu_percent", "load_1m") == ["cpu_percent"]
    assert charted(*"abcd", "cpu_percent") == ["a", "b", "c"]


# The past


def test_a_chart_of_the_history_has_a_gap_where_windows_are_missing(tmp_path):
    """And thins what is between the gaps, never the gaps."""
    start_ms = 1_700_000_000_000
    totals = []
    for number in (*range(40), *range(50, 90)):  # ten windows without a report
        many = rollups.ScopeTotals("system", "", start_ms + number * 10_000)
        traffic.fold(many.cell, test_history._column(float(number)))
        totals.append(many)
    test_history.store_groups(tmp_path, 0, totals)
    query = history_reader.members_query("system", "", "cpu_percent", start_ms)
    rows = history_reader.series(str(tmp_path), query, "cpu_percent")
    start_s = start_ms / 1000
    made = charts_data.chart("CPU", rows, from_s=start_s, to_s=start_s + 900, points=45)
    assert [line.name for line in made.lines] == ["mean", "95 %"]
    mean = made.lines[0].values
    assert mean.count(None) == 1
    assert mean[:2] == [0.5, 2.5]
    assert (mean[mean.index(None) - 1], mean[mean.index(None) + 1], mean[-1]) == (38.5, 50.5, 88.5)
    assert history_reader.series(str(tmp_path / "none"), query, "cpu_percent") == []


def test_the_history_of_a_machine_has_every_report_of_a_metric(tmp_path):
    reports = [
        traffic.report("m'1", number, test_history.T0 + number * 1000, metrics={"own": float(number)})
        for number in range(1, 1501)
    ]
    test_history.store(tmp_path, 0, [*reports, traffic.report("other", 1, test_history.T0)])
    query = history_reader.machine_query("m'1", "own", test_history.T0, test_history.T0 + 10_000_000)
    rows = history_reader.series(str(tmp_path), query, "own")
    first_s = test_history.T0 / 1000 + 1
    last = (first_s + 1499, {"own": 1500.0})
    assert (len(rows), rows[0], rows[-1]) == (1500, (first_s, {"own": 1.0}), last)
    query = history_reader.machine_query("m'1", "cpu_percent", test_history.T0, test_history.T0 + 3000)
    assert len(history_reader.series(str(tmp_path), query, "cpu_percent")) == 2
    assert history_reader.series(str(tmp_path / "none"), query, "cpu_percent") == []


def test_rows_of_the_history_are_plain_values(tmp_path):
    """The page reads their times from text."""
    test_history.store(tmp_path, 0, [traffic.report("m", 1, test_history.T0, metrics={"own": 1.5})])
    ((row,), _) = history_reader.read_page(str(tmp_path), search.HistorySearch(), 5, "")
    assert history._ms(row["reported_at"]) == test_history.T0
    assert row["metrics"] == {"own": 1.5}


def test_pending_alerts_come_after_those_that_fire():
    def alert(about: str, state: messages.AlertState, since_ms: int) -> messages.Alert:
        return messages.Alert(
            rule="hot",
            about=about,
            severity=messages.Severity.CRITICAL,
            state=state,
            since_ms=since_ms,
            at_ms=since_ms,
        )

    alerts = [
        alert("a", messages.AlertState.PENDING, 9),
        alert("b", messages.AlertState.FIRING, 5),
        alert("c", messages.AlertState.FIRING, 7),
    ]
    assert [item.about for item in sorted(alerts, key=read_model.alert_order)] == ["c", "b", "a"]


def test_the_history_is_paged_by_its_cursors(tmp_path):
    with pytest.raises(errors.NotFound, match="no history"):
        history_reader.read_page(str(tmp_path / "none"), search.HistorySearch(), 5, "")
    rows = [traffic.report(f"m{n}", 1, test_history.T0 + n) for n in range(12)]
    test_history.store(tmp_path, 0, rows)
    seen = []
    cursor: str | None = ""
    while cursor is not None:
        actual, cursor = history_reader.read_page(
            str(tmp_path), search.HistorySearch(columns=("machine",)), 5, cursor
        )
        seen.append([row["machine"] for row in actual])
    assert seen == [["m11", "m10", "m9", "m8", "m7"], ["m6", "m5", "m4", "m3", "m2"], ["m1", "m0"]]


@pytest.mark.parametrize("at_ms", [(1 << 53) - 1, (1 << 63) - 1, -(1 << 63)])
def test_a_time_that_no_calendar_has_is_shown_as_a_number(at_ms):
    assert templates.widget("moment", at_ms) == f"<span>{at_ms} ms</span>"


def test_the_unit_follows_from_a_metric_s_name():
    assert [
        charts_data.unit(name) for name in ("cpu_percent", "memory_bytes", "network_in_bytes_s", "up_s", "x")
    ] == [
        " %",
        " B",
        " B/s",
        " s",
        "",
    ]
    assert [texts.rate(per_s) for per_s in (0, 0.1, 9.96, 1234.4)] == ["0/s", "0.1/s", "10/s", "1,234/s"]
    assert [texts.measurement(value) for value in (None, 150.0, 99.168)] == ["–", "150", "99.17"]
    assert (texts.counted(1, "channel"), texts.counted(2000, "channel")) == ("1 channel", "2,000 channels")


async def test_reports_that_no_page_requests_take_no_more_memory_than_the_fleet():
    machines = latest_reports.LatestReports()
    plan = fleet.FleetPlan(machines=500, period_s=10.0)
    played = fleet.VirtualFleet(plan)
    ticks = 0
    while not machines.is_due:
        machines.add(played.batch(played.slots[0], ticks, 1_790_000_000_000 + 10_000 * ticks))
        ticks += 1
    assert ticks == latest_reports.PENDING_MIN // 500 + 1
    assert (await machines.table()).num_rows == 500
    assert not machines.is_due


def test_badges_times_and_links_of_a_table_take_no_width_of_a_sentence():
    record = messages.Decision(
        id="1", who="web", what="x", target="y", why="a long reason of it", at_ms=1_700_000_000_000
    )
    columns = ("outcome", "at_ms", "who", "why")
    made = templates.table([record], columns, label="x")
    assert made.count('<td class="text">') == made.count('<td class="word">') == 1


def test_the_form_of_a_context_ends_its_lease_by_the_clock_that_reads_the_form():
    now_s = 1_700_003_600.0  # an hour ahead of the log's
    assert contexts.lease_end_ms(60.0, now_s) / 1000 - now_s == pytest.approx(60.0, abs=0.001)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "-1", "1e3", "\u0663", " 1"])
async def test_a_time_in_a_form_that_is_none_is_refused(text: str):
    call: Any = None
    with pytest.raises(errors.InvalidInput, match="not a time"):
        await forms.run_form(call, "put-context", {"key": "k", "expires_at_ms": text})
