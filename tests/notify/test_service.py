from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from muster.bus import api
from muster.bus.memory import network
from muster.bus.rpc import admission, requests
from muster.core import errors, messages, subjects
from muster.notify import authorities, client, models, protocol, queries, rows
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy, name_table
from muster.notify.notifier import decision_log, fair_queue, query_handler
from muster.notify.notifier import notifier as notifier_notifier
from muster.notify.notifier.shards import shard_manager, summaries
from muster.predicates.syntax import parser
from muster.testing.eventually import eventually
from muster.trust import documents, grants, nkeys
from tests.notify.conftest import MODELS, QUICK, WEB_SERVER

STATE: dict[str, Any] = {"application": "IIS", "load": 0.5}

PATIENT = settings_.NotifySettings(lease_s=5.0, ack_wait_s=0.5, beat_s=1.0)


async def _define(mine: client.NotifyClient) -> None:
    for model in MODELS:
        await mine.define(model)


def _shards_known_to(served: notifier_notifier.Notifier) -> int:
    return len(served.members.shards())


# -- restricted attributes


@pytest.fixture
def root():
    return grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))


async def test_a_grant_counts_until_it_is_revoked_or_expires(notifier, receivers, root):
    served = await notifier(root=root.key.public, domain="here")
    mine, boss = await receivers("farm"), await receivers("boss")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="command AND sender._trust_level >= 3")
    sender = boss.sender("control")
    now = time.time()
    chain = root.grant("boss", {"_trust_level": 4}, tier=1, now=now, lifetime_s=3600)
    await sender.send("command", {"action": "before"})
    await boss.present(chain)
    await sender.send("command", {"action": "granted"})
    assert (await web.next(timeout_s=30))["action"] == "granted"
    await boss.revoke(root.revoke({documents.serial_of(chain[0])}, number=1, now=now))
    await sender.send("command", {"action": "revoked"})
    soon_s = time.time() + 3 - now
    await boss.present(root.grant("boss", {"_trust_level": 3}, tier=1, now=now, lifetime_s=soon_s))
    with pytest.raises(errors.Forbidden, match="expired"):
        await boss.present(root.grant("boss", {"_trust_level": 3}, tier=1, now=now - 7200, lifetime_s=60))
    await eventually(
        lambda: not served.known.effective_attributes("boss", "control", now=time.time()).everywhere
    )
    await sender.send("command", {"action": "expired"})
    await boss.present(root.grant("boss", {"_trust_level": 5}, tier=1, now=now, lifetime_s=3600))
    await sender.send("command", {"action": "again"})
    assert (await web.next(timeout_s=30))["action"] == "again"


def test_a_grant_that_is_ahead_of_the_clock_counts_from_when_it_begins(root):
    """The clocks of authority and notifier differ: the grant need not be submitted again."""
    knows = authorities.AuthorityView(root=root.key.public, domain="local")
    chain = root.grant("boss", {"_rank": 3}, tier=1, now=1000.0, lifetime_s=60.0)
    assert knows.grant_key(chain, now=997.0)[0] == knows.grant_key(chain, now=1000.5)[0]
    for now in (1000.0 - grants.SKEW_S - 1, 1060.0):
        with pytest.raises(errors.Forbidden, match="not valid"):
            knows.grant_key(chain, now=now)
    knows.apply_entry(f"grant.{documents.serial_of(chain[0])}", msgspec.json.encode(chain))
    assert knows.effective_attributes("boss", "p", now=997.0).everywhere == {}
    actual, until = knows.receiver_attributes("boss", "p", "", now=997.0)
    assert (actual, until <= 999.0) == ({}, True)
    assert knows.effective_attributes("boss", "p", now=1000.5).everywhere["_rank"].value == 3
    assert knows.receiver_attributes("boss", "p", "", now=1000.5) == ({"_rank": 3}, 1060)
    assert knows.receiver_attributes("boss", "p", "", now=1060.0) == ({}, float("inf"))


