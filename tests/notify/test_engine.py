from __future__ import annotations

import random
import tracemalloc
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies

from muster.notify import models
from muster.notify.matcher import kernels_numpy, matcher, opcodes, policy_index, receiver_columns
from muster.predicates import types
from muster.predicates.syntax import parser
from tests.notify import reference, worlds

WEB = models.Model("Web", {"application": types.STRING, "load": types.FLOAT, "port": types.INT})


def test_random_worlds_are_decided_as_the_reference_decides_them(kernels):
    sent = delivered = 0
    for seed in range(12):
        more = worlds.play(random.Random(seed), kernels)
        sent, delivered = sent + more[0], delivered + more[1]
    assert sent > 300
    assert delivered > 3 * sent  # not agreement about nothing


@hypothesis.given(strategies.integers(min_value=0))
@hypothesis.settings(max_examples=25, deadline=None)
def test_any_world(seed):
    worlds.play(random.Random(seed), kernels_numpy, receivers=25, steps=25)


def test_many_at_once_are_the_same_as_one_by_one(kernels):
    dice = random.Random(7)
    names = [f"p{number}" for number in range(5000)]
    cells: dict[str, list[Any]] = {
        "application": [dice.choice(["IIS", "Apache", None]) for _ in names],
        "load": [dice.choice([None, round(dice.random(), 2)]) for _ in names],
        "port": [dice.randrange(10) for _ in names],
    }
    policies = [parser.parse(f"level >= {level}") for level in range(50)]
    which = np.array([dice.randrange(50) for _ in names])
    ours, plainly = matcher.Matcher(kernels=kernels), reference.ReferenceMatcher()
    ours.join_many(names, WEB, cells, policies, which)
    for place, name in enumerate(names):
        plainly.join(name, {key: listed[place] for key, listed in cells.items()}, policies[which[place]])
    values = names[::7]
    ours.update(values, {"load": [0.5] * len(values)})
    for name in values:
        plainly.update(name, {"load": 0.5})
    for text in (
        "TRUE",
        "load < 0.5",
        "application = 'IIS' AND load >= 0.5",
        "load = 0.5",
        "port <> 3",
        "FALSE",
    ):
        address = parser.parse(text)
        for level in (-1, 0, 10, 60):
            match = sorted(plainly.match({"level": level}, address))
            assert sorted(ours.match({"level": level}, address)) == match


def test_both_sides_find_the_same_receivers(kernels):
    """Whether the address or the policies are evaluated first affects only the speed."""
    dice = random.Random(9)
    ours = matcher.Matcher(kernels=kernels)
    names = [f"p{number}" for number in range(3000)]
    # From one conjunction to as many as are indexed, so that they begin and end anywhere in a word.
    wide = [
        " OR ".join(
            f"(alert AND level = {dice.randrange(100)})" for _ in range(dice.choice([1, 2, 3, 40, 64]))
        )
        for _ in range(50)
    ]
    policies = [None, *map(parser.parse, wide)]
    which = np.array([dice.randrange(len(policies)) for _ in names])
    ours.join_many(names, WEB, {"load": [dice.random() for _ in names]}, policies, which)
    for name in dice.sample(names, 300):
        ours.leave(name)
    table, index = ours.tables[0], ours.policies
    values = 0
    for level in range(100):
        index.evaluate({"alert": True, "level": level})
        means, hits = table.address(parser.parse(f"load < {dice.choice([0.01, 0.5, 2])}"))
        first, other = (np.zeros(hits + opcodes.SPARE, np.int32) for _ in range(2))
        count = kernels.by_address(means, hits, table.policy_of, index.parts, index.true, first)
        again = kernels.by_policy(
            index.true, index.owner, index.room, table.spans, table.members, means, other
        )
        assert sorted(first[:count]) == sorted(other[:again])
        values += count
    assert values > 500


