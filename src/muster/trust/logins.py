"""The one place where passwords of clients are checked, for web, REST, SOAP and AMQP.

Checking a password costs 0.1 s of a core and 64 MiB on purpose (`muster.trust.passwords`).  So a correct one
is remembered, as a keyed hash in memory, and stays correct for as long as its verifier is unchanged: a
password that is changed, removed or expires ends at once.

Before any password is looked at, the throttle is asked (`muster.trust.throttle`).  Few passwords are checked
at the same time, and those of one address one after the other, so that a client with many pending logins
delays its own and not those of other addresses.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from muster.core import errors, hosts
from muster.trust import passwords
from muster.trust import throttle as throttle_

CHECKS_MAX = 2
WAITING_MAX = 256  # in all
WAITING_OF_ADDRESS_MAX = 64
REMEMBERED_MAX = 10_000

#: Called with the account and the address of each failed login.
OnFailure = Callable[[str, str], Awaitable[None]]


class Logins:
    def __init__(
        self,
        known: passwords.Passwords,
        *,
        throttle: throttle_.Throttle | None = None,
        on_failure: OnFailure | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._known = known
        self._throttle = throttle or throttle_.Throttle()
        self._on_failure = on_failure
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._right: dict[str, tuple[passwords.Password, bytes]] = {}
        self._running: dict[tuple[str, bytes, str], asyncio.Task[passwords.Password]] = {}
        self._checking = asyncio.Semaphore(CHECKS_MAX)
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: collections.Counter[str] = collections.Counter()
        self.checks = 0  # made in full

    async def check(self, name: str, password: str, address: str) -> passwords.Login:
        """`errors.Unauthorized`; `errors.Overloaded` while the client or the server has to wait."""
        return (await self.verified(name, password, address)).login

    async def verified(self, name: str, password: str, address: str) -> passwords.Password:
        """As `check`; the whole record against which the password was checked."""
        self._throttle.check(name, address)
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

    def _finished(self, key: tuple[str, bytes, str], task: asyncio.Task[passwords.Password]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # whether or not a caller still waits for it

    async def _check(self, name: str, password: str, address: str, digest: bytes) -> passwords.Password:
        try:
            with self._throttle.attempt(name, address):
                async with self._turn(hosts.network(address)):
                    self.checks += 1
                    found = await asyncio.to_thread(self._known.verify, name, password)
        except errors.Unauthorized:
            await self._failed(name, address)
            raise
        if len(self._right) >= REMEMBERED_MAX:
            self._right.clear()
        self._right[name] = (found, digest)
        return found

    @contextlib.asynccontextmanager
    async def _turn(self, address: str) -> AsyncIterator[None]:
        if self._waiting.total() >= WAITING_MAX or self._waiting[address] >= WAITING_OF_ADDRESS_MAX:
            raise errors.Overloaded("too many logins are pending", retry_after_s=2.0)
        turn = self._turns.setdefault(address, asyncio.Lock())
        self._waiting[address] += 1
        try:
            async with turn, self._checking:
                yield
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address], self._turns[address]

    async def scram(self, name: str, mechanism: str, address: str) -> passwords.Scram:
        """The verifier of which a SCRAM server states salt and iterations; `prove` then has the answer.

        An account that does not exist, has expired or has no such verifier gets one that no proof fits.
        """
        self._throttle.check(name, address)
        return await asyncio.to_thread(self._known.scram, name, mechanism)

    async def prove(
        self, name: str, verifier: passwords.Scram, address: str, auth_message: bytes, proof: bytes
    ) -> tuple[passwords.Login, bytes]:
        """The login and the server's own signature; as `check` where the proof is wrong."""
        try:
            with self._throttle.attempt(name, address):
                signature = passwords.prove(verifier, auth_message, proof)
                found = await asyncio.to_thread(self._known.get, name)
                if verifier not in found.scram or found.expired(self._clock()):
                    raise errors.Unauthorized("wrong name or password")  # changed since the challenge
                return found.login, signature
        except (errors.Unauthorized, errors.NotFound, errors.InvalidInput):
            await self._failed(name, address)
            raise errors.Unauthorized("wrong name or password") from None

    async def stands(self, login: passwords.Login) -> bool:
        """Whether the password and the role with which ``login`` was let in are still the account's.

        `errors.Refused` where the file cannot be read now, for want of descriptors for example.
        """
        try:
            found = await asyncio.to_thread(self._known.get, login.name)
        except (errors.NotFound, errors.InvalidInput):
            return False
        same = found.login == login and found.login.verifier == login.verifier
        return same and not found.expired(self._clock())

    async def _failed(self, name: str, address: str) -> None:
        if self._on_failure is not None:
            await self._on_failure(name[: throttle_.ACCOUNT_LENGTH_MAX], address)