async def test_an_authority_cannot_grant_beyond_its_tier_or_mandate(root):
    key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
    now = time.time()
    mandates = root.appoint(
        key.public,
        "regional",
        tier=2,
        may_grant={"_trust_level": documents.ValueRange(low=1, high=3)},
        now=now,
        lifetime_s=60,
    )
    regional = grants.Authority(key, mandates)
    regional.grant("x", {"_trust_level": 3}, tier=2, now=now, lifetime_s=60)
    for attributes, tier in (
        ({"_trust_level": 4}, 2),
        ({"_trust_level": 3}, 3),
        ({"_command_region": "n"}, 1),
    ):
        with pytest.raises(errors.Forbidden):
            regional.grant("x", attributes, tier=tier, now=now, lifetime_s=60)


async def test_a_receivers_restricted_attribute_is_its_authoritys_too(notifier, receivers, root, monkeypatch):
    served = await notifier(root=root.key.public)
    mine = await receivers("farm")
    await _define(mine)
    receiver = await mine.advertise("one", "Controller", {"entity": "x"}, policy="command")
    await mine.sender("s").send("command", {"action": "1"}, to="_trust_level > 1")
    chain = root.grant("farm", {"_trust_level": 4}, tier=1, now=time.time(), lifetime_s=3600)
    await mine.present(chain)
    assert served.engine.state_of("farm/one")["_trust_level"] == 4
    await mine.sender("s").send("command", {"action": "2"}, to="_trust_level > 1")
    assert (await receiver.next(timeout_s=30))["action"] == "2"
    served.grants.expire()
    assert served.engine.state_of("farm/one")["_trust_level"] == 4
    with monkeypatch.context() as later:
        at = time.time() + 3601
        later.setattr(time, "time", lambda: at)
        served.grants.expire()
    assert "_trust_level" not in served.engine.state_of("farm/one")
    assert served.engine.next_end_s() == float("inf")


# -- fairness and slowness


async def test_a_flooding_sender_waits_for_itself():
    queue = fair_queue.FairQueue[str](100)
    assert sum(queue.put("flood", "f") for _ in range(1000)) == 100
    assert queue.put("quiet", "q")
    assert [await queue.get() for _ in range(3)] == ["f", "q", "f"]
    assert queue.put("large", "x", fair_queue.BYTES_MAX)
    assert not queue.put("large", "y", 1)


async def test_a_flood_from_one_sender_does_not_starve_another(notifier, receivers, connect):
    settings = settings_.NotifySettings(lease_s=3.0, beat_s=0.1, sender_pending=50)
    served = await notifier(settings=settings)
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")
    flood = await connect("flood")
    shard = protocol.shard_of("flood/x")
    subject = subjects.from_identity("notify", "flood", "event", str(shard))
    noise = messages.encode(protocol.SendEvent(id="n", sender="x", type="noise"))
    for number in range(3000):
        await flood.publish(subject, noise, reply=f"_R.@notify.flood.s.{number}")
    await flood.flush()
    await mine.sender("quiet").send("alert", {"threat_level": 1}, timeout_s=20)
    assert (await web.next(timeout_s=30))["threat_level"] == 1
    await eventually(lambda: served.counts["overloaded"] > 0)


async def test_new_addresses_use_up_the_share_of_their_sender_only(notifier, receivers):
    served = await notifier()
    mine, loud = await receivers("farm"), await receivers("loud")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="command AND action = 'heard'")
    admission.of_loop(asyncio.get_running_loop()).share = 0.02
    sender = loud.sender("siren")

    async def send_forever() -> None:
        for number in itertools.count():
            address = " OR ".join(f"load = {number}.{clause}" for clause in range(250))
            with contextlib.suppress(errors.MusterError):
                await sender.send("command", {"action": "noise"}, to=address)

    sending = asyncio.create_task(send_forever())
    await eventually(lambda: served.common.server.refused["rate"])
    await mine.sender("control").send("command", {"action": "heard"})
    assert (await web.next(timeout_s=10))["action"] == "heard"
    sending.cancel()
    await asyncio.wait([sending])


