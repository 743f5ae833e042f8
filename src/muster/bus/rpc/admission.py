"""Admission: which requests of an identity are handled, decided before anything of them is decoded.

Each identity may use a share of the time of an event loop, for all services there, and has a bounded number
of pending requests. Costs are milliseconds of the loop. Receiving a message costs `RECEIVED`, and more if it
is large; executing a request costs `REQUEST` and the time that its steps take; a request that is malformed or
names no operation costs `MALFORMED` in addition, because correct clients hardly send any. Each cost is
charged when it is known, and the next requests are refused for it; those that wait begin when it is paid.

A budget is of a second, and others must not wait so long. In each turn of the event loop an identity uses
only a slice (`TurnSlices`), and the rest of its work waits for the next turns, in which the identities are
served in turns (`IdentityQueues`). An identity that is alone for `ALONE_S` needs no slices: they cost a
single program a quarter of its speed. In virtual time nothing takes time, so nothing waits.

A refusal costs no task and decodes nothing. It is answered at most once a second for each identity, and the
others are dropped: otherwise the replies to a flood would be a flood. A dropped request is repeated by
Muster's clients later, so a program that is too fast becomes slower. Every refusal is counted by its reason.

The table of identities is bounded. Pure: the time is an argument.
"""

from __future__ import annotations

import asyncio
import enum
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from muster.bus import uptime
from muster.core import leaky_buckets

SHARE = 0.5  # of the time, for one identity
RECEIVED = 0.02
RECEIVED_BYTES = 512 << 10  # a message of this size costs 1 ms to receive
REQUEST = 0.1
MALFORMED = 2.0
RETRY_S = 1.0
SLICE_MS = 0.15  # of a turn
ALONE_S = 10.0
PENDING_BYTES_MAX = 64 << 20  # of requests, beside their number

W = TypeVar("W")

_ANSWERS = leaky_buckets.BucketBudget(1, RETRY_S)


class OverloadReason(enum.StrEnum):
    RATE = "rate"  # the cost of the identity's requests
    PENDING = "pending"  # the number or size of its requests that are pending, or of all


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

    def wait_s(self, identity: str, now_s: float) -> float:
        """The time until the identity has a budget again; 0: it has one."""
        return self._costs.wait_s(identity, now_s)

    def receive(self, identity: str, size: int, now_s: float) -> bool:
        """Charge a received message, unless the budget is used up."""
        if self.wait_s(identity, now_s):
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


class TurnSlices:
    """The milliseconds of the current turn of an event loop that each identity has used. ``soon`` calls a
    function in the next turn."""

    def __init__(self, clock: Callable[[], float], soon: Callable[[Callable[[], None]], object]) -> None:
        self._clock = clock
        self._soon = soon
        self._used: dict[str, float] = {}
        self._has_begun = False
        self._last = ""
        self._shared_until_s = 0.0
        self.is_shared = False  # by several identities

    def note(self, identity: str, now_s: float) -> None:
        """Called for each message."""
        if identity != self._last:
            self._shared_until_s = now_s + ALONE_S if self._last else 0.0
            self._last = identity
        self.is_shared = now_s < self._shared_until_s

    def is_left(self, identity: str) -> bool:
        return not self.is_shared or self._used.get(identity, 0.0) < SLICE_MS

    @property
    def total(self) -> float:
        return sum(self._used.values())

    def start(self) -> float:
        """Before work of an identity, so that what the work schedules comes after the end of this turn."""
        if not self._has_begun:
            self._has_begun = True
            self._soon(self._end)
        return self._clock()

    def stop(self, identity: str, started_s: float) -> float:
        """Returns the milliseconds that the work took."""
        took = 1000 * (self._clock() - started_s)
        self._used[identity] = self._used.get(identity, 0.0) + took
        return took

    def _end(self) -> None:
        self._has_begun = False
        self._used.clear()


class PendingRequests:
    """Counts them, and their bytes. One identity may have half of ``limit``, and half of `PENDING_BYTES_MAX`,
    so it cannot lock out all others. One request of any size is accepted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: dict[str, tuple[int, int]] = {}
        self._number = self._bytes = 0

    def __len__(self) -> int:
        return self._number

    def has_room(self, identity: str, size: int = 0) -> bool:
        number, held = self._of.get(identity, (0, 0))
        return (
            self._number < self._limit
            and number < (self._limit + 1) // 2
            and (not number or held + size <= PENDING_BYTES_MAX // 2)
            and (not self._number or self._bytes + size <= PENDING_BYTES_MAX)
        )

    def begin(self, identity: str, size: int = 0) -> None:
        self._change(identity, 1, size)

    def end(self, identity: str, size: int = 0) -> None:
        self._change(identity, -1, -size)

    def _change(self, identity: str, number: int, size: int) -> None:
        had, held = self._of.pop(identity, (0, 0))
        self._number += number
        self._bytes += size
        if had + number:
            self._of[identity] = had + number, held + size


class IdentityQueues(Generic[W]):
    """Work that waits: of each identity in its order, and within the limits of `PendingRequests`."""

    def __init__(self, limit: int) -> None:
        self._pending = PendingRequests(limit)
        self._of: dict[str, deque[tuple[W, int]]] = {}

    def __contains__(self, identity: str) -> bool:
        return identity in self._of

    def __bool__(self) -> bool:
        return bool(self._of)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, identity: str, work: W, size: int = 0) -> bool:
        """Whether there is room for it."""
        if not self._pending.has_room(identity, size):
            return False
        self._pending.begin(identity, size)
        self._of.setdefault(identity, deque()).append((work, size))
        return True

    def next(self) -> tuple[str, W]:
        """Of the identity that was served longest ago."""
        identity = next(iter(self._of))
        return identity, self.next_of(identity)

    def next_of(self, identity: str) -> W:
        queue = self._of.pop(identity)
        work, size = queue.popleft()
        self._pending.end(identity, size)
        if queue:
            self._of[identity] = queue  # behind the others
        return work

    def clear(self) -> None:
        while self._of:
            self.next()


class LoopAdmission(Admission):
    """That of all servers of an event loop: they share its time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.slices = TurnSlices(uptime.processor_clock_of(loop), _call_soon)


def _call_soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


_of_loops: weakref.WeakKeyDictionary[object, LoopAdmission] = weakref.WeakKeyDictionary()


def of_loop(loop: asyncio.AbstractEventLoop) -> LoopAdmission:
    admission = _of_loops.get(loop)
    if admission is None:
        admission = _of_loops[loop] = LoopAdmission(loop)
    return admission
