"""Who is at the door: passwords are checked, sessions begun, renewed in nobody's favour, and ended.

Checking a password costs 0.1 s of a core and 64 MiB on purpose, so few are checked at once and a name or an
address that fails often waits.  That a login still exists is looked up again every few seconds: a removed or
changed password ends its sessions soon.
"""

from __future__ import annotations

import asyncio
import collections
import os
import secrets
import time
from pathlib import Path

import msgspec

from muster.core import errors
from muster.trust import passwords
from muster.web import sessions

CHECKS_MAX = 2  # passwords that are checked at the same time
WAITING_MAX = 16  # and that wait for it
FREE_FAILURES = 5  # for each name and for each address, before it has to wait
WAIT_S_MAX = 60.0
REMEMBERED_MAX = 10_000  # names and addresses that failed; logins that ended
KNOWN_S = 5.0
_Failures = collections.OrderedDict[str, tuple[int, float]]


class Throttle:
    """How long somebody who failed has to wait: doubles with each failure beyond some. Bounded."""

    def __init__(self) -> None:
        self._failures: _Failures = collections.OrderedDict()

    def wait_s(self, who: str, now_s: float) -> float:
        count, last_s = self._failures.get(who, (0, 0.0))
        if count < FREE_FAILURES:
            return 0.0
        return max(0.0, last_s + min(WAIT_S_MAX, 2.0 ** (count - FREE_FAILURES)) - now_s)

    def failed(self, who: str, now_s: float) -> None:
        count, last_s = self._failures.pop(who, (0, 0.0))
        if now_s - last_s > 10 * WAIT_S_MAX:
            count = 0
        self._failures[who] = (count + 1, now_s)
        while len(self._failures) > REMEMBERED_MAX:
            self._failures.popitem(last=False)

    def succeeded(self, who: str) -> None:
        self._failures.pop(who, None)


class Logins:
    def __init__(self, known: passwords.Passwords, folder: Path, *, session_s: float, token_s: float) -> None:
        self._known = known
        self._folder = folder
        self._key = b""
        self._session_s = session_s
        self._token_s = token_s
        self._throttle = Throttle()
        self._checking = asyncio.Semaphore(CHECKS_MAX)
        self._waiting = 0
        self._ended: dict[str, int] = {}
        self._born: dict[str, tuple[float, int, sessions.Role]] = {}

    async def open(self) -> None:
        """Read, or make, the key that seals sessions, and who has logged out before their time."""
        self._key, self._ended = await asyncio.to_thread(self._read)

    def _read(self) -> tuple[bytes, dict[str, int]]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "key"
        if not path.exists():
            fresh = self._folder / f".key.{os.getpid()}"
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(fresh, path)  # another web process may have been quicker: then its key counts
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        try:
            ended = msgspec.json.decode((self._folder / "ended.json").read_bytes(), type=dict[str, int])
        except (FileNotFoundError, msgspec.MsgspecError):
            ended = {}
        return path.read_bytes(), ended

    async def is_empty(self) -> bool:
        return not await asyncio.to_thread(self._known.names)

    async def check(self, name: str, password: str, address: str) -> tuple[sessions.Role, int]:
        """The login's role here and when its password was set; `errors.Unauthorized`, or told to wait."""
        now_s = time.monotonic()
        wait_s = max(self._throttle.wait_s(who, now_s) for who in (f"n {name[:200]}", f"a {address}"))
        if wait_s > 0:
            raise errors.Overloaded("too many wrong passwords", retry_after_s=round(wait_s) + 1.0)
        if self._waiting >= WAITING_MAX:
            raise errors.Overloaded("too many are logging in", retry_after_s=2.0)
        self._waiting += 1
        try:
            async with self._checking:
                login = await asyncio.to_thread(self._known.check, name, password)
                found = await asyncio.to_thread(self._known.get, name)
        except errors.Unauthorized:
            for who in (f"n {name[:200]}", f"a {address}"):
                self._throttle.failed(who, now_s)
            raise
        finally:
            self._waiting -= 1
        self._throttle.succeeded(f"n {name[:200]}")
        self._throttle.succeeded(f"a {address}")
        return sessions.role_of(login.role, administers=found.administers), found.created_at

    async def begin(
        self, name: str, password: str, address: str, kind: sessions.Kind, *, lifetime_s: float | None = None
    ) -> tuple[str, sessions.Session]:
        role, born = await self.check(name, password, address)
        longest_s = self._session_s if kind is sessions.Kind.COOKIE else self._token_s
        session = sessions.Session(
            id=secrets.token_urlsafe(12),
            name=name,
            role=role,
            kind=kind,
            born=born,
            until=int(time.time() + min(longest_s, lifetime_s or longest_s)),
        )
        return sessions.seal(session, self._key), session

    async def recognise(self, text: str, kind: sessions.Kind) -> sessions.Session:
        """Whose it is: `errors.Unauthorized` unless it is sealed by us, not ended, and its login still is."""
        session = sessions.unseal(text, self._key, kind=kind, now_s=time.time())
        if session.id in self._ended:
            raise errors.Unauthorized("this login was ended", hint="log in again")
        looked_s, born, role = self._born.get(session.name, (0.0, -1, sessions.Role.VIEWER))
        if time.monotonic() - looked_s > KNOWN_S or born < session.born:
            born, role = await asyncio.to_thread(self._look, session.name)
            if len(self._born) > REMEMBERED_MAX:
                self._born.clear()
            self._born[session.name] = (time.monotonic(), born, role)
        if born != session.born:
            raise errors.Unauthorized("the password was changed since", hint="log in again")
        return msgspec.structs.replace(session, role=role)

    def _look(self, name: str) -> tuple[int, sessions.Role]:
        try:
            found = self._known.get(name)
            if found.expires_at and found.expires_at <= time.time():
                raise errors.Unauthorized("expired")
            return found.created_at, sessions.role_of(found.role, administers=found.administers)
        except errors.MusterError:
            return -1, sessions.Role.VIEWER

    async def end(self, session: sessions.Session) -> None:
        now_s = time.time()
        kept = {id: until for id, until in self._ended.items() if until > now_s}
        self._ended = {**dict(list(kept.items())[-REMEMBERED_MAX:]), session.id: session.until}
        await asyncio.to_thread(self._write, msgspec.json.encode(self._ended))

    def _write(self, data: bytes) -> None:
        fresh = self._folder / f".ended.{os.getpid()}"
        fresh.write_bytes(data)
        fresh.replace(self._folder / "ended.json")

    def form_token(self, session: sessions.Session) -> str:
        return sessions.form_token(session, self._key)