async def test_a_slow_transient_receiver_loses_the_rest_and_it_is_counted(notifier, receivers):
    await notifier()
    mine = await receivers("farm", queue_max=5)
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")
    for number in range(12):
        await mine.sender("s").send("alert", {"threat_level": number})
    await eventually(lambda: web.dropped == 7)
    assert [(await web.next(timeout_s=30))["threat_level"] for _ in range(5)] == [0, 1, 2, 3, 4]


# -- several notifiers


async def test_a_repeated_pending_change_is_applied_once(notifier, receivers, connect, monkeypatch):
    write, go_on, waiting = shard_manager.ShardManager._write_batch, asyncio.Event(), []

    async def write_later(self: Any, held: Any, output: Any) -> None:
        waiting.append(output)
        await go_on.wait()
        await write(self, held, output)

    served = await notifier()
    await _define(await receivers("boss"))
    monkeypatch.setattr(shard_manager.ShardManager, "_write_batch", write_later)
    bus = await connect("farm")
    join = protocol.JoinReceiver(receiver="web", model="WebServer", state=protocol.to_wire(STATE))
    data, headers = messages.encode(protocol.ReceiverChanges(changes=(join,))), {requests.REQUEST_ID: "one"}
    shard = protocol.shard_of(protocol.participant_id("farm", "web"))
    subject = subjects.from_identity(protocol.PART, "farm", "change", str(shard))
    for _ in range(2):
        with pytest.raises(errors.TimedOut):
            await bus.request(subject, data, headers=headers, timeout_s=0.2)
    reply = asyncio.create_task(bus.request(subject, data, headers=headers, timeout_s=20))
    await asyncio.wait([reply], timeout=0.2)
    go_on.set()
    answer = messages.decode((await reply).data, protocol.NotifyReply)
    assert not answer.refused
    assert [len(output) for output in waiting] == [1]
    assert len(served.engine) == 1
    await bus.request(subject, data, headers=headers, timeout_s=20)  # as if the answer had been lost
    assert len(waiting) == 1


