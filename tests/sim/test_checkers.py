"""The checkers find what they are for, and nothing in a correct history."""

from __future__ import annotations

import math
from typing import Any

from tests.sim import history
from tests.sim.checkers import contexts, events, linearizability, messages, reports, resources


def operation(
    number: int, action: str, start_s: float, end_s: float, outcome: str, result: Any = None, **facts: Any
) -> history.Operation:
    return history.Operation(number, "ann", action, {"key": "k", **facts}, start_s, end_s, outcome, result)


def put(number: int, start_s: float, end_s: float, version: int, **facts: Any) -> history.Operation:
    facts = {"value": f"v{version}", "expected": None, "lease_s": 0.0, **facts}
    return operation(number, "put", start_s, end_s, "ok", version, **facts)


def get(number: int, start_s: float, end_s: float, version: int, age_s: float = 0.0) -> history.Operation:
    result = (f"v{version}", version, age_s, "n1 (primary)")
    return operation(number, "get", start_s, end_s, "ok", result, max_age_s=0.0)


def missing(number: int, start_s: float, end_s: float, max_age_s: float | None = 0.0) -> history.Operation:
    return operation(number, "get", start_s, end_s, "not-found", max_age_s=max_age_s)


def stuck(*operations: history.Operation) -> list[int] | None:
    violation = linearizability.find_violation(operations, contexts.ABSENT, contexts.step)
    return None if violation is None else [each.number for each in violation]


def test_a_read_between_two_writes_sees_either():
    assert stuck(put(0, 0, 1, 1), put(1, 2, 5, 2), get(2, 3, 4, 1), get(3, 4.5, 6, 2)) is None


def test_an_acknowledged_write_that_a_later_read_misses_is_found():
    assert stuck(put(0, 0, 1, 1), put(1, 2, 3, 2), get(2, 4, 5, 1)) == [2]
    assert stuck(put(0, 0, 1, 1), missing(1, 2, 3)) == [1]


def test_reads_do_not_go_back():
    assert stuck(put(0, 0, 1, 1), put(1, 2, 9, 2), get(2, 3, 4, 2), get(3, 5, 6, 1)) is not None


def test_a_write_without_a_reply_may_take_effect_at_any_time_or_never():
    unknown = operation(1, "put", 2, float("inf"), "unknown", value="v2", expected=None, lease_s=0.0)
    assert stuck(put(0, 0, 1, 1), unknown, get(2, 5, 6, 1)) is None
    assert stuck(put(0, 0, 1, 1), unknown, get(2, 5, 6, 1), get(3, 7, 8, 2)) is None
    assert stuck(put(0, 0, 1, 1), unknown, get(2, 5, 6, 2), get(3, 7, 8, 1)) is not None


def test_of_two_writes_that_expect_the_same_version_one_fails():
    first, second = (put(number, 2, 3, version, expected=1) for number, version in ((1, 2), (2, 3)))
    assert stuck(put(0, 0, 1, 1), first, second) is not None
    refused = operation(2, "put", 2, 3, "conflict", value="v3", expected=1, lease_s=0.0)
    assert stuck(put(0, 0, 1, 1), first, refused) is None


def test_a_lease_ends_at_its_time():
    leased = put(0, 0, 1, 1, lease_s=20.0)
    assert stuck(leased, missing(1, 10, 11)) == [1]
    assert stuck(leased, missing(1, 30, 31)) is None
    assert stuck(leased, get(1, 30, 31, 1)) == [1]
    assert stuck(leased, missing(1, 18, 19), get(2, 20, 21, 1)) is not None
    assert stuck(leased, missing(1, 18, 19, max_age_s=None), get(2, 20, 21, 1)) is None
    assert stuck(leased, missing(1, 10, 11, max_age_s=None), get(2, 20, 21, 1)) is not None


def judge(*operations: history.Operation) -> list[str]:
    story = history.History()
    story.operations += operations
    return contexts.check(story)


