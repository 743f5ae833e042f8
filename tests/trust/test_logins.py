"""Passwords that come with every request are checked in full once, and end when their verifier does."""

from __future__ import annotations

import asyncio

import pytest

from muster.core import errors
from muster.trust import logins, passwords, roles


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    nobody = passwords.Scrypt(bytes(16), 8, 8, 1, bytes(32))
    monkeypatch.setattr(passwords, "_NOBODY", nobody)


async def test_a_right_password_is_checked_once(tmp_path):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = logins.Logins(known)
    for _ in range(5):
        assert await made.check("ann", "a long secret", "10.0.0.1") == passwords.Login("ann", roles.Role.USER)
    assert made.checks == 1
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "another secret", "10.0.0.1")
    with pytest.raises(errors.Unauthorized):
        await made.check("bob", "a long secret", "10.0.0.1")
    assert made.checks == 3
    known.set("ann", roles.Role.VIEWER, "a long secret")  # a new verifier, and another role
    assert (await made.check("ann", "a long secret", "10.0.0.1")).role is roles.Role.VIEWER
    known.remove("ann")
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "a long secret", "10.0.0.1")


async def test_one_that_expires_ends(tmp_path):
    now_s = [1000.0]
    known = passwords.Passwords(tmp_path, clock=lambda: now_s[0])
    known.set("ann", roles.Role.USER, "a long secret", lifetime_s=60)
    made = logins.Logins(known, clock=lambda: now_s[0])
    await made.check("ann", "a long secret", "10.0.0.1")
    now_s[0] += 61
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "a long secret", "10.0.0.1")


async def test_sixty_wrong_passwords_and_the_right_one_is_not_looked_at(tmp_path):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    failures: list[tuple[str, str]] = []

    async def failed(name: str, address: str) -> None:
        failures.append((name, address))

    made = logins.Logins(known, on_failure=failed)
    await made.check("ann", "a long secret", "10.0.0.2")  # remembered, which must not open a way around
    refused = 0
    for number in range(60):
        try:
            await made.check("ann", f"guess {number}", "10.0.0.1")
        except errors.Overloaded:
            refused += 1
        except errors.Unauthorized:
            pass
    assert refused == 55
    with pytest.raises(errors.Overloaded):
        await made.check("ann", "a long secret", "10.0.0.1")
    assert failures == [("ann", "10.0.0.1")] * 5
    await made.check("ann", "a long secret", "10.0.0.2")


async def test_pending_wrong_logins_do_not_make_others_fail(tmp_path):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = logins.Logins(known)
    pending = [asyncio.create_task(made.check(f"eve{n}", "guess", "10.0.0.1")) for n in range(40)]
    await asyncio.sleep(0)
    # Served in turn with the address that has many, not after it.
    assert await made.check("ann", "a long secret", "10.0.0.2")
    assert sum(task.done() for task in pending) < 10
    assert await made.check("ann", "a long secret", "10.0.0.1")
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await asyncio.gather(*made._running.values(), return_exceptions=True)
    assert not made._turns


async def test_the_first_requests_of_a_client_are_checked_once(tmp_path):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = logins.Logins(known)
    await asyncio.gather(*(made.check("ann", "a long secret", "10.0.0.1") for _ in range(50)))
    assert made.checks == 1


async def test_a_password_that_is_changed_while_it_is_checked_ends(tmp_path, monkeypatch):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "the old secret")
    made = logins.Logins(known)
    matches = passwords.matches

    def change_meanwhile(verifier: passwords.Scrypt, password: bytes) -> bool:
        found = matches(verifier, password)
        monkeypatch.setattr(passwords, "matches", matches)
        known.set("ann", roles.Role.USER, "the new secret")
        return found

    monkeypatch.setattr(passwords, "matches", change_meanwhile)
    await made.check("ann", "the old secret", "10.0.0.1")
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "the old secret", "10.0.0.1")
    assert await made.check("ann", "the new secret", "10.0.0.1")
