"""Grants that are limited to a region or an audience count only for the receivers there."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from muster.notify import models, protocol, queries
from muster.notify import settings as settings_
from muster.notify.matcher import grant_scopes, kernels_numpy, matcher
from muster.notify.notifier import grants as notifier_grants
from muster.predicates import ast, types
from muster.predicates.backends import python
from muster.predicates.syntax import parser
from muster.testing.eventually import eventually
from muster.trust import documents, grants, nkeys
from tests.notify.conftest import COMMAND, QUICK

SITE = models.Model("Site", {"region": types.STRING, "_trust_level": types.INT})
REGIONS = ["a", "a/b", "a.c", "ab", "b", None]
POLICY = "command AND sender._trust_level >= 3"


@pytest.fixture
def root():
    return grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))


def _grant(root: grants.Authority, level: int, *, tier: int = 1, **scope: Any) -> tuple[str, ...]:
    return root.grant(
        "boss",
        {"_trust_level": level},
        tier=tier,
        now=time.time(),
        lifetime_s=3600,
        scope=documents.GrantScope(**scope),
    )


@pytest.fixture
async def sites(notifier, receivers, root):
    await notifier(root=root.key.public, domain="earth")
    farm = await receivers("farm")
    for model in (SITE, COMMAND):
        await farm.define(model)
    return {
        name: await farm.advertise(name, "Site", {"region": region} if region else {}, policy=POLICY)
        for name, region in (("coast", "west/coast"), ("west", "west"), ("east", "east"), ("lost", None))
    }


async def _reached(sites, boss) -> set[str]:
    """Which receivers get a command: it is followed by an event that all receivers accept."""
    await boss.sender("control").send("command", {"action": "act"})
    for site in sites.values():
        await site.policy("command")
    await boss.sender("control").send("command", {"action": "end"})
    reached = set()
    for name, site in sites.items():
        while (await site.next(timeout_s=30))["action"] != "end":
            reached.add(name)
        await site.policy(POLICY)
    return reached


async def test_a_regional_grant_counts_with_receivers_in_that_region_only(sites, receivers, root):
    boss = await receivers("boss")
    assert await _reached(sites, boss) == set()
    await boss.present(_grant(root, 4, region="west"))
    assert await _reached(sites, boss) == {"coast", "west"}
    await sites["east"].update(region="west/mountains")
    assert await _reached(sites, boss) == {"coast", "west", "east"}


async def test_a_grant_for_an_audience_counts_with_those_it_names(sites, receivers, root, connect):
    boss = await receivers("boss")
    await boss.present(_grant(root, 4, audience=("farm/east", "elsewhere")))
    assert await _reached(sites, boss) == {"east"}
    event = protocol.SendEvent(id="1", sender="control", type="command", content={"action": "act"})
    bus = await connect("asker")
    for name, delivered in (("east", True), ("west", False)):
        explanation = await queries.explain(bus, event, sender="boss/control", receiver=f"farm/{name}")
        assert explanation.delivered is delivered
        assert explanation.granted["_trust_level"].within == {
            "region": "",
            "audience": ["farm/east", "elsewhere"],
        }
    actual = await queries.match_receivers(bus, "TRUE", event=event, sender="boss/control")
    assert actual.receivers == ["farm/east"]
    await boss.present(_grant(root, 4, audience=("farm",)))
    assert await _reached(sites, boss) == set(sites)


async def test_of_grants_in_several_scopes_the_highest_tier_prevails(sites, receivers, root):
    boss = await receivers("boss")
    await boss.present(_grant(root, 4, tier=1, region="west"))
    await boss.present(_grant(root, 1, tier=2, region="west/coast"))
    assert await _reached(sites, boss) == {"west"}
    await boss.present(_grant(root, 2, tier=3))
    assert await _reached(sites, boss) == set()


@pytest.mark.parametrize("scope", [{"region": "west"}, {"audience": ("farm/west", "farm/coast")}])
async def test_of_grants_of_equal_tier_the_last_handed_in_prevails_also_inside_a_scope(
    sites, receivers, root, scope
):
    boss = await receivers("boss")
    await boss.present(_grant(root, 4, **scope))
    assert await _reached(sites, boss) == {"coast", "west"}
    await boss.present(_grant(root, 1))  # lowers trust for everyone
    assert await _reached(sites, boss) == set()
    await boss.present(_grant(root, 4, **scope))
    assert await _reached(sites, boss) == {"coast", "west"}


async def test_a_grant_for_another_domain_or_party_of_the_holder_counts_nowhere(sites, receivers, root):
    boss = await receivers("boss")
    await boss.present(_grant(root, 4, domain="earth", prefix="other"))
    assert await _reached(sites, boss) == set()
    await boss.present(_grant(root, 4, domain="earth", prefix="control"))
    assert await _reached(sites, boss) == set(sites)


async def test_a_receivers_own_regional_grant_holds_while_it_is_there(sites, receivers, root):
    farm = sites["coast"]._client
    chain = root.grant(
        "farm",
        {"_trust_level": 5},
        tier=1,
        now=time.time(),
        lifetime_s=3600,
        scope=documents.GrantScope(region="west"),
    )
    await farm.present(chain)

    async def trusted() -> list[str]:
        actual = await queries.list_receivers(farm._bus, where="_trust_level = 5")
        return [receiver.receiver for receiver in actual.receivers]

    assert await trusted() == ["farm/coast", "farm/west"]
    await sites["west"].update(region="east")
    await sites["lost"].update(region="west")
    assert await trusted() == ["farm/coast", "farm/lost"]


@pytest.fixture
async def granted(notifier, receivers, root, monkeypatch):
    """Two receivers with equal grants, of which the first ends in an hour; and a clock to move."""
    moved = fake_wall_clock(monkeypatch)

    async def start(settings: settings_.NotifySettings):
        served = await notifier(settings=settings, root=root.key.public, domain="earth")
        farm = await receivers("farm")
        for model in (SITE, COMMAND):
            await farm.define(model)
        sites = [await farm.advertise(name, "Site", policy="command") for name in ("hour", "day")]
        for site, lifetime_s in zip(sites, (3_600, 86_400), strict=True):
            scope = documents.GrantScope(prefix=site.name)
            await farm.present(
                root.grant(
                    "farm", {"_trust_level": 5}, tier=1, now=time.time(), lifetime_s=lifetime_s, scope=scope
                )
            )
        return served, sites, moved

    return start


def fake_wall_clock(monkeypatch) -> list[float]:
    """Seconds by which the notifier's wall clock is ahead, in a list of one."""
    ahead = [0.0]
    monkeypatch.setattr(notifier_grants, "time", SimpleNamespace(time=lambda: time.time() + ahead[0]))
    return ahead


