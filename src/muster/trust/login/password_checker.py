"""The one place where passwords of clients are checked, for web, REST, SOAP and AMQP.

Checking a password costs 0.1 s of a core and 64 MiB on purpose (`muster.trust.login.passwords`).  So a
correct one is remembered, as a keyed hash in memory, and stays correct for as long as its verifier is
unchanged: a password that is changed, removed or expires ends at once.

Before a password is checked, the throttle decides (`muster.trust.login.throttle`), which all processes of the
domain share (`muster.trust.login.attempt_log`). Few passwords are checked concurrently, and those of one
address one after the other: a client with many pending logins delays its own and not those of other
addresses, and none of them is checked before the failures of earlier ones are counted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from muster.core import errors
from muster.core.net import hosts
from muster.core.telemetry import log
from muster.trust.login import attempt_log, passwords, throttle

CHECKS_MAX = 2
WAITING_OF_ADDRESS_MAX = 64
CROWDED = 256  # while so many wait in all, one of each address may
WAITING_MAX = 1024  # in all
REMEMBERED_MAX = 10_000

events = log.EventLog("logins")

#: Called with the account and the address of each failed login.
OnFailure = Callable[[str, str], Awaitable[None]]


class PasswordChecker:
    def __init__(
        self,
        known: passwords.PasswordStore,
        *,
        on_failure: OnFailure | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._known = known
        self._throttle = throttle.LoginThrottle()
        self._log = attempt_log.AttemptLog(known.attempts)
        self._following = asyncio.Lock()
        self._on_failure = on_failure
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._right: dict[str, tuple[passwords.PasswordRecord, bytes]] = {}
        self._running: dict[tuple[str, bytes, str], asyncio.Task[passwords.PasswordRecord]] = {}
        self._checking = asyncio.Semaphore(CHECKS_MAX)
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # by address, and how many use it
        self._waiting: collections.Counter[str] = collections.Counter()
        self.checks = 0  # made in full

    async def check(self, name: str, password: str, address: str) -> passwords.PasswordLogin:
        """`errors.Unauthorized`; `errors.Overloaded` while the client or the server has to wait."""
        return (await self.verified(name, password, address)).login

    async def verified(self, name: str, password: str, address: str) -> passwords.PasswordRecord:
        """Like `check`; returns the record against which the password was checked."""
        await self._ask_throttle(name, address)
        digest = hashlib.blake2b(password.encode(errors="replace"), key=self._key).digest()
        remembered = self._right.get(name)
        if remembered is not None and hmac.compare_digest(remembered[1], digest):
            if await self.stands(remembered[0].login):
                return remembered[0]
            self._right.pop(name, None)
        # Clients send their first requests at once: the same password is checked once for all of them.
        key = (name, digest, address)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._check(name, password, address, digest))
            running.add_done_callback(lambda task: self._finished(key, task))
        return await asyncio.shield(running)

    def _finished(self, key: tuple[str, bytes, str], task: asyncio.Task[passwords.PasswordRecord]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # even if no caller waits for it any more

    async def _check(self, name: str, password: str, address: str, digest: bytes) -> passwords.PasswordRecord:
        try:
            with self._place(hosts.network(address)):
                async with self._turn(hosts.network(address)):
                    # The failures of those ahead in the queue count.
                    await self._ask_throttle(name, address)
                    async with self._checking:
                        self.checks += 1
                        login = await self._verify(name, password, address)
        except errors.Unauthorized:
            await self._failed(name, address)
            raise
        if len(self._right) >= REMEMBERED_MAX:
            self._right.clear()
        self._right[name] = (login, digest)
        return login

    async def _verify(self, name: str, password: str, address: str) -> passwords.PasswordRecord:
        try:
            login = await asyncio.to_thread(self._known.verify, name, password)
        except errors.Unauthorized:
            await self._count(self._throttle.wrong(name, address))
            raise
        await self._count(self._throttle.right(name, address))
        return login

    @contextlib.contextmanager
    def _place(self, address: str) -> Iterator[None]:
        """A place among the logins that wait for a check of a password."""
        waiting, own = self._waiting.total(), self._waiting[address]
        if own >= WAITING_OF_ADDRESS_MAX or (own and waiting >= CROWDED) or waiting >= WAITING_MAX:
            raise errors.Overloaded("too many logins are pending", retry_after_s=2.0)
        self._waiting[address] += 1
        try:
            yield
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]

    @contextlib.asynccontextmanager
    async def _turn(self, address: str) -> AsyncIterator[None]:
        """One login of an address at a time; the outcome is counted before the next."""
        turn, users = self._turns.get(address, (asyncio.Lock(), 0))
        self._turns[address] = (turn, users + 1)
        try:
            async with turn:
                yield
        finally:
            turn, users = self._turns[address]
            self._turns[address] = (turn, users - 1)
            if users == 1:
                del self._turns[address]

    # The throttle.

    async def _ask_throttle(self, name: str, address: str) -> None:
        await self._follow()
        self._throttle.check(name, address)

    async def _follow(self) -> None:
        """Count what processes of the domain, this one included, have appended to the log."""
        async with self._following:
            try:
                begins, attempts = await asyncio.to_thread(self._log.read)
            except OSError as error:
                events.error("attempts-not-shared", error=error)
                return
            if begins:
                self._throttle.reset(attempts)
                return
            for attempt in attempts:
                self._throttle.count(attempt)

    async def _count(self, attempt: throttle.LoginAttempt | None) -> None:
        if attempt is None:
            return
        counts_s, known_s = self._throttle.budgets.forget_s, throttle.KNOWN_S
        try:
            await asyncio.to_thread(
                self._log.append, attempt, attempt.at_s - counts_s, attempt.at_s - known_s
            )
        except (OSError, errors.MusterError) as error:
            events.error("attempts-not-shared", error=error)
            self._throttle.count(attempt)

    async def _failed(self, name: str, address: str) -> None:
        if self._on_failure is not None:
            await self._on_failure(name[: throttle.ACCOUNT_LENGTH_MAX], address)

    # SCRAM.

    async def scram(self, name: str, mechanism: str, address: str) -> passwords.ScramVerifier:
        """The verifier with the salt and iterations of a SCRAM server; `prove` then gets the reply.

        An account that does not exist, has expired or has no such verifier gets one that no proof fits.
        """
        await self._ask_throttle(name, address)
        return await asyncio.to_thread(self._known.scram, name, mechanism)

    async def prove(
        self, name: str, verifier: passwords.ScramVerifier, address: str, auth_message: bytes, proof: bytes
    ) -> tuple[passwords.PasswordLogin, bytes]:
        """The login and the server's own signature; as `check` where the proof is wrong."""
        proved: tuple[passwords.PasswordLogin, bytes] | None = None
        async with self._turn(hosts.network(address)):
            await self._ask_throttle(name, address)
            try:
                signature = passwords.check_scram_proof(verifier, auth_message, proof)
                record = await asyncio.to_thread(self._known.current, name)
                if verifier not in record.scram or record.expired(self._clock()):
                    raise errors.Unauthorized("wrong name or password")  # changed since the challenge
            except (errors.Unauthorized, errors.NotFound, errors.InvalidInput):
                await self._count(self._throttle.wrong(name, address))
            else:
                await self._count(self._throttle.right(name, address))
                proved = (record.login, signature)
        if proved is None:
            await self._failed(name, address)
            raise errors.Unauthorized("wrong name or password")
        return proved

    async def stands(self, login: passwords.PasswordLogin) -> bool:
        """Whether the password and the role of ``login`` are still those of the account.

        `errors.Refused` if the file cannot be read now, for example for lack of file descriptors.
        """
        try:
            record = await asyncio.to_thread(self._known.current, login.name)
        except (errors.NotFound, errors.InvalidInput, errors.Unauthorized):
            return False
        same = record.login == login and record.login.verifier == login.verifier
        return same and not record.expired(self._clock())
