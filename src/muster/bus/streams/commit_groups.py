"""Decides which waiting publishes go to the broker together: the pure part of group commit.

If the broker syncs before it acknowledges, each single publish costs a sync, and an atomic batch costs one
(more expensive) sync for all of its messages. So a connection has one round in progress for each stream;
publishes that arrive during it wait for the next, which is sent as one batch or one by one, depending on the
expected duration. The costs depend on the disk of the broker, its load, and whether it syncs at all, so
`CommitCosts` measures them in the rounds themselves. Measured on an idle disk: a batch about 3 ms plus 0.02
ms a message, a single publish 0.3 ms; without sync a single one 0.03 ms; on a busy disk ten times as long.

The broker accepts or rejects a batch as a unit. A rejected group is halved and tried again, so that one bad
message (a conflict, a duplicate, one too large for the remaining budget) only delays the others; messages
with `WaitingPublish.alone` and large ones are never grouped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

MIN_BATCH = 8  # fewer are never worth a batch
MAX_BATCH = 500  # the limit of the broker is 1,000
MAX_BATCH_BYTES = 4 << 20
LARGE_BYTES = (
    128 << 10
)  # of a message: the broker writes those of a batch twice, which costs more than a sync
EXPLORE_EVERY = 32  # rounds: then the other way is tried, or it could never be found to be better
EXPLORE_COUNT = MIN_BATCH

_MESSAGE_S = 0.000_02  # additional cost of a message in a batch
_WEIGHT = 0.25  # weight of the newest observation


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
    """How many of the first ones may be in one atomic batch.

    Inside a batch the broker compares an expectation with the stored messages, not with earlier messages of
    the batch, and rejects an id that occurs twice; such a message ends the batch before it.
    """
    subjects: set[str] = set()
    ids: set[str] = set()
    size = 0
    for count, publish in enumerate(waiting):
        size += publish.size
        if count == MAX_BATCH or (count and size > MAX_BATCH_BYTES):
            return count
        if publish.alone or publish.size > LARGE_BYTES:
            return count
        if (publish.guarded and publish.subject in subjects) or publish.message_id in ids:
            return count
        subjects.add(publish.subject)
        if publish.message_id is not None:
            ids.add(publish.message_id)
    return len(waiting)


class CommitCosts:
    """The measured duration of rounds, and the choice that follows from it."""

    def __init__(self) -> None:
        self.single_s = 0.000_3
        self.batch_s = 0.003
        self._rounds = 0

    def prefer_batch(self, count: int) -> bool:
        return self.batch_s + count * _MESSAGE_S < count * self.single_s

    def choose(self, count: int) -> tuple[int, bool]:
        """For ``count`` messages that may be in one batch: how many to send, and whether as one batch."""
        self._rounds += 1
        together = self.prefer_batch(count)
        if self._rounds % EXPLORE_EVERY == 0:
            return min(count, EXPLORE_COUNT), not together
        return count, together

    def observe(self, count: int, together: bool, took_s: float) -> None:
        if together:
            self.batch_s += _WEIGHT * (max(0.0, took_s - count * _MESSAGE_S) - self.batch_s)
        elif count >= MIN_BATCH:  # with few messages the round trip dominates
            self.single_s += _WEIGHT * (took_s / count - self.single_s)


def next_group(waiting: Sequence[WaitingPublish], costs: CommitCosts) -> tuple[int, bool]:
    """How many of the first ones form the next round, and whether as one batch or one by one."""
    large = itertools.takewhile(lambda publish: publish.size > LARGE_BYTES, waiting)
    if count := sum(1 for _ in large):
        return min(count, MAX_BATCH), False
    count = batchable(waiting)
    if count >= MIN_BATCH:
        return costs.choose(count)
    return min(len(waiting), MAX_BATCH), False
