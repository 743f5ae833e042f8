"""Contexts: the freshness of reads, one primary at a time, and no acknowledged write lost.

A linearizable read, every write and every "not found" is explained by one order of operations (`Register`).
A read of any age, or of a maximum age, returns a value that was current at a time between its start less that
age and its end.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tests.sim import history
from tests.sim.checkers import linearizability

LEASE_SLACK_S = 3.0  # the clock of the log is known to within a round trip
AGE_SLACK_S = 0.001


class Register(NamedTuple):
    """A context. ``version`` 0: unknown, as the write had no reply. It expires between two times."""

    value: str | None = None
    version: int = 0
    expires_s: tuple[float, float] = (math.inf, math.inf)


ABSENT = Register()


def step(state: Register, operation: history.Operation) -> Iterator[Register]:
    """The states that explain an operation."""
    expired = state.value is not None and operation.end_s >= state.expires_s[0]
    live = state.value is not None and operation.start_s <= state.expires_s[1]
    for before in [state] * live + [ABSENT] * (expired or state.value is None):
        yield from _step(before, operation)
    weak = operation.action == "get" and operation.facts["max_age_s"] != 0.0
    if weak and expired and operation.outcome == "not-found":
        yield state  # by the clock of a node: the lease may not have ended for others


def _step(state: Register, operation: history.Operation) -> Iterator[Register]:
    present = state.value is not None
    if operation.action == "get":
        if operation.outcome == "not-found":
            if not present:
                yield ABSENT
        elif present and state.value == operation.result[0] and state.version in (0, operation.result[1]):
            yield state._replace(version=operation.result[1])
        return
    expected = operation.facts["expected"]
    fits = expected is None or (not present if expected == 0 else present and state.version in (0, expected))
    differs = expected is not None and (
        present if expected == 0 else state.version != expected or not present
    )
    if operation.outcome == "conflict":
        if differs or expected is None:  # another attempt of the same deletion had been rejected
            yield state
    elif operation.outcome == "not-found":  # of a deletion
        if not present:
            yield ABSENT
    elif fits and (operation.action == "put" or present):
        yield _written(operation)


def _written(operation: history.Operation) -> Register:
    if operation.action == "delete":
        return ABSENT
    version = operation.result if operation.outcome == "ok" else 0
    lease_s = operation.facts["lease_s"]
    if not lease_s:
        return Register(operation.facts["value"], version)
    expires_s = operation.start_s + lease_s - LEASE_SLACK_S, operation.end_s + lease_s + LEASE_SLACK_S
    return Register(operation.facts["value"], version, expires_s)


def check(story: history.History) -> list[str]:
    by_key: dict[str, list[history.Operation]] = collections.defaultdict(list)
    for operation in story.of("put", "delete", "get"):
        by_key[operation.key].append(operation)
    violations: list[str] = []
    for key, operations in by_key.items():
        violations += _check_order(key, operations)
        violations += _check_ages(key, operations)
    violations += _check_log(story)
    violations += _check_watchers(story)
    return violations


def _counts(operation: history.Operation) -> bool:
    """Whether an operation has, or may have, an effect or a result."""
    if operation.action == "get":
        linearizable = operation.facts["max_age_s"] == 0.0
        return operation.outcome == "not-found" or (operation.outcome == "ok" and linearizable)
    return operation.outcome in ("ok", "unknown", "conflict", "not-found")


def _check_order(key: str, operations: list[history.Operation]) -> list[str]:
    try:
        stuck = linearizability.find_violation(list(filter(_counts, operations)), ABSENT, step)
    except linearizability.Undecided as error:
        return [f"contexts: {key}: the order of operations is undecided: {error}"]
    if stuck is None:
        return []
    candidates = "".join(f"\n    {operation}" for operation in stuck)
    return [f"contexts: {key} is not linearizable; none of these can be next:{candidates}"]


def _check_ages(key: str, operations: list[history.Operation]) -> Iterator[str]:
    """A value was current at some time after the start of the read less its age."""
    writes = {operation.facts["value"]: operation for operation in operations if operation.action == "put"}
    # An acknowledged write replaces all values that were acknowledged before it began.
    done = sorted(
        (operation for operation in operations if operation.action != "get" and operation.outcome == "ok"),
        key=lambda operation: operation.result,
    )
    for read in operations:
        if read.action != "get" or read.outcome != "ok":
            continue
        value, version, age_s, _ = read.result
        limit_s = read.facts["max_age_s"]
        write = writes.get(value)
        if write is None or write.start_s > read.end_s:
            yield f"contexts: {key}: {read} returned a value that was not written"
            continue
        # An age counts from the reply; a value that was confirmed after the request is never too old.
        current_s = read.start_s - min(age_s, math.inf if limit_s is None else limit_s) - AGE_SLACK_S
        newer = next((other for other in done if other.result > version and other.end_s < current_s), None)
        if newer is not None:
            yield f"contexts: {key}: {read} was replaced earlier than its age says, by {newer}"


def _check_log(story: history.History) -> Iterator[str]:
    """Every record continues the one before: the epochs of a context's primaries."""
    by_key: dict[str, list[history.Operation]] = collections.defaultdict(list)
    for entry in story.of("logged"):
        by_key[entry.key].append(entry)
    for key, entries in by_key.items():
        values = {entry.facts["sequence"]: entry.facts["value"] for entry in entries}
        for operation in story.of("put"):
            lost = operation.outcome == "ok" and values.get(operation.result) != operation.facts["value"]
            if operation.key == key and lost:
                yield f"contexts: {operation} is not in the log"
        counted = collections.Counter(
            entry.facts["value"] for entry in entries if entry.facts["reason"] == "put"
        )
        for value, count in counted.items():
            if count > 1:
                yield f"contexts: {key}: {value} is {count} times in the log"
        for before, after in itertools.pairwise(entries):
            if "refuse" in (before.facts["reason"], after.facts["reason"]):
                continue
            if after.facts["reason"] in ("place", "forget") or before.facts["reason"] == "forget":
                continue
            purged = before.facts["value"] is None
            ends = after.facts["reason"] == "expire"
            if ends and (purged or after.facts["at_s"] < before.facts["expires_s"] - LEASE_SLACK_S):
                yield f"contexts: {key}: {after} is before the end of the lease of {before}"
            if after.facts["stamped_by"] != after.facts["primary"] and not purged:
                yield f"contexts: {key}: {after} is not of the primary, {after.facts['primary']}"
            if after.facts["stamp"] <= before.facts["stamp"] and not purged:
                yield f"contexts: {key}: the stamp of {after} is not above that of {before}"


def _check_watchers(story: history.History) -> Iterator[str]:
    seen: dict[tuple[str, str], list[history.Operation]] = collections.defaultdict(list)
    is_trimmed = any("log-read-again" in line for line in story.trace)
    for change in story.of("watched"):
        before = seen[change.actor, change.key]
        if before and change.facts["version"] <= before[-1].facts["version"]:
            yield f"contexts: {change} was watched after {before[-1]}"
        before.append(change)
    for (actor, key), changes in seen.items():
        versions = {change.facts["version"]: change.facts["value"] for change in changes}
        last, last_s = max(versions), changes[-1].start_s
        for operation in story.of("put"):
            if operation.key != key or operation.outcome != "ok" or operation.end_s > last_s:
                continue
            if operation.result < last and operation.result not in versions:
                previous = max((version for version in versions if version < operation.result), default=0)
                if is_trimmed and previous and versions[previous] is None:
                    continue  # the deletion was trimmed meanwhile, and what followed in part
                yield f"contexts: {actor} did not see {operation}"
