"""Roles of identities for services that check every request."""

from __future__ import annotations

from muster.core import errors
from muster.trust import credential_records as rows
from muster.trust import keyring

KNOWN_MAX = 100_000


class IdentityRoles:
    """Roles of identities, read again when credentials or revocations have changed.

    None: it has no rights of a role, because its credentials are unknown here, revoked or expired.
    """

    def __init__(self, trust: keyring.Keyring) -> None:
        self._trust = trust
        self._known: dict[str, tuple[object, rows.CredentialRecord]] = {}

    def __call__(self, identity: str) -> str | None:
        try:
            version = self._trust.version(identity)
            known = self._known.get(identity)
            if known is None or known[0] != version:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[identity] = known = version, self._trust.show(identity)
        except errors.MusterError:
            return None
        return str(known[1].role) if known[1].status == "valid" else None