def test_a_model_that_grows_leaves_the_columns_right_that_were_there(kernels):
    ours = matcher.Matcher(kernels=kernels)
    pair = models.Model("Pair", {"a": types.STRING, "b": types.STRING})
    ours.join("p", pair, {"a": "x", "b": "y"}, parser.parse("TRUE"))
    ours.join("q", pair, {"a": "y"}, parser.parse("TRUE"))
    alike = parser.parse("a = b")
    assert ours.match({}, alike) == []
    ours.define(models.Model("Pair", {**pair.attributes, "c": types.STRING}))
    ours.update(["p"], {"a": ["y"]})
    assert ours.match({}, alike) == ["p"]


def test_a_slot_that_is_used_again_keeps_nothing_of_its_last_receiver(kernels):
    ours = matcher.Matcher(kernels=kernels)
    ours.join("a", WEB, {"application": "IIS", "load": 0.5, "port": 1}, parser.parse("TRUE"), durable=True)
    ours.leave("a")
    ours.join("b", WEB, {}, parser.parse("TRUE"))
    assert ours.state_of("b") == {}
    assert not ours.is_durable("b")
    assert ours.match({}, parser.parse("application IS NULL AND load IS NULL AND port IS NULL")) == ["b"]


def test_unused_words_are_dropped(kernels):
    ours = matcher.Matcher(kernels=kernels)
    ours.join("a", WEB, {}, parser.parse("TRUE"))
    for number in range(10_000):
        ours.update(["a"], {"application": [f"v{number}"]})
    column = ours.tables[0].columns["application"]
    assert isinstance(column, receiver_columns.WordColumn)
    assert len(column._words) < 6000
    assert ours.match({}, parser.parse("application = 'v9999'")) == ["a"]


def test_long_words_are_dropped_when_no_receiver_has_them(kernels):
    ours, plainly = matcher.Matcher(kernels=kernels), reference.ReferenceMatcher()
    for name in ("a", "b"):
        ours.join(name, WEB, {"application": "IIS"}, parser.parse("TRUE"))
        plainly.join(name, {"application": "IIS"}, parser.parse("TRUE"))
    tracemalloc.start()
    try:
        for number in range(100):
            text = f"{number}".rjust(200_000)
            ours.update(["a"], {"application": [text]})
            plainly.update("a", {"application": text})
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20
    for address in map(
        parser.parse, ("application = 'IIS'", "application LIKE '%99'", "application IS NULL")
    ):
        assert sorted(ours.match({}, address)) == sorted(plainly.match({}, address))


def test_values_of_events_are_not_kept_without_bound(monkeypatch):
    monkeypatch.setattr(policy_index, "ROWS_BYTES_MAX", 1 << 20)
    ours = matcher.Matcher(kernels=kernels_numpy)
    ours.join("a", WEB, {}, parser.parse("word LIKE 'a%' OR words CONTAINS 'a'"))
    everybody = parser.parse("TRUE")
    tracemalloc.start()
    try:
        for number in range(200):
            text = f"{number}".rjust(100_000)
            event = {"word": text} if number % 2 else {"words": frozenset({text})}
            assert ours.match(event, everybody) == []
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20
    assert ours.match({"word": "ab"}, everybody) == ["a"]


def test_unused_policies_are_dropped(kernels):
    ours = matcher.Matcher(kernels=kernels)
    ours.join("a", WEB, {}, None)
    for number in range(3000):
        ours.set_policy("a", parser.parse(f"level = {number}"))
    assert len(ours.policies) == 1
    assert ours.match({"level": 2999}, parser.parse("TRUE")) == ["a"]
    assert ours.match({"level": 2998}, parser.parse("TRUE")) == []


