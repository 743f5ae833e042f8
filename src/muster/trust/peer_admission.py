"""Admits the identities that connect to a process of the domain directly, as a broker admits them."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from muster.core import errors
from muster.trust import credentials, jwt, keyring
from muster.trust.permissions import roles

_CONNECTION = "STANDARD"  # the kind of connection that credentials for direct ones must allow


@dataclass(frozen=True, slots=True)
class AdmittedIdentity:
    identity: str
    role: str
    public_key: str
    allow: tuple[str, ...]  # subjects that it may publish on; empty: all
    deny: tuple[str, ...]
    expires_at: int  # 0: never


class PeerAdmission:
    """``of_roles``: None admits identities of all roles. ``brokers``: the folder of brokers of this machine,
    which have revocations that a copy of the keys does not have. Its methods block.
    """

    def __init__(
        self,
        keys: pathlib.Path,
        *,
        brokers: pathlib.Path | None = None,
        of_roles: tuple[roles.Role, ...] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._brokers = brokers
        self._of_roles = of_roles
        self._clock = clock
        self._trust: keyring.Keyring | None = None

    def _keyring(self) -> keyring.Keyring:
        if self._trust is None:
            self._trust = keyring.Keyring.open(self._keys, clock=self._clock)
        return self._trust

    def admit(self, document: str) -> AdmittedIdentity:
        """The rights of the holder of a user's document, whose signature is not checked here."""
        trust = self._keyring()
        copies = []
        for path in self._copies():
            with contextlib.suppress(OSError, UnicodeDecodeError):  # its broker is being removed
                copies.append(path.read_text())
        claims, limits = trust.limits_of(document, trust.newest_account(copies))
        assert isinstance(claims.nats, jwt.UserClaims)
        role = roles.role_from_tags(claims.nats.tags)
        kinds = limits.allowed_connection_types
        if limits.bearer_token or (kinds and _CONNECTION not in kinds):
            raise errors.Forbidden(f"the credentials of {claims.name!r} are not for direct connections")
        if role is None or (self._of_roles is not None and role not in self._of_roles):
            raise errors.Forbidden(f"{claims.name!r} has a role that does not connect here")
        return AdmittedIdentity(
            claims.name, role.value, claims.sub, limits.pub.allow, limits.pub.deny, claims.exp
        )

    def version(self) -> object:
        """Differs when revocations or the permissions of roles have changed."""
        paths = (self._keyring().account_path(), *self._copies())
        states = [path.stat() for path in paths if path.exists()]
        return [(state.st_ino, state.st_mtime_ns) for state in states]

    def _copies(self) -> list[pathlib.Path]:
        """The account as brokers have stored it (`muster.bus.brokers.config.BrokerConfig.accounts_path`)."""
        if self._brokers is None:
            return []
        return sorted(self._brokers.glob(f"*/accounts/{self._keyring().account_key()}.jwt"))

    def check_answer(self, public_key: str, nonce: str, answer: bytes) -> None:
        credentials.Credentials.check_answer(public_key, nonce, answer)