async def _every_page_has_its_parties(bus: api.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are cut by their bytes, at another place by each notifier, and by their number."""
    with pytest.raises(errors.InvalidInput, match="limit"):
        await queries.list_receivers(bus, limit=0)
    everyone = [receiver.receiver for receiver in (await queries.list_receivers(bus)).receivers]
    assert len(everyone) == 20
    assert everyone == sorted(everyone)
    monkeypatch.setattr(query_handler, "PAGE_BYTES", 500)  # two or three of them
    assert [
        receiver.receiver for receiver in (await queries.list_receivers(bus, limit=100)).receivers
    ] == everyone
    actual, after = list[str](), ""
    while True:
        page = await queries.list_receivers(bus, limit=7, after=after)
        assert page.count == 20
        actual += [receiver.receiver for receiver in page.receivers]
        if page.next is None:
            break
        assert len(page.receivers) == 7
        after = page.next
    assert actual == everyone


async def test_receivers_spread_move_and_come_back(notifier, receivers, connect, monkeypatch):
    first = await notifier("n1", PATIENT)
    mine = await receivers("farm")
    await _define(mine)
    webs = [await mine.advertise(f"web-{n}", "WebServer", STATE, policy="alert") for n in range(20)]
    second = await notifier("n2", PATIENT, serving=False)

    async def hurry() -> None:
        """Whatever moves has every notifier look again at what is its own: also while it gives up a shard."""
        while True:
            first.common.moved.set()
            await asyncio.sleep(0)

    hurrying = asyncio.create_task(hurry())
    await eventually(lambda: len(first.held) + len(second.held) == protocol.SHARDS and second.held)
    hurrying.cancel()
    assert not set(first.held) & set(second.held)
    assert len(first.engine) + len(second.engine) == 20

    async def everybody_hears(level: int) -> None:
        await mine.sender("s").send("alert", {"threat_level": level})
        assert {(await web.next(timeout_s=30))["threat_level"] for web in webs} == {level}

    await everybody_hears(1)
    async with asyncio.timeout(30):  # a query ends when every shard has a reply
        assert (await queries.list_receivers(await connect("asker"), timeout_s=600)).count == 20
    await _every_page_has_its_parties(await connect("reader"), monkeypatch)
    await webs[0].policy("alert AND threat_level > 1")
    await second.stop()
    await first.serving()
    await everybody_hears(2)


async def test_an_event_is_not_passed_to_a_notifier_where_it_cannot_match(notifier, receivers):
    first = await notifier("n1", PATIENT)
    second = await notifier("n2", PATIENT, serving=False)
    await eventually(lambda: len(first.held) + len(second.held) == protocol.SHARDS and second.held)
    await eventually(lambda: _shards_known_to(first) == _shards_known_to(second) == protocol.SHARDS)
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")

    def pruned() -> int:
        return int(first.counts["pruned"] + second.counts["pruned"])

    for kind, to in (("command", "TRUE"), ("alert", "application = 'Apache'")):
        before = pruned()

        async def is_pruned(kind: str = kind, to: str = to, before: int = before) -> bool:
            await mine.sender("s").send(kind, {}, to=to)
            return pruned() > before

        await eventually(is_pruned)  # where a summary is not fresh, nothing is ruled out
    # What widens a summary is known to the others when it is acknowledged.
    await web.update(application="Apache")
    await mine.sender("s").send("alert", {"threat_level": 7}, to="application = 'Apache'")
    assert (await web.next(timeout_s=30))["threat_level"] == 7
    for number in range(20):
        other = await mine.advertise(
            f"o{number}", "WebServer", {"application": f"a{number}"}, policy="command"
        )
        await mine.sender(f"s{number}").send("command", {"action": "x"}, to=f"application = 'a{number}'")
        assert (await other.next(timeout_s=30)).type == "command"


def test_a_summary_rules_out_only_what_cannot_match():
    summary = protocol.ShardSummary(notifier="n", shards=(1,), accepts=("alert",), words={"a": ("x", "y")})
    requested = [
        ({"alert": True}, "TRUE", True),
        ({"command": True}, "TRUE", False),
        ({"alert": True}, "a = 'z' AND b > 1", False),
        ({"alert": True}, "a = 'z' OR b > 1", True),
        ({"alert": True}, "a IN ('z', 'x')", True),
        ({"alert": True}, "NOT a = 'x'", True),
        ({"alert": True}, "unknown = 'x'", True),
    ]
    for attributes, address, expected in requested:
        assert summaries.may_match(summary, attributes, parser.parse(address)) is expected


async def test_a_notifier_that_is_cut_off_decides_nothing():
    net = network.SimulatedNetwork(seed=3)
    async with (
        await net.connect("n1") as bus,
        await net.connect("farm") as own,
        notifier_notifier.Notifier(bus, QUICK, kernels=kernels_numpy) as served,
        client.NotifyClient(own) as mine,
    ):
        await served.serving()
        await _define(mine)
        web = await mine.advertise("web", "WebServer", STATE, policy="alert")
        send = protocol.SendEvent(id="1", sender="s", type="alert", content={"threat_level": 1})
        event, address = served.router.admit("farm", send)
        net.unplug("n1")
        await eventually(lambda: not served.common.deciding().any())
        await served.router._deliver_here(event, address)
        assert served.counts["delivered"] == 0
        net.heal()
        # An event that is sent while no notifier serves a shard is not kept for the receivers there.
        await eventually(lambda: served.common.deciding().all(), timeout_s=30)
        await mine.sender("s").send("alert", {"threat_level": 2})
        assert (await web.next(timeout_s=30))["threat_level"] == 2


async def test_events_that_receivers_may_miss_are_counted(notifier, receivers):
    served = await notifier()
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")
    await mine.sender("s").send("alert", {"threat_level": 1})
    assert (await web.next(timeout_s=30))["threat_level"] == 1
    assert (served.counts["unserved"], served.counts["in-doubt"]) == (0, 0)
    send = protocol.SendEvent(id="1", sender="s", type="alert", content={"threat_level": 1})
    event, address = served.router.admit("farm", send)
    shard = protocol.shard_of("farm/web")
    held = served.common.held.pop(shard)
    deciding = asyncio.ensure_future(served.router._decide(event, address))
    await asyncio.sleep(0)
    served.common.held[shard] = held
    await deciding
    assert served.counts["delivered"] == 1
    assert served.counts["unserved"] == 1


# -- what is kept


async def test_a_log_is_replaced_by_a_snapshot_and_read_back(notifier, receivers):
    settings = settings_.NotifySettings(lease_s=3.0, beat_s=0.1, snapshot_changes=10)
    first = await notifier("n1", settings)
    mine = await receivers("farm")
    await _define(mine)
    state = {**STATE, "services": frozenset({"docs"})}
    await mine.advertise("web", "WebServer", state, policy="alert AND threat_level > 2", durable=True)
    web = mine._receivers["web"]
    for number in range(25):
        await web.update(load=number / 100)
    assert first.counts["snapshots"] >= 2
    await first.stop()
    second = await notifier("n2", settings)
    assert second.engine.state_of("farm/web") == {**state, "load": 0.24}
    assert second.engine.policy_of("farm/web") == "alert = TRUE AND threat_level > 2"
    assert second.engine.is_durable("farm/web")


async def test_models_changes_and_decisions_are_kept_as_history(notifier, receivers, connect):
    await notifier()
    mine = await receivers("farm")
    await _define(mine)
    await mine.advertise("web", "WebServer", STATE, policy="alert")
    passing = await mine.sender("s").send("alert", {"threat_level": 3}, to="load > 0.1")
    lasting = await mine.sender("s").send("alert", {"threat_level": 4}, durable=True)
    stream = await (await connect("reader")).open_stream(protocol.STREAM_HISTORY)

    async def kept() -> dict[str, list[bytes]]:
        matches: dict[str, list[bytes]] = {"model": [], "change": [], "decision": []}
        async for message in stream.read(1, (await stream.state()).last_sequence):
            matches[message.subject.rpartition(".")[2]].append(message.data)
        assert [len(values) for values in matches.values()] == [len(MODELS), 1, 2]
        return matches

    actual = await eventually(kept)
    defined = [messages.decode(data, protocol.DefineModel) for data in actual["model"]]
    assert [authorities.model_of(item) for item in defined] == list(MODELS)
    join = messages.decode(actual["change"][0], protocol.AppliedChanges).entries[0].changes[0]
    assert isinstance(join, protocol.JoinReceiver)
    assert join.policy == "alert = TRUE"  # in its canonical form
    decided = {
        (decoded := messages.decode(data, protocol.DecisionRecord)).event.id: decoded
        for data in actual["decision"]
    }
    assert set(decided) == {passing, lasting}
    for (
        decoded
    ) in decided.values():  # a durable event's too, to a receiver that did not request durable delivery
        assert (decoded.to, decoded.count, decoded.event.attributes["_process"]) == (("farm/web",), 1, "farm")
    assert decided[lasting].sequence > decided[passing].sequence == 0


async def test_grants_of_receivers_are_kept_as_history(notifier, receivers, connect, root):
    await notifier(root=root.key.public)
    mine = await receivers("farm")
    await _define(mine)
    await mine.advertise("one", "Controller", {"entity": "x"}, policy="command")
    now = time.time()
    chain = root.grant("farm", {"_trust_level": 4}, tier=1, now=now, lifetime_s=3600)
    await mine.present(chain)
    await mine.revoke(root.revoke({documents.serial_of(chain[0])}, number=1, now=now))
    stream = await (await connect("reader")).open_stream(protocol.STREAM_HISTORY)

    async def kept() -> list[protocol.Change]:
        last = (await stream.state()).last_sequence
        reported = [message async for message in stream.read(1, last, subject=decision_log.CHANGE)]
        stored = [
            messages.decode(message.data, protocol.AppliedChanges).entries[0].changes[0]
            for message in reported
        ]
        assert len(stored) == 3
        return stored

    join, *granted = await eventually(kept)
    assert isinstance(join, protocol.JoinReceiver)
    assert granted == [
        protocol.UpdateReceivers(
            receivers=("one",), values={"_command_region": [None], "_trust_level": [level]}
        )
        for level in (4, None)
    ]


# -- questions


async def test_who_explain_and_check_commands(notifier, receivers, connect, root):
    await notifier(root=root.key.public)
    mine = await receivers("farm")
    await _define(mine)
    policy = "alert AND threat_level >= 4 AND sender._trust_level >= 2"
    await mine.advertise("busy", "WebServer", {"application": "IIS", "load": 0.9}, policy=policy)
    await mine.advertise("calm", "WebServer", {"application": "IIS", "load": 0.1}, policy=policy)
    bus = await connect("asker")
    event = protocol.SendEvent(
        id="e", sender="p", type="alert", content={"threat_level": 3}, address="load > 0.8"
    )

    actual = await queries.match_receivers(bus, "load > 0.8")
    assert (actual.count, actual.receivers) == (1, ["farm/busy"])
    assert "load is 0.1" in str(actual.near)
    refused = await queries.match_receivers(bus, "load > 0.8", event=event, sender="asker/p")
    assert refused.count == 0
    assert "threat_level is 3" in str(refused.near)

    explanation = await queries.explain(bus, event, sender="asker/p", receiver="farm/calm")
    assert not explanation.delivered
    assert [side.holds for side in (explanation.address, explanation.event, explanation.sender)] == [
        False,
        False,
        False,
    ]
    assert any("load is 0.1" in why for why in explanation.address.because)
    await mine.present(root.grant("asker", {"_trust_level": 2}, tier=1, now=time.time(), lifetime_s=60))
    loud = protocol.SendEvent(
        id="e", sender="p", type="alert", content={"threat_level": 4}, address="load > 0.8"
    )
    explanation = await queries.explain(bus, loud, sender="asker/p", receiver="farm/busy")
    assert explanation.delivered
    assert explanation.granted["_trust_level"].by == "root"
    assert time.time() - explanation.granted["_trust_level"].since < 60
    assert explanation.receiver_granted == {}
    # For a policy with OR, the part with the fewest failed conditions is explained.
    either = (
        "(command AND sender._trust_level >= 9) OR (alert AND threat_level >= 4 AND sender._trust_level >= 3)"
    )
    await mine.advertise("wary", "WebServer", {"load": 0.9}, policy=either)
    explanation = await queries.explain(bus, loud, sender="asker/p", receiver="farm/wary")
    assert [side.holds for side in (explanation.address, explanation.event, explanation.sender)] == [
        True,
        True,
        False,
    ]
    assert explanation.sender.because == ["false: sender._trust_level >= 3 (sender._trust_level is 2)"], (
        explanation
    )
    await mine.advertise("boss", "Controller", {"entity": "x"}, policy="alert")
    await mine.present(root.grant("farm", {"_trust_level": 7}, tier=3, now=time.time(), lifetime_s=60))
    trusted = protocol.SendEvent(id="e", sender="p", type="alert", address="_trust_level > 7")
    explanation = await queries.explain(bus, trusted, sender="asker/p", receiver="farm/boss")
    assert "_trust_level is 7" in str(explanation.address.because)
    assert [(item.value, item.tier) for item in explanation.receiver_granted.values()] == [(7, 3)]

    cost = await queries.check(bus, policy)
    assert (cost.clauses, cost.cost, cost.indexed) == (3, "lookup", True)
    with pytest.raises(errors.ParseError, match="no attribute threat"):
        await queries.check(bus, "threat > 3")
    assert (await queries.list_receivers(bus, where="load < 0.5")).count == 1


async def test_hostile_policies_are_refused_quickly(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    await _define(mine)
    wide = " AND ".join(f"(threat_level = {n} OR threat_level = {n + 1})" for n in range(100))
    hostile = ["x" * 900_000, " OR ".join(["alert"] * 9_000), "NOT " * 5000 + "alert", "(" * 9000]
    for text in hostile:
        started = time.process_time()  # the notifier is in this process
        with pytest.raises((errors.LimitExceeded, errors.ParseError)):
            await mine.advertise("bad", "WebServer", STATE, policy=text)
        assert time.process_time() - started < 2
    with pytest.raises(errors.LimitExceeded):  # never leaves this process
        await mine.advertise("bad", "WebServer", STATE, policy="x" * 10_000_000)
    web = await mine.advertise("web", "WebServer", STATE, policy=wide)  # 2^100 conjunctions: not expanded
    await mine.sender("s").send("alert", {"threat_level": 1})
    await web.policy("alert")
    await mine.sender("s").send("alert", {"threat_level": 2})
    assert (await web.next(timeout_s=30))["threat_level"] == 2


async def test_new_policies_of_one_request_are_checked_between_other_work(notifier, receivers, monkeypatch):
    served = await notifier()
    mine = await receivers("farm")
    await _define(mine)
    check, turn, in_turn = models.Vocabulary.policy, 0, collections.Counter[int]()

    def count(self: models.Vocabulary, text: str) -> Any:
        in_turn[turn] += 1
        return check(self, text)

    async def pass_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(models.Vocabulary, "policy", count)
    admission.of_loop(asyncio.get_running_loop()).share = 0.001
    turns = asyncio.create_task(pass_turns())
    good = [" OR ".join(f"threat_level = {n}.{clause}" for clause in range(100)) for n in range(20)]
    bad = [protocol.SetReceiverPolicy(receiver="web", policy=f"{text} OR") for text in good]
    await mine.advertise("web", "WebServer", STATE)
    in_turn.clear()
    joins = protocol.JoinReceivers(receivers=("other",), model="WebServer", policies=tuple(good))
    with pytest.raises(errors.MusterError):
        await mine.change([joins, *bad])
    turns.cancel()
    assert in_turn.total() == 40, "each is checked once"
    assert max(in_turn.values()) <= 2
    assert served.common.server._admission.wait_s("farm", asyncio.get_running_loop().time())


async def test_of_more_parties_than_an_answer_holds_only_those_that_fit_are_read(connect, monkeypatch):
    """To read a million takes longer than a lease holds."""
    served = notifier_notifier.Notifier(await connect("n1"), kernels=kernels_numpy)
    names = [f"farm/web-{number:05}" for number in range(20_000)]
    served.engine.join_many(names, WEB_SERVER, {}, [""], np.zeros(len(names), np.int64))
    read, shown = list[str](), query_handler._receiver_row

    def counted(by: notifier_notifier.Notifier, receiver: str) -> rows.ReceiverRow:
        read.append(receiver)
        return shown(by, receiver)

    monkeypatch.setattr(query_handler, "_receiver_row", counted)
    reported = await query_handler.QUERIES["receivers"](served, protocol.NotifyQuery(limit=10**9))
    assert len(read) == len(reported.receivers) < 10_000
    assert len(messages.encode(reported)) < messages.MAX_BYTES
    assert reported.facts["next"] == reported.receivers[-1].receiver == names[len(read) - 1]
    assert reported.count == 20_000


@pytest.mark.parametrize("name", ["receivers", "who"])
async def test_a_query_of_many_receivers_shares_the_event_loop(connect, name):
    """A notifier holds leases of shards, and decides for all senders meanwhile."""
    served = notifier_notifier.Notifier(await connect("n1"), kernels=kernels_numpy)
    names = [f"farm/web-{number:05}" for number in range(20_000)]
    loads = np.arange(20_000) % 2 / 1.0
    served.known.vocabulary.add(WEB_SERVER)
    served.engine.join_many(names, WEB_SERVER, {"load": loads.tolist()}, [""], np.zeros(20_000, np.int64))
    query = protocol.NotifyQuery(expression="load = 1", limit=5)
    answered = asyncio.create_task(query_handler.QUERIES[name](served, query))
    turns = 0
    while not answered.done():
        if turns == 3:  # rows of receivers that the query has selected get others
            served.engine.leave_shard(0)
            others = [f"other/{number:05}" for number in range(20_000)]
            served.engine.join_many(others, WEB_SERVER, {}, [""], np.zeros(20_000, np.int64))
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10_000 // name_table.BLOCK
    assert answered.result().count == 10_000
    if name == "who":
        listed = [row["receiver"] for row in answered.result().receivers]
        assert listed == [f"farm/web-{number:05}" for number in (1, 3, 5, 7, 9)]


async def test_a_reply_covers_the_shards_that_were_held_all_the_time(connect):
    served = notifier_notifier.Notifier(await connect("n1"), kernels=kernels_numpy)
    names = [f"farm/web-{number:05}" for number in range(2_000)]
    served.engine.join_many(names, WEB_SERVER, {}, [""], np.zeros(2_000, np.int64))
    held: Any = served.held
    held.update({1: "lost", 2: "kept", 3: "lost and gained"})
    operation = served._query_server._operations["read.receivers"]
    call: Any = None
    answered = asyncio.ensure_future(operation.handler(call, protocol.NotifyQuery()))
    await asyncio.sleep(0)
    del held[1]
    held.update({3: "again", 4: "gained"})
    assert (await answered).shards == (2,)


async def test_many_changes_of_one_party_are_made_in_their_order(notifier, receivers, connect, monkeypatch):
    await notifier()
    farm = await receivers("farm")
    await _define(farm)
    await farm.advertise("a", "WebServer", {"load": 0.0}, policy="TRUE")
    request = farm._request
    under_way: list[int] = []
    most = 0

    async def counted(subject, message, **more):
        nonlocal most
        under_way.append(1)
        most = max(most, len(under_way))
        try:
            return await request(subject, message, **more)
        finally:
            under_way.pop()

    monkeypatch.setattr(farm, "_request", counted)
    changes = [protocol.UpdateReceivers(receivers=("a",), values={"load": [float(n)]}) for n in range(1201)]
    refused = protocol.UpdateReceivers(receivers=("a",), values={"nonsense": [1]})
    with pytest.raises(errors.InvalidInput, match="nonsense"):
        await farm.change([refused, *changes])
    assert most == 1  # of one shard
    actual = await queries.match_receivers(await connect("asker"), "load = 1200")
    assert actual.receivers == ["farm/a"]


async def test_a_process_has_a_number_of_receivers(notifier, receivers):
    served = await notifier(settings=msgspec.structs.replace(QUICK, receivers_per_identity=3))
    farm, other = await receivers("farm"), await receivers("other")
    await _define(farm)
    web = await farm.advertise("w1", "WebServer", STATE)
    for name in ("w2", "w3"):
        await farm.advertise(name, "WebServer", STATE)
    with pytest.raises(errors.LimitExceeded, match="farm has 3 receivers, of 3") as refused:
        await farm.advertise("w4", "WebServer", STATE)
    assert "notify.receivers_per_identity" in (refused.value.hint or "")
    await other.advertise("w4", "WebServer", STATE)
    await web.leave()
    await farm.advertise("w4", "WebServer", STATE)
    assert served.engine.stored.of("farm") == (3, 0)
