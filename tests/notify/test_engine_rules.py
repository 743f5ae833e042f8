"""The records of the matcher, rule by rule: receivers, policies, and their validity."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from muster.core import errors
from muster.notify import models
from muster.notify.matcher import kernels_numpy, matcher, opcodes
from muster.predicates import types
from muster.predicates.syntax import parser

WEB = models.Model("Web", {"load": types.FLOAT, "port": types.INT})
DB = models.Model("Db", {"load": types.FLOAT, "rows": types.INT})
EVERYBODY = parser.parse("TRUE")
ALERT = {"alert": True}


@pytest.fixture
def ours() -> matcher.Matcher:
    """Two of each model; ``w2`` accepts nothing."""
    made = matcher.Matcher(kernels=kernels_numpy)
    made.join("w1", WEB, {"load": 0.1}, "alert", at_s=5)
    made.join("w2", WEB, {"load": 0.2}, None)
    made.join("d1", DB, {"load": 0.3}, "alert", durable=True, shard=3)
    made.join("d2", DB, {"load": 0.4}, "level > 2", shard=4)
    return made


def everybody(made: matcher.Matcher) -> list[str]:
    return sorted(made.receivers())


# Who is here.


def test_receivers_are_identified_by_name_in_all_models(ours: matcher.Matcher):
    assert len(ours) == 4
    assert everybody(ours) == ["d1", "d2", "w1", "w2"]
    assert "w1" in ours
    assert "d2" in ours
    assert "x" not in ours
    assert ours.model_of("w1") == ours.known_model_of("w1") == WEB
    assert ours.known_model_of("d1") == DB
    assert ours.known_model_of("x") is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda made: made.model_of("x"),
        lambda made: made.state_of("x"),
        lambda made: made.policy_of("x"),
        lambda made: made.leave("x"),
        lambda made: made.set_policy("x", None),
        lambda made: made.update(["w1", "x", "d1"], {"load": [1.0, 2.0, 3.0]}),
        lambda made: made.places(["w1", "w1", "x"]),
    ],
)
def test_a_party_that_is_not_here_is_named(ours: matcher.Matcher, ask: Any):
    with pytest.raises(errors.NotFound, match="no receiver 'x'"):
        ask(ours)
    assert len(ours) == 4


def test_the_models_of_many_are_known_only_if_all_are_here(ours: matcher.Matcher):
    assert ours.models_of(["w1", "w2"]) == {WEB}
    assert ours.models_of(["w1", "d1"]) == {WEB, DB}
    assert ours.models_of(["d2"]) == {DB}
    assert ours.models_of(["w1", "x"]) is None
    assert ours.models_of(["x"]) is None


def test_a_receiver_that_joins_again_has_its_new_state(ours: matcher.Matcher):
    ours.join("w1", DB, {"rows": 7}, "level > 2")
    assert (len(ours), ours.model_of("w1"), ours.state_of("w1")) == (4, DB, {"rows": 7})
    assert ours.policy_of("w1") == ours.policy_of("d2")
    assert ours.changed_s("w1") == 0
    ours.join_many(["w1", "new"], WEB, {"port": [1, 2]}, ["alert"], np.array([0, 0]), at_s=9)
    assert (len(ours), ours.model_of("w1"), ours.state_of("w1")) == (5, WEB, {"port": 1})
    assert (ours.changed_s("w1"), ours.changed_s("new")) == (9, 9)


def test_of_many_that_join_those_that_were_here_leave_first(ours: matcher.Matcher):
    ours.join_many(["d1", "w1"], WEB, {"port": [1, 2]}, ["level > 2"], np.array([0, 0]))
    assert (len(ours), everybody(ours)) == (4, ["d1", "d2", "w1", "w2"])
    assert (ours.match(ALERT, EVERYBODY), ours.state_of("w1")) == ([], {"port": 2})


def test_a_refused_policy_neither_adds_nor_changes_a_receiver(ours: matcher.Matcher):
    for receiver in ("w1", "new"):
        with pytest.raises(errors.MusterError):
            ours.join(receiver, WEB, {"load": 0.9}, "level >")
    assert everybody(ours) == ["d1", "d2", "w1", "w2"]
    assert ours.state_of("w1") == {"load": 0.1}


def test_a_receiver_that_leaves_removes_only_itself(ours: matcher.Matcher):
    assert len(ours.policies) == 2
    ours.leave("w1")
    assert len(ours.policies) == 2, "d1 has the same"
    ours.leave("d1")
    assert len(ours.policies) == 1
    ours.leave("w2")
    assert (everybody(ours), len(ours)) == (["d2"], 1)
    assert (
        ours.match({"alert": True, "level": 3}, EVERYBODY)
        == ours.names(ours.find_addressed(EVERYBODY))
        == ["d2"]
    )
    assert [len(table) for table in ours.tables] == [0, 1], "their places are free"


def test_a_shard_leaves_at_once(ours: matcher.Matcher):
    ours.join("w3", WEB, {}, "alert", shard=3)
    ours.join("w4", WEB, {}, None, shard=3)
    ours.leave_shard(3)
    assert everybody(ours) == ["d2", "w1", "w2"]
    assert len(ours.policies) == 2
    assert ours.match(ALERT, EVERYBODY) == ["w1"]
    ours.join_many(["w5"], WEB, {}, ["alert"], np.array([0]))
    assert ours.changed_s("w5") == 0
    ours.leave_shard(0)  # where receivers are unless another is given
    assert (everybody(ours), len(ours.policies)) == (["d2"], 1)
    ours.leave_shard(9)
    assert len(ours) == 1


def test_a_model_is_defined_once_and_may_grow(ours: matcher.Matcher):
    ours.define(WEB)
    assert len(ours.tables) == 2
    grown = models.Model("Web", {**WEB.attributes, "new": types.STRING})
    ours.define(grown)
    assert ours.model_of("w1") == grown
    ours.update(["w1"], {"new": ["x"]})
    assert ours.state_of("w1") == {"load": 0.1, "new": "x"}


# What is known of them.


def test_a_policy_is_shown_as_it_is_held(ours: matcher.Matcher):
    assert parser.parse(ours.policy_of("w1")) == parser.parse("alert")
    assert ours.policy_of("w2") == ""
    assert parser.parse(ours.policy_of("d2")) == parser.parse("level > 2")


def test_a_policy_is_replaced_and_the_old_one_released(ours: matcher.Matcher):
    ours.set_policy("w2", "alert", at_s=7)
    assert (sorted(ours.match(ALERT, EVERYBODY)), ours.changed_s("w2")) == (["d1", "w1", "w2"], 7)
    ours.set_policy("w2", None)
    assert (sorted(ours.match(ALERT, EVERYBODY)), ours.changed_s("w2")) == (["d1", "w1"], 0)
    for receiver in ("w1", "d1", "d2"):
        ours.set_policy(receiver, "other")
    assert len(ours.policies) == 1
    ours.set_policy("w1", "other")
    assert len(ours.policies) == 1
    assert len(ours.match({"other": True}, EVERYBODY)) == 3


def test_durable_receivers_are_known(ours: matcher.Matcher):
    assert [receiver for receiver in everybody(ours) if ours.is_durable(receiver)] == ["d1"]
    ours.join_many(["a", "b"], WEB, {}, [None], np.array([0, 0]), durable=np.array([False, True]), shard=2)
    assert [ours.is_durable(receiver) for receiver in "ab"] == [False, True]
    assert sorted(ours.tables[0].rows_of(2).tolist()) == sorted(ours.places(["a", "b"])[0][2].tolist())
    ours.join_many(["c"], WEB, {}, [None], np.array([0]), durable=np.array([False]))
    assert not ours.is_durable("c")


def test_when_a_party_changed_is_known(ours: matcher.Matcher):
    assert [ours.changed_s(receiver) for receiver in ("w1", "w2")] == [5, 0]
    ours.update(["w1", "d1"], {"load": [0.5, 0.6]}, at_s=8)
    assert [ours.changed_s(receiver) for receiver in ("w1", "w2", "d1")] == [8, 0, 8]
    ours.update(["w1"], {"load": [0.7]})
    assert ours.changed_s("w1") == 8, "without a time it keeps the last"


def test_an_update_reaches_receivers_of_several_models_and_the_last_value_counts(ours: matcher.Matcher):
    ours.update(["d1", "w1", "d2", "w1"], {"load": [1.0, 2.0, 3.0, 4.0]})
    loads = {receiver: ours.state_of(receiver)["load"] for receiver in everybody(ours)}
    assert loads == {"d1": 1.0, "d2": 3.0, "w1": 4.0, "w2": 0.2}
    ours.update(["w2", "w1"], {"load": [5.0, 6.0]})
    assert (ours.state_of("w1")["load"], ours.state_of("w2")["load"]) == (6.0, 5.0)
    ours.update([], {"load": []})


def test_the_places_of_parties_are_by_table_and_each_party_once(ours: matcher.Matcher):
    ((number, places, rows),) = ours.places(["w2", "w1"])
    assert (number, list(places), rows.tolist()) == (0, [0, 1], [1, 0])
    ((number, places, rows),) = ours.places(["w1", "w1"])
    assert (number, list(places), rows.tolist()) == (0, [1], [0])
    result = ours.places(["d1", "w1", "d1"])
    assert [(number, list(places), rows.tolist()) for number, places, rows in result] == [
        (0, [1], [0]),
        (1, [2], [0]),
    ]
    assert ours.places([]) == []


def test_a_grant_is_in_force_until_it_ends(ours: matcher.Matcher):
    assert ours.next_end_s() == np.inf
    assert matcher.Matcher(kernels=kernels_numpy).next_end_s() == np.inf
    assert ours.ended(10**9) == []
    ours.write_granted(0, np.array([0, 1]), {"port": [80, 81]}, [50.0, 70.0])
    ours.write_granted(1, np.array([0]), {"rows": [3]}, [60.0])
    assert ours.state_of("w1") == {"load": 0.1, "port": 80}
    assert ours.next_end_s() == 50.0
    assert (ours.ended(49.9), ours.ended(50.0), sorted(ours.ended(60.0))) == ([], ["w1"], ["d1", "w1"])


# Who gets an event.


def test_an_event_reaches_receivers_that_match_and_accept_it(ours: matcher.Matcher):
    assert sorted(ours.match(ALERT, EVERYBODY)) == ["d1", "w1"]
    assert ours.match(ALERT, parser.parse("load > 0.2")) == ["d1"]
    assert ours.match(ALERT, parser.parse("load > 0.9")) == []
    assert ours.match({"alert": False}, EVERYBODY) == []
    assert sorted(ours.match({"alert": True, "level": 3}, EVERYBODY)) == ["d1", "d2", "w1"]
    assert sorted(ours.names(ours.find_addressed(parser.parse("load >= 0.2")))) == ["d1", "d2", "w2"]
    assert ours.names(ours.find_addressed(parser.parse("load > 9"))) == []


def test_an_engine_whose_parties_have_left_finds_no_receiver():
    made = matcher.Matcher(kernels=kernels_numpy)
    assert (made.match(ALERT, EVERYBODY), made.names(made.find_addressed(EVERYBODY))) == ([], [])
    made.define(DB)
    assert (made.find(ALERT, EVERYBODY), made.find_addressed(EVERYBODY)) == ([], [])
    made.join("w", WEB, {}, "alert")
    assert made.match(ALERT, EVERYBODY) == ["w"]
    assert [each.table for each in made.find_addressed(EVERYBODY)] == [1]
    made.leave("w")
    assert made.match(ALERT, EVERYBODY) == []


def test_only_receivers_of_some_shards_are_kept(ours: matcher.Matcher):
    shards = np.zeros(16, np.bool_)
    shards[[0, 4]] = True
    result = ours.of_shards(ours.find_addressed(EVERYBODY), shards)
    assert sorted(ours.names(result)) == ["d2", "w1", "w2"]


def test_which_receivers_accept_an_event_is_known_row_by_row(ours: matcher.Matcher):
    rows = np.array([1, 0, 1])
    assert ours.accepts(ALERT, 0, rows).tolist() == [False, True, False]
    assert ours.accepts({}, 0, rows).tolist() == [False] * 3
    assert ours.accepts({"level": 3}, 1, np.array([0, 1])).tolist() == [False, True]
    ours.set_policy("w1", None)
    assert ours.accepts({"alert": True, "level": 3}, 0, rows).tolist() == [False] * 3


class Counted:
    """Kernels that record from which side a match was computed."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("by_address", "by_policy"):
            self.asked.append(name)
        return getattr(kernels_numpy, name)


