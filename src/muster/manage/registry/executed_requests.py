"""Requests that were executed, by their id: another registry recognises a repetition. Pure.

A client repeats a request that has no reply. The registry that executed it may be lost with its reply, so the
id is stored together with the changes of the request. The oldest ids are dropped by their number, not by
their age: clocks of two registries may differ by more than a client waits.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets

REQUESTS_MAX = 20_000
ORDER_ID_MAX = 256  # characters: see `protocol.Operation.id`


def derived_id(request: str, characters: int) -> str:
    """The id of what a request starts: a repetition of the request, to any registry, has the same id."""
    id = hashlib.sha256(request.encode()).hexdigest() if request else secrets.token_hex(32)
    return id[:characters]


def order_id(request: str, resource: str) -> str:
    """The id of an operation on one resource, in a length that agents accept."""
    id = f"{request}-{resource}"
    return id if len(id) <= ORDER_ID_MAX else derived_id(id, 64)


class ExecutedRequests:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # oldest first
        self._last = 0

    def __contains__(self, request: str) -> bool:
        return request in self._numbers

    def add(self, request: str) -> dict[str, int | None]:
        """The records to store for a request that is executed now; None deletes the oldest ones."""
        if not request or request in self:
            return {}
        surplus = max(0, len(self._numbers) + 1 - REQUESTS_MAX)
        return {**dict.fromkeys(itertools.islice(self._numbers, surplus)), request: self._last + 1}

    def accept(self, changes: dict[str, int | None]) -> None:
        """Apply stored changes."""
        for request, number in changes.items():
            if number is None:
                self._numbers.pop(request, None)
            else:
                self._numbers[request] = number
                self._last = max(self._last, number)
