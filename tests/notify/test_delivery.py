from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.core import errors, messages, subjects
from muster.notify import models, protocol
from muster.predicates import types
from muster.predicates.syntax import parser
from tests.notify.conftest import ALERT, MODELS

IIS = {"application": "IIS", "load": 0.9, "services": {"docs", "cgi"}}
APACHE = {"application": "Apache", "load": 0.2}


async def test_an_event_reaches_exactly_those_whose_state_and_policy_agree(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    keen = await mine.advertise("keen", "WebServer", IIS, policy="alert AND threat_level >= 4")
    calm = await mine.advertise("calm", "WebServer", IIS, policy="alert AND threat_level >= 9")
    other = await mine.advertise("other", "WebServer", APACHE, policy="alert")
    sender = mine.sender("watch")
    await sender.send("alert", {"threat_level": 5}, to="application = 'IIS' AND load > 0.8")
    await sender.send("alert", {"threat_level": 9, "text": "second"}, to="TRUE")
    first, second = await keen.next(timeout_s=30), await keen.next(timeout_s=30)
    assert (first.type, first["threat_level"], first.sender["_id"]) == ("alert", 5, "farm/watch")
    assert second["text"] == "second"
    assert (await calm.next(timeout_s=30))["threat_level"] == 9
    assert (await other.next(timeout_s=30))["threat_level"] == 9


async def test_a_change_holds_for_every_event_after_its_acknowledgement(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    web = await mine.advertise("web", "WebServer", IIS, policy="alert")
    sender = mine.sender("watch")
    for number in range(30):
        await web.update(load=number / 100)
        await sender.send("alert", {"threat_level": number}, to=f"load = {number / 100}")
        assert (await web.next(timeout_s=30))["threat_level"] == number
    await web.policy("command")
    await sender.send("alert", {"threat_level": 1})
    await sender.send("command", {"action": "stop"})
    assert (await web.next(timeout_s=30)).type == "command"
    await web.leave()
    await sender.send("command", {"action": "stop"})


@pytest.mark.parametrize(
    ("state", "policy", "error", "words"),
    [
        ({"lod": 0.5}, "", errors.InvalidInput, "no attribute lod"),
        ({"load": "high"}, "", errors.InvalidInput, "of type float"),
        ({}, "threat_levle >= 4", errors.ParseError, "threat_levle"),
        ({}, "threat_level = 'high'", errors.ParseError, "unlike"),
        ({}, "sender._trust_levle > 2", errors.ParseError, "_trust_levle"),
        ({}, "alert AND", errors.ParseError, ""),
        ({}, " OR ".join(["alert"] * 10_000), errors.LimitExceeded, ""),
        ({}, "(" * 500 + "alert" + ")" * 500, errors.LimitExceeded, ""),
        ({}, f"text LIKE '{'%a' * 200}'", errors.LimitExceeded, ""),
        ({"_trust_level": 4}, "", models.RestrictedAttributeClaimed, "restricted"),
    ],
)
async def test_what_does_not_fit_is_refused_where_it_is_registered(
    notifier, receivers, state, policy, error, words
):
    served = await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    with pytest.raises(error) as refused:
        await mine.advertise("web", "WebServer", state, policy=policy)
    assert words in str(refused.value)
    assert len(served.engine) == 0
    assert served.counts[refused.value.code] == 1


async def test_a_misspelt_attribute_is_pointed_at_and_the_right_one_suggested(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    with pytest.raises(errors.ParseError) as refused:
        await mine.sender("x").send("alert", {}, to="aplication = 'IIS'")
    assert (refused.value.position, refused.value.hint) == (0, "did you mean application?")
    with pytest.raises(errors.InvalidInput, match="threat_level"):
        await mine.sender("x").send("alert", {"threat_level": "high"})


async def test_an_event_that_breaks_its_schema_is_refused_at_the_sender_and_again_at_the_notifier(
    notifier, receivers, connect
):
    served = await notifier()
    mine, other = await receivers("farm"), await receivers("other")
    for model in MODELS:
        await mine.define(model)
    for content, words in (({"threat_level": "high"}, "of type int"), ({"thread": 1}, "no attribute thread")):
        with pytest.raises(errors.InvalidInput, match=words):
            await other.sender("x").send("alert", content)
    assert served.counts["invalid-input"] == 0  # it never got there
    bus = await connect("rogue")
    subject = subjects.from_identity("notify", "rogue", "event", str(protocol.shard_of("rogue/x")))
    bad = protocol.SendEvent(id="1", sender="x", type="alert", content={"threat_level": "high"})
    answer = messages.decode((await bus.request(subject, messages.encode(bad))).data, protocol.NotifyReply)
    assert answer.refused[0][1].code == "invalid-input"
    assert served.counts["admitted"] == 0
    # A model may grow while senders remember how it was.
    grown = models.Model("alert", {**ALERT.attributes, "more": types.INT}, models.ModelKind.EVENT)
    await mine.define(grown)
    await other.sender("x").send("alert", {"more": 1})


async def test_numbers_that_no_message_can_contain_are_refused(notifier, receivers, connect):
    """JSON has whole numbers of any size and no infinity; MessagePack is the other way round."""
    served = await notifier()
    mine = await receivers("farm")
    for model in (*MODELS, models.Model("reading", {"value": types.FLOAT}, models.ModelKind.EVENT)):
        await mine.define(model)
    web = await mine.advertise("web", "WebServer", {"load": 0.5}, policy="reading")
    bus = await connect("farm-2")
    shard = str(protocol.shard_of("farm-2/x"))
    huge, endless = 10**400, float("inf")

    async def say(what: str, message: messages.WireMessage, form: Any) -> str:
        subject = subjects.from_identity("notify", "farm-2", what, shard)
        data = (await bus.request(subject, messages.encode(message, form), timeout_s=10)).data
        return messages.decode(data, protocol.NotifyReply).refused[0][1].code

    for number, form in ((huge, "json"), (2**64, "json"), (endless, "msgpack")):
        for kind in ("reading", "untyped"):
            bad = protocol.SendEvent(id="1", sender="x", type=kind, content={"value": number})
            assert await say("event", bad, form) == "invalid-input"
        join = protocol.JoinReceiver(receiver="x", model="WebServer", state={"load": number})
        joins = protocol.JoinReceivers(receivers=("x",), model="WebServer", values={"load": [number]})
        for change in (join, joins):
            assert await say("change", protocol.ReceiverChanges(changes=(change,)), form) == "invalid-input"
    with pytest.raises(errors.InvalidInput, match="not finite"):
        await web.update(load=endless)
    with pytest.raises(errors.InvalidInput, match="not finite"):
        await mine.advertise("web", "WebServer", {"load": -endless})
    with pytest.raises(errors.InvalidInput, match="64 bits"):
        await web.send("untyped", {"value": huge})
    assert not served.common.tasks.failures
    await web.send("reading", {"value": 2**63 - 1})
    assert (await web.next(timeout_s=10))["value"] == float(2**63 - 1)


async def test_a_party_receives_in_a_loop_until_it_leaves(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    web = await mine.advertise("web", "WebServer", IIS, policy="alert", durable=True)
    for level in range(3):
        await mine.sender("s").send("alert", {"threat_level": level}, durable=True)
    seen = []
    async with asyncio.timeout(30):
        async for event in web:
            seen.append(event["threat_level"])
            if len(seen) == 3:
                await web.leave()
    assert seen == [0, 1, 2]


async def test_an_event_that_is_too_large_is_refused(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    with pytest.raises(errors.LimitExceeded, match="at most"):
        await mine.sender("x").send("alert", {"text": "x" * 300_000}, durable=True)


async def test_many_join_at_once_in_columns(notifier, receivers):
    served = await notifier()
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    joins = protocol.JoinReceivers(
        receivers=tuple(f"web-{number}" for number in range(100)),
        model="WebServer",
        values={"load": [number / 100 for number in range(100)]},
        policies=("alert", "command"),
        which=[number % 2 for number in range(100)],
        durable=[3],
    )
    await mine.change([joins])
    assert len(served.engine) == 100
    assert served.engine.is_durable("farm/web-3")
    assert not served.engine.is_durable("farm/web-4")
    assert sorted(served.engine.match({"alert": True}, parser.parse("load < 0.05"))) == [
        "farm/web-0",
        "farm/web-2",
        "farm/web-4",
    ]
    for wrong in (
        {"receivers": ("a", "a")},
        {"receivers": ("a",), "which": [1]},
        {"receivers": ("a",), "which": [0, 0]},
        {"receivers": ("a",), "durable": [1]},
        {"receivers": ("a",), "values": {"load": []}},
        {"receivers": ("a",), "values": {"load": ["x"]}},
        {"receivers": ("a",), "policies": ("threat_levle > 1",)},
    ):
        with pytest.raises(errors.InvalidInput):
            await mine.change([protocol.JoinReceivers(model="WebServer", **wrong)])
    assert len(served.engine) == 100
