"""Tokens of the security port: who logged in, for a while.

A token lives as long as it is used and not longer than `AGE_S_MAX`.  One that has ended is remembered for
some time, so that its holder hears that it has expired and not that it never was.

Pure: the caller brings the time.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from muster.inform.uddi import faults, registry

IDLE_S = 1_800.0
AGE_S_MAX = 8 * 3_600.0
REMEMBERED_S = 3_600.0
LIVE_MAX = 10_000


@dataclass(slots=True)
class _Token:
    publisher: registry.Publisher
    made_at_s: float
    used_at_s: float
    discarded: bool = False

    def ends_at_s(self) -> float:
        return min(self.used_at_s + IDLE_S, self.made_at_s + AGE_S_MAX)


class Tokens:
    def __init__(self) -> None:
        self._all: dict[str, _Token] = {}

    def make(self, publisher: registry.Publisher, now_s: float) -> str:
        for text in [text for text, one in self._all.items() if one.ends_at_s() + REMEMBERED_S < now_s]:
            del self._all[text]
        if len(self._all) >= LIVE_MAX:
            raise faults.fault(faults.Code.BUSY, f"{LIVE_MAX} publishers are logged in")
        text = f"authtoken:{secrets.token_urlsafe(24)}"
        self._all[text] = _Token(publisher, now_s, now_s)
        return text

    def publisher(self, text: str, now_s: float) -> registry.Publisher:
        one = self._all.get(text.strip())
        if one is None:
            raise faults.fault(faults.Code.AUTH_TOKEN_REQUIRED, "this needs the authInfo of get_authToken")
        if one.discarded or one.ends_at_s() <= now_s:
            raise faults.fault(faults.Code.AUTH_TOKEN_EXPIRED, "the authInfo has expired: get another")
        one.used_at_s = now_s
        return one.publisher

    def discard(self, text: str, now_s: float) -> None:
        self.publisher(text, now_s)
        self._all[text.strip()].discarded = True