@pytest.mark.parametrize(
    ("hits", "true", "side"),
    [
        (1, 1, "by_address"),
        (100, 1, "by_policy"),
        (100, 100, "by_address"),
    ],
)
def test_a_match_is_worked_out_from_the_smaller_side(hits, true, side):
    """A hundred receivers with as many policies of one conjunction: of these one or all are true."""
    kernels = Counted()
    made = matcher.Matcher(kernels=kernels)
    receivers = [f"p{place}" for place in range(100)]
    policies = [f"level >= {place}" for place in range(100)]
    made.join_many(receivers, WEB, {"port": list(range(100))}, policies, np.arange(100))
    kernels.asked.clear()
    address = parser.parse(f"port < {hits}")
    result = made.match({"level": 0 if true == 1 else 99}, address)
    assert sorted(result) == sorted(receivers[: min(hits, true)])
    assert kernels.asked == [side]


def test_where_both_sides_cost_the_same_receivers_ask_for_their_policies():
    """Two conjunctions of four members each: one true costs 6 + 2 * 4 = 14, as do 3.5 receivers."""
    kernels = Counted()
    made = matcher.Matcher(kernels=kernels)
    receivers = [f"p{place}" for place in range(8)]
    made.join_many(receivers, WEB, {"port": list(range(8))}, ["alert", "level > 2"], np.arange(8) % 2)
    for hits, side in ((3, "by_address"), (4, "by_policy"), (7, "by_policy")):
        kernels.asked.clear()
        made.match(ALERT, parser.parse(f"port < {hits}"))
        assert kernels.asked == [side]
    for hits, side in ((7, "by_address"), (8, "by_policy")):  # two true: 28
        kernels.asked.clear()
        made.match({"alert": True, "level": 3}, parser.parse(f"port < {hits}"))
        assert kernels.asked == [side]


