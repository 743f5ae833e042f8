"""Tokens of the security port: who logged in, for a while.

A token lives as long as it is used and not longer than `AGE_S_MAX`.  One that has ended is remembered for
some time, so that its holder hears that it has expired and not that it never was.  A publisher that has too
many loses the one it used longest ago; the number of all is bounded as well, and tokens that have ended give
way first.

Pure: the caller brings the time.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from muster.gateways.soap import endpoint
from muster.gateways.uddi.model import faults

IDLE_S = 1_800.0
AGE_S_MAX = 8 * 3_600.0
REMEMBERED_S = 3_600.0
OF_PUBLISHER_MAX = 32
ALL_MAX = 10_000


@dataclass(slots=True)
class _Token:
    caller: endpoint.SoapCaller
    made_at_s: float
    used_at_s: float
    discarded: bool = False

    def ends_at_s(self) -> float:
        return min(self.used_at_s + IDLE_S, self.made_at_s + AGE_S_MAX)

    def lives(self, now_s: float) -> bool:
        return not self.discarded and now_s < self.ends_at_s()


class AuthTokens:
    def __init__(self) -> None:
        self._all: dict[str, _Token] = {}
        self._of: dict[str, list[str]] = {}  # by publisher, oldest first

    def make(self, caller: endpoint.SoapCaller, now_s: float) -> str:
        mine = self._of.get(caller.name, [])
        for text in [text for text in mine if self._all[text].ends_at_s() + REMEMBERED_S < now_s]:
            self._forget(text)
        while len(mine) >= OF_PUBLISHER_MAX:
            # An ended one, or else the one that was used longest ago.
            self._forget(
                min(mine, key=lambda text: (self._all[text].lives(now_s), self._all[text].used_at_s))
            )
        if len(self._all) >= ALL_MAX:
            for text in [text for text, token in self._all.items() if not token.lives(now_s)]:
                self._forget(text)
        if len(self._all) >= ALL_MAX:
            raise faults.fault(faults.UddiErrorCode.BUSY, f"{ALL_MAX} tokens are in use")
        text = f"authtoken:{secrets.token_urlsafe(24)}"
        self._all[text] = _Token(caller, now_s, now_s)
        self._of.setdefault(caller.name, []).append(text)
        return text

    def caller(self, text: str, now_s: float) -> endpoint.SoapCaller:
        token = self._all.get(text.strip())
        if token is None:
            raise faults.fault(
                faults.UddiErrorCode.AUTH_TOKEN_REQUIRED, "this needs the authInfo of get_authToken"
            )
        if not token.lives(now_s):
            raise faults.fault(
                faults.UddiErrorCode.AUTH_TOKEN_EXPIRED, "the authInfo has expired: get another"
            )
        token.used_at_s = now_s
        return token.caller

    def discard(self, text: str, now_s: float) -> None:
        self.caller(text, now_s)
        self._all[text.strip()].discarded = True

    def _forget(self, text: str) -> None:
        name = self._all.pop(text).caller.name
        self._of[name].remove(text)
        if not self._of[name]:
            del self._of[name]
