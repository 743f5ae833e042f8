"""Passwords that come with every request are checked in full once, and end when their verifier does."""

from __future__ import annotations

import asyncio

import pytest

from muster.core import errors
from muster.trust import logins, passwords, roles


async def test_a_right_password_is_checked_once(tmp_path):
    known = passwords.Passwords(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = logins.Logins(known)
    for _ in range(5):
        assert await made.check("ann", "a long secret") == passwords.Login("ann", roles.Role.USER)
    assert made.checks == 1
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "another secret")
    with pytest.raises(errors.Unauthorized):
        await made.check("bob", "a long secret")
    assert made.checks == 3
    known.set("ann", roles.Role.VIEWER, "a long secret")  # a new verifier, and another role
    assert (await made.check("ann", "a long secret")).role is roles.Role.VIEWER
    known.remove("ann")
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "a long secret")


async def test_one_that_expires_ends(tmp_path):
    now_s = [1000.0]
    known = passwords.Passwords(tmp_path, clock=lambda: now_s[0])
    known.set("ann", roles.Role.USER, "a long secret", lifetime_s=60)
    made = logins.Logins(known, clock=lambda: now_s[0])
    await made.check("ann", "a long secret")
    now_s[0] += 61
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "a long secret")


async def test_few_wait_to_be_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(logins, "WAITING_MAX", 2)
    made = logins.Logins(passwords.Passwords(tmp_path))
    results = await asyncio.gather(
        *(made.check("eve", f"guess {n}") for n in range(5)), return_exceptions=True
    )
    kinds = sorted(type(one).__name__ for one in results)
    assert kinds == ["Overloaded"] * 3 + ["Unauthorized"] * 2