def test_more_receivers_than_there_is_room_for_are_found():
    made = matcher.Matcher(kernels=kernels_numpy)
    receivers = [f"p{place}" for place in range(3000)]
    made.join_many(receivers, WEB, {}, ["alert"], np.zeros(3000, np.int64))
    assert len(made._ids) < 3000
    assert sorted(made.match(ALERT, EVERYBODY)) == sorted(receivers)
    assert len(made._ids) >= 3000 + opcodes.SPARE
    room = made._ids
    made.match(ALERT, EVERYBODY)
    assert made._ids is room, "room is kept"


def test_results_of_several_tables_do_not_share_their_room(ours: matcher.Matcher):
    first, second = ours.find(ALERT, EVERYBODY)
    assert (first.table, second.table) == (0, 1)
    assert not np.shares_memory(first.rows, second.rows)


def test_after_tidying_the_same_receivers_are_found(ours: matcher.Matcher):
    for number in range(300):
        ours.join(f"n{number}", WEB, {}, "level > 5")
        ours.set_policy(f"n{number}", "alert")
    before = sorted(ours.match(ALERT, EVERYBODY))
    ends = ours.tables[0]._members_end
    ours.tidy()
    assert sorted(ours.match(ALERT, EVERYBODY)) == before
    assert ours.tables[0]._members_end <= ends


# Kernels.


def test_other_kernels_take_over_all_that_is_held(ours: matcher.Matcher):
    kernels = Counted()
    ours.use(kernels)
    assert ours._kernels is kernels
    assert all(table.kernels is kernels for table in ours.tables)
    assert all(known.kernels is kernels for known in ours._names)
    assert ours.policies._kernels is kernels
    ours.match(ALERT, EVERYBODY)
    assert kernels.asked


def test_the_fastest_kernels_are_used_unless_others_are_given():
    assert matcher.Matcher()._kernels is matcher.select_kernels()
    assert matcher.Matcher(kernels=kernels_numpy)._kernels is kernels_numpy


def test_without_numba_the_plain_kernels_are_the_fastest(monkeypatch):
    monkeypatch.delattr("muster.notify.matcher.kernels_numba", raising=False)
    monkeypatch.setitem(sys.modules, "muster.notify.matcher.kernels_numba", None)
    assert matcher.select_kernels() is kernels_numpy


def test_found_receivers_are_a_value():
    result = matcher.MatchResult(0, np.zeros(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.table = 1  # type: ignore[misc]
    assert not hasattr(result, "__dict__")
