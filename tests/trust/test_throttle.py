"""The throttle of password checks: separate budgets; no client locks out another."""

from __future__ import annotations

import pytest

from muster.core import leaky_buckets
from muster.core.net import hosts
from muster.trust.login import throttle


class ThrottleClock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ThrottleClock:
    return ThrottleClock()


@pytest.fixture
def made(clock: ThrottleClock) -> throttle.LoginThrottle:
    return throttle.LoginThrottle(clock=clock)


def fail(made: throttle.LoginThrottle, account: str, address: str) -> bool:
    """One wrong password; False: it was not looked at."""
    if not allowed(made, account, address):
        return False
    made.count(made.wrong(account, address))
    return True


def succeed(made: throttle.LoginThrottle, account: str, address: str) -> None:
    made.check(account, address)
    attempt = made.right(account, address)
    if attempt is not None:
        made.count(attempt)


def allowed(made: throttle.LoginThrottle, account: str, address: str) -> bool:
    try:
        made.check(account, address)
    except throttle.LoginThrottled:
        return False
    return True


def test_one_client_that_guesses_waits_and_no_other_does(made: throttle.LoginThrottle, clock: ThrottleClock):
    looked_at = sum(fail(made, "ann", "10.0.0.1") for _ in range(1000))
    assert looked_at == 5
    assert not allowed(made, "ann", "10.0.0.1")
    assert allowed(made, "ann", "10.0.0.2")
    assert allowed(made, "bob", "10.0.0.1")
    clock.now_s += 20.0
    assert fail(made, "ann", "10.0.0.1")
    assert not allowed(made, "ann", "10.0.0.1")
    # For a day, one guess whenever it is allowed: the account stays open to others.
    for _ in range(4000):
        clock.now_s += 20.0
        assert fail(made, "ann", "10.0.0.1")
    assert allowed(made, "ann", "10.0.0.2")


def test_an_address_that_tries_many_accounts_waits(made: throttle.LoginThrottle):
    assert sum(fail(made, f"user{number}", "10.0.0.1") for number in range(1000)) == 30
    assert not allowed(made, "another", "10.0.0.1")
    assert allowed(made, "another", "10.0.0.2")


def test_an_account_tried_from_many_addresses_stays_open_to_clients_that_logged_in(
    made: throttle.LoginThrottle,
):
    succeed(made, "ann", "10.1.0.1")
    assert sum(fail(made, "ann", f"10.0.{number // 250}.{number % 250}") for number in range(1000)) == 50
    assert not allowed(made, "ann", "10.9.9.9")
    assert allowed(made, "ann", "10.1.0.1")
    assert allowed(made, "bob", "10.9.9.9")


def test_clients_behind_one_address_that_logged_in_are_not_locked_out(made: throttle.LoginThrottle):
    succeed(made, "ann", "10.0.0.1")
    assert sum(fail(made, f"user{number}", "10.0.0.1") for number in range(100)) == 30
    assert allowed(made, "ann", "10.0.0.1")


def test_a_login_of_ones_own_does_not_forgive_guesses(made: throttle.LoginThrottle):
    for number in range(100):
        succeed(made, "mallory", "10.0.0.1")
        fail(made, f"user{number}", "10.0.0.1")
    assert not allowed(made, "victim", "10.0.0.1")


def test_a_clock_that_steps_back_neither_forgives_nor_locks_out(
    made: throttle.LoginThrottle, clock: ThrottleClock
):
    while fail(made, "ann", "10.0.0.1"):
        pass
    clock.now_s -= 1_000_000.0
    assert not allowed(made, "ann", "10.0.0.1")
    clock.now_s += 20.0
    assert allowed(made, "ann", "10.0.0.1")


def test_the_tables_are_bounded(made: throttle.LoginThrottle, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leaky_buckets, "KEYS_MAX", 10)
    monkeypatch.setattr(throttle, "KNOWN_MAX", 10)
    for number in range(100):
        fail(made, f"user{number}", f"10.0.0.{number}")
        succeed(made, f"user{number}", f"10.0.1.{number}")
    for table in (made._pairs, made._addresses, made._accounts, made._known):
        assert len(table) == 10


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("-", "-"),
    ],
)
def test_a_client_of_ipv6_is_its_network(address: str, network: str):
    assert hosts.network(address) == network


@pytest.mark.parametrize(
    ("header", "address"),
    [
        ("", "10.0.0.9"),
        ("1.2.3.4", "1.2.3.4"),
        ("6.6.6.6, 1.2.3.4", "1.2.3.4"),  # what stands before is the client's own claim
        ("1.2.3.4:5678", "1.2.3.4"),
        ("[2001:db8::1]:5678", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("unknown", "10.0.0.9"),
    ],
)
def test_the_last_entry_of_the_forwarded_header_counts(header: str, address: str):
    assert hosts.forwarded_for("10.0.0.9", header) == address
