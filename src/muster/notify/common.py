"""What the parts of a notifier share: the connection, what is held and known, how things are counted."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.bus import api
from muster.bus.rpc import faults, requests
from muster.core import errors, log, messages, metrics, subjects
from muster.notify import engine as engines
from muster.notify import holding, known, protocol
from muster.notify import settings as settings_

events = log.Events("notify")


class Common:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.Notify,
        knows: known.Known,
        engine: engines.Engine,
        measure: metrics.Metrics,
    ) -> None:
        self.name = bus.identity
        self.bus = bus
        self.settings = settings
        self.known = knows
        self.engine = engine
        self.held: dict[protocol.Shard, holding.Holding] = {}
        self.moved = asyncio.Event()  # members or shards changed
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()  # messages that were no requests
        self._counter = measure.counter(
            "notify_events", "What happened to events and changes, by outcome.", ("outcome",)
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[api.Subscription] = []

    def count(self, outcome: str, number: int = 1) -> None:
        self.counts[outcome] += number
        self._counter.add(number, outcome=outcome)

    # -- work

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"notifier {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.count("internal-error")
            events.error("task-failed", error=error)

    async def listen(self, subject: str, handler: api.Handler, *, group: str | None = None) -> None:
        self._subscriptions.append(await self.subscribe(subject, handler, group=group))

    async def subscribe(
        self, subject: str, handler: api.Handler, *, group: str | None = None
    ) -> api.Subscription:
        """On a ``from`` subject, messages whose sender is certain (`requests.accept`) reach ``handler``."""

        def checked(message: api.Message) -> Awaitable[None] | None:
            if requests.accept(message, subject, self.refused, needs_reply=False) is None:
                self.count("no-request")
                return None
            return handler(message)

        from_others = subject.startswith(subjects.said_by(protocol.PART, "*", ""))
        return await self.bus.subscribe(subject, handler=checked if from_others else handler, group=group)

    async def close_ears(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    async def cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- answers

    async def answer(self, message: api.Message, answer: messages.Message) -> None:
        if message.reply:
            with contextlib.suppress(errors.Unavailable):
                await message.respond(messages.encode(answer))

    def reply(self, message: api.Message, answer: messages.Message) -> None:
        if message.reply:
            self.spawn(self.answer(message, answer))

    # -- shards

    def held_of(self, message: api.Message) -> holding.Holding | None:
        """The shard that a message is about, if it is ours to decide for at this moment."""
        held = self.held.get(int(message.subject.rpartition(".")[2]))
        if held is None or not held.lease.held:
            self.count("not-held")
            self.reply(message, refusal(moving()))
            return None
        return held

    def deciding(self) -> npt.NDArray[np.bool_]:
        """By shard, whether this notifier decides for it now: not while its lease is in doubt."""
        found = np.zeros(protocol.SHARDS, np.bool_)
        for shard, held in self.held.items():
            found[shard] = held.lease.held
        return found


def moving() -> errors.Unavailable:
    return errors.Unavailable("this shard is on its way to another notifier, or back to this one")


def refusal(error: errors.MusterError) -> protocol.Answer:
    return protocol.Answer(refused=((-1, faults.fault_of(error)),))


class Codec:
    """Replies to what is served by `rpc.server`: see `protocol.Answer`."""

    def result(self, value: int) -> bytes:
        return messages.encode(protocol.Answer(sequence=value))

    def error(self, error: errors.MusterError) -> bytes:
        return messages.encode(refusal(error))
