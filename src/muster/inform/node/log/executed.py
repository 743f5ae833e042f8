"""Requests that were executed in the last minutes: a repetition of one is not executed again. Pure."""

from __future__ import annotations

from collections.abc import Callable

from muster.inform.node.log import context_log

EXECUTED_S = 180.0  # how long requests are recognised: longer than any node tries a write
EXECUTED_MAX = 500_000


class ExecutedRequests:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._positions: dict[int, int] = {}  # by a hash of their ids
        self._former: dict[int, int] = {}  # of the time before `_begun_s`
        self._begun_s = self.since_s = now_s()  # all requests since then are known

    def remember(self, entry: context_log.ContextLogEntry) -> None:
        """Recognise it if it is repeated."""
        record = entry.record
        if not record.request or record.reason not in ("put", "delete", "refuse"):
            return
        now_s = self._now_s()
        if now_s - self._begun_s >= EXECUTED_S or len(self._positions) >= EXECUTED_MAX // 2:
            if self._former:
                self.since_s = max(self.since_s, self._begun_s)
            self._former, self._positions, self._begun_s = self._positions, {}, now_s
        self._positions[hash((record.writer, record.key, record.request))] = entry.position

    @property
    def has_all(self) -> bool:
        """Whether a request that `position` does not find was not executed in the last minutes."""
        return self._now_s() - self.since_s >= EXECUTED_S

    def position(self, writer: str, key: str, request: str) -> int | None:
        """The position of a request that was executed, or rejected for good, in the last minutes."""
        id = hash((writer, key, request))
        return self._positions.get(id) or self._former.get(id)
