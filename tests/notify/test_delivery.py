from __future__ import annotations

import pytest

from muster.core import errors
from muster.notify import model as models
from tests.notify.conftest import MODELS

IIS = {"application": "IIS", "load": 0.9, "services": {"docs", "cgi"}}
APACHE = {"application": "Apache", "load": 0.2}


async def test_an_event_reaches_exactly_those_whose_state_and_policy_agree(notifier, parties):
    await notifier()
    mine = await parties("farm")
    for model in MODELS:
        await mine.define(model)
    keen = await mine.advertise("keen", "WebServer", IIS, policy="alert AND threat_level >= 4")
    calm = await mine.advertise("calm", "WebServer", IIS, policy="alert AND threat_level >= 9")
    other = await mine.advertise("other", "WebServer", APACHE, policy="alert")
    sender = mine.sender("watch")
    await sender.send("alert", {"threat_level": 5}, to="application = 'IIS' AND load > 0.8")
    await sender.send("alert", {"threat_level": 9, "text": "second"}, to="TRUE")
    first, second = await keen.next(timeout_s=5), await keen.next(timeout_s=5)
    assert (first.type, first["threat_level"], first.sender["party"]) == ("alert", 5, "farm/watch")
    assert second["text"] == "second"
    assert (await calm.next(timeout_s=5))["threat_level"] == 9
    assert (await other.next(timeout_s=5))["threat_level"] == 9


async def test_a_change_holds_for_every_event_after_its_acknowledgement(notifier, parties):
    await notifier()
    mine = await parties("farm")
    for model in MODELS:
        await mine.define(model)
    web = await mine.advertise("web", "WebServer", IIS, policy="alert")
    sender = mine.sender("watch")
    for number in range(30):
        await web.update(load=number / 100)
        await sender.send("alert", {"threat_level": number}, to=f"load = {number / 100}")
        assert (await web.next(timeout_s=5))["threat_level"] == number
    await web.policy("command")
    await sender.send("alert", {"threat_level": 1})
    await sender.send("command", {"action": "stop"})
    assert (await web.next(timeout_s=5)).type == "command"
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
        ({"_trust_level": 4}, "", models.RestrictedClaim, "restricted"),
    ],
)
async def test_what_does_not_fit_is_refused_where_it_is_registered(
    notifier, parties, state, policy, error, words
):
    served = await notifier()
    mine = await parties("farm")
    for model in MODELS:
        await mine.define(model)
    with pytest.raises(error) as refused:
        await mine.advertise("web", "WebServer", state, policy=policy)
    assert words in str(refused.value)
    assert len(served.engine) == 0
    assert served.counts[refused.value.code] == 1


async def test_a_misspelt_attribute_is_pointed_at_and_the_right_one_suggested(notifier, parties):
    await notifier()
    mine = await parties("farm")
    for model in MODELS:
        await mine.define(model)
    with pytest.raises(errors.ParseError) as refused:
        await mine.sender("x").send("alert", {}, to="aplication = 'IIS'")
    assert (refused.value.position, refused.value.hint) == (0, "did you mean application?")
    with pytest.raises(errors.InvalidInput, match="threat_level"):
        await mine.sender("x").send("alert", {"threat_level": "high"})
