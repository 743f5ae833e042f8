"""Limits for each client: concurrent requests, and anonymous XML over time.

Clients are identified by address, because nothing else is available before a login.  Anonymous messages are
charged by their size against a budget that refills; messages of authenticated clients are not.

Pure: the clock is injected.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muster.core import errors
from muster.core.net import hosts

ADDRESSES_MAX = 10_000
MESSAGE_BYTES_MIN = 4096  # minimum charge of a message


@dataclass(frozen=True, slots=True)
class ClientBudget:
    requests: int = 32  # concurrent
    anonymous_bytes: int = 1 << 20
    anonymous_bytes_per_s: float = 256 << 10


class ClientBudgets:
    def __init__(
        self, budget: ClientBudget | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget or ClientBudget()
        self._clock = clock
        self._requests: collections.Counter[str] = collections.Counter()
        self._spent: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    @contextlib.contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Enter for the duration of a request; `errors.Overloaded` if the client has too many."""
        client = hosts.network(address)
        if self._requests[client] >= self._budget.requests:
            raise errors.Overloaded("too many concurrent requests of one client", retry_after_s=1.0)
        self._requests[client] += 1
        try:
            yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    def spend(self, address: str, size: int) -> None:
        """Charge an anonymous message; `errors.Overloaded` if the client has to wait."""
        client, now_s = hosts.network(address), self._clock()
        spent, at_s = self._spent.pop(client, (0.0, now_s))
        spent = max(0.0, spent - (now_s - at_s) * self._budget.anonymous_bytes_per_s)
        cost = max(size, MESSAGE_BYTES_MIN)
        over = spent + cost - self._budget.anonymous_bytes
        self._spent[client] = (spent if over > 0 else spent + cost, now_s)
        if len(self._spent) > ADDRESSES_MAX:
            self._spent.popitem(last=False)
        if over > 0:
            wait_s = over / self._budget.anonymous_bytes_per_s
            raise errors.Overloaded(
                "too many anonymous messages of one client", retry_after_s=float(int(wait_s) + 1)
            )
