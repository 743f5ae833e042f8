"""What an identity may do: access rules, and quotas of its contexts."""

from __future__ import annotations

from typing import Protocol

from muster.bus.rpc import requests
from muster.core import errors, quotas
from muster.inform import access_rules, protocol
from muster.inform import settings as settings_
from muster.inform.node.log import context_log

LOG_RESERVED = 0.05  # of the log


class RoleResolver(Protocol):
    """Returns the role of an identity, if it is known."""

    def __call__(self, identity: str) -> str | None: ...


class ContextAccess:
    """``stored``: contexts and their bytes in the log, by writer."""

    def __init__(
        self,
        settings: settings_.InformSettings,
        role_of: RoleResolver | None,
        log: context_log.ContextLog,
        stored: quotas.StoredAmounts,
    ) -> None:
        self._role_of = role_of
        self._log = log
        self._stored = stored
        # Without trust, identities are not verified, so contexts have no owners.
        self._rules = (*settings.rules, *(access_rules.BUILT_IN if role_of is not None else ()))
        self._quota = quotas.Quota(
            "contexts",
            settings.contexts_per_identity,
            "inform.contexts_per_identity",
            int(settings.share_per_identity * log.max_bytes),
            "inform.share_per_identity",
        )

    def check(self, identity: str, act: str, key: str, owner: str | None) -> None:
        rule = access_rules.rule_for(self._rules, key)
        if not rule.allows_all(act):
            role = self._role_of(identity) if self._role_of is not None else None
            rule.check(key, act, identity=identity, role=role, owner=owner)

    def check_quota(self, writer: str, size: int, *, is_new: bool) -> None:
        """Raise `errors.LimitExceeded` for a value that would exceed the quota of its writer, or that needs
        space of the log that is kept for deletions and operators."""
        records, size_under_way = self._log.under_way.of(writer)
        used, most = self._log.bytes + self._log.under_way.bytes, self._log.max_bytes
        try:
            self._stored.check(writer, self._quota, is_new * (1 + records), size + size_under_way)
            if used + size > (1 - LOG_RESERVED) * most:
                raise errors.LimitExceeded(
                    f"the log of contexts has {used:,} bytes of {most:,}, the rest of which is kept for "
                    "deletions and operators",
                    hint="raise retention.contexts.max_bytes; deleted contexts leave the log after "
                    "inform.tombstone_s",
                )
        except errors.LimitExceeded:
            role = self._role_of(writer) if self._role_of is not None else None
            if role not in quotas.EXEMPT_ROLES:
                requests.count_refusal(protocol.PART, "quota")
                raise

    def may_read(self, identity: str, key: str, writer: str) -> bool:
        try:
            self.check(identity, "read", key, writer)
        except errors.Forbidden:
            return False
        return True