def test_a_value_is_not_older_than_the_age_in_its_reply():
    writes = put(0, 0, 1, 1), put(1, 2, 3, 2)
    old = operation(2, "get", 10, 11, "ok", ("v1", 1, 9.0, "n1"), max_age_s=None)
    assert judge(*writes, old) == []
    lie = operation(2, "get", 10, 11, "ok", ("v1", 1, 2.0, "n1"), max_age_s=None)
    assert "replaced earlier" in judge(*writes, lie)[0]
    limited = operation(2, "get", 10, 11, "ok", ("v1", 1, 9.0, "n1"), max_age_s=5.0)
    assert "replaced earlier" in judge(*writes, limited)[0]


def entry(
    number: int, sequence: int, holders: tuple[str, ...], by: str, stamp: int, **more: Any
) -> history.Operation:
    facts: dict[str, Any] = {"reason": "put", "value": f"v{sequence}", "primary": holders[0]}
    facts |= {"stamp": stamp, "stamped_by": by}
    times = {"at_s": 0.0, "expires_s": math.inf}
    return operation(
        number, "logged", 0, 0, "ok", sequence=sequence, version=sequence, **facts | times | more
    )


def test_two_primaries_are_found():
    first = entry(0, 1, ("a", "b"), "a", 1)
    assert judge(first, entry(1, 2, ("a", "b"), "a", 2)) == []
    assert "not of the primary" in judge(first, entry(1, 2, ("a", "b"), "b", 2))[0]
    assert "not above" in judge(first, entry(1, 2, ("a", "b"), "a", 1))[0]


def test_a_lease_that_ends_too_early_is_found():
    first = entry(0, 1, ("a", "b"), "a", 1, expires_s=10.0)
    for at_s, early in ((5.0, True), (10.0, False)):
        end = entry(1, 2, ("a", "b"), "a", 2, reason="expire", value=None, at_s=at_s)
        assert ["before the end of the lease" in text for text in judge(first, end)] == [True] * early


def message(number: int, action: str, start_s: float, actor: str = "ann", **facts: Any) -> history.Operation:
    return history.Operation(number, actor, action, facts, start_s, start_s + 0.5, "ok")


def received(number: int, at_s: float, id: str, actor: str = "ann", *, redelivered: bool = False) -> Any:
    facts = {"key": "queue:q", "source": "queue:q", "id": id, "redelivered": redelivered}
    return message(number, "received", at_s, actor, **facts)


def test_messages_that_are_lost_doubled_or_taken_twice_are_found():
    story = history.History()
    sends = [message(number, "send", number, key="queue:q", id=f"{number}") for number in range(2)]
    story.operations += [*sends, received(2, 3.0, "0"), received(3, 4.0, "1")]
    assert messages.check(story) == []
    story.operations.append(received(4, 5.0, "1"))
    assert "not marked" in messages.check(story)[0]
    story.operations[-1] = received(4, 5.0, "1", redelivered=True)
    assert messages.check(story) == []
    acknowledged = message(4, "acknowledge", 4.2, source="queue:q", ids=["1"])
    story.operations[-1:] = [acknowledged, received(5, 5.0, "1", redelivered=True)]
    assert "had been taken" in messages.check(story)[0]
    story.operations[-2:] = [received(4, 5.0, "1", redelivered=True)]
    commits = [
        message(number, "commit", number, actor, source="queue:q", ids=["1"])
        for number, actor in ((6, "ann"), (7, "bob"))
    ]
    story.operations += commits
    assert "two transactions" in messages.check(story)[0]
    del story.operations[3:]
    assert "not received" in messages.check(story)[0]


def act(number: int, start_s: float, end_s: float, epoch: int, manager: str) -> history.Operation:
    facts = {"key": "r", "verb": "put", "epoch": epoch, "manager": manager, "id": f"{number}"}
    return history.Operation(number, "agent", "act", facts, start_s, end_s, "ok")


def test_two_owners_are_found():
    story = history.History()
    story.operations += [act(0, 0, 1, 1, "a"), act(1, 2, 3, 2, "b")]
    assert resources.check(story) == []
    story.operations.append(act(2, 4, 5, 1, "a"))
    assert "older owner" in resources.check(story)[0]
    story.operations[-1] = act(2, 2.5, 5, 2, "b")
    assert "overlaps" in resources.check(story)[0]
    story.operations[-1] = act(2, 4, 5, 2, "c")
    assert "belongs to b" in resources.check(story)[0]


