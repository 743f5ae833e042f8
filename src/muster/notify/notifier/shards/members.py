"""Who else is there, and what each notifier holds: summaries, said at every beat.

An event is not passed to a notifier whose summary rules it out, so a summary must never be too narrow: before
a change that widens it is acknowledged, every other notifier has answered that it heard the wider one.
Summaries of one notifier arrive in the order they were sent; until one is confirmed the others may go by any
that were sent since the last confirmed one, so a change has to be covered by all of those.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from muster.bus import api
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.notify.notifier import state as common_
from muster.notify.notifier.shards import summaries
from muster.predicates import ast, types

GONE_BEATS = 5
FRESH_BEATS = 3
IN_DOUBT_MAX = 16
SUBJECT = subjects.to_all(protocol.PART, "notifier")


class NotifierMembers:
    def __init__(self, common: common_.NotifierState, owing_max: int) -> None:
        self._common = common
        self._owing_max = owing_max
        self._heard: dict[str, tuple[float, protocol.ShardSummary]] = {}
        self._in_doubt: list[protocol.ShardSummary] = []  # others go by one of these

    async def start(self) -> None:
        await self._common.listen(SUBJECT, self._take)

    async def beat(self) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self.say(confirmed=len(self._in_doubt) > IN_DOUBT_MAX)
            self._common.moved.set()
            await asyncio.sleep(self._common.settings.beat_s)

    # -- saying

    async def say(
        self, *, leaving: bool = False, confirmed: bool = False, also: tuple[protocol.Shard, ...] = ()
    ) -> None:
        """What this notifier holds, to the others; ``confirmed``: until they have all heard it."""
        summary = self._summary(leaving, also)
        if not self._in_doubt or self._in_doubt[-1] != summary:
            self._in_doubt.append(summary)
        data = messages.encode(summary)
        bus = self._common.bus
        if not confirmed:
            await bus.publish(SUBJECT, data)
            return
        # A notifier that does not answer is removed soon, and then no request waits for it.
        while others := len(self.others()):
            answers = await bus.gather(SUBJECT, data, enough=others, timeout_s=self._common.settings.beat_s)
            if len(answers) >= others:
                break
        if summary in self._in_doubt:
            del self._in_doubt[: self._in_doubt.index(summary)]

    def _summary(self, leaving: bool, also: tuple[protocol.Shard, ...]) -> protocol.ShardSummary:
        common = self._common
        accepts = common.engine.policies.accepts()
        return protocol.ShardSummary(
            notifier=common.name,
            shards=() if leaving else (*common.held, *also),
            leaving=leaving,
            full=self.owing >= self._owing_max,
            floors={shard: held.floor for shard, held in common.held.items()},
            words=summaries.summary_words(common.engine),
            accepts=None if accepts is None else tuple(sorted(accepts)),
        )

    @property
    def owing(self) -> int:
        return sum(len(held.pending) for held in self._common.held.values())

    @property
    def is_full(self) -> bool:
        """Whether here or elsewhere so many acknowledgements are owed that more would be too many."""
        return self.owing >= self._owing_max or any(summary.full for _, summary in self._heard.values())

    async def widen(self) -> None:
        """Returns when the others know that there may be more here than they were told."""
        if self._heard and any(
            summaries.is_wider(self._common.engine, summary) for summary in self._in_doubt
        ):
            await self.say(confirmed=True)

    # -- hearing

    def _take(self, message: api.Message) -> None:
        try:
            summary = messages.decode(message.data, protocol.ShardSummary)
        except errors.MusterError:
            self._common.count("malformed")
            return
        if summary.notifier == self._common.name:
            return
        new = summary.notifier not in self._heard
        if summary.leaving:
            self._heard.pop(summary.notifier, None)
        else:
            self._heard[summary.notifier] = (time.monotonic(), summary)
        if new or summary.leaving:
            self._common.moved.set()
        if message.reply:
            self._common.spawn(self._confirm(message))

    async def _confirm(self, message: api.Message) -> None:
        """Not a reply to a request: `say` gathers it from all that heard the announcement."""
        with contextlib.suppress(errors.MusterError):
            await message.respond(b"heard")

    def others(self) -> list[str]:
        limit = time.monotonic() - GONE_BEATS * self._common.settings.beat_s
        for name in [name for name, (at, _) in self._heard.items() if at < limit]:
            del self._heard[name]
        return list(self._heard)

    # -- what follows from it

    def shards(self) -> set[protocol.Shard]:
        """Those that a known notifier holds."""
        return set(self._common.held).union(*(summary.shards for _, summary in self._heard.values()))

    def floors(self) -> dict[protocol.Shard, int]:
        """By shard, the first durable event that it still needs."""
        floors: dict[protocol.Shard, int] = {}
        for _, summary in self._heard.values():
            for shard, floor in summary.floors.items():
                floors[shard] = min(floor, floors.get(shard, floor))
        for shard, held in self._common.held.items():
            floors[shard] = min(held.floor, floors.get(shard, held.floor))
        return floors

    def to_be_told(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[str] | None:
        """The notifiers that may hold a receiver of an event; None: all notifiers."""
        if len(self.shards()) < protocol.SHARDS:
            # Somebody holds, or is about to hold, shards that we were not told of.
            return None
        names = []
        for name, (heard_at, summary) in self._heard.items():
            # A summary that is not fresh may be too narrow.
            fresh = time.monotonic() - heard_at < FRESH_BEATS * self._common.settings.beat_s
            if fresh and not summaries.may_match(summary, attributes, address):
                self._common.count("pruned")
            else:
                names.append(name)
        return names
