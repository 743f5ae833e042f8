"""Keeps a node's view at rest: reads it at the start, and writes what it lacks twice a second."""

from __future__ import annotations

import asyncio

from muster.core import errors
from muster.inform import contextlog, desk, unsaved, views

SAVE_EVERY_S = 0.5  # a commit syncs the disk on which the log syncs as well: few and large ones
SAVE_AGAIN_S = 2.0  # where the view could not be written
SAVE_ENTRIES = 5_000
SAVE_BYTES = 16 << 20


class Keeper:
    def __init__(self, shared: desk.Desk, view: views.View) -> None:
        self._desk = shared
        self._view = view
        self.failure: errors.MusterError | None = None  # while the view cannot be written
        self._saved = 0  # the position of the view
        self._stored = asyncio.Event()  # something of what the view lacked

    async def load(self) -> None:
        view, shared = self._view, self._desk
        try:
            position, saved_at_ns = await view.position()
            age_s = (shared.now_ns() - saved_at_ns) / 1e9
            # Below zero the clock was stepped back, and the age is unknown.
            is_young = 0 <= age_s <= shared.settings.tombstone_s
            if position and (not is_young or position > await shared.log.ends_at()):
                desk.events.warning("view-too-old", node=shared.name, position=position)
                position = 0
            if position:
                async for page in view.load():
                    shared.restore(page)
                    await asyncio.sleep(0)
        except errors.InvalidInput as error:
            desk.events.error("view-damaged", node=shared.name, error=error)
            # All of it is read from the log again: what is known already would not be saved again.
            shared.forget_all()
            position = 0
        if not position:
            await view.clear()
        self._saved = shared.position = position

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S if self.failure is None else SAVE_AGAIN_S)
            try:
                await self.save()
            except errors.MusterError as error:  # a full disk: reads and writes go on without the view
                if self.failure is None:
                    desk.events.error("view-not-stored", node=self._desk.name, error=error)
                self.failure = error
                self._stored.set()
            else:
                if self.failure is not None:
                    desk.events.warning("view-stored-again", node=self._desk.name)
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
            if len(taken) < len(shared.unsaved):
                position = self._saved  # not all that the position promises is in this commit
            await self._view.save(await self._read_later(taken), position, shared.now_ns())
            self._saved = position
            shared.unsaved.saved(taken)
            self._stored.set()

    async def _read_later(self, taken: dict[str, unsaved.Change]) -> dict[str, contextlog.Entry | None]:
        """With what the log has in place of the marks."""
        found: dict[str, contextlog.Entry | None] = {}
        for key, change in taken.items():
            entry = await self._desk.log.last(key) if isinstance(change, unsaved.Later) else change
            found[key] = entry if entry is not None and self._desk.name in entry.record.holders else None
        return found
