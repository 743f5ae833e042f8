"""Requests that were executed, by their id: another registry recognises a repetition. Pure.

A client repeats a request that has no reply. The registry that executed it may be lost with its reply, so the
id is stored together with the changes of the request.
"""

from __future__ import annotations

REQUESTS_MAX, KEPT_MS = 20_000, 600_000


class ExecutedRequests:
    def __init__(self) -> None:
        self._times_ms: dict[str, int] = {}  # oldest first

    def __contains__(self, request: str) -> bool:
        return request in self._times_ms

    def add(self, request: str, now_ms: int) -> dict[str, int | None]:
        """The records to store for a request that is executed now; None deletes those that are too old."""
        if not request or request in self:
            return {}
        changes: dict[str, int | None] = {}
        surplus = len(self._times_ms) + 1 - REQUESTS_MAX
        for number, (known, at_ms) in enumerate(self._times_ms.items()):
            if number >= surplus and at_ms > now_ms - KEPT_MS:
                break
            changes[known] = None
        return {**changes, request: now_ms}

    def accept(self, changes: dict[str, int | None]) -> None:
        """Apply stored changes."""
        for request, at_ms in changes.items():
            if at_ms is None:
                self._times_ms.pop(request, None)
            else:
                self._times_ms[request] = at_ms
