"""Searches: every primary answers for its own, in the order of keys, a part at a time.

A node may have a million contexts, and a search of them must keep it from nothing else.  So it is walked in
slices of a moment, all searches taking turns; it ends when it has enough, or when its time is up, and says
how far it came (``reached``), and who asked goes on from there.  What a search holds in memory is one answer.

A primary may move while a search goes on, from a node that has not come to its key to one that has passed it.
So a node also names the keys that it gave up a moment ago, and who asked looks into the log for those that
nobody has found.

The order of the keys is made when a node is first asked to search, and kept from then on.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from muster.core import errors
from muster.inform import protocol, search_plan
from muster.inform.node import reads, state
from muster.inform.node.replicas import replica_table, sorted_keys

SLICE_S = 0.001
SLICE_KEYS = 64  # between two looks at the clock
SEARCH_S = 1.0  # then a node answers with what it has
ANSWERS_S = 3.0  # who has not answered by then is silent
SEARCHES_MAX = 64
MOVED_MAX = 200  # in one answer: each costs a look into the log
ANSWERS_BYTES_MAX = 64 << 20  # of values in the answers of all nodes to one question…
NODE_BYTES_MIN = 4 << 10  # …but of so many for each


class _Slice(NamedTuple):
    matching: list[tuple[str, replica_table.Replica]]
    reached: str | None  # None: there are no further keys


class ContextSearch:
    def __init__(self, shared: state.NodeState, reader: reads.ContextReader) -> None:
        self._desk = shared
        self._reader = reader
        self._turn = asyncio.Lock()  # of the searches: one slice in each round of the loop
        self._unordered: list[str] = []  # keys that are still to be put in order
        self._searches = 0

    # Everywhere.

    async def find(self, query: protocol.FindContexts, identity: str) -> protocol.FindResult:
        """Those that satisfy the predicate, wherever they are, as far as one answer holds them."""
        shared = self._desk
        plan = search_plan.plan(query.predicate)  # its faults are told here, once
        without = set(query.without)
        others = [node for node in shared.directory.nodes if node not in without]
        share = ANSWERS_BYTES_MAX // (len(others) + 1)
        query = msgspec.structs.replace(
            query, reader=identity, bytes_max=max(NODE_BYTES_MIN, min(share, protocol.ANSWER_BYTES_MAX))
        )
        replies, (mounted, failed) = await asyncio.gather(
            shared.bus.gather(  # we are one of those asked
                protocol.to_all("find"),
                protocol.encode(msgspec.structs.replace(query, without=())),
                enough=len(others) + 1,
                timeout_s=min(ANSWERS_S, shared.settings.timeout_s),
            ),
            self._find_mounted(query, plan),
        )
        ours = [protocol.result_of(message.data, protocol.PartialFindResult) for message in replies]
        answered = {result.node for result in ours}
        answers = ours + mounted
        # Who had more to say than one answer holds has told all up to where it came, and so have we.
        unfinished = [_end(result) for result in answers if result.more]
        reached = min(unfinished, default="")
        contexts = [context for each in answers for context in each.contexts]
        moved = sorted({key for each in ours for key in each.moved} - {context.key for context in contexts})
        if len(moved) > MOVED_MAX and (not unfinished or moved[MOVED_MAX - 1] < reached):
            reached = moved[MOVED_MAX - 1]
            unfinished.append(reached)
        if unfinished:
            contexts = [context for context in contexts if context.key <= reached]
            moved = [key for key in moved if key <= reached]
        contexts += await self._moved(plan, moved)
        # While a primary moves, the old one and the new one may each take themselves for it.
        newest = {
            context.key: context
            for context in sorted(contexts, key=lambda context: (context.key, context.version))
        }
        contexts = [
            context for context in newest.values() if shared.may_read(identity, context.key, context.writer)
        ]
        shown = protocol.fit_to_reply(contexts[: query.limit])
        if len(shown) < len(contexts):
            reached = shown[-1].key
        silent = [node for node in others if node not in answered]
        return protocol.FindResult(
            shown,
            silent[: protocol.SILENT_MAX],
            bool(unfinished) or len(shown) < len(contexts),
            failed,
            reached,
            [result.node for result in mounted if result.cut],
            len(silent[protocol.SILENT_MAX :]),
        )

    async def _moved(self, plan: search_plan.SearchPlan, keys: Sequence[str]) -> list[protocol.Context]:
        """Those of them that the plan still selects, as the log has them.

        `errors.Unavailable` if the log does not answer: without them the search would be incomplete.
        """
        contexts: list[protocol.Context] = []
        for key in keys:
            with contextlib.suppress(errors.NotFound):
                context = await self._reader.logged(key)
                if plan.selects(key, context.version, context.writer, dict(context.attributes)):
                    contexts.append(context)
        return contexts

    async def _find_mounted(
        self, query: protocol.FindContexts, plan: search_plan.SearchPlan
    ) -> tuple[list[protocol.PartialFindResult], dict[str, str]]:
        """What the other registries have, and which of them could not be asked."""
        may_read = functools.partial(self._desk.may_read, query.reader)
        theirs = {
            name: mount
            for name, mount in self._desk.mounts.items()
            if name not in query.without and mount.may_have(plan, query.after)
        }
        outcomes = await asyncio.gather(
            *(mount.find(plan, query.after, query.limit, may_read) for mount in theirs.values()),
            return_exceptions=True,
        )
        results, failed = [], {}
        for name, outcome in zip(theirs, outcomes, strict=True):
            if isinstance(outcome, Exception):  # a fault in a back end, too, is no reason to find nothing
                failed[name] = getattr(outcome, "message", "") or f"{type(outcome).__name__}: {outcome}"
                state.events.warning("mount-failed", mount=name, error=outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        return results, failed

    # Here.

    async def find_here(self, query: protocol.FindContexts) -> protocol.PartialFindResult:
        """Among the contexts whose primary we are."""
        if self._searches >= SEARCHES_MAX:
            raise errors.Overloaded(
                f"{self._desk.name} has {SEARCHES_MAX} searches in flight", retry_after_s=SEARCH_S
            )
        self._searches += 1
        try:
            return self._with_moved(query, await self._search(query, search_plan.plan(query.predicate)))
        finally:
            self._searches -= 1

    def _with_moved(
        self, query: protocol.FindContexts, result: protocol.PartialFindResult
    ) -> protocol.PartialFindResult:
        """And what we gave up a moment ago, as it was then: the log tells what has become of it."""
        shared, plan = self._desk, search_plan.plan(query.predicate)
        moved = sorted(
            key
            for key, (at_s, was) in shared.moved.items()
            if query.after < key and (not result.more or key <= result.reached)
            if key.startswith(plan.begins) and all(needle in was.attributes for needle in plan.bytes)
            if at_s > shared.now_s() - state.MOVED_REMEMBERED_S and was.is_live(shared.now_ns())
            if plan.selects(key, was.version, was.writer, protocol.attributes_of(was.attributes))
        )
        if len(moved) > MOVED_MAX:
            reached = moved[MOVED_MAX - 1]
            contexts = [context for context in result.contexts if context.key <= reached]
            return protocol.PartialFindResult(result.node, contexts, True, reached, moved=moved[:MOVED_MAX])
        return msgspec.structs.replace(result, moved=moved) if moved else result

    async def _search(
        self, query: protocol.FindContexts, plan: search_plan.SearchPlan
    ) -> protocol.PartialFindResult:
        shared, until_s = self._desk, time.monotonic() + SEARCH_S
        contexts: list[protocol.Context] = []
        size, reached = 0, query.after
        if plan.keys is None and not await self._ordered(until_s):
            return protocol.PartialFindResult(shared.name, contexts, True, reached)
        while True:
            async with self._turn:
                matching, after = self._slice(plan, reached)
                await asyncio.sleep(0)
            for key, selected in matching:
                if query.reader and not shared.may_read(query.reader, key, selected.writer):
                    continue
                if len(contexts) == query.limit:
                    return protocol.PartialFindResult(shared.name, contexts, True, contexts[-1].key)
                copy, value = await self._value(plan, key, selected)
                if value is None:
                    continue
                size += len(value) + len(copy.attributes) + 256
                if contexts and size > query.bytes_max:
                    return protocol.PartialFindResult(shared.name, contexts, True, contexts[-1].key)
                contexts.append(self._reader.context(key, copy, value, shared.age_s(copy)))
            if after is None:
                return protocol.PartialFindResult(shared.name, contexts)
            reached = after
            if time.monotonic() > until_s:
                return protocol.PartialFindResult(shared.name, contexts, True, reached)

    async def _value(
        self, plan: search_plan.SearchPlan, key: str, copy: replica_table.Replica
    ) -> tuple[replica_table.Replica, bytes | None]:
        """The value of what was selected; None where it has gone, or is no longer what is looked for."""
        while True:
            value = await self._desk.value_of(key, copy)
            if value is not None:
                return copy, value
            now = self._desk.copies.index.get(key)
            if now is None or now is copy or not self._selects(plan, key, now, self._desk.now_ns()):
                return copy, None
            copy = now  # it was written meanwhile

    def _slice(self, plan: search_plan.SearchPlan, after: str) -> _Slice:
        now_ns, until_s = self._desk.now_ns(), time.monotonic() + SLICE_S
        index, needed = self._desk.copies.index, plan.bytes
        matching: list[tuple[str, replica_table.Replica]] = []
        while keys := self._following(plan, after):
            for key in keys:
                copy = index.get(key)
                if copy is None:
                    continue
                packed = copy.attributes
                for needle in needed:  # most end here
                    if needle not in packed:
                        break
                else:
                    if self._selects(plan, key, copy, now_ns):
                        matching.append((key, copy))
            after = keys[-1]
            if time.monotonic() > until_s:
                return _Slice(matching, after)
        return _Slice(matching, None)

    def _selects(
        self, plan: search_plan.SearchPlan, key: str, copy: replica_table.Replica, now_ns: int
    ) -> bool:
        if copy.temporary or copy.holders[0] != self._desk.name or not copy.is_live(now_ns):
            return False
        attributes = protocol.attributes_of(copy.attributes) if plan.asks else {}
        return plan.selects(key, copy.version, copy.writer, attributes)

    # The order of the keys.

    def _following(self, plan: search_plan.SearchPlan, after: str) -> Sequence[str]:
        """Some keys that the plan may select; none only where there are none."""
        if plan.keys is not None:
            first = bisect.bisect_right(plan.keys, after)
            return plan.keys[first : first + SLICE_KEYS]
        order = self._desk.copies.order
        assert order is not None
        if after < plan.begins:
            keys = order.following(plan.begins, SLICE_KEYS, itself=True)
        else:
            keys = order.following(after, SLICE_KEYS)
        if not plan.begins or (keys and keys[-1].startswith(plan.begins)):
            return keys
        return [key for key in keys if key.startswith(plan.begins)]

    async def _ordered(self, until_s: float) -> bool:
        """Whether all keys are in order; if not, the next search goes on with it."""
        held = self._desk.copies
        if held.order is None:
            held.order = sorted_keys.SortedKeys()
            self._unordered = list(held.index)[::-1]
        while self._unordered:
            async with self._turn:
                self._order_some(held.order)
                await asyncio.sleep(0)
            if time.monotonic() > until_s:
                break
        return not self._unordered

    def _order_some(self, order: sorted_keys.SortedKeys) -> None:
        until_s, index, waiting = time.monotonic() + SLICE_S, self._desk.copies.index, self._unordered
        while waiting:
            for key in waiting[: -SLICE_KEYS - 1 : -1]:
                if key in index:
                    order.add(key)
            del waiting[-SLICE_KEYS:]
            if time.monotonic() > until_s:
                return


def _end(result: protocol.PartialFindResult) -> str:
    """How far it came; a node of an older version says no more than its last key."""
    return result.reached or (result.contexts[-1].key if result.contexts else "")
