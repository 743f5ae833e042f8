"""Searches: missing parts, pages, and other requests during a search."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest

from muster.bus.http import server as http_server
from muster.core import errors
from muster.inform import client, protocol, search_plan
from muster.inform.mounts import base as mounts
from muster.inform.mounts import registry
from muster.inform.node import node as node_node
from muster.inform.node import search
from muster.inform.node.replicas import sorted_keys
from muster.predicates.backends import python
from muster.predicates.syntax import parser
from muster.testing.eventually import eventually


def test_keys_stay_in_their_order(monkeypatch):
    monkeypatch.setattr(sorted_keys, "BLOCK", 4)
    chance = random.Random(7)
    keys, there = sorted_keys.SortedKeys(), set()
    for _ in range(3_000):
        key = f"k{chance.randrange(200)}"
        if chance.random() < 0.6:
            keys.add(key)
            there.add(key)
        else:
            keys.discard(key)
            there.discard(key)
        expected = f"k{chance.randrange(200)}"
        for itself in (False, True):
            behind = sorted(item for item in there if item > expected or (itself and item == expected))
            actual: list[str] = []
            while values := keys.after(actual[-1] if actual else expected, 3, itself=itself and not actual):
                actual += values
            assert actual == behind


PREDICATES = (
    "TRUE",
    "floor = 2",
    "floor = 2.0 AND name = 'a'",
    "name = 'a'",
    "NOT (name = 'a')",
    "name <> 'a' AND floor > 1",
    "name IN ('a', 'é') AND NOT (floor = 3)",
    "name LIKE 'a%' OR floor = 3",
    "name IS NULL",
    "name IS NOT NULL AND key LIKE 'p/%'",
    "tags CONTAINS 'x'",
    "NOT (tags CONTAINS 'x')",
    "floor + 1 > 2 AND lit",
    "key = 'p/1'",
    "key IN ('q/2', 'p/1') AND name = 'a'",
    "key LIKE 'p/_' AND key LIKE '%1'",
    "key LIKE 'p/!_%' ESCAPE '!'",
    "version > 1 AND writer = 'ann'",
    "key = name",
    "key = 5",
)
FACTS: tuple[dict[str, Any], ...] = (
    {},
    {"floor": 2, "name": "a", "tags": ["x", "y"], "lit": True},
    {"floor": 2.0, "name": "b" * 40, "tags": ["y"], "lit": False},
    {"floor": 3, "name": "é"},
    {"name": 1, "tags": "x"},
    {"floor": "2", "name": "p/1", "key": "other"},
)


def test_a_plan_leaves_out_nothing_that_its_predicate_selects():
    for predicate in PREDICATES:
        plan, matches = search_plan.plan(predicate), python.compile(parser.parse(predicate))
        for key, facts in itertools.product(("p/1", "p/_2", "p/", "q/2", "p"), FACTS):
            visible = _seen({**facts, "key": key, "version": 2, "writer": "ann"})
            assert plan.selects(key, 2, "ann", dict(facts) if plan.attribute_names else {}) is matches(
                visible.get
            )
            if not matches(visible.get):
                continue
            assert all(needle in protocol.encode(facts) for needle in plan.needles), (predicate, facts)
            assert key.startswith(plan.key_prefix)
            assert plan.keys is None or key in plan.keys
            assert plan.reaches(key[:1])


def test_a_plan_knows_what_is_out_of_its_reach():
    assert search_plan.plan("key LIKE 'service/%' AND kind = 'service'").key_prefix == "service/"
    assert not search_plan.plan("key LIKE 'service/%'").reaches("mount/lab/")
    assert search_plan.plan("key LIKE 'mou%'").reaches("mount/lab/")
    assert search_plan.plan("key = 'mount/lab/x'").reaches("mount/lab/")
    assert not search_plan.plan("key IN ('a', 'b')").reaches("mount/lab/")
    assert search_plan.plan("version = 1").attribute_names == ()


def fill(node: node_node.InformationNode, count: int) -> None:
    """Contexts as if they had come from the log, in no order."""
    numbers = list(range(count))
    random.Random(3).shuffle(numbers)
    for number in numbers:
        attributes = protocol.encode({"number": number, "even": number % 2 == 0})
        record = protocol.ContextRecord(
            f"c/{number:05}", (node.name,), 1, node.name, b"v", attributes, number + 1
        )
        node.replicas.apply(record, number + 1, 0.0)


async def test_a_search_is_one_of_many_answers_and_others_have_their_turns(start_node, inform, monkeypatch):
    node = await start_node("n1")
    fill(node, 3_000)
    monkeypatch.setattr(search, "SLICE_S", 0.0)
    monkeypatch.setattr(search, "SEARCH_S", 0.0)  # each answer is one slice, and the first are of the order
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    matches = await inform.find("number >= 2990 AND even")
    other.cancel()
    assert [context.attributes["number"] for context in matches.contexts] == [2990, 2992, 2994, 2996, 2998]
    assert not matches.more
    assert turns > 2 * 3_000 / search.SLICE_KEYS


class Moving:
    """Contexts of one node that come, change, expire and go; and what each has been since a search began."""

    def __init__(self, node: node_node.InformationNode, chance: random.Random) -> None:
        self._node = node
        self._chance = chance
        self._sequence = 0
        self._now: dict[str, dict[str, Any] | None] = {}  # None: it is not there
        self.been: dict[str, list[dict[str, Any] | None]] = {}

    def change(self) -> None:
        self._sequence += 1
        node, chance = self._node, self._chance
        key = f"{chance.choice('pq')}/{chance.choice(['', '_'])}{chance.randrange(60)}"
        what = chance.random()
        facts = dict(chance.choice(FACTS)) if what < 0.7 else None
        record = protocol.ContextRecord(
            key,
            (node.name,),
            1,
            node.name,
            None if 0.7 <= what < 0.9 else b"v",
            protocol.encode(facts) if facts else b"",
            expires_at_ns=1 if what >= 0.9 else 0,
            writer="ann",
        )
        node.replicas.apply(record, self._sequence, 0.0)
        visible = None if facts is None else {**facts, "key": key, "version": self._sequence, "writer": "ann"}
        self._now[key] = visible
        self.been.setdefault(key, [None]).append(visible)

    def begin(self) -> None:
        self.been = {key: [visible] for key, visible in self._now.items()}


@pytest.mark.parametrize("seed", range(3))
async def test_a_search_finds_what_a_plain_filter_finds_while_contexts_come_and_go(
    start_node, inform, monkeypatch, seed
):
    node = await start_node("n1")
    chance = random.Random(seed)
    moving = Moving(node, chance)
    for _ in range(300):
        moving.change()
    monkeypatch.setattr(search, "SLICE_KEYS", 20)
    monkeypatch.setattr(search, "SLICE_S", 0.0)
    monkeypatch.setattr(search, "SEARCH_S", 0.0)

    slice_ = search.ContextSearch._slice

    def changing(self: search.ContextSearch, plan: search_plan.SearchPlan, after: str) -> search._Slice:
        moving.change()
        made = slice_(self, plan, after)
        for _ in range(5):  # before their values are read
            moving.change()
        return made

    monkeypatch.setattr(search.ContextSearch, "_slice", changing)
    for predicate in PREDICATES:
        moving.begin()
        matches = python.compile(parser.parse(predicate))
        actual: list[str] = []
        after, more = "", True
        while more:
            page = await inform.find(predicate, limit=chance.choice([10, 10_000]), after=after)
            for context in page.contexts:
                own = {"key": context.key, "version": context.version, "writer": context.writer}
                assert matches(_seen({**context.attributes, **own}).get), (predicate, context)
                actual.append(context.key)
            after, more = page.reached, page.more
        assert actual == sorted(set(actual)), "each once, in their order"
        for key, been in moving.been.items():
            fits = [visible is not None and matches(_seen(visible).get) for visible in been]
            assert all(fits) <= (key in actual) <= any(fits), (predicate, key, been)


def _seen(visible: dict[str, Any]) -> dict[str, Any]:
    return {name: frozenset(item) if isinstance(item, list) else item for name, item in visible.items()}


async def test_a_search_that_times_out_reports_its_position(start_node, inform, monkeypatch):
    node = await start_node("n1")
    fill(node, 500)
    assert not (await inform.find("number = 1")).more  # the order is made
    monkeypatch.setattr(search, "SLICE_S", 0.0)
    monkeypatch.setattr(search, "SEARCH_S", 0.0)
    parts = [await inform.find("number = 499", within_s=0.0)]
    while parts[-1].more:
        parts.append(await inform.find("number = 499", within_s=0.0, after=parts[-1].reached))
    assert len(parts) > 500 // search.SLICE_KEYS
    assert [context.key for part in parts for context in part.contexts] == ["c/00499"]


async def test_a_context_whose_primary_moves_is_found_once(start_node, inform):
    nodes = [await start_node(name) for name in ("n1", "n2")]
    await eventually(lambda: all(len(node.directory.nodes) == 1 for node in nodes))
    for sequence, node in enumerate(nodes, 1):  # the first does not know yet that the second has taken over
        holders = (node.name, *(other.name for other in nodes if other is not node))
        record = protocol.ContextRecord("k", holders, sequence, node.name, b"%d" % sequence)
        node.replicas.apply(record, sequence, 0.0)
    assert [(context.key, context.value) for context in (await inform.find("TRUE")).contexts] == [("k", b"2")]


@pytest.mark.parametrize("at_once", [2, 200])
async def test_a_context_whose_primary_moves_behind_the_search_is_found(
    start_node, inform, monkeypatch, at_once
):
    first, second = [await start_node(name, replicas=1) for name in ("n1", "n2")]
    await eventually(lambda: all(len(node.directory.nodes) == 1 for node in (first, second)))
    monkeypatch.setattr(search, "MOVED_MAX", at_once)
    keys = [f"k{number}" for number in range(5)]
    for key in (*keys, "x-deleted", "x-changed"):
        await client.InformClient(inform._bus, node="n1").put(key, b"v", attributes={"a": 1})
    passed, moved = asyncio.Event(), asyncio.Event()
    here = search.ContextSearch.find_here

    async def find_here(
        self: search.ContextSearch, contexts: protocol.FindContexts
    ) -> protocol.PartialFindResult:
        if self is first.search:
            await moved.wait()
        local_matches = await here(self, contexts)
        passed.set()
        return local_matches

    monkeypatch.setattr(search.ContextSearch, "find_here", find_here)
    searching = asyncio.create_task(inform.find("a = 1"))
    await passed.wait()  # by the second, which has none of them yet
    for key in (*keys, "x-deleted", "x-changed"):
        await first.primary.place(key, ("n2",), before=("n1",))
    await second.freshness.refresh(10.0)
    await inform.delete("x-deleted")
    await inform.put("x-changed", b"w", attributes={"a": 2})
    assert first.replicas.permanent == 0
    moved.set()
    matches = await searching
    assert ([context.key for context in matches.contexts], matches.more, matches.silent) == (keys, False, [])
    assert len((await inform.find("a = 2")).contexts) == 1


async def test_a_limit_is_reported_and_the_search_continues_after_it(start_node, inform):
    node = await start_node("n1")
    fill(node, 50)
    matches = await inform.find("even", limit=20)
    assert (len(matches.contexts), matches.more, matches.reached) == (20, True, "c/00038")
    rest = await inform.find("even", limit=20, after=matches.reached)
    assert ([context.key for context in rest.contexts], rest.more) == (
        [f"c/000{n}" for n in (40, 42, 44, 46, 48)],
        False,
    )
    exactly = await inform.find("even", limit=25)
    assert (len(exactly.contexts), exactly.more) == (25, False)
    by_prefix = await inform.find("key LIKE 'c/0001%'")
    assert [context.key for context in by_prefix.contexts] == [f"c/0001{n}" for n in range(10)]


async def test_keys_that_come_and_go_are_in_the_order(start_node, inform):
    await start_node("n1")
    assert (await inform.find("TRUE")).contexts == []
    for key in ("b", "a", "c"):
        await inform.put(key, b"")
    await inform.delete("b")
    assert [context.key for context in (await inform.find("TRUE")).contexts] == ["a", "c"]
    await inform.put("b", b"again")
    assert [context.key for context in (await inform.find("TRUE")).contexts] == ["a", "b", "c"]


async def test_searches_beyond_what_a_node_takes_are_refused(start_node, connect, monkeypatch):
    monkeypatch.setattr(search, "SEARCHES_MAX", 0)
    await start_node("n1")
    with pytest.raises(errors.Overloaded, match="searches"):
        await client.InformClient(await connect("bob")).find("TRUE")


async def test_a_mount_is_asked_only_where_it_may_have_something(start_node, inform, monkeypatch):
    monkeypatch.setattr(mounts, "ENTRIES_MAX", 3)
    asked = 0

    def answer(_: object) -> http_server.HttpResponse:
        nonlocal asked
        asked += 1
        # In base 64: k1 to k3, each with {"tags": ["edge"]}.
        entries = [{"key": key, "value": "eyJ0YWdzIjogWyJlZGdlIl19"} for key in ("azE=", "azI=", "azM=")]
        return http_server.text(json.dumps({"kvs": entries}))

    async with await http_server.serve({}, post_routes={"/v3/kv/range": answer}) as server:
        await start_node("n1", mounts=(registry.MountSettings(name="old", kind="etcd", url=server.url),))
        matches = await inform.find("tags CONTAINS 'edge'", limit=2)
        assert [context.key for context in matches.contexts] == ["mount/old/k1", "mount/old/k2"]
        assert (matches.more, matches.reached, matches.cut) == (True, "mount/old/k2", ["old"])
        assert {context.stamp for context in matches.contexts} == {""}, "no clock of ours has seen it"
        rest = await inform.find("tags CONTAINS 'edge'", after=matches.reached)
        assert ([context.key for context in rest.contexts], rest.more) == (["mount/old/k3"], False)
        before = asked
        await inform.find("key LIKE 'service/%'")
        await inform.find("TRUE", after="mount/z")
        assert asked == before