def test_the_policies_that_remain_are_still_asked_when_others_were_forgotten(kernels):
    """Many come and go, so that those in between are renumbered."""
    dice = random.Random(3)
    ours, plainly = matcher.Matcher(kernels=kernels), reference.ReferenceMatcher()
    clauses = (
        "alert",
        "level > 3",
        "word LIKE 'a%'",
        "level = other + 1",
        "word = 'a'",
        "NOT alert",
        "FALSE",
    )
    there: dict[str, str] = {}
    for step in range(800):
        if len(there) > 40:
            gone = dice.choice(sorted(there))
            del there[gone]
            ours.leave(gone)
            plainly.leave(gone)
        own = " OR ".join(
            f"({dice.choice(clauses)} AND level <> {step % 700})" for _ in range(dice.randrange(2, 5))
        )
        there[f"p{step}"] = own
        ours.join(f"p{step}", WEB, {}, own)
        plainly.join(f"p{step}", {}, parser.parse(own))
        if step % 50 == 0:
            event: dict[str, Any] = {
                "alert": step % 100 == 0,
                "level": dice.randrange(6),
                "word": "ab",
                "other": 2,
            }
            everybody = parser.parse("TRUE")
            assert sorted(ours.match(event, everybody)) == sorted(plainly.match(event, everybody))
    assert len(ours.policies) < 50


def test_receivers_that_change_their_policies_are_each_found_once(kernels):
    """Stretches of members move and are put together again, one receiver at a time and many at once."""
    dice = random.Random(4)
    ours = matcher.Matcher(kernels=kernels)
    policies = [f"level = {number}" for number in range(5)]
    own: dict[str, int] = {}
    for step in range(60):
        if step % 3 == 0:
            new = {f"p{step}-{number}": dice.randrange(5) for number in range(dice.choice([20, 300]))}
            ours.join_many(list(new), WEB, {}, policies, np.array(list(new.values())))
            own |= new
        for name in dice.sample(sorted(own), min(len(own), 150)):
            own[name] = dice.randrange(5)
            ours.set_policy(name, policies[own[name]])
        for name in dice.sample(sorted(own), 5):
            del own[name]
            ours.leave(name)
        if step == 50:
            ours.tidy()
        for level in range(5):
            expected = sorted(name for name, number in own.items() if number == level)
            assert sorted(ours.match({"level": level}, parser.parse("TRUE"))) == expected
    assert len(own) > 1500


def test_a_policy_that_can_never_be_true_accepts_nothing(kernels):
    """It has no conjunction, and must not be confused with the next row."""
    ours = matcher.Matcher(kernels=kernels)
    ours.join("never", WEB, {"load": 0.1}, parser.parse("alert AND NOT alert"))
    ours.join("always", WEB, {"load": 0.2}, parser.parse("alert"))
    for number in range(200):
        ours.join(f"p{number}", WEB, {"load": 0.9}, parser.parse("alert"))
    assert ours.match({"alert": True}, parser.parse("load < 0.5")) == ["always"]
    assert "never" not in ours.match({"alert": True}, parser.parse("TRUE"))


def test_no_word_of_a_policy_matches_all_others(kernels):
    ours = matcher.Matcher(kernels=kernels)
    ours.join("p", WEB, {}, parser.parse("word = '\ufdd0\ufdd1'"))
    everybody = parser.parse("TRUE")
    assert ours.match({"word": "other"}, everybody) == []
    assert ours.match({"word": "\ufdd0\ufdd1"}, everybody) == ["p"]


def test_kernels_can_be_changed_while_parties_are_held():
    held = matcher.Matcher(kernels=kernels_numpy)
    held.join("a", WEB, {"application": "IIS", "load": 0.9}, parser.parse("alert"))
    held.use(matcher.warm_up())
    held.join("b", WEB, {"application": "IIS", "load": 0.1}, parser.parse("alert"))
    held.update(["a"], {"load": [0.5]})
    busy = parser.parse("application = 'IIS' AND load > 0.4")
    assert held.match({"alert": True}, busy) == ["a"]
    assert held.match({"alert": False}, busy) == []
