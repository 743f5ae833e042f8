"""A request that arrives twice shares one attempt.

Otherwise the second one could be executed after the first was rejected, and undo what was written in between.
The log recognises writes that were stored, so only rejections are remembered. A repetition that its client
has marked is another request: its rejection makes sure that no other attempt is stored any more. Clients
choose request ids, so an id is scoped to one writer and key, as in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from muster.bus.rpc import single_flight
from muster.core import errors
from muster.inform import protocol

REJECTED_MAX = 1_000  # equivalent: any bound of this order serves

Write = protocol.PutContext | protocol.DeleteContext
AttemptId = tuple[str, str, str, bool]  # writer, key, request, whether it is a repetition
Attempt = Callable[[], Coroutine[Any, Any, protocol.WriteResult]]


class WriteAttempts:
    def __init__(self) -> None:
        self._in_progress = single_flight.SingleFlight[protocol.WriteResult]()
        self._rejections: dict[AttemptId, errors.MusterError] = {}  # oldest first

    def has(self, writer: str, write: Write) -> bool:
        """Whether this request is being executed or was rejected."""
        id = _id(writer, write)
        return id in self._rejections or id in self._in_progress

    async def run(self, writer: str, write: Write, attempt: Attempt) -> protocol.WriteResult:
        """Execute the write; or return or raise the outcome of the first such request."""
        id = _id(writer, write)

        async def remember_rejection() -> protocol.WriteResult:
            try:
                return await attempt()
            except protocol.PrimaryMoved:
                raise
            except (errors.NotFound, errors.Refused) as rejection:
                self._rejections[id] = rejection
                if len(self._rejections) > REJECTED_MAX:
                    del self._rejections[next(iter(self._rejections))]
                raise

        if (rejection := self._rejections.get(id)) is not None:
            raise rejection.with_traceback(None)
        return await self._in_progress.once(id, remember_rejection)


def _id(writer: str, write: Write) -> AttemptId:
    return (writer, write.key, write.request, write.repeat)
