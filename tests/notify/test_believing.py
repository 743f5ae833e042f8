"""What all notifiers know, when several are told of it at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from muster.core import errors
from muster.notify import client, service
from muster.notify import model as models
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust import grants, nkeys

TIMES = 12  # two notifiers share the asking by chance: often enough, each has one of the two


def _see_each_other(*served: service.Notifier) -> bool:
    return all(len(one.members.others()) == len(served) - 1 for one in served)


async def _both(one: client.Parties, other: client.Parties, name: str) -> Sequence[object]:
    return await asyncio.gather(
        one.define(models.Model(name, {"x": types.INT})),
        other.define(models.Model(name, {"x": types.STRING})),
        return_exceptions=True,
    )


async def test_of_two_unlike_models_of_one_name_one_is_refused_and_all_know_the_other(notifier, parties):
    first, second = await notifier("n1", serving=False), await notifier("n2", serving=False)
    await eventually(lambda: _see_each_other(first, second))
    one, other = await parties("p1"), await parties("p2")
    for number in range(TIMES):
        outcomes = await _both(one, other, f"Model{number}")
        assert {type(outcome) for outcome in outcomes} == {type(None), errors.Conflict}
    assert first.known.vocabulary.parties == second.known.vocabulary.parties
    assert len(first.known.vocabulary.parties) == TIMES
    assert not first.counts["bad-record"] + second.counts["bad-record"]


async def test_of_two_lists_of_revocations_with_one_number_one_is_refused(notifier, parties):
    """Whoever was told that a grant is revoked can rely on it."""
    root = grants.Authority(nkeys.KeyPair.create(nkeys.Kind.ACCOUNT))
    trusts = {"root": root.key.public, "domain": "here", "serving": False}
    first, second = await notifier("n1", **trusts), await notifier("n2", **trusts)
    await eventually(lambda: _see_each_other(first, second))
    one, other = await parties("p1"), await parties("p2")
    serials: set[str] = set()
    for number in range(1, TIMES + 1):
        new = (f"{number:031d}a", f"{number:031d}b")
        lists = [root.revoke({*serials, serial}, number=number, now=time.time()) for serial in new]
        outcomes = await asyncio.gather(one.revoke(lists[0]), other.revoke(lists[1]), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {type(None), errors.Refused}
        serials.add(new[outcomes.index(None)])
        for served in (first, second):
            assert served.known.revocations.lists[root.key.public].serials == serials
