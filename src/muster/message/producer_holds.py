"""How long slow consumers of topics hold producers back: the times, and the budget of each identity.

A report of a slow consumer holds producers for `HOLD_S` and is renewed. The client library stops renewing
after `PATIENCE_S`, but a client without the library need not, so the dispatcher limits the holds of each
identity, over all its connections and topics: producers wait for it at most `PATIENCE_S` at once, and at most
`SHARE_MAX` of the time in the long run. A consumer that is slower than that loses its oldest messages.

Pure: the time is an argument.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HOLD_S: Final = 0.5
RENEW_S: Final = 0.2
PATIENCE_S: Final = 10.0
SHARE_MAX: Final = 0.9
TOPICS_MAX: Final = 256  # that reports of one identity hold at one time
RECOVERIES_A_SECOND: Final = 100  # of one identity that are broadcast: all clients receive these

_REGAINED: Final = SHARE_MAX / (1 - SHARE_MAX)  # of the budget, for each second without a hold
_SAME_S: Final = RENEW_S / 2  # a report that follows so soon changes nothing


class HoldDecision(enum.Enum):
    BROADCAST = "broadcast"
    UNCHANGED = "unchanged"  # nothing changes for producers
    REFUSED = "refused"


#: Called for each report, with the time for which producers were held since the identity's last one.
OnReport = Callable[[str, HoldDecision, float], None]


@dataclass(slots=True)
class _IdentityHolds:
    at_s: float  # of the other fields
    used_s: float = 0.0
    exhausted: bool = False
    topics: dict[str, float] = field(default_factory=dict)  # until when each is held
    second: int = 0
    recoveries: int = 0  # in this second

    def advance(self, now_s: float) -> float:
        """Count the time until now; returns for how much of it producers were held."""
        held_until_s = min(now_s, max(self.topics.values(), default=self.at_s))
        held_s = max(0.0, held_until_s - self.at_s)
        released_s = max(0.0, now_s - self.at_s - held_s)
        self.used_s = max(0.0, self.used_s + held_s - released_s * _REGAINED)
        self.at_s = max(self.at_s, now_s)
        self.topics = {topic: until_s for topic, until_s in self.topics.items() if until_s > now_s}
        if int(now_s) != self.second:
            self.second, self.recoveries = int(now_s), 0
        if self.used_s >= PATIENCE_S:
            self.exhausted = True
        elif not self.used_s:
            self.exhausted = False
        return held_s


class HoldBudgets:
    """The holds of all identities. There is an entry for each identity that ever reported a slow consumer."""

    def __init__(self, on_report: OnReport = lambda identity, decision, held_s: None) -> None:
        self._on_report = on_report
        self._identities: dict[str, _IdentityHolds] = {}

    def report(self, identity: str, topic: str, now_s: float, *, recovered: bool = False) -> HoldDecision:
        holds = self._identities.setdefault(identity, _IdentityHolds(now_s))
        held_s = holds.advance(now_s)
        decision = self._recovered(holds, topic, now_s) if recovered else self._slow(holds, topic, now_s)
        self._on_report(identity, decision, held_s)
        return decision

    def _recovered(self, holds: _IdentityHolds, topic: str, now_s: float) -> HoldDecision:
        if topic not in holds.topics or holds.recoveries >= RECOVERIES_A_SECOND:
            return HoldDecision.UNCHANGED  # in the second case the hold ends after its time
        del holds.topics[topic]
        holds.recoveries += 1
        # Or else producers would not wait for the slow consumers of others.
        others_wait = any(other.topics.get(topic, now_s) > now_s for other in self._identities.values())
        return HoldDecision.UNCHANGED if others_wait else HoldDecision.BROADCAST

    def _slow(self, holds: _IdentityHolds, topic: str, now_s: float) -> HoldDecision:
        if holds.exhausted or (topic not in holds.topics and len(holds.topics) >= TOPICS_MAX):
            return HoldDecision.REFUSED
        if holds.topics.get(topic, now_s) > now_s + HOLD_S - _SAME_S:
            return HoldDecision.UNCHANGED
        holds.topics[topic] = now_s + HOLD_S
        return HoldDecision.BROADCAST
