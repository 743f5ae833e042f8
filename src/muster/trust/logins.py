"""Passwords that come with every request, as HTTP's Basic authentication has it.

Checking one costs 0.1 s of a core and 64 MiB on purpose (`muster.trust.passwords`).  So one that was right is
remembered, as a keyed hash in memory, and is right again for as long as its verifier stands unchanged: a
password that is changed, removed or expires ends at once.  Few are checked at the same time, and few wait for
it; the rest are told to come back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from muster.core import errors
from muster.trust import passwords

CHECKS_MAX = 2
WAITING_MAX = 32
REMEMBERED_MAX = 10_000


class Logins:
    def __init__(self, known: passwords.Passwords, *, clock: Callable[[], float] = time.time) -> None:
        self._known = known
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._right: dict[str, tuple[passwords.Password, bytes]] = {}
        self._checking = asyncio.Semaphore(CHECKS_MAX)
        self._waiting = 0
        self.checks = 0  # that were made in full

    async def check(self, name: str, password: str) -> passwords.Login:
        """`errors.Unauthorized`; `errors.Overloaded` while too many passwords are being checked."""
        digest = hashlib.blake2b(password.encode(errors="replace"), key=self._key).digest()
        remembered = self._right.get(name)
        if remembered is not None and hmac.compare_digest(remembered[1], digest):
            if await self._stands(name, remembered[0]):
                return passwords.Login(name, remembered[0].role)
            del self._right[name]
        if self._waiting >= WAITING_MAX:
            raise errors.Overloaded("too many are logging in", retry_after_s=2.0)
        self._waiting += 1
        try:
            async with self._checking:
                self.checks += 1
                login = await asyncio.to_thread(self._known.check, name, password)
                found = await asyncio.to_thread(self._known.get, name)
        finally:
            self._waiting -= 1
        if len(self._right) >= REMEMBERED_MAX:
            self._right.clear()
        self._right[name] = (found, digest)
        return login

    async def stands(self, name: str) -> bool:
        """Whether the password with which ``name`` was let in is still its password."""
        remembered = self._right.get(name)
        return remembered is not None and await self._stands(name, remembered[0])

    async def _stands(self, name: str, verifier: passwords.Password) -> bool:
        try:
            found = await asyncio.to_thread(self._known.get, name)
        except errors.MusterError:
            return False
        return found == verifier and not 0 < found.expires_at <= self._clock()
