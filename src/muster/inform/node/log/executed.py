"""Requests that were executed in the last minutes: a repetition of one is not executed again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from muster.inform.node.log import context_log

EXECUTED_S = 180.0  # how long requests are recognised: longer than any node tries a write
EXECUTED_MAX = 500_000


class ExecutedRequests:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._positions: dict[int, int] = {}  # by a hash of their ids
        self._at: deque[tuple[float, int]] = deque()
        self.since_s = now_s()  # all requests since then are known

    def remember(self, entry: context_log.ContextLogEntry) -> None:
        """Recognise it if it is repeated."""
        record = entry.record
        if not record.request or record.reason not in ("put", "delete", "refuse"):
            return
        executed, at, now_s = self._positions, self._at, self._now_s()
        id = hash((record.writer, record.key, record.request))
        executed[id] = entry.position
        at.append((now_s, id))
        while at[0][0] < now_s - EXECUTED_S or len(at) > EXECUTED_MAX:
            at_s, oldest = at.popleft()
            executed.pop(oldest, None)
            self.since_s = max(self.since_s, at_s)

    @property
    def has_all(self) -> bool:
        """Whether a request that `position` does not find was not executed in the last minutes."""
        return self._now_s() - self.since_s >= EXECUTED_S

    def position(self, writer: str, key: str, request: str) -> int | None:
        """The position of a request that was executed, or rejected for good, in the last minutes."""
        return self._positions.get(hash((writer, key, request)))
