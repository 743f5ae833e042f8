"""Messages: none that was accepted is lost, doubled or out of order, and one commit takes each.

A message may be delivered again if its acknowledgement failed or its consumer was lost; then it is marked as
redelivered.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from tests.sim import history

SHARED = "team"  # the source of what two clients share
CHANGED = "changes"  # begins those of a subscription that is replaced; its last version stays


def check(story: history.History) -> list[str]:
    return [
        *lost(story),
        *_check_sent(story),
        *_check_marks(story),
        *_check_commits(story),
        *_check_order(story),
    ]


def lost(story: history.History) -> Iterator[str]:
    """Each queue, and each subscription that existed at the time, gets a message that does not expire."""
    received = {(event.facts["source"], event.facts["id"]) for event in story.of("received")}
    subscribed = {subscription.facts["source"]: subscription for subscription in story.of("subscribed")}
    last = subscribed[list(subscribed)[-1]] if subscribed else None
    for send in story.of("send"):
        if send.outcome != "ok" or send.facts.get("ttl_s"):
            continue
        sources = [send.key]
        if send.key.startswith("topic:"):
            sources = ["topic:news/*", SHARED]
            if last is not None and send.start_s > last.end_s and send.facts["n"] < last.facts["below"]:
                sources.append(last.facts["source"])
        for source in sources:
            if (source, send.facts["id"]) not in received:
                yield f"messages: {send} was not received from {source}"


def _check_sent(story: history.History) -> Iterator[str]:
    received: dict[tuple[str, str], history.Operation] = {}
    for event in story.of("received"):
        received.setdefault((event.key, event.facts["id"]), event)
    sends = {(send.key, send.facts["id"]): send for send in story.of("send")}
    for place, send in sends.items():
        if send.outcome not in ("ok", "unknown") and place in received:
            yield f"messages: {send} was rejected, and received: {received[place]}"
    for place, event in received.items():
        if place not in sends:
            yield f"messages: {event} was not sent"


def _check_marks(story: history.History) -> Iterator[str]:
    """Whatever a consumer gets a second time is marked. (One that stood still may have prefetched, unmarked,
    what another one got in the meantime.)"""
    seen: dict[tuple[str, str, str], history.Operation] = {}
    for event in story.of("received"):
        place = event.actor, event.facts["source"], event.facts["id"]
        if place in seen and not event.facts["redelivered"]:
            yield f"messages: {event} is not marked, but was delivered before: {seen[place]}"
        seen.setdefault(place, event)


def _check_commits(story: history.History) -> Iterator[str]:
    """One transaction takes a message, and it is not delivered after that, nor after its acknowledgement."""
    taken: dict[tuple[str, str], history.Operation] = {}
    for commit in story.of("commit", "acknowledge"):
        for id in commit.facts["ids"] if commit.outcome == "ok" else ():
            place = commit.facts["source"], id
            if place in taken and commit.action == taken[place].action == "commit":
                yield f"messages: {id} was taken by two transactions: {taken[place]} and {commit}"
            taken[place] = commit
    for event in story.of("received"):
        by = taken.get((event.facts["source"], event.facts["id"]))
        if by is not None and event.start_s > by.end_s and event.actor == by.actor:
            yield f"messages: {event} had been taken: {by}"


def _check_order(story: history.History) -> Iterator[str]:
    """One consumer gets the messages of one producer in the order of sending, except for those that were
    delayed or delivered again."""
    last: dict[tuple[str, str, str], str] = collections.defaultdict(str)
    delayed = {send.facts["id"] for send in story.of("send") if send.facts.get("delay_s")}
    alone = {source for source, actors in _consumers(story).items() if len(actors) == 1}
    for event in story.of("received"):
        if event.facts["redelivered"] or event.facts["source"] not in alone or event.facts["id"] in delayed:
            continue
        place = event.actor, event.facts["source"], event.key
        if event.facts["id"] < last[place]:
            yield f"messages: {event} came after {last[place]}"
        last[place] = max(last[place], event.facts["id"])


def _consumers(story: history.History) -> dict[str, set[str]]:
    actors: dict[str, set[str]] = collections.defaultdict(set)
    for event in story.of("received"):
        actors[event.facts["source"]].add(event.actor)
    return actors
