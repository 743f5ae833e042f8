"""Passwords that come with every request are checked in full once, and end when their verifier does."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

import pytest

from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust.login import attempt_log, password_checker, passwords, throttle
from muster.trust.permissions import roles


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    nobody = passwords.ScryptVerifier(bytes(16), 8, 8, 1, bytes(32))
    monkeypatch.setattr(passwords, "_NOBODY", nobody)


async def test_a_right_password_is_checked_once(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = password_checker.PasswordChecker(known)
    for _ in range(5):
        assert await made.check("ann", "a long secret", "10.0.0.1") == passwords.PasswordLogin(
            "ann", roles.Role.USER
        )
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
    known = passwords.PasswordStore(tmp_path, clock=lambda: now_s[0])
    known.set("ann", roles.Role.USER, "a long secret", lifetime_s=60)
    made = password_checker.PasswordChecker(known, clock=lambda: now_s[0])
    await made.check("ann", "a long secret", "10.0.0.1")
    now_s[0] += 61
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "a long secret", "10.0.0.1")


async def test_sixty_wrong_passwords_and_the_right_one_is_not_looked_at(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    failures: list[tuple[str, str]] = []

    async def failed(name: str, address: str) -> None:
        failures.append((name, address))

    made = password_checker.PasswordChecker(known, on_failure=failed)
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
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = password_checker.PasswordChecker(known)
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


async def test_a_new_address_has_its_turn_however_many_logins_of_others_are_pending(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = password_checker.PasswordChecker(known)
    pending = [
        asyncio.create_task(made.check(f"eve{n}", "guess", f"10.0.1.{n % 4}"))
        for n in range(4 * password_checker.WAITING_OF_ADDRESS_MAX)
    ]
    await eventually(lambda: made._waiting.total() >= password_checker.CROWDED - 20)
    assert await made.check("ann", "a long secret", "10.0.0.2")
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await asyncio.gather(*made._running.values(), return_exceptions=True)
    assert not made._turns
    assert not made._waiting


async def test_guesses_that_come_at_once_have_the_same_budget(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = password_checker.PasswordChecker(known)
    guesses = (made.check("ann", f"guess {n}", "10.0.0.1") for n in range(40))
    actual = await asyncio.gather(*guesses, return_exceptions=True)
    assert sum(isinstance(outcome, errors.Unauthorized) for outcome in actual) == made.checks == 5
    assert sum(isinstance(outcome, throttle.LoginThrottled) for outcome in actual) == 35


async def test_many_scram_logins_of_one_client_at_once_succeed(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret", mechanisms=("SCRAM-SHA-256",))
    made = password_checker.PasswordChecker(known)
    verifier = await made.scram("ann", "SCRAM-SHA-256", "10.0.0.1")
    proof = proof_of("a long secret", verifier, b"exchange")
    right = (made.prove("ann", verifier, "10.0.0.1", b"exchange", proof) for _ in range(100))
    assert len(await asyncio.gather(*right)) == 100
    wrong = (made.prove("ann", verifier, "10.0.0.1", b"exchange", bytes(32)) for _ in range(20))
    actual = await asyncio.gather(*wrong, return_exceptions=True)
    assert sum(isinstance(outcome, errors.Unauthorized) for outcome in actual) == 5
    assert sum(isinstance(outcome, throttle.LoginThrottled) for outcome in actual) == 15


def proof_of(password: str, verifier: passwords.ScramVerifier, auth_message: bytes) -> bytes:
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), verifier.salt, verifier.iterations)
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(verifier.stored_key, auth_message, "sha256")
    return bytes(a ^ b for a, b in zip(key, signature, strict=True))


async def test_processes_of_a_domain_share_one_budget_which_outlives_them(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    web, soap = password_checker.PasswordChecker(known), password_checker.PasswordChecker(known)
    for number in range(5):
        with pytest.raises(errors.Unauthorized):
            await (web if number % 2 else soap).check("ann", f"guess {number}", "10.0.0.1")
    for made in (
        web,
        soap,
        password_checker.PasswordChecker(known),
    ):  # the last is a process that was started again
        with pytest.raises(throttle.LoginThrottled):
            await made.check("ann", "a long secret", "10.0.0.1")
        assert await made.check("ann", "a long secret", "10.0.0.2")


async def test_a_client_that_logged_in_at_one_process_is_not_locked_out_at_another(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    web, soap = password_checker.PasswordChecker(known), password_checker.PasswordChecker(known)
    await web.check("ann", "a long secret", "10.0.0.1")
    for number in range(30):
        with pytest.raises(errors.Unauthorized):
            await soap.check(f"eve{number}", "guess", "10.0.0.1")
    with pytest.raises(throttle.LoginThrottled):
        await soap.check("eve", "guess", "10.0.0.1")
    assert await soap.check("ann", "a long secret", "10.0.0.1")


async def test_the_log_of_attempts_is_bounded_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_log, "BYTES_MAX", 4000)
    known = passwords.PasswordStore(tmp_path)
    now_s = [1000.0]
    first, second = attempt_log.AttemptLog(known.attempts), attempt_log.AttemptLog(known.attempts)
    clients = [throttle.LoginThrottle(clock=lambda: now_s[0]) for _ in range(2)]

    def follow() -> None:
        for log, client in zip((first, second), clients, strict=True):
            begins, actual = log.read()
            if begins:
                client.reset(actual)
            else:
                for item in actual:
                    client.count(item)

    first.append(throttle.LoginAttempt("right", 999.0, "ann", "10.0.0.9"), 0.0, 0.0)
    for number in range(400):
        now_s[0] += 60.0
        first.append(clients[0].wrong(f"eve{number}", "10.0.0.1"), now_s[0] - 1000.0, 0.0)
        if number % 150 == 149:
            follow()
    for _ in range(5):
        second.append(clients[1].wrong("ann", "10.0.0.1"), now_s[0] - 1000.0, 0.0)
    follow()
    assert known.attempts.stat().st_size < 6000
    assert known.attempts.stat().st_mode & 0o777 == 0o600
    for client in clients:
        with pytest.raises(throttle.LoginThrottled):
            client.check("ann", "10.0.0.1")
        assert client.right("ann", "10.0.0.9") is None  # still known


def test_an_attempt_after_a_half_written_line_counts(tmp_path):
    path = tmp_path / "attempts"
    log = attempt_log.AttemptLog(path)
    attempts = [throttle.LoginAttempt("wrong", 1000.0 + number, "ann", "10.0.0.1") for number in range(3)]
    log.append(attempts[0], 0.0, 0.0)
    log.append(attempts[1], 0.0, 0.0)
    path.write_bytes(path.read_bytes()[:-9])  # as the disk became full
    assert log.read() == (True, attempts[:1])
    log.append(attempts[2], 0.0, 0.0)
    assert log.read() == (False, attempts[2:])
    assert attempt_log.AttemptLog(path).read() == (True, [attempts[0], attempts[2]])


async def test_without_the_log_a_process_counts_by_itself(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    known.attempts.mkdir()
    made = password_checker.PasswordChecker(known)
    for number in range(5):
        with pytest.raises(errors.Unauthorized):
            await made.check("ann", f"guess {number}", "10.0.0.1")
    with pytest.raises(throttle.LoginThrottled):
        await made.check("ann", "a long secret", "10.0.0.1")


async def test_the_first_requests_of_a_client_are_checked_once(tmp_path):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "a long secret")
    made = password_checker.PasswordChecker(known)
    await asyncio.gather(*(made.check("ann", "a long secret", "10.0.0.1") for _ in range(50)))
    assert made.checks == 1


async def test_a_password_that_is_changed_while_it_is_checked_ends(tmp_path, monkeypatch):
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "the old secret")
    made = password_checker.PasswordChecker(known)
    matches = passwords.matches

    def change_meanwhile(verifier: passwords.ScryptVerifier, password: bytes) -> bool:
        result = matches(verifier, password)
        monkeypatch.setattr(passwords, "matches", matches)
        known.set("ann", roles.Role.USER, "the new secret")
        return result

    monkeypatch.setattr(passwords, "matches", change_meanwhile)
    await made.check("ann", "the old secret", "10.0.0.1")
    with pytest.raises(errors.Unauthorized):
        await made.check("ann", "the old secret", "10.0.0.1")
    assert await made.check("ann", "the new secret", "10.0.0.1")
