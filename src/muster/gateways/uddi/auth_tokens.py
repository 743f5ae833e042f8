"""Tokens of the security API: authenticated callers, for a limited time.

A token expires when it is unused for `IDLE_S`, and after `AGE_S_MAX` at the latest.  Expired tokens are
stored for some time, so that their owner gets the error "expired" instead of "unknown".  If a publisher has
too many tokens, the least recently used one is removed.  The total number is bounded as well; expired tokens
are removed first.

Pure: the caller passes the time.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from muster.gateways.uddi.model import faults
from muster.trust.login import passwords

IDLE_S = 1_800.0
AGE_S_MAX = 8 * 3_600.0
REMEMBERED_S = 3_600.0
OF_PUBLISHER_MAX = 32
ALL_MAX = 10_000


@dataclass(slots=True)
class _Token:
    caller: passwords.PasswordLogin
    made_at_s: float
    used_at_s: float
    discarded: bool = False

    def ends_at_s(self) -> float:
        return min(self.used_at_s + IDLE_S, self.made_at_s + AGE_S_MAX)

    def is_valid(self, now_s: float) -> bool:
        return not self.discarded and now_s < self.ends_at_s()


class AuthTokens:
    def __init__(self) -> None:
        self._tokens: dict[str, _Token] = {}
        self._by_publisher: dict[str, list[str]] = {}  # by publisher, oldest first

    def issue(self, caller: passwords.PasswordLogin, now_s: float) -> str:
        mine = self._by_publisher.get(caller.name, [])
        for text in [text for text in mine if self._tokens[text].ends_at_s() + REMEMBERED_S < now_s]:
            self._remove(text)
        while len(mine) >= OF_PUBLISHER_MAX:
            # An expired one, or else the least recently used one.
            self._remove(
                min(mine, key=lambda text: (self._tokens[text].is_valid(now_s), self._tokens[text].used_at_s))
            )
        if len(self._tokens) >= ALL_MAX:
            for text in [text for text, token in self._tokens.items() if not token.is_valid(now_s)]:
                self._remove(text)
        if len(self._tokens) >= ALL_MAX:
            raise faults.fault(faults.UddiErrorCode.BUSY, f"{ALL_MAX} tokens are in use")
        text = f"authtoken:{secrets.token_urlsafe(24)}"
        self._tokens[text] = _Token(caller, now_s, now_s)
        self._by_publisher.setdefault(caller.name, []).append(text)
        return text

    def caller(self, text: str, now_s: float) -> passwords.PasswordLogin:
        token = self._tokens.get(text.strip())
        if token is None:
            raise faults.fault(
                faults.UddiErrorCode.AUTH_TOKEN_REQUIRED, "this operation needs the authInfo of get_authToken"
            )
        if not token.is_valid(now_s):
            raise faults.fault(
                faults.UddiErrorCode.AUTH_TOKEN_EXPIRED, "the authInfo has expired: get a new one"
            )
        token.used_at_s = now_s
        return token.caller

    def discard(self, text: str, now_s: float) -> None:
        self.caller(text, now_s)
        self._tokens[text.strip()].discarded = True

    def _remove(self, text: str) -> None:
        name = self._tokens.pop(text).caller.name
        self._by_publisher[name].remove(text)
        if not self._by_publisher[name]:
            del self._by_publisher[name]
