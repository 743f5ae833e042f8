"""Pure decisions: holders, primaries, moves, access."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from muster.core import errors
from muster.inform import access_rules, protocol
from muster.inform import settings as settings_
from muster.inform.node import change_events
from muster.inform.node.log import context_log, executed
from muster.inform.node.replicas import demand, peers, placement, replica_table

T = settings_.DEFAULT


def node(name: str, load: float = 0.0, proximity_ms: float = 1.0) -> placement.ReplicaCandidate:
    return placement.ReplicaCandidate(name, load, proximity_ms)


# Placement.


def test_the_closest_is_taken_unless_it_has_twice_the_load_of_the_idlest():
    near, far = node("near", 0.2, 1), node("far", 0.15, 50)
    assert placement.rank([near, far], 2) == ["near", "far"]
    assert placement.rank([node("near", 0.4, 1), far], 2) == ["far", "near"]


def test_next_to_no_load_is_no_reason_to_go_far():
    assert placement.rank([node("near", 0.015, 1), node("far", 0.0, 50)], 1) == ["near"]


def test_nodes_above_the_watermark_come_last():
    full, free = node("full", 0.9, 0), node("free", 0.7, 50)
    assert placement.rank([full, free], 1, watermark=0.8) == ["free"]
    assert placement.rank([full, free], 2, watermark=0.8) == ["free", "full"]


@pytest.mark.parametrize(("load", "first"), [(0.4, "near"), (0.400_001, "far")])
def test_exactly_twice_the_load_of_the_idlest_is_no_reason_to_go_far(load, first):
    assert placement.rank([node("near", load, 1), node("far", 0.2, 50)], 2)[0] == first


def test_a_node_at_the_watermark_is_as_one_above_it():
    assert placement.rank([node("full", 0.8, 0), node("free", 0.7, 50)], 1, watermark=0.8) == ["free"]
    assert placement.rank([node("full", 1.0, 0), node("free", 0.9, 50)], 1) == ["free"]
    assert placement.rank([node("b", 0.9, 1), node("a", 0.8, 2)], 2, watermark=0.8) == ["b", "a"]


def test_of_equally_near_nodes_the_idler_is_taken_and_of_equally_idle_ones_the_nearer():
    assert placement.rank([node("a", 0.2, 5), node("b", 0.1, 5)], 1) == ["b"]
    assert placement.rank([node("a", 0.9, 1), node("b", 0.1, 9), node("c", 0.1, 8)], 1) == ["c"]
    assert placement.rank([node("b"), node("a")], 2) == ["a", "b"]


def test_as_many_are_taken_as_are_asked_for_and_there():
    three = [node(name) for name in "abc"]
    assert [len(placement.rank(three, count)) for count in (0, 1, 3, 4)] == [0, 1, 3, 3]


def test_a_candidate_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        node("a").load = 1.0  # type: ignore[misc]
    assert not hasattr(node("a"), "__dict__")


CANDIDATES = st.lists(
    st.builds(
        placement.ReplicaCandidate,
        st.sampled_from("abcdefgh"),
        st.floats(0, 2),
        st.floats(0, 100),
    ),
    unique_by=lambda value: value.node,
)


@hypothesis.given(CANDIDATES, st.integers(0, 10), st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_repair_keeps_live_holders_and_adds_others(live, count, holders):
    repaired = placement.repair_plan(holders, live, count)
    alive = {replica.node for replica in live}
    kept = [holder for holder in holders if holder in alive]
    assert list(repaired[: len(kept)]) == kept, "order, so the primary, stays"
    assert len(set(repaired)) == len(repaired)
    assert set(repaired) <= alive
    assert len(repaired) == max(len(kept), min(count, len(alive)))


# Demand, by the paper's sentences.


def decide(
    kind: demand.ReplicaKind, counts: dict[str, int], held_s: float = 1000.0
) -> list[demand.Instruction]:
    return demand.decide("me", kind, counts, held_s, T)


def test_a_temporary_copy_below_the_deletion_threshold_goes():
    assert decide(demand.ReplicaKind.TEMPORARY, {"me": 2}) == [demand.DeleteReplica()]
    assert decide(demand.ReplicaKind.TEMPORARY, {"me": 3}) == []
    assert decide(demand.ReplicaKind.PERMANENT, {}) == []
    assert decide(demand.ReplicaKind.PRIMARY, {}) == []


def test_above_the_migration_ratio_the_context_moves_there():
    assert decide(demand.ReplicaKind.PRIMARY, {"x": 13, "me": 7}) == [demand.MigrateReplica("x")]
    assert decide(demand.ReplicaKind.PRIMARY, {"x": 12, "me": 8}) == [demand.CreateReplica("x")]


def test_above_the_replication_ratio_it_is_copied_there():
    assert decide(demand.ReplicaKind.PRIMARY, {"x": 10, "y": 9, "z": 3}) == [
        demand.CreateReplica("x"),
        demand.CreateReplica("y"),
    ]


def test_at_the_replication_threshold_nothing_moves():
    assert decide(demand.ReplicaKind.PRIMARY, {"x": 18}) == []
    assert decide(demand.ReplicaKind.PRIMARY, {"x": 19}) == [demand.MigrateReplica("x")]


def test_only_the_primary_decides_on_permanent_copies():
    assert decide(demand.ReplicaKind.PERMANENT, {"x": 100}) == []


@hypothesis.given(st.dictionaries(st.sampled_from(["me", "x", "y"]), st.integers(0, 500)))
def test_it_does_not_flap(counts):
    """What came within the interval stays, and the same demand does not send a context back."""
    assert decide(demand.ReplicaKind.PRIMARY, counts, held_s=50.0) == []
    assert decide(demand.ReplicaKind.TEMPORARY, counts, held_s=50.0) == []
    for instruction in decide(demand.ReplicaKind.PRIMARY, counts):
        if isinstance(instruction, demand.MigrateReplica):
            there = demand.decide(instruction.to, demand.ReplicaKind.PRIMARY, counts, 1000.0, T)
            assert not any(isinstance(back, demand.MigrateReplica) for back in there)


def test_a_migration_makes_the_other_primary_and_keeps_the_number_of_copies():
    assert demand.migrated(("me", "b", "c"), "me", "x") == ("x", "b", "c")
    assert demand.migrated(("me", "b", "c"), "me", "c") == ("c", "me", "b")


# The directory.


def info(name: str) -> protocol.ServerInformation:
    return protocol.ServerInformation(name, protocol.NodeLoad())


def directory() -> peers.NodeDirectory:
    settings = msgspec.structs.replace(settings_.DEFAULT, lost_after_s=10.0, refresh_s=1.0)
    return peers.NodeDirectory("me", settings, replica_table.ReplicaTable("me", memory_bytes_max=1 << 20))


def test_nodes_are_lost_when_silent_for_too_long_and_found_again():
    seen = directory()
    assert seen.observe(info("a"), 0.0, round_trip_s=0.002)
    assert not seen.observe(info("a"), 5.0)
    assert not seen.observe(info("me"), 5.0)
    assert seen.remove_lost(15.0) == []
    assert seen.remove_lost(15.1) == ["a"]
    assert seen.nodes == []
    assert seen.observe(info("a"), 20.0)


def test_a_node_that_was_disconnected_suspects_no_other():
    seen = directory()
    seen.observe(info("a"), 0.0)
    seen.restart_timers(100.0)
    assert seen.remove_lost(105.0) == []


def test_proximity_is_the_round_trip_smoothed():
    seen = directory()
    seen.observe(info("a"), 0.0, round_trip_s=0.010)
    seen.observe(info("a"), 1.0, round_trip_s=0.110)
    (_, view) = sorted(seen.views(1.0), key=lambda value: value.node == "a")
    assert 10 < view.proximity_ms < 110


# Copies.


def record(
    key: str, holders: tuple[str, ...] = ("me",), value: bytes | None = b"v"
) -> protocol.ContextRecord:
    return protocol.ContextRecord(key, holders, 1, "me", value)


def test_late_and_doubled_records_change_nothing():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    assert held.apply(record("k", value=b"2"), 2, 0.0)
    assert not held.apply(record("k", value=b"1"), 1, 0.0)
    assert not held.apply(record("k", value=b"2"), 2, 0.0)
    assert held.index["k"].value == b"2"
    assert (held.permanent, held.buckets) == (1, {protocol.bucket("k"): 1})


def test_a_copy_that_moved_away_is_dropped():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    held.apply(record("k"), 1, 0.0)
    assert held.apply(record("k", ("other",)), 2, 0.0)
    assert (held.permanent, held.buckets, held.memory_bytes) == (0, {}, 0)


def test_a_temporary_replica_follows_the_log():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    held.install_temporary(record("k", ("other",), b"old"), 2, 0.0, fresh_at_s=0.0)
    assert not held.apply(record("k", ("other",), b"older"), 1, 1.0)
    assert not held.apply(record("k", ("other",), b"old"), 2, 1.0)
    assert held.apply(record("k", ("other",), b"new"), 3, 1.0)
    assert (held.index["k"].value, held.temporary) == (b"new", 1)
    assert held.apply(record("k", ("other",), None), 4, 1.0)
    assert (held.index, held.temporary, held.memory_bytes) == ({}, 0, 0)


def test_a_temporary_replica_that_is_ahead_of_the_follower_becomes_permanent_at_its_own_record():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    held.install_temporary(record("k", ("other", "me"), b"new"), 3, 0.0, fresh_at_s=0.0)
    assert not held.apply(record("k", ("other", "me"), b"old"), 2, 1.0)
    assert held.index["k"].value == b"new"
    assert held.apply(record("k", ("other", "me"), b"new"), 3, 1.0)
    assert (held.permanent, held.temporary) == (1, 0)


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 400_000), st.booleans()), max_size=60)
)
def test_memory_stays_within_its_bound_and_the_touched_stay_longer(steps):
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    for sequence, (key, size, read) in enumerate(steps, 1):
        held.apply(record(key, value=b"x" * size), sequence, 0.0)
        if read:
            held.index[key].read()
        assert held.memory_bytes <= 1 << 20
        assert held.index[key].value is not None, "what was just written is there"


def test_what_was_asked_for_outlives_what_was_not():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    for number in range(9):
        held.apply(record(f"k{number}", value=b"x" * 100_000), number + 1, 0.0)
    held.index["k0"].read()
    for number in range(9, 17):
        held.apply(record(f"k{number}", value=b"x" * 100_000), number + 1, 0.0)
    kept = [key for key, copy in held.index.items() if copy.value is not None]
    assert kept == ["k0", *(f"k{number}" for number in range(8, 17))]
    assert held.evicted == 7


def test_a_value_read_again_is_not_put_into_a_newer_copy():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    held.apply(record("k", value=b"old"), 1, 0.0)
    before = held.index["k"]
    held.apply(record("k", value=b"new"), 2, 0.0)
    held.store_value("k", before, b"old")
    assert held.index["k"].value == b"new"


def test_contexts_that_come_and_go_leave_nothing():
    held = replica_table.ReplicaTable("me", memory_bytes_max=1 << 20)
    for number in range(5_000):
        held.apply(record("k"), 2 * number + 1, 0.0)
        held.apply(record("k", ("other",)), 2 * number + 2, 0.0)
    assert (held.memory_bytes, held.permanent, held.buckets) == (0, 0, {})
    assert len(held._queue) <= 1_000


# Rights.


def test_the_first_rule_that_covers_a_key_decides():
    rules = (
        access_rules.AccessRule("a/open"),
        access_rules.AccessRule("a/*", read=("bob",), write=("role:operator", "owner")),
        access_rules.AccessRule("*", write=()),
    )

    def may(key: str, act: str, who: str, role: str | None = "user", owner: str | None = None) -> bool:
        try:
            access_rules.rule_for(rules, key).check(key, act, identity=who, role=role, owner=owner)
        except errors.Forbidden:
            return False
        return True

    assert may("a/open", "write", "eve")
    assert may("a/x", "read", "bob")
    assert not may("a/x", "read", "eve")
    assert may("a/x", "write", "olga", role="operator", owner="bob")
    assert may("a/x", "write", "eve"), "a missing context has no owner"
    assert not may("a/x", "write", "eve", owner="bob")
    assert may("elsewhere", "read", "eve")
    assert not may("elsewhere", "write", "olga", role="operator")


# The wire.


@hypothesis.given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_with_a_reason(data):
    for kind in (
        protocol.PutContext,
        protocol.GetContext,
        protocol.UpdateContext,
        protocol.Page,
        protocol.Reply,
    ):
        try:
            protocol.decode(data, kind)
        except errors.InvalidInput as error:
            assert kind.__name__ in str(error)  # noqa: PT017


@hypothesis.given(st.text(st.sampled_from("aé.*> \0/😀\ud800"), min_size=1, max_size=200))
def test_any_text_is_a_key_or_refused_and_its_subject_is_one(key):
    try:
        protocol.check_key(key)
    except errors.InvalidInput:
        return
    subject = protocol.former_subject(key)
    assert subject.split(".")[:4] == ["muster", "inform", "log", "context"]
    assert len(subject.split(".")) == 6


def test_errors_travel():
    for error in (errors.Forbidden("no"), errors.NotFound("x", hint="h"), errors.Conflict("c", actual=7)):
        with pytest.raises(type(error)) as caught:
            protocol.result_of(protocol.InformCodec("n").error(error), object)
        assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    with pytest.raises(errors.Conflict) as conflict:
        protocol.result_of(protocol.InformCodec("n").error(errors.Conflict("c", actual=7)), object)
    assert conflict.value.actual == 7


# Requests that were executed, and callers that wait.


def written(number: int) -> context_log.ContextLogEntry:
    record = protocol.ContextRecord("k", ("n",), number << 16, "n", b"v", writer="ann", request=str(number))
    return context_log.ContextLogEntry(record, number << 20)


def test_requests_are_recognised_for_the_time_of_a_write_and_forgotten_after_that():
    now_s = 0.0
    requests = executed.ExecutedRequests(lambda: now_s)
    for number in range(1, 11):
        now_s = number * executed.EXECUTED_S / 4
        requests.remember(written(number))
        known = [each for each in range(1, 11) if requests.position("ann", "k", str(each)) is not None]
        assert set(range(max(1, number - 4), number + 1)) <= set(known)
        assert len(known) <= 9
        assert requests.has_all == (now_s >= executed.EXECUTED_S)
    assert requests.position("bob", "k", "10") is None


def test_more_requests_than_are_remembered_are_known_to_be_unknown(monkeypatch):
    monkeypatch.setattr(executed, "EXECUTED_MAX", 10)
    now_s = executed.EXECUTED_S
    requests = executed.ExecutedRequests(lambda: now_s)
    requests.since_s = -float("inf")
    for number in range(1, 12):
        assert requests.has_all
        now_s += 1.0
        requests.remember(written(number))
    assert not requests.has_all
    assert requests.position("ann", "k", "5") is None
    assert requests.position("ann", "k", "6") == 6 << 20
    assert requests.since_s <= executed.EXECUTED_S + 6.0, "all since then are known"


@pytest.mark.parametrize("others", [0, 1_000])
def test_a_change_wakes_those_who_wait_for_a_prefix_of_its_key(others):
    events = change_events.ChangeEvents()
    kept = [events.of_prefix(f"other/{number}") for number in range(others)]
    woken = [events.of_prefix(prefix) for prefix in ("", "ab", "ab/c")]
    asleep = [events.of_prefix(prefix) for prefix in ("b", "ab/cd")]
    events.changed(["ab/c"])
    assert all(event.is_set() for event in woken)
    assert not any(event.is_set() for event in (*asleep, *kept))


class CountedKey(str):
    compared = 0

    def startswith(self, *prefix: Any) -> bool:
        CountedKey.compared += 1
        return super().startswith(*prefix)


def test_a_change_costs_no_more_if_thousands_wait_for_other_prefixes():
    events = change_events.ChangeEvents()
    kept = [events.of_prefix(f"other/{number}") for number in range(5_000)]
    events.changed([CountedKey("ab/c")])
    assert not any(event.is_set() for event in kept)
    assert CountedKey.compared < 100
