"""Resources: at most one acting owner of each, and no acknowledged change of the desired state lost."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator

from tests.sim import history
from tests.sim.checkers import linearizability


def check(story: history.History) -> list[str]:
    return [
        *_check_owners(story),
        *_check_desired(story),
        *_check_together(story),
        *_check_found(story),
    ]


def _check_owners(story: history.History) -> Iterator[str]:
    """Operations on a resource are carried out one after another, and never for an older owner."""
    killed: dict[str, list[float]] = collections.defaultdict(list)
    for event in story.of("killed"):
        killed[event.actor].append(event.start_s)
    acts: dict[str, list[history.Operation]] = collections.defaultdict(list)
    for act in story.of("act"):
        acts[act.key].append(act)
    for name, of_resource in acts.items():
        for before, after in itertools.pairwise(of_resource):
            if after.facts["epoch"] < before.facts["epoch"]:
                yield f"resources: {name}: {after} is of an older owner than {before}"
            ends_s = before.end_s
            if ends_s == math.inf:
                ends_s = min(
                    (at_s for at_s in killed[before.actor] if at_s >= before.start_s), default=math.inf
                )
            if ends_s > after.start_s:
                yield f"resources: {name}: {after} overlaps {before}"
        owners: dict[int, str] = {}
        for act in of_resource:
            owner = owners.setdefault(act.facts["epoch"], act.facts["manager"])
            if owner != act.facts["manager"]:
                yield f"resources: {name}: epoch {act.facts['epoch']} belongs to {owner}, and {act}"
        changes = collections.Counter(act.facts["id"] for act in of_resource if act.facts["verb"] == "create")
        for id, count in changes.items():
            if count > 1:
                yield f"resources: {name}: operation {id} was carried out {count} times"


def _step(state: int | None, operation: history.Operation) -> Iterator[int | None]:
    if operation.action == "apply":
        yield operation.facts["value"]
    elif operation.outcome == "not-found":
        if state is None:
            yield state
    elif operation.result == state:
        yield state


def _check_desired(story: history.History) -> Iterator[str]:
    by_name: dict[str, list[history.Operation]] = collections.defaultdict(list)
    for operation in story.of("apply", "describe"):
        reads = operation.action == "describe"
        if operation.outcome in (("ok", "not-found") if reads else ("ok", "unknown")):
            by_name[operation.key].append(operation)
    for name, operations in by_name.items():
        try:
            stuck = linearizability.find_violation(operations, None, _step)
        except linearizability.Undecided as error:
            yield f"resources: {name}: the order of changes is undecided: {error}"
            continue
        if stuck is not None:
            candidates = "".join(f"\n    {operation}" for operation in stuck)
            yield f"resources: {name} is not linearizable; none of these can be next:{candidates}"


def _check_together(story: history.History) -> Iterator[str]:
    """A change of several resources is stored as a whole, or not at all."""
    desired = {end.key: end.facts["desired"] for end in story.of("found")}
    changes: dict[int, list[history.Operation]] = collections.defaultdict(list)
    last: dict[str, int] = {}
    for operation in story.of("apply"):
        if operation.outcome in ("ok", "unknown"):
            changes[operation.facts["value"]].append(operation)
            last[operation.key] = operation.facts["value"]
    for value, together in changes.items():
        final = [operation for operation in together if last[operation.key] == value]
        stored = [operation for operation in final if desired.get(operation.key) == value]
        older = [operation for operation in final if (desired.get(operation.key) or 0) < value]
        if desired and stored and older:
            yield f"resources: {stored[0]} is stored, and {older[0]} is not"


def _check_found(story: history.History) -> Iterator[str]:
    for end in story.of("found"):
        facts = end.facts
        if facts["desired"] is not None and (facts["value"] != facts["desired"] or not facts["running"]):
            yield f"resources: {end}"
