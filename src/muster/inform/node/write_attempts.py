"""A request that arrives twice shares one attempt.

Otherwise the second one could be executed after the first was rejected, and undo what was written in between.
The log recognises writes that were stored, so only rejections are remembered. A repetition that its client
has marked is another request: its rejection makes sure that no other attempt is stored any more.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Coroutine
from typing import Any

from muster.core import errors
from muster.inform import protocol

REJECTED_MAX = 1_000  # equivalent: any bound of this order serves

AttemptId = tuple[str, str, bool]  # writer, request, whether it is a repetition
Attempt = Callable[[], Coroutine[Any, Any, protocol.WriteResult]]


class WriteAttempts:
    def __init__(self) -> None:
        self._outcomes: dict[AttemptId, asyncio.Future[protocol.WriteResult]] = {}
        self._rejected: collections.deque[AttemptId] = collections.deque()

    def has(self, writer: str, write: protocol.PutContext | protocol.DeleteContext) -> bool:
        """Whether this request is being executed or was rejected."""
        return (writer, write.request, write.repeat) in self._outcomes

    async def run(
        self, writer: str, write: protocol.PutContext | protocol.DeleteContext, attempt: Attempt
    ) -> protocol.WriteResult:
        """Execute the write; or return or raise the outcome of the first such request."""
        id = (writer, write.request, write.repeat)
        if (first := self._outcomes.get(id)) is not None:
            return await asyncio.shield(first)
        outcome = self._outcomes[id] = asyncio.get_running_loop().create_future()
        try:
            result = await attempt()
        except BaseException as error:
            if isinstance(error, errors.NotFound | errors.Refused) and not isinstance(
                error, protocol.PrimaryMoved
            ):
                self._rejected.append(id)
                if len(self._rejected) > REJECTED_MAX:
                    del self._outcomes[self._rejected.popleft()]
            else:
                del self._outcomes[id]
            known = isinstance(error, errors.MusterError)
            outcome.set_exception(error if known else errors.TimedOut("the outcome of the write is unknown"))
            outcome.exception()  # others need not ask for it
            raise
        del self._outcomes[id]
        outcome.set_result(result)
        return result
