"""Loads the persistent view of a node at start and saves unsaved changes twice a second."""

from __future__ import annotations

import asyncio
import contextlib

from muster.core import errors
from muster.inform.node import state
from muster.inform.node.log import context_log, page_order, unsaved
from muster.inform.node.log import view as log_view

SAVE_EVERY_S = 0.5  # few large commits: each syncs the disk, as the log does
SAVE_AGAIN_S = 2.0  # after a failed save
SAVE_ENTRIES = 5_000
SAVE_BYTES = 16 << 20


class ViewWriter:
    def __init__(self, shared: state.NodeState) -> None:
        self._state = shared
        self._view = shared.view
        self.failure: errors.MusterError | None = None  # set while the view cannot be written
        self._log = ""  # the identity of the log
        self._saved = 0  # the position of the view
        self._discarded = 0  # how often the view was
        self._closed = False
        self._stored = asyncio.Event()  # set after each save

    async def load(self) -> None:
        view, shared = self._view, self._state
        log = await shared.log.state()
        self._log = f"{log.created_ns} {log.restored}"
        try:
            facts = await view.facts()
            if facts.position and not (
                facts.log == self._log
                and page_order.is_continued(log.first_sequence, facts.position)
                and facts.position <= log.last_sequence
            ):
                state.events.warning("view-outdated", node=shared.name, position=facts.position)
                await self.restart()
                return
            shared.fences = facts.fences
            async for page in view.load():
                shared.restore(page)
                await asyncio.sleep(0)
        except errors.InvalidInput as error:
            state.events.error("view-damaged", node=shared.name, error=error)
            await self.restart()
            return
        self._saved = shared.log.applied = facts.position

    async def restart(self) -> None:
        """Discard the view, and read the log from its beginning."""
        self._state.restart()
        self._saved = 0
        self._discarded += 1
        await self._view.clear()

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

    @property
    def saved(self) -> int:
        """The position of the view."""
        return self._saved

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
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
        while shared.unsaved or self._saved < shared.log.applied:
            applied, discarded = shared.log.applied, self._discarded
            taken = shared.unsaved.first(SAVE_ENTRIES, SAVE_BYTES)
            is_all = len(taken) == len(shared.unsaved)
            changes = await self._load_deferred(taken)
            if self._discarded != discarded:
                continue
            if not is_all or len(changes) < len(taken):
                applied = self._saved  # this commit does not contain all changes up to there
            fences = [fence for fence in shared.fences if fence.sequence <= applied]  # the others come again
            await self._view.save(changes, log_view.ViewFacts(self._log, applied, fences))
            if self._discarded != discarded:
                continue
            self._saved = applied
            for key in changes:
                shared.unsaved.saved(key, taken[key])
            self._stored.set()

    async def _load_deferred(
        self, taken: dict[str, list[unsaved.Change]]
    ) -> dict[str, list[context_log.ContextLogEntry]]:
        """Return the entries to save, reading deferred records from the log up to a size limit."""
        changes: dict[str, list[context_log.ContextLogEntry]] = {}
        size = 0
        for key, deferred in taken.items():
            changes[key] = await self._state.loaded(key, deferred)
            size += sum(map(unsaved.size, changes[key]))
            if size > SAVE_BYTES:
                break
        return changes
