"""Searches: every primary searches its contexts in key order and replies with one page.

A node may have a million contexts, and a search must not block its other work. A search therefore runs in
short time slices, and concurrent searches take turns: first those of one client, then the clients. The time
is charged to the client (`muster.bus.rpc.admission`). A search stops when it has enough matches or its time
is up, and reports how far it came (``reached``), so that the caller can continue. It holds one reply in
memory.

A primary may move during a search, from a node that has not reached its key to one that has passed it.  So a
node also reports the matching keys whose primary it was until recently, and the requesting node reads from
the log those that no node has returned.

The sorted key list of a node is built at the first search and maintained from then on.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from muster.bus import api
from muster.bus.rpc import admission
from muster.core import errors
from muster.core.telemetry import log
from muster.inform import protocol, search_plan
from muster.inform import settings as settings_
from muster.inform.mounts import base
from muster.inform.node import access as access_control
from muster.inform.node import reads
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.replicas import peers, replica_table, sorted_keys
from muster.inform.node.replicas import records as replica_records

events = log.EventLog("inform")

SLICE_S = 0.00015
SLICE_KEYS = 64  # between two checks of the clock
SEARCH_S = 1.0  # a node replies after this time
REPLIES_S = 3.0  # nodes without a reply after this time are reported as silent
SEARCHES_MAX = 64
EACH_AT_ONCE = 2  # searches of all nodes for one client; its others wait
SEARCHES_EACH_MAX = 16  # of one client
CONTEXT_COST = 0.003  # of encoding a context in a reply, in the unit of `muster.bus.rpc.admission`
FOUND_MAX = 1_000  # contexts in one reply: more are encoded and decoded for too long; clients continue
MOVED_MAX = 200  # in one reply: each costs a read of the log
REPLIES_BYTES_MAX = 64 << 20  # total size of the values in the replies of all nodes
NODE_BYTES_MIN = 4 << 10  # but at least so many for each node


class _Slice(NamedTuple):
    matching: list[tuple[str, replica_table.Replica]]
    reached: str | None  # None: all keys have been searched


@dataclasses.dataclass(slots=True)
class _ClientSearches:
    turn: asyncio.Semaphore
    number: int = 0  # that run or wait


@dataclasses.dataclass(eq=False)
class ContextSearch:
    node: str
    bus: api.Bus
    settings: settings_.InformSettings
    records: replica_records.ContextRecords
    freshness: log_freshness.LogFreshness
    access: access_control.ContextAccess
    directory: peers.NodeDirectory
    mounts: Mapping[str, base.MountedRegistry]
    reader: reads.ContextReader

    def __post_init__(self) -> None:
        self._slice_lock = asyncio.Lock()  # one slice in each iteration of the event loop
        self._turns: dict[str, asyncio.Lock] = {}  # by client: it waits for one slice at a time
        self._unordered: list[str] = []  # keys that are not sorted yet
        self._finding: dict[str, _ClientSearches] = {}
        self._searches: Counter[str] = Counter()  # by client

    # All nodes.

    async def find(self, query: protocol.FindContexts, identity: str) -> protocol.FindResult:
        """Return the contexts of all nodes that match the predicate, as many as one reply holds."""
        search_plan.plan(query.predicate)  # raises errors in the predicate once, here
        of = self._finding.setdefault(identity, _ClientSearches(asyncio.Semaphore(EACH_AT_ONCE)))
        of.number += 1
        try:
            async with of.turn:
                return await self._find(query, identity)
        finally:
            of.number -= 1
            if not of.number:
                del self._finding[identity]

    async def _find(self, query: protocol.FindContexts, identity: str) -> protocol.FindResult:
        plan = search_plan.plan(query.predicate)
        without = set(query.without)
        others = [node for node in self.directory.nodes if node not in without]
        share = REPLIES_BYTES_MAX // (len(others) + 1)
        query = msgspec.structs.replace(
            query,
            reader=identity,
            limit=min(query.limit, FOUND_MAX),
            bytes_max=max(NODE_BYTES_MIN, min(share, protocol.REPLY_BYTES_MAX)),
        )
        replies, (mounted, failed) = await asyncio.gather(
            self.bus.gather(  # this node replies as well
                protocol.to_all("find"),
                protocol.encode(msgspec.structs.replace(query, without=())),
                enough=len(others) + 1,
                timeout_s=min(REPLIES_S, self.settings.timeout_s),
            ),
            self._find_mounted(query, plan),
        )
        ours = [protocol.result_of(message.data, protocol.PartialFindResult) for message in replies]
        answered = {result.node for result in ours}
        results = ours + mounted
        # A node with more matches than one reply holds has searched all keys up to ``reached``.
        unfinished = [_end(result) for result in results if result.more]
        reached = min(unfinished, default="")
        contexts = [context for result in results for context in result.contexts]
        moved = sorted({key for each in ours for key in each.moved} - {context.key for context in contexts})
        if len(moved) > MOVED_MAX and (not unfinished or moved[MOVED_MAX - 1] < reached):
            reached = moved[MOVED_MAX - 1]
            unfinished.append(reached)
        if unfinished:
            contexts = [context for context in contexts if context.key <= reached]
            moved = [key for key in moved if key <= reached]
        contexts += await self._moved(plan, moved)
        # While a primary moves, both the former and the new primary may return the context.
        newest = {
            context.key: context
            for context in sorted(contexts, key=lambda context: (context.key, context.version))
        }
        contexts = [
            context
            for context in newest.values()
            if self.access.may_read(identity, context.key, context.writer)
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
        """Read these keys from the log and return the contexts that the plan still selects.

        `errors.Unavailable` if the log does not reply: the result would be incomplete without them.
        """
        contexts: list[protocol.Context] = []
        for key in keys:
            with contextlib.suppress(errors.NotFound):
                context = await self.reader.logged(key)
                if plan.selects(key, context.version, context.writer, dict(context.attributes)):
                    contexts.append(context)
        return contexts

    async def _find_mounted(
        self, query: protocol.FindContexts, plan: search_plan.SearchPlan
    ) -> tuple[list[protocol.PartialFindResult], dict[str, str]]:
        """Return the results of the mounts, and the mounts that failed."""
        may_read = functools.partial(self.access.may_read, query.reader)
        theirs = {
            name: mount
            for name, mount in self.mounts.items()
            if name not in query.without and mount.may_have(plan, query.after)
        }
        outcomes = await asyncio.gather(
            *(mount.find(plan, query.after, query.limit, may_read) for mount in theirs.values()),
            return_exceptions=True,
        )
        results, failed = [], {}
        for name, outcome in zip(theirs, outcomes, strict=True):
            if isinstance(outcome, Exception):  # an error in a back end must not fail the search
                failed[name] = getattr(outcome, "message", "") or f"{type(outcome).__name__}: {outcome}"
                events.warning("mount-failed", mount=name, error=outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        return results, failed

    # This node.

    async def find_here(self, query: protocol.FindContexts) -> protocol.PartialFindResult:
        """Search the contexts whose primary this node is."""
        client, of = query.reader, self._searches
        if of.total() >= SEARCHES_MAX or of[client] >= SEARCHES_EACH_MAX:
            raise errors.Overloaded(
                f"{self.node} already runs {of[client]} searches of {client}, {of.total()} in all",
                retry_after_s=SEARCH_S,
            )
        of[client] += 1
        turn = self._turns.setdefault(client, asyncio.Lock())
        try:
            return self._with_moved(query, await self._search(query, search_plan.plan(query.predicate), turn))
        finally:
            of[client] -= 1
            if not of[client]:
                del of[client], self._turns[client]

    def _with_moved(
        self, query: protocol.FindContexts, result: protocol.PartialFindResult
    ) -> protocol.PartialFindResult:
        """Add matching keys whose primary this node was until recently; the log has their current state."""
        since_s = self.freshness.now_s() - replica_records.MOVED_REMEMBERED_S
        plan = search_plan.plan(query.predicate)
        moved = sorted(
            key
            for key, (at_s, was) in self.records.moved.items()
            if query.after < key and (not result.more or key <= result.reached)
            if key.startswith(plan.key_prefix) and all(needle in was.attributes for needle in plan.needles)
            if at_s > since_s and self.freshness.is_live(was)
            if plan.selects(key, was.version, was.writer, protocol.attributes_of(was.attributes))
        )
        if len(moved) > MOVED_MAX:
            reached = moved[MOVED_MAX - 1]
            contexts = [context for context in result.contexts if context.key <= reached]
            return protocol.PartialFindResult(result.node, contexts, True, reached, moved=moved[:MOVED_MAX])
        return msgspec.structs.replace(result, moved=moved) if moved else result

    async def _search(
        self, query: protocol.FindContexts, plan: search_plan.SearchPlan, turn: asyncio.Lock
    ) -> protocol.PartialFindResult:
        until_s = time.monotonic() + SEARCH_S
        loop = asyncio.get_running_loop()
        costs = admission.of_loop(loop)
        contexts: list[protocol.Context] = []
        size, reached = 0, query.after
        if plan.keys is None and not await self._ensure_sorted(until_s):
            return protocol.PartialFindResult(self.node, contexts, True, reached)
        while True:
            async with turn, self._slice_lock:
                matching, after = self._slice(plan, reached)
            costs.charge(query.reader, CONTEXT_COST * len(matching), loop.time())
            await asyncio.sleep(0)
            for key, selected in matching:
                if query.reader and not self.access.may_read(query.reader, key, selected.writer):
                    continue
                if len(contexts) == query.limit:
                    return protocol.PartialFindResult(self.node, contexts, True, contexts[-1].key)
                replica, value = await self._value(plan, key, selected)
                if value is None:
                    continue
                size += len(value) + len(replica.attributes) + 256
                if contexts and size > query.bytes_max:
                    return protocol.PartialFindResult(self.node, contexts, True, contexts[-1].key)
                contexts.append(self.reader.context(key, replica, value, self.freshness.age_s(replica)))
            if after is None:
                return protocol.PartialFindResult(self.node, contexts)
            reached = after
            if time.monotonic() > until_s:
                return protocol.PartialFindResult(self.node, contexts, True, reached)

    async def _value(
        self, plan: search_plan.SearchPlan, key: str, replica: replica_table.Replica
    ) -> tuple[replica_table.Replica, bytes | None]:
        """Return the value of a selected replica; None if it is gone or no longer matches."""
        while True:
            value = await self.records.value_of(key, replica)
            if value is not None:
                return replica, value
            now = self.records.replicas.index.get(key)
            if (
                now is None
                or now is replica
                or not self._selects(plan, key, now, self.freshness.log_now_ns())
            ):
                return replica, None
            replica = now  # it was written in the meantime

    def _slice(self, plan: search_plan.SearchPlan, after: str) -> _Slice:
        now_ns, until_s = self.freshness.log_now_ns(), time.monotonic() + SLICE_S
        index, needed = self.records.replicas.index, plan.needles
        matching: list[tuple[str, replica_table.Replica]] = []
        while keys := self._keys_after(plan, after):
            for key in keys:
                replica = index.get(key)
                if replica is None:
                    continue
                packed = replica.attributes
                for needle in needed:  # most keys fail here
                    if needle not in packed:
                        break
                else:
                    if self._selects(plan, key, replica, now_ns):
                        matching.append((key, replica))
            after = keys[-1]
            if time.monotonic() > until_s:
                return _Slice(matching, after)
        return _Slice(matching, None)

    def _selects(
        self, plan: search_plan.SearchPlan, key: str, replica: replica_table.Replica, now_ns: int
    ) -> bool:
        if replica.temporary or replica.holders[0] != self.node or not replica.is_live(now_ns):
            return False
        attributes = protocol.attributes_of(replica.attributes) if plan.attribute_names else {}
        return plan.selects(key, replica.version, replica.writer, attributes)

    # Sorted keys.

    def _keys_after(self, plan: search_plan.SearchPlan, after: str) -> Sequence[str]:
        """Return some keys that the plan may select; empty only if there are none."""
        if plan.keys is not None:
            first = bisect.bisect_right(plan.keys, after)
            return plan.keys[first : first + SLICE_KEYS]
        order = self.records.replicas.order
        assert order is not None
        if after < plan.key_prefix:
            keys = order.after(plan.key_prefix, SLICE_KEYS, itself=True)
        else:
            keys = order.after(after, SLICE_KEYS)
        if not plan.key_prefix or (keys and keys[-1].startswith(plan.key_prefix)):
            return keys
        return [key for key in keys if key.startswith(plan.key_prefix)]

    async def _ensure_sorted(self, until_s: float) -> bool:
        """Whether all keys are sorted; if not, the next search continues."""
        held = self.records.replicas
        if held.order is None:
            held.order = sorted_keys.SortedKeys()
            self._unordered = list(held.index)[::-1]
        while self._unordered:
            async with self._slice_lock:
                self._sort_slice(held.order)
                await asyncio.sleep(0)
            if time.monotonic() > until_s:
                break
        return not self._unordered

    def _sort_slice(self, order: sorted_keys.SortedKeys) -> None:
        until_s, index, waiting = time.monotonic() + SLICE_S, self.records.replicas.index, self._unordered
        while waiting:
            for key in waiting[: -SLICE_KEYS - 1 : -1]:
                if key in index:
                    order.add(key)
            del waiting[-SLICE_KEYS:]
            if time.monotonic() > until_s:
                return


def _end(result: protocol.PartialFindResult) -> str:
    """The last key that was searched; older versions of a node only return contexts."""
    return result.reached or (result.contexts[-1].key if result.contexts else "")
