"""Admission: which requests of an identity are handled, decided before anything of them is decoded.

Each identity may use a share of the time of an event loop, for all services there, and has a bounded number
of pending requests. Costs are milliseconds of the loop. Receiving a message costs `RECEIVED`, and more if it
is large; executing a request costs `REQUEST` and the time that its steps take; a request that is malformed or
names no operation costs `MALFORMED` in addition, because correct clients hardly send any. Each cost is
charged when it is known, and the next requests are refused for it.

A refusal costs no task and decodes nothing. It is answered at most once a second for each identity, and the
others are dropped: otherwise the replies to a flood would be a flood. A dropped request is repeated by
Muster's clients later, so a program that is too fast becomes slower. Every refusal is counted by its reason.

The table of identities is bounded. Pure: the time is an argument.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter

from muster.core import leaky_buckets

SHARE = 0.5  # of the time, for one identity
RECEIVED = 0.02
RECEIVED_BYTES = 512 << 10  # a message of this size costs 1 ms to receive
REQUEST = 0.1
MALFORMED = 2.0
RETRY_S = 1.0

_ANSWERS = leaky_buckets.BucketBudget(1, RETRY_S)


class OverloadReason(enum.StrEnum):
    RATE = "rate"  # the cost of the identity's requests
    PENDING = "pending"  # the number of its requests that are pending, or of all


class Admission:
    """The budgets of the identities."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self._answers: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(_ANSWERS)

    @property
    def share(self) -> float:
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        """Of the time of the loop, for one identity; budgets start anew."""
        each_s = 1000 * share
        budget = leaky_buckets.BucketBudget(max(1, round(each_s)), 1.0 / each_s)
        self._share = share
        self._costs: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(budget)

    def is_over(self, identity: str, now_s: float) -> bool:
        """Whether the identity has used up its budget."""
        return self._costs.wait_s(identity, now_s) > 0

    def receive(self, identity: str, size: int, now_s: float) -> bool:
        """Charge a received message, unless the budget is used up."""
        if self.is_over(identity, now_s):
            return False
        self._costs.add(identity, now_s, RECEIVED + size / RECEIVED_BYTES)
        return True

    def charge(self, identity: str, cost: float, now_s: float) -> None:
        self._costs.add(identity, now_s, cost)

    def may_answer(self, identity: str, now_s: float) -> bool:
        """Whether this refusal is answered; if so, the next ones for a second are not."""
        if self._answers.wait_s(identity, now_s):
            return False
        self._answers.add(identity, now_s)
        return True


_of_loops: weakref.WeakKeyDictionary[object, Admission] = weakref.WeakKeyDictionary()


def of_loop(loop: object) -> Admission:
    """That of all servers of an event loop: they share its time."""
    admission = _of_loops.get(loop)
    if admission is None:
        admission = _of_loops[loop] = Admission()
    return admission


class PendingRequests:
    """Counts them. One identity may have half of ``limit``, so it cannot lock out all others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: Counter[str] = Counter()
        self._total = 0

    def has_room(self, identity: str) -> bool:
        return self._total < self._limit and self._of[identity] < (self._limit + 1) // 2

    def begin(self, identity: str) -> None:
        self._of[identity] += 1
        self._total += 1

    def end(self, identity: str) -> None:
        self._total -= 1
        self._of[identity] -= 1
        if not self._of[identity]:
            del self._of[identity]
