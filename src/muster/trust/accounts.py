"""The account of a domain: role templates, revocations, and the connection events that it imports.

Pure.  The brokers' own account (``SYS``) exports the events; each domain imports its own and no other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.core import subjects
from muster.trust import jwt
from muster.trust.permissions import roles

_EVENTS = {"connect": "CONNECT", "disconnect": "DISCONNECT"}


@dataclass(frozen=True, slots=True)
class BrokerTrust:
    """The trust settings of a broker: ``operator``, ``system_account``, ``resolver_preload``."""

    operator_jwt: str
    system_account: str
    accounts: dict[str, str]  # public key -> JWT


def domain(
    public: str,
    *,
    system: str,
    signing: str,
    role_keys: Mapping[roles.Role, str],
    revocations: Mapping[str, int],
) -> jwt.AccountClaims:
    """``public`` is the account's key, ``system`` that of the brokers' account."""
    return jwt.AccountClaims(
        imports=tuple(
            jwt.AccountImport(
                name=name,
                subject=f"$SYS.ACCOUNT.{public}.{event}",
                account=system,
                type="stream",
                local_subject=f"{subjects.CONNECTIONS}.{name}",
            )
            for name, event in _EVENTS.items()
        ),
        limits=jwt.AccountLimits(mem_storage=jwt.UNLIMITED, disk_storage=jwt.UNLIMITED),
        signing_keys=(signing, *_scopes(role_keys)),
        revocations=dict(sorted(revocations.items())),
    )


def brokers(
    *, signing: str, role_keys: Mapping[roles.Role, str], revocations: Mapping[str, int]
) -> jwt.AccountClaims:
    """The brokers' own account, which stores nothing."""
    return jwt.AccountClaims(
        exports=tuple(
            # The importer's own key must be at the star: no account receives the connection events of
            # another.
            jwt.AccountExport(
                name=event, subject=f"$SYS.ACCOUNT.*.{event}", type="stream", account_token_position=3
            )
            for event in _EVENTS.values()
        ),
        limits=jwt.AccountLimits(),
        signing_keys=(signing, *_scopes(role_keys)),
        revocations=dict(sorted(revocations.items())),
    )


def _scopes(role_keys: Mapping[roles.Role, str]) -> list[jwt.SigningScope]:
    return [
        jwt.SigningScope(key=key, role=role.value, template=roles.limits(role))
        for role, key in role_keys.items()
    ]


def roles_of(account: jwt.AccountClaims) -> set[str]:
    """The roles for which it names a key."""
    return {key.role for key in account.signing_keys if isinstance(key, jwt.SigningScope)}
