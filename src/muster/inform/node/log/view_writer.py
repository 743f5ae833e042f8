"""Loads the persistent view of a node at start and saves unsaved changes twice a second."""

from __future__ import annotations

import asyncio
import contextlib

from muster.core import errors
from muster.inform.node import state
from muster.inform.node.log import context_log, unsaved
from muster.inform.node.log import view as log_view

SAVE_EVERY_S = 0.5  # few large commits: each syncs the disk, as the log does
SAVE_AGAIN_S = 2.0  # after a failed save
SAVE_ENTRIES = 5_000
SAVE_BYTES = 16 << 20


class ViewWriter:
    def __init__(self, shared: state.NodeState, view: log_view.ReplicaView) -> None:
        self._state = shared
        self._view = view
        self.failure: errors.MusterError | None = None  # set while the view cannot be written
        self._saved = 0  # the position of the view
        self._stored = asyncio.Event()  # set after each save

    async def load(self) -> None:
        view, shared = self._view, self._state
        try:
            position = await view.position()
            if position and not await self._is_usable(position):
                state.events.warning("view-too-old", node=shared.name, position=position)
                position = 0
            if position:
                newest: context_log.ContextLogEntry | None = None
                async for page in view.load():
                    shared.restore(page)
                    newest = max(
                        page if newest is None else [newest, *page], key=lambda entry: entry.sequence
                    )
                    await asyncio.sleep(0)
                if newest is not None and not await self._is_logged(newest):
                    raise errors.InvalidInput("the view was made from another log")
        except errors.InvalidInput as error:
            state.events.error("view-damaged", node=shared.name, error=error)
            # Read the log from the start: records that are already in memory would not be saved again.
            shared.forget_all()
            position = 0
        if not position:
            await view.clear()
        self._saved = shared.position = position

    async def _is_usable(self, position: int) -> bool:
        """Whether the log still has all changes after ``position``."""
        log = self._state.log
        return await log.purged_up_to() <= position <= await log.last_sequence()

    async def _is_logged(self, entry: context_log.ContextLogEntry) -> bool:
        """Whether the newest record of the view is in this log: a log that was restored from a backup may
        assign the same sequences to other records.
        """
        log, key = self._state.log, entry.record.key
        last = await log.last(key)
        if last is None:
            return entry.record.value is None  # a deletion that has been purged
        if last.sequence < entry.sequence:
            return False
        logged = await log.get(entry.sequence, key)
        return logged is None or logged.record == entry.record

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S if self.failure is None else SAVE_AGAIN_S)
            try:
                await self.save()
            except errors.MusterError as error:  # such as a full disk: the node works without the view
                if self.failure is None:
                    state.events.error("view-not-stored", node=self._state.name, error=error)
                self.failure = error
                self._stored.set()
            else:
                if self.failure is not None:
                    state.events.warning("view-stored-again", node=self._state.name)
                self.failure = None

    async def close(self) -> None:
        with contextlib.suppress(errors.MusterError):  # the log has the unsaved changes
            await self.save()
        await self._view.close()

    async def wait_for_space(self) -> None:
        """Wait for a save if too many changes are unsaved."""
        while self._state.unsaved.is_full and self.failure is None:
            self._stored.clear()
            await self._stored.wait()

    async def save(self) -> None:
        shared = self._state
        while shared.unsaved or self._saved < shared.position:
            position = shared.position
            taken = shared.unsaved.first(SAVE_ENTRIES, SAVE_BYTES)
            is_all = len(taken) == len(shared.unsaved)
            entries = await self._load_deferred(taken)
            if not is_all or len(entries) < len(taken):
                position = self._saved  # this commit does not contain all changes up to the position
            await self._view.save(entries, position)
            self._saved = position
            shared.unsaved.saved({key: taken[key] for key in entries})
            self._stored.set()

    async def _load_deferred(
        self, taken: dict[str, unsaved.Change]
    ) -> dict[str, context_log.ContextLogEntry | None]:
        """Return the entries to save, reading deferred records from the log up to a size limit."""
        entries: dict[str, context_log.ContextLogEntry | None] = {}
        size = 0
        for key, change in taken.items():
            entry = await self._state.log.last(key) if isinstance(change, unsaved.DeferredChange) else change
            entries[key] = entry if entry is not None and self._state.name in entry.record.holders else None
            size += unsaved.size(entries[key])
            if size > SAVE_BYTES:
                break
        return entries
