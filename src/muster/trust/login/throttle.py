"""The throttle of password checks: how many wrong passwords are tolerated, by account and by address.

Every server that checks passwords (web, REST, SOAP, AMQP) consults it before a check. Failures are counted in
three budgets, and each failure expires after some time:

- one account from one address: small, so that guessing is slow;
- one address, whatever accounts it tries: larger, since an address may be shared;
- one account, whatever the address: largest.  One address alone can never exhaust it, because its own budget
  for the account refills more slowly than the account's.

A client that logged in to an account from an address earlier is subject to the first budget only.  So neither
a client that attacks from many addresses nor one behind the same proxy locks it out.

Refused attempts are not counted and the password is not checked: the right one is refused as well. All tables
are bounded; the least recently used entries are dropped first. `muster.trust.login.attempt_log` shares the
counts among the processes of a domain.

Pure: the clock is injected.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from muster.core import errors, leaky_buckets
from muster.core.net import hosts

KNOWN_MAX = 10_000
KNOWN_S = 30 * 86_400.0  # how long an account and address that logged in are stored
KNOWN_AGAIN_S = 86_400.0  # after which a login of theirs is noted again
ACCOUNT_LENGTH_MAX = 200

OF_PAIR = leaky_buckets.BucketBudget(5, 20.0)
OF_ADDRESS = leaky_buckets.BucketBudget(30, 10.0)
OF_ACCOUNT = leaky_buckets.BucketBudget(50, 10.0)


class LoginAttempt(NamedTuple):
    """A check of a password, by account and address as they are counted."""

    outcome: Literal["right", "wrong"]
    at_s: float
    account: str
    address: str


@dataclass(frozen=True, slots=True)
class LoginBudgets:
    pair: leaky_buckets.BucketBudget = OF_PAIR
    address: leaky_buckets.BucketBudget = OF_ADDRESS
    account: leaky_buckets.BucketBudget = OF_ACCOUNT

    @property
    def forget_s(self) -> float:
        """After which a failure counts in none of them."""
        return max(2 * limit.at_once * limit.forget_s for limit in (self.pair, self.address, self.account))


class LoginThrottled(errors.Overloaded):
    """Too many wrong passwords; ``retry_after_s`` is the time until the next check."""


class LoginThrottle:
    def __init__(
        self, budgets: LoginBudgets | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.budgets = budgets or LoginBudgets()
        self._clock = clock
        self.reset(())

    def reset(self, attempts: Iterable[LoginAttempt]) -> None:
        """Forget all, and count these, in the order of their times."""
        self._pairs: leaky_buckets.LeakyBuckets[tuple[str, str]] = leaky_buckets.LeakyBuckets(
            self.budgets.pair
        )
        self._addresses: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(self.budgets.address)
        self._accounts: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(self.budgets.account)
        self._known: collections.OrderedDict[tuple[str, str], float] = collections.OrderedDict()
        for attempt in attempts:
            self.count(attempt)

    def check(self, account: str, address: str) -> None:
        """`errors.Throttled` if no password for ``account`` from ``address`` is checked now."""
        pair, now_s = _pair(account, address), self._clock()
        wait_s = self._pairs.wait_s(pair, now_s)
        if not wait_s and now_s - self._known.get(pair, -KNOWN_S) >= KNOWN_S:
            wait_s = max(self._accounts.wait_s(pair[0], now_s), self._addresses.wait_s(pair[1], now_s))
        if wait_s > 0:
            raise LoginThrottled("too many wrong passwords", retry_after_s=float(int(wait_s) + 1))

    def wrong(self, account: str, address: str) -> LoginAttempt:
        """An attempt to `count`."""
        return LoginAttempt("wrong", self._clock(), *_pair(account, address))

    def right(self, account: str, address: str) -> LoginAttempt | None:
        """An attempt to `count`; None if it would change nothing."""
        pair, now_s = _pair(account, address), self._clock()
        if 0 <= now_s - self._known.get(pair, -KNOWN_S) < KNOWN_AGAIN_S:
            return None
        return LoginAttempt("right", now_s, *pair)

    def count(self, attempt: LoginAttempt) -> None:
        pair = (attempt.account, attempt.address)
        at_s = min(attempt.at_s, self._clock())  # the clock may have been ahead
        if attempt.outcome == "wrong":
            self._pairs.add(pair, at_s)
            self._addresses.add(pair[1], at_s)
            self._accounts.add(pair[0], at_s)
            return
        # Failures are not forgiven: a second client behind the same address may be the one that guesses.
        self._known.pop(pair, None)
        self._known[pair] = at_s
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)


def _pair(account: str, address: str) -> tuple[str, str]:
    account = account[:ACCOUNT_LENGTH_MAX].encode(errors="replace").decode()
    return account, hosts.network(address)
