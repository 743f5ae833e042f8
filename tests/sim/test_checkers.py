"""The checkers find what they are for, and nothing in a correct history."""

from __future__ import annotations

from typing import Any

from tests.sim import history
from tests.sim.checkers import contexts, linearizability


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


def missing(number: int, start_s: float, end_s: float) -> history.Operation:
    return operation(number, "get", start_s, end_s, "not-found", max_age_s=0.0)


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


def judge(*operations: history.Operation) -> list[str]:
    story = history.History()
    story.operations += operations
    return contexts.check(story)


def test_a_value_is_not_older_than_its_reply_says():
    writes = put(0, 0, 1, 1), put(1, 2, 3, 2)
    old = operation(2, "get", 10, 11, "ok", ("v1", 1, 9.0, "n1"), max_age_s=None)
    assert judge(*writes, old) == []
    lie = operation(2, "get", 10, 11, "ok", ("v1", 1, 2.0, "n1"), max_age_s=None)
    assert "replaced earlier" in judge(*writes, lie)[0]
    limited = operation(2, "get", 10, 11, "ok", ("v1", 1, 9.0, "n1"), max_age_s=5.0)
    assert "replaced earlier" in judge(*writes, limited)[0]


def entry(number: int, sequence: int, holders: tuple[str, ...], by: str, stamp: int) -> history.Operation:
    facts = {"reason": "put", "value": f"v{sequence}", "holders": holders, "stamp": stamp, "stamped_by": by}
    return operation(number, "logged", 0, 0, "ok", sequence=sequence, version=sequence, **facts)


def test_two_primaries_are_found():
    first = entry(0, 1, ("a", "b"), "a", 1)
    assert judge(first, entry(1, 2, ("a", "b"), "a", 2)) == []
    assert "not of the primary" in judge(first, entry(1, 2, ("a", "b"), "b", 2))[0]
    assert "not above" in judge(first, entry(1, 2, ("a", "b"), "a", 1))[0]
