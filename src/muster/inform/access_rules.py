"""Who may read and write which contexts, by identity and role.

Rules are looked at in their order, and the first whose pattern covers the key decides; where none of the
settings' does, `BUILT_IN` ones and then `DEFAULT` hold: everybody in the domain reads and writes (the broker
keeps a viewer from asking to write at all), and what was published as a service is its owner's.  A pattern is
a key, or a prefix with a ``*`` at its end.  Names are identities, ``role:<role>``, ``owner`` (whoever wrote
the context) or ``*``.

Who may not read a context learns neither its value nor its attributes, and no search tells of it.  That there
is something under a key is no secret.  Each version is its own writer's: who owns a key now does not read
what another wrote there before.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from muster.core import errors

EVERYBODY = "*"
OWNER = "owner"


class AccessRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: str
    read: tuple[str, ...] = (EVERYBODY,)
    write: tuple[str, ...] = (EVERYBODY,)

    def covers(self, key: str) -> bool:
        return key.startswith(self.keys[:-1]) if self.keys.endswith("*") else key == self.keys

    def lets_everybody(self, act: str) -> bool:
        return EVERYBODY in (self.read if act == "read" else self.write)

    def check(self, key: str, act: str, *, identity: str, role: str | None, owner: str | None) -> None:
        """``act``: read or write. ``owner``: who wrote what is there; None where nothing is (all are)."""
        names = self.read if act == "read" else self.write
        if EVERYBODY in names or identity in names or (role is not None and f"role:{role}" in names):
            return
        if OWNER in names and (owner is None or owner == identity):
            return
        raise errors.Forbidden(
            f"{identity} may not {act} {key[:80]!r}",
            hint=f"the rule for {self.keys!r} names {', '.join(names)}",
        )


#: After the settings' own: what somebody published is theirs, unless the settings say otherwise.
BUILT_IN = (
    AccessRule("service/*", write=(OWNER, "role:operator")),
    AccessRule("uddi/*", write=(OWNER, "role:operator")),
)
DEFAULT = AccessRule("*")


def rule_for(rules: Sequence[AccessRule], key: str) -> AccessRule:
    return next((rule for rule in rules if rule.covers(key)), DEFAULT)
