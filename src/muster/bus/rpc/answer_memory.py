"""Stores replies by request id, so that a repeated request is executed once.

All identities share one budget. When it is exceeded, the identity that uses most of it loses its oldest
reply, so a client with many requests displaces its own replies and not those of clients with few.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

BYTES_MAX = 16 << 20
ANSWER_BYTES_MIN = 16 << 10  # minimum size for the budget: at most 1,024 replies are stored


@dataclass(slots=True)
class RememberedAnswer:
    digest: bytes  # of the request
    data: asyncio.Future[bytes]
    bytes: int = 0  # its size in the budget; 0 until there is a reply


class AnswerMemory:
    def __init__(self) -> None:
        self._of: dict[str, dict[str, RememberedAnswer]] = {}  # by identity and request id, the oldest first
        self._bytes: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def get(self, identity: str, id: str) -> RememberedAnswer | None:
        return self._of.get(identity, {}).get(id)

    def expect(self, identity: str, id: str, digest: bytes) -> RememberedAnswer:
        """Register a request whose reply is pending, until `keep` or `drop`."""
        made = RememberedAnswer(digest, asyncio.get_running_loop().create_future())
        self._of.setdefault(identity, {})[id] = made
        return made

    def drop(self, identity: str, id: str) -> None:
        of_identity = self._of[identity]
        dropped = of_identity.pop(id)
        self._bytes[identity] -= dropped.bytes
        self._total -= dropped.bytes
        if not of_identity:
            del self._of[identity], self._bytes[identity]

    def keep(self, identity: str, id: str, data: bytes, *, remember: bool = True) -> None:
        """Complete a pending request for those who wait; with ``remember`` also for later repetitions."""
        answer = self._of[identity][id]
        answer.data.set_result(data)
        if not remember:
            self.drop(identity, id)
            return
        answer.bytes = max(len(data), ANSWER_BYTES_MIN)
        self._bytes[identity] += answer.bytes
        self._total += answer.bytes
        while self._total > BYTES_MAX:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.drop(largest, next(id for id, known in self._of[largest].items() if known.bytes))
