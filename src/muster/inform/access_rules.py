"""Access to contexts, by identity and role.

The first rule whose pattern matches the key decides.  The rules of the settings come first, then `BUILT_IN`,
then `DEFAULT`: all identities of the domain read and write (the broker blocks write requests of viewers,
machines and users who are limited to topics), and only its owner and operators change a published service.  A
pattern is a key, or a prefix that ends with ``*``.  The names in a rule are identities, ``role:<role>``,
``owner`` (the writer of the context) or ``*``.

An identity that may not read a context gets neither its value nor its attributes, and searches leave it out.
The existence of a key is not secret.  Each version belongs to its writer: the owner of the current version
cannot read versions that others wrote before.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.core import errors

ANYONE = "*"
OWNER = "owner"


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: str
    read: tuple[str, ...] = (ANYONE,)
    write: tuple[str, ...] = (ANYONE,)

    def covers(self, key: str) -> bool:
        return key.startswith(self.keys[:-1]) if self.keys.endswith("*") else key == self.keys

    def allows_all(self, act: str) -> bool:
        return ANYONE in (self.read if act == "read" else self.write)

    def check(self, key: str, act: str, *, identity: str, role: str | None, owner: str | None) -> None:
        """``act``: read or write. ``owner``: the writer of the current version; None if there is none."""
        names = self.read if act == "read" else self.write
        if ANYONE in names or identity in names or (role is not None and f"role:{role}" in names):
            return
        if OWNER in names and (owner is None or owner == identity):
            return
        raise errors.Forbidden(
            f"{identity} may not {act} {key[:80]!r}",
            hint=f"the rule for {self.keys!r} names {', '.join(names)}",
        )


#: Applied after the rules of the settings: a publisher owns its entries.
BUILT_IN = (
    AccessRule("service/*", write=(OWNER, "role:operator")),
    AccessRule("uddi/*", write=(OWNER, "role:operator")),
)
DEFAULT = AccessRule("*")


def rule_for(rules: Sequence[AccessRule], key: str) -> AccessRule:
    return next((rule for rule in rules if rule.covers(key)), DEFAULT)
