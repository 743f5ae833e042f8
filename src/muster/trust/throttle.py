"""The throttle of password checks: how many wrong passwords are tolerated, by account and by address.

Every server that checks passwords (web, REST, SOAP, AMQP) asks one of these before it looks at a password.
Failures are counted in three budgets, and each failure is forgotten after a while:

- one account from one address: small, so that guessing is slow;
- one address, whatever accounts it tries: larger, since an address may be shared;
- one account, whatever the address: largest.  One address alone can never exhaust it, because its own budget
  for the account refills more slowly than the account's.

A client that logged in to an account from an address earlier is subject to the first budget only.  So neither
a client that attacks from many addresses nor one behind the same proxy locks it out.

Refused attempts are not counted and the password is not looked at: the right one is refused as well.  All
tables are bounded; the entries that were used longest ago are dropped first.  The state is that of one
process.

Pure: the clock is injected.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.core import errors, hosts

ENTRIES_MAX = 10_000
KNOWN_S = 30 * 86_400.0  # how long an account and address that logged in are remembered
ACCOUNT_LENGTH_MAX = 200

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Budget:
    failures: int  # tolerated at once
    forget_s: float  # then one more in each such time


@dataclass(frozen=True, slots=True)
class Budgets:
    pair: Budget = Budget(5, 20.0)
    address: Budget = Budget(30, 10.0)
    account: Budget = Budget(50, 10.0)


class Throttled(errors.Overloaded):
    """Too many wrong passwords; ``retry_after_s`` says when the next one is looked at."""


class _Failures(Generic[K]):
    """A leaky bucket for each key."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._levels: collections.OrderedDict[K, tuple[float, float]] = collections.OrderedDict()

    def wait_s(self, key: K, now_s: float, pending: int = 0) -> float:
        over = self._level(key, now_s) + pending - (self._budget.failures - 1)
        # Rounding must not leave a client waiting for the last fraction of a second.
        return over * self._budget.forget_s if over > 1e-6 else 0.0

    def add(self, key: K, now_s: float) -> None:
        level = min(self._level(key, now_s) + 1.0, 2.0 * self._budget.failures)
        self._levels.pop(key, None)
        self._levels[key] = (level, now_s)
        while len(self._levels) > ENTRIES_MAX:
            self._levels.popitem(last=False)

    def _level(self, key: K, now_s: float) -> float:
        level, at_s = self._levels.get(key, (0.0, now_s))
        return max(0.0, level - (now_s - at_s) / self._budget.forget_s)


class Throttle:
    def __init__(
        self, budgets: Budgets | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        budgets = budgets or Budgets()
        self._clock = clock
        self._pairs: _Failures[tuple[str, str]] = _Failures(budgets.pair)
        self._addresses: _Failures[str] = _Failures(budgets.address)
        self._accounts: _Failures[str] = _Failures(budgets.account)
        self._pending: collections.Counter[tuple[str, str]] = collections.Counter()
        self._known: collections.OrderedDict[tuple[str, str], float] = collections.OrderedDict()

    def check(self, account: str, address: str) -> None:
        """`Throttled` if no password for ``account`` is looked at now when it comes from ``address``."""
        pair, now_s = _pair(account, address), self._clock()
        wait_s = self._pairs.wait_s(pair, now_s, self._pending[pair])
        if not wait_s and now_s - self._known.get(pair, -KNOWN_S) >= KNOWN_S:
            wait_s = max(self._accounts.wait_s(pair[0], now_s), self._addresses.wait_s(pair[1], now_s))
        if wait_s > 0:
            raise Throttled("too many wrong passwords", retry_after_s=float(int(wait_s) + 1))

    @contextlib.contextmanager
    def attempt(self, account: str, address: str) -> Iterator[None]:
        """Around one check of a password: counts it as a failure if it raises `errors.Unauthorized`."""
        self.check(account, address)
        pair = _pair(account, address)
        self._pending[pair] += 1
        try:
            yield
        except errors.Unauthorized:
            now_s = self._clock()
            self._pairs.add(pair, now_s)
            self._addresses.add(pair[1], now_s)
            self._accounts.add(pair[0], now_s)
            raise
        else:
            # Failures are not forgiven: a second client behind the same address may be the one that guesses.
            self._known.pop(pair, None)
            self._known[pair] = self._clock()
            if len(self._known) > ENTRIES_MAX:
                self._known.popitem(last=False)
        finally:
            self._pending[pair] -= 1
            if not self._pending[pair]:
                del self._pending[pair]


def _pair(account: str, address: str) -> tuple[str, str]:
    return account[:ACCOUNT_LENGTH_MAX], hosts.network(address)
