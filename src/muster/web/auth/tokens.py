"""API tokens of programs, in files that all web processes of the domain share.

The text of a token is ``muster_<id>_<secret>``.  The file of its id has its owner, role, scopes and expiry,
and a digest of the secret, never the secret.  A token is valid while its file exists, so it can be listed and
revoked.  Its role never exceeds the current role of its owner (`muster.web.auth.logins`).

All functions block: call them in a thread.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from muster.core import errors, files
from muster.core.telemetry import log
from muster.web.auth import sessions

OF_OWNER_MAX = 1000  # tokens that have not expired
DESCRIPTION_MAX = 200
CLOCK_STEP_S = 86400  # a file is kept for so long after the expiry of its token: the clock may be set back
events = log.EventLog("web")
_TEXT = re.compile(r"muster_([0-9a-f]{16})_([A-Za-z0-9_-]{43})\Z")


#: The columns of tables of tokens.
TOKENS = ("id", "description", "owner", "role", "scopes", "created_at", "expires_at")


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """An API token without its secret. ``scopes`` empty: no limit. Times are in seconds since 1970."""

    id: str
    owner: str
    role: sessions.WebRole
    scopes: tuple[str, ...]
    description: str
    created_at: int
    expires_at: int


class TokenRecord(TokenRow, frozen=True, kw_only=True):
    """The file of a token."""

    born: int  # when the owner's password was set
    groups: tuple[str, ...] | None = None  # of an owner from the identity provider
    digest: bytes

    @property
    def row(self) -> TokenRow:
        return TokenRow(**{name: getattr(self, name) for name in TokenRow.__struct_fields__})

    @property
    def session(self) -> sessions.LoginSession:
        return sessions.LoginSession(
            id=self.id,
            name=self.owner,
            role=self.role,
            kind=sessions.TokenKind.TOKEN,
            born=self.born,
            until=self.expires_at,
            groups=self.groups,
            scopes=self.scopes,
        )


class TokenStore:
    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    def create(
        self, owner: sessions.LoginSession, *, scopes: tuple[str, ...], description: str, lifetime_s: float
    ) -> tuple[str, TokenRecord]:
        """The text of a new token, which cannot be read again, and its record.

        ``owner`` has the role of the token. `errors.LimitExceeded` if the owner has too many tokens.
        """
        now_s = self._clock()
        id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        record = TokenRecord(
            id=id,
            owner=owner.name,
            role=owner.role,
            scopes=scopes,
            description=description[:DESCRIPTION_MAX],
            created_at=int(now_s),
            expires_at=int(now_s + lifetime_s),
            born=owner.born,
            groups=owner.groups,
            digest=_digest(secret),
        )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(self._folder / "lock"):
            if len(self.list(owner.name)) >= OF_OWNER_MAX:
                raise errors.LimitExceeded(
                    f"{owner.name} has {OF_OWNER_MAX} tokens", hint="revoke tokens that are not used"
                )
            files.write(self._path(id), msgspec.json.encode(record))
        return f"muster_{id}_{secret}", record

    def verify(self, text: str) -> TokenRecord:
        """The record of a token. `errors.Unauthorized` if it is unknown, revoked or expired."""
        parts = _TEXT.match(text)
        record = self._read(self._path(parts[1])) if parts else None
        if parts is None or record is None or not hmac.compare_digest(_digest(parts[2]), record.digest):
            raise errors.Unauthorized("this token is not valid", hint="create a token, or log in")
        if record.expires_at <= self._clock():
            raise errors.Unauthorized("this token has expired", hint="create a token, or log in")
        return record

    def list(self, owner: str | None = None) -> list[TokenRecord]:
        """The tokens of ``owner``, or all, oldest first. Deletes those that have expired long ago."""
        records, now_s = [], self._clock()
        for path in self._folder.glob("*.json"):
            record = self._read(path)
            if record is None:
                continue
            if record.expires_at <= now_s - CLOCK_STEP_S:
                path.unlink(missing_ok=True)
            elif record.expires_at > now_s and owner in (None, record.owner):
                records.append(record)
        return sorted(records, key=lambda record: (record.created_at, record.id))

    def revoke(
        self, id: str, *, owner: str | None = None, role_max: sessions.WebRole | None = None
    ) -> TokenRecord:
        """Delete a token: of ``owner`` if given, and with at most the role ``role_max``.

        `errors.NotFound` if there is none, `errors.Forbidden` if its role is higher.
        """
        path = self._path(id)
        record = self._read(path) if re.fullmatch(r"[0-9a-f]{16}", id) else None
        if record is None or (owner is not None and record.owner != owner):
            raise errors.NotFound(f"there is no token {id[:40]!r}", hint="list tokens for their ids")
        if role_max is not None and not role_max.covers(record.role):
            raise errors.Forbidden(
                f"the token {id} has the role {record.role.value}, and this one only {role_max.value}",
                hint=f"use a token with the role {record.role.value}, or log in",
            )
        path.unlink(missing_ok=True)
        files.sync_folder(self._folder)  # a crash does not bring it back
        return record

    def _read(self, path: Path) -> TokenRecord | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=TokenRecord)
        except FileNotFoundError:
            return None
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:  # its token is not valid; the others are
            events.error("token-damaged", file=path.name, error=error)
            return None

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
