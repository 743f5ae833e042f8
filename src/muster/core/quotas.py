"""Quotas: how many things of one kind, and how many bytes, each identity has stored.

A service counts what it stores for each identity, and refuses what would exceed the quota before it stores
it. What makes room, such as a deletion, is never refused. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.core import errors

#: Roles whose requests follow from the work of the domain, or make room in it: they have no quota.
EXEMPT_ROLES = frozenset({"operator", "bootstrap", "gateway", "web"})


@dataclass(frozen=True, slots=True)
class Quota:
    """``what`` and the ``…_setting``: for the error. 0: no limit."""

    what: str
    items: int
    items_setting: str
    bytes: int = 0
    bytes_setting: str = ""


class StoredAmounts:
    """What each identity has stored."""

    def __init__(self) -> None:
        self.bytes = 0  # of all
        self._of: dict[str, tuple[int, int]] = {}

    def change(self, identity: str, items: int, size: int = 0) -> None:
        had_items, had_bytes = self._of.get(identity, (0, 0))
        now = had_items + items, had_bytes + size
        self.bytes += size
        if any(now):
            self._of[identity] = now
        else:
            self._of.pop(identity, None)

    def of(self, identity: str) -> tuple[int, int]:
        """Items and bytes."""
        return self._of.get(identity, (0, 0))

    def check(self, identity: str, quota: Quota, items: int, size: int = 0) -> None:
        """`errors.LimitExceeded` if so much more exceeds the quota."""
        had_items, had_bytes = self.of(identity)
        for unit, now, more, most, setting in (
            (quota.what, had_items, items, quota.items, quota.items_setting),
            (f"bytes of {quota.what}", had_bytes, size, quota.bytes, quota.bytes_setting),
        ):
            if most and more > 0 and now + more > most:
                raise exceeded(identity, now, unit, most, setting)


def exceeded(identity: str, now: int, unit: str, most: int, setting: str) -> errors.LimitExceeded:
    return errors.LimitExceeded(
        f"{identity} has {now:,} {unit}, of {most:,} that one identity may have",
        hint=f"delete some, or let an operator raise {setting}",
    )
