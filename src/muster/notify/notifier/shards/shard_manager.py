"""The shards of a notifier: acquired and released, their logs replayed and written.

Receivers are distributed over shards, and shards over the notifiers (`placement`), each under a lease.  A
notifier that acquires a shard reads its log, appends a message of its own, and only then subscribes to the
shard.  That message is the fence: pending writes of the former holder can no longer be stored, so no change
is acknowledged that the new holder does not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from muster.bus import api, leases
from muster.bus.rpc import server
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.notify.notifier import decision_log, durable_events, event_router, grants, state
from muster.notify.notifier.shards import members, placement, snapshots
from muster.notify.notifier.shards import shard as shards_shard
from muster.supervision import os_process

PART = protocol.PART
BYTES_MAX = 450_000  # of changes in one write
BATCH_BYTES = 4 << 20  # of a snapshot in one batch
BATCH = 100
MUCH_BYTES = 8 << 20  # of changes: after so many, unused memory is released
LITTLE_BYTES, QUIET_S = 1 << 20, 10.0  # fewer bytes in this time count as quiet


class ShardManager:
    def __init__(
        self,
        common: state.NotifierState,
        others: members.NotifierMembers,
        grant_view: grants.GrantView,
        router: event_router.EventRouter,
        lasting: durable_events.DurableEvents,
        past: decision_log.DecisionLog,
    ) -> None:
        self._common = common
        self._members = others
        self._grants = grant_view
        self._router = router
        self._durable = lasting
        self._history = past
        self._lease_tasks: dict[protocol.Shard, asyncio.Task[None]] = {}
        self._handled_bytes = 0  # written to and replayed from logs
        self._change = server.RpcOperation(
            "change.*",
            self._changed,
            audited=False,  # the log of receivers contains the process
            decode=lambda data: messages.decode(data, protocol.ReceiverChanges),
            is_charged=False,
        )
        self._replaying = asyncio.Lock()  # one at a time, because a replay needs much memory

    async def start(self, receivers: api.Stream, all_leases: leases.Leases) -> None:
        self._log, self._leases = receivers, all_leases

    async def stop(self) -> None:
        tasks = list(self._lease_tasks.values())
        for task in tasks:
            _cancel(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serving(self, shards: Iterable[protocol.Shard]) -> None:
        """Wait until this notifier holds all of these shards."""
        expected = set(shards)
        while not expected <= set(self._common.held):
            self._common.moved.clear()
            await self._common.moved.wait()

    # -- leases

    async def place(self) -> None:
        """Acquire the shards that are placed here, and release the others."""
        while True:
            self._common.moved.clear()
            notifiers = [self._common.name, *self._members.others()]
            for shard in range(protocol.SHARDS):
                ours = placement.holder_of(shard, notifiers) == self._common.name
                task = self._lease_tasks.get(shard)
                if ours and task is None:
                    task = self._common.tasks.spawn("shard", self._hold_shard(shard))
                    self._lease_tasks[shard] = task
                    task.add_done_callback(lambda done, shard=shard: self._ended(shard, done))  # type: ignore[misc]
                elif not ours and task is not None:
                    _cancel(task)
            await self._common.moved.wait()

    def _ended(self, shard: protocol.Shard, task: asyncio.Task[None]) -> None:
        self._lease_tasks.pop(shard, None)
        if not task.cancelled() and task.exception() is not None:
            self._common.count("shard-lost")
        self._common.moved.set()

    async def _hold_shard(self, shard: protocol.Shard) -> None:
        common = self._common
        lease = await self._leases.acquire(protocol.lease_of(shard))
        held = shards_shard.Shard(shard, lease)
        writer: asyncio.Task[None] | None = None
        try:
            async with self._replaying:
                await self._replay(held)
            await self._durable.replay(held)
            for kind, operation in (("change", self._change), ("event", self._router.send)):
                pattern = subjects.from_identity(PART, "*", kind, str(shard))
                held.subscriptions.append(await common.serve(pattern, operation))
            receipts = subjects.from_identity(PART, "*", "ack", str(shard))
            held.subscriptions.append(
                await common.bus.subscribe(
                    receipts, handler=functools.partial(self._durable.acknowledged, receipts)
                )
            )
            await self._members.publish_summary(confirmed=True, also=(shard,))
            common.held[shard] = held
            self._durable.follow()
            common.moved.set()
            state.events.info("shard-gained", shard=shard, epoch=lease.epoch, receivers=len(common.engine))
            writer = asyncio.create_task(self._write(held))
            await _first(writer, lease.lost.wait(), held.uncertain.wait())
            if writer.done() and not writer.cancelled() and (error := writer.exception()):
                raise error
        finally:
            common.held.pop(shard, None)
            for subscription in held.subscriptions:
                await subscription.close()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            while held.queue:
                state.finish(held.queue.take().answer, state.moving())
            common.engine.leave_shard(shard)
            await lease.release()

    async def _replay(self, held: shards_shard.Shard) -> None:
        common = self._common
        common.engine.leave_shard(held.shard)
        replay = snapshots.ShardReplay(common.engine, common.known, held.shard)
        while True:
            async for data, sequence in durable_events.read(self._log, held.subject, held.sequence + 1):
                replay.take(data)
                self._handled_bytes += len(data)
                held.sequence = sequence
            held.require_lease()
            with contextlib.suppress(errors.Conflict):
                await self._store(held, snapshots.encode_applied((), held.lease.epoch))
                break
        replay.finish()
        held.log_messages, held.log_bytes = replay.since_snapshot + 1, replay.bytes
        for error in replay.refused:
            common.count("replay-refused")
            state.events.warning("replay-refused", shard=held.shard, error=error)
        self._grants.apply_grants_to_shard(held.shard)

    # -- changes

    async def _changed(self, call: server.RpcCall, changes: protocol.ReceiverChanges) -> protocol.NotifyReply:
        """Reply when the changes are stored. A request that is repeated while it waits, or because its reply
        was lost, is detected by its id (`rpc.requests.REQUEST_ID`).
        """
        held = self._common.held_of(call.message.subject)
        answer: asyncio.Future[protocol.NotifyReply] = asyncio.get_running_loop().create_future()
        queued = shards_shard.QueuedChanges(call.identity, changes.changes, answer, len(call.message.data))
        if not held.queue.put(call.identity, queued, queued.size):
            raise errors.Overloaded(f"{call.identity} has too many changes waiting")
        return await answer

    async def _write(self, held: shards_shard.Shard) -> None:
        """Write the changes of a shard to its log. There is one such task for each shard."""
        while True:
            queued = [await held.queue.get()]
            size = queued[0].size
            while held.queue and size < BYTES_MAX:
                queued.append(held.queue.take())
                size += queued[-1].size
            try:
                await self._write_batch(held, queued)
            finally:  # changes without a known outcome are sent again by the client, which is harmless
                for entry in queued:
                    state.finish(entry.answer, state.moving())
            if self._snapshot_due(held):
                await self._write_snapshot(held)

    async def _write_batch(self, held: shards_shard.Shard, queued: list[shards_shard.QueuedChanges]) -> None:
        common = self._common
        checker = shards_shard.ChangeValidator(
            common.engine, common.known, common.count, common.settings.receivers_per_identity
        )
        entries, outcomes = [], []
        for entry in queued:
            await self._check_policies(entry)
            accepted, refused = checker.check(entry.process, entry.changes, held.shard)
            outcomes.append((entry, refused))
            if accepted:
                entries.append((entry.process, accepted))
        if entries:
            try:
                data = snapshots.encode_applied(entries, held.lease.epoch)
                await self._store(held, data)
            except errors.LimitExceeded as error:
                # Nothing was stored: the stream is full, or the batch was too large.
                if len(queued) > 1:
                    for entry in queued:
                        await self._write_batch(held, [entry])
                    return
                for entry, _ in outcomes:
                    state.finish(entry.answer, error)
                return
            held.log_messages += 1
            held.log_bytes += len(data)
            self._handled_bytes += len(data)
            self._history.changed(entries, held.lease.epoch, len(data))
            for process, accepted in entries:
                for change in accepted:
                    self._apply(held, process, change)
            await self._members.widen()
        for entry, refused in outcomes:
            state.finish(entry.answer, protocol.NotifyReply(sequence=held.sequence, refused=tuple(refused)))

    async def _check_policies(self, entry: shards_shard.QueuedChanges) -> None:
        """A large one takes 20 ms, and a request has up to sixty: between other work, at the expense of their
        process. The outcome is remembered."""
        vocabulary = self._common.known.vocabulary
        for text in shards_shard.policies(entry.changes):
            if not vocabulary.is_checked(text):
                with contextlib.suppress(errors.MusterError):
                    check = functools.partial(vocabulary.policy_text, text)
                    self._common.server.measure(entry.process, check)
                await asyncio.sleep(0)

    def _apply(self, held: shards_shard.Shard, process: str, change: protocol.Change) -> None:
        common = self._common
        snapshots.apply(common.engine, common.known, held.shard, process, change, int(time.time()))
        common.count("changes")
        if self._grants.moved(process, change):
            self._grants.apply_grants(snapshots.receivers_of(process, change))
        if isinstance(change, protocol.JoinReceiver | protocol.JoinReceivers):
            self._durable.joined(held, snapshots.receivers_of(process, change))
        elif isinstance(change, protocol.LeaveReceiver):
            self._durable.left(held, protocol.participant_id(process, change.receiver))

    async def release_memory(self) -> None:
        """Release unused memory when many changes have been followed by a quiet time."""
        released = 0
        while True:
            seen = self._handled_bytes
            await asyncio.sleep(QUIET_S)
            if self._handled_bytes - seen < LITTLE_BYTES and seen - released > MUCH_BYTES:
                released = seen
                self._common.known.vocabulary.forget()
                self._common.engine.tidy()
                await asyncio.to_thread(os_process.trim_heap)

    # -- snapshots

    def _snapshot_due(self, held: shards_shard.Shard) -> bool:
        """Whether a snapshot is due: many messages, or a large part of this shard's share of the stream."""
        settings = self._common.settings
        part = settings.stream_bytes // protocol.SHARDS
        return held.log_messages >= settings.snapshot_changes or held.log_bytes > max(
            part // 4, min(part // 2, held.snapshot_bytes)
        )

    async def _write_snapshot(self, held: shards_shard.Shard) -> None:
        """Replace the log with a snapshot; it is valid when its last message is stored."""
        parts: list[bytes] = []
        for data in snapshots.snapshot(self._common.engine, held.shard, held.lease.epoch):
            parts.append(data)
            await asyncio.sleep(0)
        size = sum(map(len, parts))
        used = (await self._log.state()).bytes
        first = held.sequence + 1
        try:
            # An incomplete snapshot would only use up the remaining space.
            if used + size > self._common.settings.stream_bytes:
                raise errors.LimitExceeded(f"a snapshot of {size:,} bytes does not fit beside {used:,}")
            for batch in _batches(parts):
                await self._store(held, *batch)
        except errors.LimitExceeded as error:
            state.events.warning("snapshot-refused", shard=held.shard, error=error)
            self._common.count("snapshot-refused")
            held.log_bytes = held.log_messages = 0  # try again later
            return
        held.snapshot_bytes, held.log_bytes, held.log_messages = size, 0, 0
        await self._log.purge(subject=held.subject, before=first)
        self._common.count("snapshots")

    async def _store(self, held: shards_shard.Shard, *batch: bytes) -> None:
        """Append to the log of a shard, unless another notifier has."""
        last = await self._log.publish_batch(
            [
                api.OutgoingMessage(
                    held.subject,
                    data,
                    message_id=next(self._common.record_ids),
                    expected_last_subject_sequence=None if place else held.sequence,
                )
                for place, data in enumerate(batch)
            ]
        )
        held.sequence = int(last)  # an `api.Duplicate` cannot be encoded


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task once: its clean-up must complete, or the lease would be renewed for ever."""
    if not task.cancelling():
        task.cancel()


def _batches(parts: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for data in parts:
        batch.append(data)
        size += len(data)
        if size >= BATCH_BYTES or len(batch) >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _first(task: asyncio.Task[None], *others: Coroutine[Any, Any, object]) -> None:
    """Wait until the task or one of the others is done, then cancel the others."""
    waits = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