@pytest.mark.parametrize("durable", [False, True])
async def test_an_event_after_the_end_of_a_receivers_grant_does_not_reach_it(granted, receivers, durable):
    """Although the notifier's own look at its grants is not due yet."""
    settings = msgspec.structs.replace(QUICK, beat_s=60.0)
    _, (hour, day), ahead = await granted(settings)
    sender = (await receivers("boss")).sender("control")
    await sender.send("command", {"action": "before"}, to="_trust_level = 5", durable=durable)
    for site in (hour, day):
        assert (await site.next(timeout_s=30))["action"] == "before"
    ahead[0] = 3_601.0
    await sender.send("command", {"action": "after"}, to="_trust_level = 5", durable=durable)
    await sender.send("command", {"action": "end"}, durable=durable)
    for site, expected in ((hour, ["end"]), (day, ["after", "end"])):
        assert [(await site.next(timeout_s=30))["action"] for _ in expected] == expected


async def test_the_end_of_a_receivers_grant_shows_without_any_event(granted):
    served, _, ahead = await granted(QUICK)

    def trusted() -> list[str]:
        return [
            name for name in served.engine.receivers() if served.engine.state_of(name).get("_trust_level")
        ]

    assert sorted(trusted()) == ["farm/day", "farm/hour"]
    ahead[0] = 3_601.0
    await eventually(lambda: trusted() == ["farm/day"])


