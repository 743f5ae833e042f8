"""The tasks of a dispatcher, from its start to the first failure of one, which ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from muster.core import errors
from muster.message import protocol
from muster.supervision import tasks

ReplyCallback = Callable[[protocol.DispatcherReply], None]


class DispatcherLifetime:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.tasks = tasks.TaskSupervisor("dispatcher", on_fatal=self.end, handles=self._is_interruption)

    def end(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.tasks.spawn("task", work, on_failure=tasks.OnFailure.FATAL)

    def reply_when_done(
        self, work: Coroutine[Any, Any, protocol.DispatcherReply], reply: ReplyCallback
    ) -> None:
        """Reply with the result of ``work``, or with its error."""

        async def run() -> None:
            try:
                reply(await work)
            except errors.MusterError as error:
                reply(protocol.failed(error))

        self.spawn(run()).add_done_callback(lambda _: work.close())  # it may be cancelled before it begins

    def _is_interruption(self, error: BaseException) -> bool:
        """Such as a lost connection or a new owner of the log: the next dispatcher reads the log again."""
        if isinstance(error, errors.MusterError):
            self.end(error)
            return True
        return False
