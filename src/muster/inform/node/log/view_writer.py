"""Keeps a node's view at rest: reads it at the start, and writes what it lacks twice a second."""

from __future__ import annotations

import asyncio

from muster.core import errors
from muster.inform.node import state
from muster.inform.node.log import context_log, unsaved
from muster.inform.node.log import view as log_view

SAVE_EVERY_S = 0.5  # a commit syncs the disk on which the log syncs as well: few and large ones
SAVE_AGAIN_S = 2.0  # where the view could not be written
SAVE_ENTRIES = 5_000
SAVE_BYTES = 16 << 20


class ViewWriter:
    def __init__(self, shared: state.NodeState, view: log_view.ReplicaView) -> None:
        self._desk = shared
        self._view = view
        self.failure: errors.MusterError | None = None  # while the view cannot be written
        self._saved = 0  # the position of the view
        self._stored = asyncio.Event()  # something of what the view lacked

    async def load(self) -> None:
        view, shared = self._view, self._desk
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
                    raise errors.InvalidInput("it was made from another log than the one that is here")
        except errors.InvalidInput as error:
            state.events.error("view-damaged", node=shared.name, error=error)
            # All of it is read from the log again: what is known already would not be saved again.
            shared.forget_all()
            position = 0
        if not position:
            await view.clear()
        self._saved = shared.position = position

    async def _is_usable(self, position: int) -> bool:
        """Whether the log still tells what happened after ``position``."""
        log = self._desk.log
        return await log.forgotten_up_to() <= position <= await log.ends_at()

    async def _is_logged(self, entry: context_log.ContextLogEntry) -> bool:
        """Whether the newest record of the view is of this log: one that was restored from a backup may give
        the same sequences to other records."""
        log, key = self._desk.log, entry.record.key
        last = await log.last(key)
        if last is None:
            return entry.record.value is None  # a deletion, which has been forgotten
        if last.sequence < entry.sequence:
            return False
        logged = await log.at(entry.sequence, key)
        return logged is None or logged.record == entry.record

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S if self.failure is None else SAVE_AGAIN_S)
            try:
                await self.save()
            except errors.MusterError as error:  # a full disk: reads and writes go on without the view
                if self.failure is None:
                    state.events.error("view-not-stored", node=self._desk.name, error=error)
                self.failure = error
                self._stored.set()
            else:
                if self.failure is not None:
                    state.events.warning("view-stored-again", node=self._desk.name)
                self.failure = None

    async def keep_up(self) -> None:
        """Wait for the view where much is held in memory that it lacks."""
        while self._desk.unsaved.is_full and self.failure is None:
            self._stored.clear()
            await self._stored.wait()

    async def save(self) -> None:
        shared = self._desk
        while shared.unsaved or self._saved < shared.position:
            position = shared.position
            taken = shared.unsaved.first(SAVE_ENTRIES, SAVE_BYTES)
            is_all = len(taken) == len(shared.unsaved)
            entries = await self._read_later(taken)
            if not is_all or len(entries) < len(taken):
                position = self._saved  # not all that the position promises is in this commit
            await self._view.save(entries, position)
            self._saved = position
            shared.unsaved.saved({key: taken[key] for key in entries})
            self._stored.set()

    async def _read_later(
        self, taken: dict[str, unsaved.Change]
    ) -> dict[str, context_log.ContextLogEntry | None]:
        """With what the log has in place of the marks; only the first of them where that is much."""
        entries: dict[str, context_log.ContextLogEntry | None] = {}
        size = 0
        for key, change in taken.items():
            entry = await self._desk.log.last(key) if isinstance(change, unsaved.DeferredChange) else change
            entries[key] = entry if entry is not None and self._desk.name in entry.record.holders else None
            size += unsaved.size(entries[key])
            if size > SAVE_BYTES:
                break
        return entries