async def test_attributes_of_many_parties_are_those_granted_to_each(notifier, receivers, root, monkeypatch):
    monkeypatch.setattr(notifier_grants, "AT_ONCE", 7)
    served = await notifier(root=root.key.public, domain="earth")
    dice = random.Random(5)
    held = {f"{dice.choice(['boss', 'farm'])}/{number}": dice.choice(REGIONS) for number in range(60)}
    first, other = [
        receiver[5:] for receiver, region in held.items() if receiver.startswith("boss/") and region
    ][:2]
    for receiver, region in held.items():
        served.engine.join(receiver, SITE, {} if region is None else {"region": region}, None)
    boss = await receivers("boss")
    seen = set()
    there = held[f"boss/{other}"]
    granted: list[dict[str, Any]] = [
        {},
        {"region": "a"},
        {"prefix": first},
        {"region": there, "prefix": other},
    ]
    for level, scope in enumerate(granted):
        await boss.present(_grant(root, level, **scope))
        for receiver, region in held.items():
            process, _, name = receiver.partition("/")
            expected, _ = served.known.receiver_attributes(process, name, region or "", now=time.time())
            entry = served.engine.state_of(receiver).get("_trust_level")
            assert entry == expected.get("_trust_level"), receiver
            seen.add(entry)
    assert seen >= {None, 0, 1, 2, 3}


async def test_what_is_granted_rules_out_no_notifier_that_holds_receivers(notifier, receivers, root):
    """Summaries contain the states of receivers; grants may begin and end between two summaries."""
    trusts: dict[str, Any] = {"root": root.key.public, "domain": "earth"}
    settings = settings_.NotifySettings(lease_s=5.0, beat_s=1.0)
    first = await notifier("n1", settings, **trusts)
    second = await notifier("n2", settings, serving=False, **trusts)
    await eventually(
        lambda: len(first.members.shards()) == len(second.members.shards()) == 16 and second.held
    )
    farm, boss = await receivers("farm"), await receivers("boss")
    await farm.define(models.Model("Guard", {"region": types.STRING, "_r": types.STRING, "_b": types.BOOL}))
    await farm.define(COMMAND)
    guards = [
        await farm.advertise(f"guard-{number}", "Guard", {"region": "west"}, policy="sender._b")
        for number in range(12)
    ]
    assert min(len(first.engine), len(second.engine)) > 0

    def grant(holder: str, name: str, value: Any, **scope: Any) -> Any:
        where = documents.GrantScope(**scope)
        return root.grant(holder, {name: value}, tier=1, now=time.time(), lifetime_s=3600, scope=where)

    await boss.present(grant("boss", "_b", True, region="west"))
    await boss.present(grant("boss", "_b", False, region="east"))
    await boss.sender("control").send("command", {"action": "hear"})
    await farm.present(grant("farm", "_r", "here"))
    await boss.sender("control").send("command", {"action": "here"}, to="_r = 'here'")
    for guard in guards:
        assert [(await guard.next(timeout_s=30))["action"] for _ in range(2)] == ["hear", "here"]


def test_random_scopes_are_decided_as_each_receiver_would():
    dice = random.Random(11)
    for _ in range(30):
        made = matcher.Matcher(kernels=kernels_numpy)
        policies = [
            parser.parse(f"e AND sender._l {sign} {level}") for sign in ("<", ">=") for level in (1, 2, 3)
        ]
        policies.append(parser.parse("sender._l IS NULL"))
        held: dict[str, tuple[dict[str, types.Value], ast.Condition]] = {}
        for number in range(60):
            receiver, region = f"p{number % 5}/{number}", dice.choice(REGIONS)
            held[receiver] = ({} if region is None else {"region": region}, dice.choice(policies))
            made.join(receiver, SITE, *held[receiver])
        within = tuple(
            protocol.ScopedAttributes(
                attributes={"_l": dice.randrange(4)},
                region=dice.choice(["", "a", "a/b", "b"]),
                audience=dice.choice([(), ("p1",), ("p2/7", "p3")]),
            )
            for _ in range(dice.choice([0, 1, 2, 3, 70]))
        )
        event = protocol.AdmittedEvent(id="1", type="e", sender="s/s", attributes={"_l": 2}, within=within)
        address = parser.parse(dice.choice(["TRUE", "region IS NOT NULL", "region = 'a'"]))
        asks = python.compile(address)
        expected = {
            receiver
            for receiver, (state, policy) in held.items()
            if asks(state.get)
            and python.compile(policy)(grant_scopes.attributes_seen_by(event, receiver, state).get)
        }
        assert set(made.names(grant_scopes.find(made, event, address))) == expected
