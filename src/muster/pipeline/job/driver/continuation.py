"""Where a driver continues: its epoch, its term in the checkpoint, its positions in the streams.

`begin` claims an epoch first and reads afterwards where the last driver stopped: from then on that one can
commit nothing.  A stream that ends before the position of the checkpoint was created again, restored from a
backup or lost its last messages; it is read from its first new message.  So is one that was created after the
last message that was read, even if it has grown beyond the position.

A checkpoint that is older than the history, such as one copied back by hand, is not continued: it would use
numbers of batches again, and the history would refuse other reports as repeated ones.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline.history import delta, storage, tables
from muster.pipeline.job import batch_commit, checkpoint_label, state_copy
from muster.pipeline.job.driver import driver_lease, driver_terms

CLAIM_ATTEMPTS = 10
HISTORY_OF_BATCHES = (tables.NODES, tables.GROUPS)  # tables with the number of each batch


class Continuation:
    """``term`` and ``label`` are set by `begin`."""

    term: driver_terms.DriverTerm
    label: checkpoint_label.CheckpointLabel

    def __init__(
        self,
        driver: driver_lease.DriverLease,
        events: log.EventLog,
        *,
        folder: Path,
        checkpoint: str,
        history: str,
        keep_s: float,
    ) -> None:
        self._driver = driver
        self._log = events
        self._folder = folder
        self._checkpoint = checkpoint
        self._history = history
        self._keep_s = keep_s

    def begin(self) -> bool:
        """Begin a term. Whether the streams were restored, so that positions changed."""
        self.label = checkpoint_label.open_(self._checkpoint)
        is_renewed = self._follow_restored_streams()
        self.begin_term()
        return is_renewed

    def begin_term(self) -> None:
        """Also again: then the number of shards can change."""
        epoch = self._claim_epoch()
        if self._is_older_than_history():
            self._renew_checkpoint({}, "older-than-history")
        run = self.label.run
        last = driver_terms.read_last(self._checkpoint, run)
        self.term = driver_terms.next_term(epoch, run, last, self._stored_positions())
        if self.term.state is not None:
            driver_terms.relocate(self._checkpoint, self.term.state.epoch)
        driver_terms.begin(self._checkpoint, self.term)
        self._driver.epoch = epoch
        self._log.info("term-begun", epoch=epoch, batch=self.term.first)

    def _claim_epoch(self) -> int:
        """Higher than every epoch in the checkpoint and the history, and than that of the lease."""
        for _ in range(CLAIM_ATTEMPTS):
            try:
                written = [
                    delta.HistoryTable(self._history, name, keep_s=self._keep_s)
                    for name in (tables.NODES, tables.GROUPS, tables.ALERTS)
                ]
                claimed = [table.transaction_version(delta.DRIVER) or 0 for table in written]
                epoch = 1 + max([*claimed, *driver_terms.epochs(self._checkpoint), self._driver.lease_epoch])
                for table in written:
                    table.claim(epoch)
                return epoch
            except (storage.ConcurrentChange, errors.StaleEpoch):
                self._driver.check()
            except (storage.HistoryFull, storage.StorageUnavailable) as error:
                # The pipeline runs without a history that cannot be written; then only the lease protects it.
                self._log.error("epoch-not-claimed", error=error)
                return 1 + max([*driver_terms.epochs(self._checkpoint), self._driver.lease_epoch])
        raise errors.Unavailable("the history changes too often to begin as its driver")

    def _is_older_than_history(self) -> bool:
        """Whether the history has batches after the first one that this term would begin."""
        begun = driver_terms.next_term(0, "", self.last(), {}).first
        stored = (delta.position(self._history, name, self.label.run) for name in HISTORY_OF_BATCHES)
        try:
            return any(batch is not None and batch > begun for batch in stored)
        except storage.StorageUnavailable:  # as when it cannot be claimed
            return False

    def last(self) -> driver_terms.TermProgress | None:
        """The newest term in the checkpoint, of this driver or another."""
        return driver_terms.read_last(self._checkpoint, self.label.run)

    async def is_current(self) -> bool:
        """Whether no later driver has begun, by the storage."""
        last = await asyncio.to_thread(self.last)
        return last is not None and last.term.epoch == self.term.epoch

    async def has_committed(self) -> bool:
        """Whether Spark has committed a batch of this term."""
        last = await asyncio.to_thread(self.last)
        return last is not None and last.term.epoch == self.term.epoch and last.committed is not None

    def remove_former(self) -> None:
        """Remove the terms of earlier drivers, which nothing reads any more."""
        driver_terms.remove_before(self._checkpoint, self.term.epoch)

    # Positions

    async def follow_shorter_streams(self, bus: api.Bus, clock_ms: int) -> bool:
        """Begin a new checkpoint if a stream ends before the position of this one, or is another one; whether
        it did.

        New messages are those stored later than ``clock_ms``, when the newest message that was read was
        stored; without this they would be skipped up to the position.
        """
        positions = await asyncio.to_thread(self._positions)
        after = dict(positions)
        is_committed = await asyncio.to_thread(self._is_committed)
        for name, position in positions.items():
            try:
                stream = await bus.open_stream(name)
            except errors.NotFound:
                after[name] = 0
                continue
            state = await stream.state()
            is_new = is_committed and 0 < clock_ms < state.created_ns // 1_000_000
            if state.last_sequence < position or is_new:
                # A restored stream is new, too, but its messages keep their times.
                after[name] = min(position, await last_stored_by(stream, clock_ms))
        if after == positions:
            return False
        await asyncio.to_thread(self._renew_checkpoint, after, "streams-shorter")
        await asyncio.to_thread(self.begin_term)
        return True

    def _is_committed(self) -> bool:
        """Whether Spark has committed a batch of this checkpoint: then the clock is that of its messages."""
        last = self.last()
        return last is not None and (last.committed is not None or last.term.state is not None)

    def _positions(self) -> dict[str, int]:
        """The last position that was read or planned, by stream."""
        last = self.last()
        return {
            **dict.fromkeys(batch_commit.POSITIONS, 0),
            **((last and (last.planned or last.end)) or self.term.until or self.term.after),
        }

    def _stored_positions(self) -> dict[str, int]:
        """Where a new checkpoint starts: after what the history has, unless the label names positions."""
        return {
            stream: self.label.after.get(stream, delta.position(self._history, tables.NODES, name) or 0)
            for stream, name in batch_commit.POSITIONS.items()
        }

    def _follow_restored_streams(self) -> bool:
        """Continue where restored streams end, if the checkpoint or the history is not of the same backup.

        What was read after the backup is in the history, but not in the streams: their sequences are used
        again.
        """
        restored = state_copy.read_restored(self._folder)
        if restored is None:
            return False
        last = self.last()
        positions = (last and (last.planned or last.end)) or self._stored_positions()
        after = {
            stream: min(positions.get(stream, 0), restored.streams.get(stream, 0))
            for stream in batch_commit.POSITIONS
        }
        self._renew_checkpoint(after, "streams-restored")
        state_copy.forget_restored(self._folder)
        return True

    def _renew_checkpoint(self, after: dict[str, int], reason: str) -> None:
        self.label = checkpoint_label.renew(self._checkpoint, after)
        self._log.warning("checkpoint-renewed", reason=reason, run=self.label.run, **after)


async def last_stored_by(stream: api.Stream, clock_ms: int) -> int:
    """The sequence of the last message that was stored at this time or before."""
    state = await stream.state()
    low, high = state.first_sequence - 1, state.last_sequence
    while low < high:
        middle = (low + high + 1) // 2
        try:
            is_old = (await stream.get(middle)).stored_at_ns // 1_000_000 <= clock_ms
        except errors.NotFound:  # removed meanwhile by the retention of the stream
            is_old = True
        low, high = (middle, high) if is_old else (low, middle - 1)
    return low
