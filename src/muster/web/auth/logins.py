"""Sessions and tokens: created with a password, verified with each request, and ended.

`muster.trust.login.password_checker` verifies passwords and throttles attempts.  The existence of a login is
checked again every few seconds, so a removed login or a changed password ends its sessions soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path

import msgspec

from muster.core import errors, files
from muster.trust.login import password_checker as trust_logins
from muster.trust.login import passwords
from muster.web.auth import ended_logins, sessions

REMEMBERED_MAX = 10_000  # accounts
KNOWN_S = 5.0


class LoginService:
    def __init__(
        self,
        known: passwords.PasswordStore,
        folder: Path,
        *,
        session_s: float,
        token_s: float,
        on_failure: trust_logins.OnFailure | None = None,
    ) -> None:
        self._known = known
        self._passwords = trust_logins.PasswordChecker(known, on_failure=on_failure)
        self._folder = folder
        self._key = b""
        self._session_s = session_s
        self._token_s = token_s
        self._ended = ended_logins.EndedLogins(folder)
        self._born: dict[str, tuple[float, int, sessions.WebRole]] = {}

    async def open(self) -> None:
        """Read or create the key that signs sessions."""
        self._key = await asyncio.to_thread(self._read_key)
        await asyncio.to_thread(self._ended.read)  # raises if the file is damaged

    def _read_key(self) -> bytes:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "key"
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another web process created the key first
                files.create(path, secrets.token_bytes(32))
        return path.read_bytes()

    async def is_empty(self) -> bool:
        return not await asyncio.to_thread(self._known.names)

    async def check(self, name: str, password: str, address: str) -> tuple[sessions.WebRole, int]:
        """Create a session or token. Raises `errors.Unauthorized`, or `errors.Overloaded` while throttled."""
        login = await self._passwords.verified(name, password, address)
        return sessions.role_of(login.role, administers=login.administers), login.created_at

    async def begin(
        self,
        name: str,
        password: str,
        address: str,
        kind: sessions.TokenKind,
        *,
        lifetime_s: float | None = None,
    ) -> tuple[str, sessions.LoginSession]:
        role, born = await self.check(name, password, address)
        if await asyncio.to_thread(self._ended.is_full, name):
            raise errors.Overloaded(f"{name} has too many ended sessions that have not expired yet")
        longest_s = self._session_s if kind is sessions.TokenKind.COOKIE else self._token_s
        session = sessions.LoginSession(
            id=secrets.token_urlsafe(12),
            name=name,
            role=role,
            kind=kind,
            born=born,
            until=int(time.time() + min(longest_s, lifetime_s or longest_s)),
        )
        return sessions.seal(session, self._key), session

    async def recognise(self, text: str, kind: sessions.TokenKind) -> sessions.LoginSession:
        """Verify a session. Raises `errors.Unauthorized` if it is invalid, ended, or its login is gone."""
        session = sessions.unseal(text, self._key, kind=kind, now_s=time.time())
        if await asyncio.to_thread(self._ended.has, session):
            raise errors.Unauthorized("this session was ended", hint="log in again")
        looked_s, born, role = self._born.get(session.name, (0.0, -1, sessions.WebRole.VIEWER))
        if time.monotonic() - looked_s > KNOWN_S or born < session.born:
            born, role = await asyncio.to_thread(self._look, session.name)
            if len(self._born) > REMEMBERED_MAX:
                self._born.clear()
            self._born[session.name] = (time.monotonic(), born, role)
        if born != session.born:
            raise errors.Unauthorized("the password was changed", hint="log in again")
        return msgspec.structs.replace(session, role=role)

    def _look(self, name: str) -> tuple[int, sessions.WebRole]:
        try:
            cached = self._known.get(name)
            if cached.expires_at and cached.expires_at <= time.time():
                raise errors.Unauthorized("expired")
            return cached.created_at, sessions.role_of(cached.role, administers=cached.administers)
        except errors.MusterError:
            return -1, sessions.WebRole.VIEWER

    async def end(self, session: sessions.LoginSession) -> None:
        """End a session for all web processes of the domain."""
        await asyncio.to_thread(self._ended.add, session)

    def form_token(self, session: sessions.LoginSession) -> str:
        return sessions.form_token(session, self._key)
