"""Models and grants of all notifiers, with concurrent submissions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.core import errors
from muster.notify import authorities, client, models, protocol, queries
from muster.notify.notifier import notifier as notifier_notifier
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust import documents, grants, nkeys

TIMES = 12  # two notifiers receive the requests at random: often enough, each has one of the two


@pytest.fixture
def root():
    return grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT))


def _see_each_other(*served: notifier_notifier.Notifier) -> bool:
    return all(len(notifier.members.others()) == len(served) - 1 for notifier in served)


async def _both(
    notify_client: client.NotifyClient, other: client.NotifyClient, name: str
) -> Sequence[object]:
    return await asyncio.gather(
        notify_client.define(models.Model(name, {"x": types.INT})),
        other.define(models.Model(name, {"x": types.STRING})),
        return_exceptions=True,
    )


async def test_one_of_two_different_models_with_the_same_name_is_refused(notifier, receivers):
    first, second = await notifier("n1", serving=False), await notifier("n2", serving=False)
    await eventually(lambda: _see_each_other(first, second))
    item, other = await receivers("p1"), await receivers("p2")
    for number in range(TIMES):
        outcomes = await _both(item, other, f"Model{number}")
        assert {type(outcome) for outcome in outcomes} == {type(None), errors.Conflict}
    assert first.known.vocabulary.receivers == second.known.vocabulary.receivers
    assert len(first.known.vocabulary.receivers) == TIMES
    assert not first.counts["bad-record"] + second.counts["bad-record"]


async def test_one_of_two_revocation_lists_with_the_same_number_is_refused(notifier, receivers, root):
    """A confirmed revocation is effective."""
    trusts = {"root": root.key.public, "domain": "here", "serving": False}
    first, second = await notifier("n1", **trusts), await notifier("n2", **trusts)
    await eventually(lambda: _see_each_other(first, second))
    item, other = await receivers("p1"), await receivers("p2")
    serials: set[str] = set()
    for number in range(1, TIMES + 1):
        new = (f"{number:031d}a", f"{number:031d}b")
        lists = [root.revoke({*serials, serial}, number=number, now=time.time()) for serial in new]
        outcomes = await asyncio.gather(item.revoke(lists[0]), other.revoke(lists[1]), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {type(None), errors.Refused}
        serials.add(new[outcomes.index(None)])
        for served in (first, second):
            assert served.known.revocations.lists[root.key.public].serials == serials


async def test_a_grant_that_is_long_over_is_forgotten(notifier, receivers, connect, root, monkeypatch):
    """Otherwise hourly grants would fill the bucket, and no list would fit into it."""
    monkeypatch.setattr(authorities, "SHOWN_S", 1.0)
    served = await notifier(root=root.key.public, domain="here", serving=False)
    boss = await receivers("boss")
    await boss.present(root.grant("boss", {"_rank": 1}, tier=1, now=time.time(), lifetime_s=5.0))
    await boss.present(root.grant("boss", {"_rank": 2}, tier=1, now=time.time(), lifetime_s=3e9))
    reader = await connect("reader")
    bucket = await reader.key_value(api.KeyValueSettings(protocol.BUCKET))

    async def one_is_left() -> bool:
        return len(await bucket.keys("grant.*")) == 1

    await eventually(one_is_left)
    await eventually(lambda: len(served.known.chains()) == 1)
    assert served.known.effective_attributes("boss", "p", now=time.time()).everywhere["_rank"].value == 2


async def test_revocations_of_grants_that_are_over_leave_the_list(notifier, receivers, connect, root):
    served = await notifier(root=root.key.public, domain="here", serving=False)
    boss, bus = await receivers("boss"), await connect("administration")
    now, revoked = time.time(), []
    for rank, lifetime_s in enumerate((60.0, 3e6)):
        chain = root.grant("boss", {"_rank": rank}, tier=1, now=now, lifetime_s=lifetime_s)
        await boss.present(chain)
        revoked.append(documents.serial_of(chain[0]))

    async def revoke(serials: Sequence[str], at_s: float) -> set[str]:
        await boss.revoke((await queries.next_revocations(bus, root, serials, now=at_s))[1])
        return set(served.known.revocations.lists[root.key.public].serials)

    assert await revoke(revoked[:1], now) == {*revoked[:1]}
    assert await revoke(revoked[1:], now) == {*revoked}
    assert await revoke(["unseen"], now + 3600) == {revoked[1], "unseen"}
    assert await revoke([], now + 1e9) == {"unseen"}


def _take(knows: authorities.AuthorityView, chain: Sequence[str]) -> None:
    knows.apply_entry(f"grant.{documents.serial_of(chain[0])}", msgspec.json.encode(chain))


async def test_a_model_that_gains_a_granted_attribute_has_it_for_receivers_that_joined_before(
    notifier, receivers, root
):
    await notifier(root=root.key.public, domain="here")
    boss = await receivers("boss")
    await boss.define(models.Model("M", {"x": types.INT}))
    await boss.define(models.Model("alert", {"level": types.INT}, models.ModelKind.EVENT))
    receiver = await boss.advertise("r", "M", {"x": 1}, policy="alert")
    await boss.present(root.grant("boss", {"_rank": 7}, tier=1, now=time.time(), lifetime_s=600))
    await boss.define(models.Model("M", {"x": types.INT, "_rank": types.INT}))
    await boss.send("r", "alert", {"level": 1}, to="_rank >= 5")
    assert (await receiver.next(timeout_s=30))["level"] == 1


def test_of_equal_grants_the_last_that_was_handed_in_counts_also_if_it_was_before(root):
    """A notifier that starts reads them in that order: all have to decide alike."""
    knows = authorities.AuthorityView(root=root.key.public, domain="here")
    chains = [root.grant("boss", {"_rank": n}, tier=1, now=1000.0, lifetime_s=60.0) for n in (1, 2)]
    for place in (0, 1, 0):
        _take(knows, chains[place])
        assert knows.effective_attributes("boss", "p", now=1001.0).everywhere["_rank"].value == place + 1


def test_what_was_revoked_stays_so_when_the_list_is_read_before_its_authority_is_known(root):
    key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
    rules: dict[str, Any] = {"_rank": documents.AnyValue()}
    mandates = root.appoint(key.public, "west", tier=2, may_grant=rules, now=1000.0, lifetime_s=60)
    west = grants.Authority(key, mandates)
    chain = west.grant("boss", {"_rank": 1}, tier=1, now=1000.0, lifetime_s=60.0)
    knows = authorities.AuthorityView(root=root.key.public, domain="here")
    sealed = west.revoke({documents.serial_of(chain[0])}, number=1, now=1001.0)
    with pytest.raises(errors.Refused, match="no authority here"):
        knows.revocation_key(sealed)
    knows.apply_entry(f"revoked.{key.public}", sealed.encode())
    with pytest.raises(errors.Forbidden, match="revoked"):
        knows.grant_key(chain, now=1002.0)


async def test_models_and_grants_are_listed_whole_however_many_there_are(notifier, receivers, root):
    """Sending and revoking would fail if all grants had to fit into one message."""
    await notifier(root=root.key.public, domain="here", serving=False)
    boss = await receivers("boss")
    words = types.set_of(*(f"word-{'x' * 200}-{number}" for number in range(60)))
    for number in range(3):
        await boss.define(models.Model(f"M{number}", {f"set_{n}": words for n in range(40)}))
    await boss.define(models.Model("alert", {"level": types.INT}, models.ModelKind.EVENT))
    assert [model.name for model in await queries.list_models(boss._bus)] == ["M0", "M1", "M2", "alert"]
    notes = {f"_note_{number}": "x" * 1000 for number in range(10)}
    chains = [
        root.grant("boss", {**notes, "_n": number}, tier=1, now=time.time(), lifetime_s=60)
        for number in range(120)
    ]
    for chain in chains:
        await boss.present(chain)
    listed = await queries.list_grants(boss._bus)
    assert sorted(grant.serial for grant in listed) == sorted(
        documents.serial_of(chain[0]) for chain in chains
    )