def test_a_change_of_several_resources_that_is_stored_in_part_is_found():
    def apply(number: int, start_s: float, outcome: str = "ok") -> history.Operation:
        end_s = start_s + 1 if outcome == "ok" else float("inf")
        facts = {"keys": ["a", "b"], "value": number}
        return history.Operation(number, "ann", "apply", facts, start_s, end_s, outcome)

    def describe(number: int, start_s: float, name: str, value: int) -> history.Operation:
        return history.Operation(
            number, "bob", "describe", {"key": name}, start_s, start_s + 0.1, "ok", value
        )

    def load(number: int, start_s: float, **values: int) -> history.Operation:
        return history.Operation(number, "r1", "load", {"values": values}, start_s, start_s, "ok")

    def judge_changes(*operations: history.Operation) -> list[str]:
        story = history.History()
        story.operations += operations
        return resources.check(story)

    changes = apply(1, 0), apply(2, 2, "unknown")
    assert judge_changes(*changes, describe(3, 5, "a", 2), describe(4, 6, "b", 2)) == []
    assert judge_changes(*changes, describe(3, 5, "a", 1), describe(4, 6, "b", 2)) == []
    assert "not linearizable" in judge_changes(*changes, describe(3, 5, "a", 2), describe(4, 6, "b", 1))[0]
    assert (
        judge_changes(*changes, load(3, 5, a=1, b=1)) == judge_changes(*changes, load(3, 5, a=2, b=2)) == []
    )
    assert "not linearizable" in judge_changes(*changes, load(3, 5, a=2, b=1))[0]


def notified(number: int, at_s: float) -> history.Operation:
    return message(number, "notified", at_s, "farm", key="farm/a", id="e")


def test_deliveries_that_differ_from_the_reference_are_found():
    def change(number: int, at_s: float, load: int) -> history.Operation:
        policy = "alert AND level >= 5"
        return message(number, "change", at_s, "farm", key="farm/a", state={"load": load}, policy=policy)

    sender = message(1, "change", 0, "s", key="s/s", state={}, policy="FALSE")
    event = message(2, "event", 5, "s", key="s/s", id="e", content={"level": 7}, address="load >= 5")
    facts = [
        message(3, "admitted", 9, id="e", sequence=1),
        message(4, "matched", 9, shard=0, position=1, epoch=1, at_s=6.0),
        message(5, "shard", 9, key="farm/a", shard=0),
    ]

    def judge_events(*operations: history.Operation) -> list[str]:
        story = history.History()
        story.operations += [sender, event, *facts, *operations]
        return events.check(story)

    assert judge_events(change(6, 0, 9), notified(7, 7)) == []
    assert "did not get" in judge_events(change(6, 0, 9))[0]
    assert "does not match" in judge_events(change(6, 0, 1), notified(7, 7))[0]
    assert "2 times" in judge_events(change(6, 0, 9), notified(7, 7), notified(8, 8))[0]
    overlapping = change(6, 0, 9), change(7, 5.2, 1)  # either state may be the one that is matched
    assert judge_events(*overlapping) == judge_events(*overlapping, notified(8, 8)) == []


def test_aggregates_without_a_live_machine_or_with_one_twice_are_found():
    facts = [
        message(number, "machine", 9, key=f"m{number}", group="g", value=16**number) for number in range(2)
    ]
    facts += [message(number, "stored", 9, key=f"m{number}", at_s=1.0) for number in range(2)]
    made = [message(number, "report", 2, key=f"m{number}", at_ms=2000) for number in range(2)]

    def judge_sum(total: int, **changes: Any) -> list[str]:
        window = {"from_ms": 0, "window_ms": 5000, "known": 2, "machines": 2, "stale": 0, "dropped": 0}
        story = history.History()
        aggregate = {**window, "partial": False, "sum": float(total), **changes}
        story.operations += [*facts, *made, message(20, "aggregate", 20, key="g", **aggregate)]
        return reports.check(story)

    assert judge_sum(17) == []
    assert "m1 is missing" in judge_sum(1)[0]
    assert judge_sum(1, partial=True) == judge_sum(1, machines=1) == []
    assert "counts 2" in judge_sum(18, partial=True)[0]
