"""Sessions and tokens: created with a password or by an identity provider, verified with each request, ended.

`muster.trust.login.password_checker` verifies passwords and throttles attempts, `muster.web.auth.oidc` talks
to the provider.  The login is read again with each request: one that is removed, or has another role or
password, ends its sessions and tokens at once.  The role of a person from the provider follows the current
settings; changes of groups in the provider take effect at the next login.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from muster.core import errors, files, leaky_buckets, units
from muster.core.net import hosts
from muster.trust.login import password_checker, passwords
from muster.web import settings as settings_
from muster.web.auth import ended_logins, oidc, scopes, sessions, tokens

REFUSED_CODES = leaky_buckets.BucketBudget(30, 10.0)  # of the provider, by address


#: The columns of tables of logins.
LOGINS = ("name", "role", "created_at", "expires_at")


class LoginRow(msgspec.Struct, frozen=True, kw_only=True):
    """A login. Times are in seconds since 1970; ``expires_at`` None: it does not expire."""

    name: str
    role: str
    created_at: int
    expires_at: int | None = None


def login_rows(store: passwords.PasswordStore) -> list[LoginRow]:
    """Blocks: call it in a thread."""
    return [
        LoginRow(
            name=login.name,
            role="admin" if login.administers else login.role.value,
            created_at=login.created_at,
            expires_at=login.expires_at or None,
        )
        for login in map(store.get, store.names())
    ]


class LoginService:
    def __init__(
        self,
        known: passwords.PasswordStore,
        folder: Path,
        settings: settings_.WebSettings,
        *,
        on_failure: password_checker.OnFailure | None = None,
    ) -> None:
        self._known = known
        self._passwords = password_checker.PasswordChecker(known, on_failure=on_failure)
        self._folder = folder
        self._key = b""
        self._settings = settings
        self._ended = ended_logins.EndedLogins(folder)
        self._refused_codes = leaky_buckets.LeakyBuckets[str](REFUSED_CODES)
        self.tokens = tokens.TokenStore(folder / "tokens")
        self.provider = oidc.OidcProvider(settings.oidc) if settings.oidc.issuer else None

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
        return self.provider is None and not await asyncio.to_thread(self._known.names)

    # Sessions.

    async def check_password(self, name: str, password: str, address: str) -> sessions.LoginSession:
        """A session that is not yet handed out.

        Raises `errors.Unauthorized`, or `errors.Overloaded` while throttled.
        """
        login = await self._passwords.verified(name, password, address)
        role = sessions.role_of(login.role, administers=login.administers)
        return await self._session(name, role, born=login.created_at)

    async def _session(
        self, name: str, role: sessions.WebRole, *, born: int, groups: tuple[str, ...] | None = None
    ) -> sessions.LoginSession:
        if await asyncio.to_thread(self._ended.is_full, name):
            raise errors.Overloaded(f"{name} has too many ended sessions that have not expired yet")
        return sessions.LoginSession(
            id=secrets.token_urlsafe(12),
            name=name,
            role=role,
            kind=sessions.TokenKind.COOKIE,
            born=born,
            until=int(time.time() + self._settings.session_s),
            groups=groups,
        )

    def seal(self, session: sessions.LoginSession) -> str:
        return sessions.seal(session, self._key)

    async def recognise_cookie(self, text: str) -> sessions.LoginSession:
        """Verify a session. Raises `errors.Unauthorized` if it is invalid, ended, or its login is gone."""
        session = sessions.unseal(text, self._key, now_s=time.time())
        return await asyncio.to_thread(self._continued, session)

    async def recognise_token(self, text: str) -> sessions.LoginSession:
        """Verify an API token. Raises `errors.Unauthorized` like `recognise_cookie`."""
        return await asyncio.to_thread(lambda: self._current(self.tokens.verify(text).session))

    # These read files and block.

    def _continued(self, session: sessions.LoginSession) -> sessions.LoginSession:
        if self._ended.has(session):
            raise errors.Unauthorized("this session was ended", hint="log in again")
        return self._current(session)

    def _current(self, session: sessions.LoginSession) -> sessions.LoginSession:
        """The session with the role that its login has now, at most the role of the session."""
        role = self._role_now(session)
        if session.kind is sessions.TokenKind.TOKEN and not session.role.covers(role):
            role = session.role
        return msgspec.structs.replace(session, role=role)

    def _role_now(self, session: sessions.LoginSession) -> sessions.WebRole:
        if session.groups is not None:
            permitted = oidc.role_of_groups(session.groups, self._settings.oidc) if self.provider else None
            if permitted is None:
                raise errors.Unauthorized("the groups of this login have no role any more")
            return self._limited(session.name, permitted[0])
        try:
            login = self._known.current(session.name)
        except (errors.NotFound, errors.InvalidInput):
            login = None
        if login is None or login.created_at != session.born or login.expired(time.time()):
            raise errors.Unauthorized("the password was changed or removed", hint="log in again")
        return sessions.role_of(login.role, administers=login.administers)

    def _limited(self, name: str, role: sessions.WebRole) -> sessions.WebRole:
        """The role of a person from the provider, with the identity that `finish_oidc` made."""
        if self._known.identities is None:
            return role
        limited = self._known.identities.role(name, sessions.bus_role(role))
        return min(role, sessions.role_of(limited, administers=True), key=lambda each: each.rank)

    async def end(self, session: sessions.LoginSession) -> None:
        """End a session or token for all web processes of the domain."""
        if session.kind is sessions.TokenKind.TOKEN:
            await asyncio.to_thread(self.tokens.revoke, session.id)
        else:
            await asyncio.to_thread(self._ended.add, session)

    def form_token(self, session: sessions.LoginSession) -> str:
        return sessions.form_token(session, self._key)

    # Tokens.

    async def create_token(
        self,
        owner: sessions.LoginSession,
        *,
        role: sessions.WebRole | None = None,
        scopes_: Sequence[str] = (),
        description: str = "",
        lifetime_s: float | None = None,
    ) -> tuple[str, tokens.TokenRecord]:
        """A token of the owner with at most the owner's role, and its record."""
        if role is not None and not owner.role.covers(role):
            raise errors.Forbidden(f"{owner.name} has the role {owner.role.value}, not {role.value}")
        longest_s = self._settings.token_s
        if lifetime_s is not None and lifetime_s > longest_s:
            raise errors.InvalidInput(
                f"a token can last {units.rounded_duration(longest_s)} at most",
                hint="the setting web.token_s limits it",
            )
        return await asyncio.to_thread(
            self.tokens.create,
            msgspec.structs.replace(owner, role=role or owner.role),
            scopes=scopes.check(scopes_),
            description=description,
            lifetime_s=lifetime_s or longest_s,
        )

    # The identity provider.

    async def begin_oidc(self, redirect: str, next_: str) -> tuple[str, str]:
        """The address of the provider to which the browser is sent, and the text that it keeps."""
        address, attempt = await self._provider().begin(redirect, next_)
        return address, oidc.seal_attempt(attempt, self._key)

    async def finish_oidc(
        self, text: str, *, state: str, code: str, address: str
    ) -> tuple[sessions.LoginSession, str]:
        """A session of the person that the provider authenticated, and the page that was requested.

        Raises `errors.Unauthorized`, `errors.Forbidden` if none of the person's groups has a role, or
        `errors.Overloaded` after many codes of one address that the provider refused.
        """
        attempt = oidc.unseal_attempt(text, self._key, now_s=time.time())
        client = hosts.network(address)
        wait_s = self._refused_codes.wait_s(client, time.monotonic())
        if wait_s:
            raise errors.Overloaded("too many failed logins", retry_after_s=wait_s)
        try:
            claims = await self._provider().finish(attempt, state=state, code=code)
        except errors.Unauthorized:
            self._refused_codes.add(client, time.monotonic())
            raise
        name = oidc.identity_name(claims.name, self._settings.oidc.name_prefix)
        permitted = oidc.role_of_groups(claims.groups, self._settings.oidc)
        if permitted is None:
            raise errors.Forbidden(
                f"{claims.name[:100]} is in no group that may use the dashboard",
                hint="an administrator maps groups to roles with web.oidc.viewers, operators and admins",
            )
        role, groups = permitted
        if self._known.identities is not None:
            await asyncio.to_thread(self._known.identities.provide, name, sessions.bus_role(role))
        return await self._session(name, role, born=int(time.time()), groups=groups), attempt.next

    def _provider(self) -> oidc.OidcProvider:
        if self.provider is None:
            raise errors.NotFound("no identity provider is configured", hint="set web.oidc.issuer")
        return self.provider
