"""Which waiting publishes go to the broker together: the deciding half of group commit.

Where the broker syncs before it acknowledges, each single publish costs a sync, however many are under way,
and an atomic batch costs one (dearer) sync for all of its messages.  So a connection has one round under way
for each stream; whatever is published meanwhile waits for the next, and goes as one batch or one by one,
whichever promises to be done earlier.  How dear each is depends on the broker's disk, its load, and whether
it syncs at all, so `Costs` learns it from the rounds themselves.  Measured on an idle disk: a batch some
3 ms and 0.02 ms a message, a single publish 0.3 ms; without sync a single one 0.03 ms; on a busy disk all of
it tenfold.

The broker takes or refuses a batch as a whole.  A refused group is halved and tried again, so that one bad
message (a conflict, a duplicate, one too large for what is left of the budget) costs its neighbours some
time and nothing else; `Waiting.alone` ones are never grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MIN_BATCH = 8  # fewer are never worth a batch
MAX_BATCH = 500  # the broker takes 1,000
MAX_BATCH_BYTES = 4 << 20
EXPLORE_EVERY = 32  # rounds: then the other way is tried, or it could never be found to be better
EXPLORE_COUNT = MIN_BATCH

_MESSAGE_S = 0.000_02  # what a message adds to a batch
_WEIGHT = 0.25  # of the newest observation


class WaitingPublish(Protocol):
    """A publish that waits for its round."""

    @property
    def subject(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def alone(self) -> bool: ...
    @property
    def guarded(self) -> bool: ...
    @property
    def message_id(self) -> str | None: ...


def batchable(waiting: Sequence[WaitingPublish]) -> int:
    """How many of the first ones may stand in one atomic batch.

    Inside a batch the broker compares an expectation with what is stored, not with the batch's own earlier
    messages, and refuses an id that occurs twice; such a message ends the batch before it.
    """
    subjects: set[str] = set()
    ids: set[str] = set()
    size = 0
    for count, publish in enumerate(waiting):
        size += publish.size
        if count == MAX_BATCH or (count and size > MAX_BATCH_BYTES) or publish.alone:
            return count
        if (publish.guarded and publish.subject in subjects) or publish.message_id in ids:
            return count
        subjects.add(publish.subject)
        if publish.message_id is not None:
            ids.add(publish.message_id)
    return len(waiting)


class CommitCosts:
    """What rounds took, and so which way to go."""

    def __init__(self) -> None:
        self.single_s = 0.000_3
        self.batch_s = 0.003
        self._rounds = 0

    def prefer_batch(self, count: int) -> bool:
        return self.batch_s + count * _MESSAGE_S < count * self.single_s

    def choose(self, count: int) -> tuple[int, bool]:
        """For ``count`` that may stand in one batch: how many to send, and whether as one."""
        self._rounds += 1
        together = self.prefer_batch(count)
        if self._rounds % EXPLORE_EVERY == 0:
            return min(count, EXPLORE_COUNT), not together
        return count, together

    def observe(self, count: int, together: bool, took_s: float) -> None:
        if together:
            self.batch_s += _WEIGHT * (max(0.0, took_s - count * _MESSAGE_S) - self.batch_s)
        elif count >= MIN_BATCH:  # of few, the round trip is most of it
            self.single_s += _WEIGHT * (took_s / count - self.single_s)


def next_group(waiting: Sequence[WaitingPublish], costs: CommitCosts) -> tuple[int, bool]:
    """How many of the first ones make the next round, and whether as one batch or one by one."""
    count = batchable(waiting)
    if count >= MIN_BATCH:
        return costs.choose(count)
    return min(len(waiting), MAX_BATCH), False
