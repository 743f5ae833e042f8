"""Roles of identities, for services that check every request, and of the logins that refer to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from muster.core import errors
from muster.trust import credential_records
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.trust import keyring

KNOWN_MAX = 100_000


class IdentityRoles:
    """Roles of identities, read again when credentials or revocations have changed.

    None: it has no rights of a role, because its credentials are unknown here, revoked or expired. A copy of
    the keys does not know of a renewal: there expiry is left to the brokers.
    """

    def __init__(self, trust: keyring.Keyring) -> None:
        self._trust = trust
        self._known: dict[str, tuple[object, credential_records.CredentialRecord]] = {}

    def __call__(self, identity: str) -> str | None:
        try:
            record = self.record(identity)
        except errors.MusterError:
            return None
        known = record.status == "valid" or (record.status == "expired" and not self._trust.signs)
        return record.role if known else None

    def record(self, identity: str) -> credential_records.CredentialRecord:
        version = self._trust.version(identity)
        known = self._known.get(identity)
        if known is None or known[0] != version:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[identity] = known = version, self._trust.show(identity)
        record = known[1]
        if record.status == "valid" and record.expires_at and record.expires_at <= self._trust.now_s:
            return dataclasses.replace(record, status="expired")
        return record


class LoginIdentities:
    """A login refers to the identity of its name, and has its role or a narrower one."""

    def __init__(self, trust: keyring.Keyring) -> None:
        self._roles = IdentityRoles(trust)
        self._trust = trust
        self.provide = trust.provide_login

    def role(self, name: str, role: roles.Role) -> roles.Role:
        """The role of a login now; `errors.Unauthorized` if its identity is revoked or expired."""
        try:
            record = self._roles.record(name)
        except errors.NotFound:  # the login was made by an earlier version, and not used since
            record = self.provide(name, role)
        if record.status != "valid":
            raise errors.Unauthorized(f"the identity {name!r} of this login is {record.status}")
        try:
            return roles.of_login(roles.Role.named(record.role), role)
        except errors.Conflict as error:
            raise errors.Unauthorized(error.message, hint=error.hint) from error

    def prepare(self, name: str, role: roles.Role) -> None:
        """Have an identity for a login with this role; `errors.Conflict` if the login would be wider."""
        self.check_changes()
        identity = self.provide(name, role)
        if identity.status != "valid":
            raise errors.Conflict(f"{name!r} is {identity.status}", hint=f"`muster creds issue {name}` first")
        if roles.of_login(roles.Role.named(identity.role), role) is not role:
            raise errors.Conflict(
                f"{name!r} has the role {identity.role}: its login cannot have the wider role {role}",
                hint=f"`muster creds revoke {name}`, then `muster creds issue {name} --role {role}`",
            )

    def check_changes(self) -> None:
        """`errors.Refused` on a machine that joined: those of the first machine replace its logins."""
        if self._trust.of_machine:
            raise errors.Refused(
                "logins are changed on the machine that signs accounts",
                hint="a gateway here knows them a second later",
            )
