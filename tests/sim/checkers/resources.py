"""Resources: at most one acting owner of each, no acknowledged change of the desired state lost, no version
reported as healthy that is not, and none that moves runs on two machines.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator

from tests.sim import history
from tests.sim.checkers import linearizability

Desired = tuple[tuple[str, int], ...]


def check(story: history.History) -> list[str]:
    return [
        *_check_owners(story),
        *_check_desired(story),
        *_check_found(story),
        *_check_releases(story),
        *_check_moved(story),
        *(f"resources: {twice}" for twice in story.of("twice")),
    ]


def _check_owners(story: history.History) -> Iterator[str]:
    """Operations on a resource are carried out one after another, and never for an older owner."""
    killed: dict[str, list[float]] = collections.defaultdict(list)
    for event in story.of("killed"):
        killed[event.actor].append(event.start_s)
    acts: dict[tuple[str, str], list[history.Operation]] = collections.defaultdict(list)
    for act in story.of("act"):
        if act.facts["manager"]:  # an agent deletes an orphan by itself
            acts[act.key, act.actor].append(act)
    for (name, _), of_resource in acts.items():
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


def _step(state: Desired, operation: history.Operation) -> Iterator[Desired]:
    """``state`` has the value of each resource: an apply changes several of them at once, or none."""
    if operation.action == "apply":
        changed = dict.fromkeys(operation.facts["keys"], operation.facts["value"])
        yield tuple(sorted((dict(state) | changed).items()))
    elif operation.action == "load":  # a registry becomes active, with all that is stored
        if operation.facts["values"] == dict(state):
            yield state
    elif (operation.result if operation.outcome == "ok" else None) == dict(state).get(operation.key):
        yield state


def _check_desired(story: history.History) -> Iterator[str]:
    operations = [
        operation
        for operation in story.of("apply", "describe", "load")
        if operation.outcome in ("ok", "unknown" if operation.action == "apply" else "not-found")
    ]
    initial: Desired = ()
    try:
        stuck = linearizability.find_violation(operations, initial, _step)
    except linearizability.Undecided as error:
        yield f"resources: the order of changes is undecided: {error}"
        return
    if stuck is not None:
        candidates = "".join(f"\n    {operation}" for operation in stuck)
        yield f"resources: the desired state is not linearizable; none of these can be next:{candidates}"


def _check_found(story: history.History) -> Iterator[str]:
    for end in story.of("found"):
        facts = end.facts
        if facts["desired"] is not None and (facts["value"] != facts["desired"] or not facts["running"]):
            yield f"resources: {end}"


def _check_moved(story: history.History) -> Iterator[str]:
    """In the end, a resource runs only where it belongs."""
    for end in story.of("runs"):
        if end.facts["machine"] != end.facts["belongs"]:
            yield f"resources: {end}"


def _check_releases(story: history.History) -> Iterator[str]:
    """A version that does not stay up is never reported as healthy."""
    for operation in story.of("release", "rollout"):
        if operation.outcome == "ok" and operation.facts["life_s"] is not None:
            yield f"resources: {operation} was reported as healthy"
