"""The other notifiers and what each holds: every notifier publishes a summary at each beat.

An event is not forwarded to a notifier whose summary excludes it, so a summary must never be too narrow:
before a change that widens it is acknowledged, every other notifier has confirmed the wider summary.
Summaries of one notifier arrive in the order in which they were sent.  Until one is confirmed, the others may
use any that was sent since the last confirmed one, so all of those have to cover a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from muster.bus import api
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.notify.notifier import state
from muster.notify.notifier.shards import summaries
from muster.predicates import ast, types

GONE_BEATS = 5
FRESH_BEATS = 3
IN_DOUBT_MAX = 16
SUBJECT = subjects.to_all(protocol.PART, "notifier")


class NotifierMembers:
    def __init__(self, common: state.NotifierState, owing_max: int) -> None:
        self._common = common
        self._owing_max = owing_max
        self._peers: dict[str, tuple[float, protocol.ShardSummary]] = {}
        self._in_doubt: list[protocol.ShardSummary] = []  # the others use one of these

    async def start(self) -> None:
        await self._common.listen(SUBJECT, self._on_summary)

    async def beat(self) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self.publish_summary(confirmed=len(self._in_doubt) > IN_DOUBT_MAX)
            self._common.moved.set()
            await asyncio.sleep(self._common.settings.beat_s)

    # -- publishing

    async def publish_summary(
        self, *, leaving: bool = False, confirmed: bool = False, also: tuple[protocol.Shard, ...] = ()
    ) -> None:
        """Publish what this notifier holds; ``confirmed``: wait until all others have confirmed it."""
        summary = self._summary(leaving, also)
        if not self._in_doubt or self._in_doubt[-1] != summary:
            self._in_doubt.append(summary)
        data = messages.encode(summary)
        bus = self._common.bus
        if not confirmed:
            await bus.publish(SUBJECT, data)
            return
        # A notifier that does not reply is removed soon, and then this does not wait for it.
        while others := len(self.others()):
            answers = await bus.gather(SUBJECT, data, enough=others, timeout_s=self._common.settings.beat_s)
            if len(answers) >= others:
                break
        if summary in self._in_doubt:
            del self._in_doubt[: self._in_doubt.index(summary)]

    def _summary(self, leaving: bool, also: tuple[protocol.Shard, ...]) -> protocol.ShardSummary:
        common = self._common
        return protocol.ShardSummary(
            notifier=common.name,
            shards=() if leaving else (*common.held, *also),
            leaving=leaving,
            full=self.owing >= self._owing_max,
            floors={shard: held.floor for shard, held in common.held.items()},
            words=summaries.summary_words(common.engine),
            accepts=summaries.summary_accepts(common.engine),
        )

    @property
    def owing(self) -> int:
        return sum(len(held.pending) for held in self._common.held.values())

    @property
    def is_full(self) -> bool:
        """Whether this notifier or another one has reached the limit of pending acknowledgements."""
        return self.owing >= self._owing_max or any(summary.full for _, summary in self._peers.values())

    async def widen(self) -> None:
        """Publish a wider summary if needed; returns when all others have confirmed it."""
        if self._peers and any(
            summaries.is_wider(self._common.engine, summary) for summary in self._in_doubt
        ):
            await self.publish_summary(confirmed=True)

    # -- receiving

    def _on_summary(self, message: api.Message) -> None:
        try:
            summary = messages.decode(message.data, protocol.ShardSummary)
        except errors.MusterError:
            self._common.count("malformed")
            return
        if summary.notifier == self._common.name:
            return
        new = summary.notifier not in self._peers
        if summary.leaving:
            self._peers.pop(summary.notifier, None)
        else:
            self._peers[summary.notifier] = (time.monotonic(), summary)
        if new or summary.leaving:
            self._common.moved.set()
        if message.reply:
            self._common.tasks.spawn("confirmation", self._confirm(message))

    async def _confirm(self, message: api.Message) -> None:
        """Confirm a summary; `publish_summary` gathers the confirmations."""
        with contextlib.suppress(errors.MusterError):
            await message.respond(b"received")

    def others(self) -> list[str]:
        limit = time.monotonic() - GONE_BEATS * self._common.settings.beat_s
        for name in [name for name, (at, _) in self._peers.items() if at < limit]:
            del self._peers[name]
        return list(self._peers)

    # -- queries

    def shards(self) -> set[protocol.Shard]:
        """Return the shards that this or another known notifier holds."""
        return set(self._common.held).union(*(summary.shards for _, summary in self._peers.values()))

    def floors(self) -> dict[protocol.Shard, int]:
        """Return, by shard, the first durable event that it still needs."""
        floors: dict[protocol.Shard, int] = {}
        for _, summary in self._peers.values():
            for shard, floor in summary.floors.items():
                floors[shard] = min(floor, floors.get(shard, floor))
        for shard, held in self._common.held.items():
            floors[shard] = min(held.floor, floors.get(shard, held.floor))
        return floors

    def forward_candidates(
        self, attributes: Mapping[str, types.Value], address: ast.Condition
    ) -> list[str] | None:
        """Return the notifiers that may hold a receiver of an event; None: any notifier may."""
        if len(self.shards()) < protocol.SHARDS:
            # An unknown notifier holds, or is about to hold, the missing shards.
            return None
        names = []
        for name, (received_at, summary) in self._peers.items():
            # An old summary may be too narrow.
            fresh = time.monotonic() - received_at < FRESH_BEATS * self._common.settings.beat_s
            if fresh and not summaries.may_match(summary, attributes, address):
                self._common.count("pruned")
            else:
                names.append(name)
        return names
