"""Events: delivered as the naive three-sided reference says (`tests.notify.reference`).

An event reaches a receiver if its address matches the receiver's state, and the receiver's policy accepts the
event and its sender.  States and policies change meanwhile, and an event is matched at a time that only the
notifiers know: between its start and the record of the shard.  So a receiver must get an event if the
reference delivers it under every version that may have been in force then, and must not if under none.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from muster.predicates.backends import python
from muster.predicates.syntax import parser
from tests.notify import reference
from tests.sim import history


def check(story: history.History) -> list[str]:
    changes: dict[str, list[history.Operation]] = collections.defaultdict(list)
    for change in story.of("change"):
        if change.outcome in ("ok", "unknown"):
            changes[change.key].append(change)
    notified: dict[tuple[str, str], list[history.Operation]] = collections.defaultdict(list)
    for delivery in story.of("notified"):
        notified[delivery.key, delivery.facts["id"]].append(delivery)
    sequences = {fact.facts["id"]: fact.facts["sequence"] for fact in story.of("admitted")}
    shards = {fact.key: fact.facts["shard"] for fact in story.of("shard")}
    matched: dict[int, list[tuple[int, float]]] = collections.defaultdict(list)
    for fact in story.of("matched"):
        matched[fact.facts["shard"]].append((fact.facts["position"], fact.facts["at_s"]))
    violations = [*_check_epochs(story)]
    for event in story.of("event"):
        if event.outcome != "ok":
            continue
        sequence = sequences.get(event.facts["id"])
        if sequence is None:
            violations.append(f"events: {event} is not stored")
            continue
        senders = [
            {"alert": True, **event.facts["content"], **_sender(version)}
            for version in _in_force(changes[event.key], event.start_s, event.end_s)
        ]
        if all(version.outcome == "unknown" for version in changes[event.key][:1]):  # maybe without a state
            senders.append({"alert": True, **event.facts["content"]})
        for receiver, shard in shards.items():
            until_s = min(
                (at_s for position, at_s in matched[shard] if position >= sequence), default=math.inf
            )
            versions = _in_force(changes[receiver], event.start_s, until_s)
            verdicts = {
                _reaches(event.facts["address"], version, attributes)
                for version in versions
                for attributes in senders
            }
            deliveries = notified[receiver, event.facts["id"]]
            if verdicts == {True} and not deliveries:
                violations.append(f"events: {receiver} did not get {event}")
            elif True not in verdicts and deliveries:
                violations.append(f"events: {deliveries[0]} does not match {event}")
            if len(deliveries) > 1:
                violations.append(f"events: {deliveries[1]} came {len(deliveries)} times")
    return violations


def _in_force(changes: list[history.Operation], start_s: float, end_s: float) -> list[history.Operation]:
    """The versions of a receiver that may be in force between two times, the first one included."""
    possible: list[history.Operation] = []
    for change in changes:
        if change.start_s > end_s:
            break
        if change.outcome == "ok" and change.end_s <= start_s:
            possible = [each for each in possible if each.outcome == "unknown"]
        possible.append(change)
    return possible


def _sender(version: history.Operation) -> dict[str, Any]:
    return {f"sender.{name}": value for name, value in version.facts["state"].items()}


@functools.cache
def _compiled(text: str) -> Callable[[Callable[[str], Any]], bool]:
    return python.compile(parser.parse(text))


def _reaches(address: str, version: history.Operation, attributes: dict[str, Any]) -> bool:
    receiver = reference.ReferenceReceiver("", version.facts["state"], _compiled(version.facts["policy"]))
    return bool(reference.match([receiver], attributes, _compiled(address)))


def _check_epochs(story: history.History) -> Iterator[str]:
    """A shard is recorded by one notifier at a time."""
    last: dict[int, int] = {}
    for fact in story.of("matched"):
        shard, epoch = fact.facts["shard"], fact.facts["epoch"]
        if epoch < last.get(shard, 0):
            yield f"events: shard {shard} was recorded in epoch {epoch} after {last[shard]}"
        last[shard] = max(epoch, last.get(shard, 0))
