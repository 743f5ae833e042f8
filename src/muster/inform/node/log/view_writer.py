"""Loads the persistent view of a node at start and saves unsaved changes twice a second."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from muster.bus.log import pages
from muster.core import errors
from muster.core.telemetry import log as log_
from muster.inform.node.log import context_log, page_order, unsaved
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.log import view as log_view
from muster.inform.node.replicas import records as replica_records

events = log_.EventLog("inform")

SAVE_EVERY_S = 0.5  # few large commits: each syncs the disk, as the log does
SAVE_AGAIN_S = 2.0  # after a failed save
SAVE_ENTRIES = 5_000
SAVE_BYTES = 16 << 20


@dataclasses.dataclass(eq=False)
class ViewWriter:
    node: str
    log: context_log.ContextLog
    records: replica_records.ContextRecords
    freshness: log_freshness.LogFreshness

    def __post_init__(self) -> None:
        self.failure: errors.MusterError | None = None  # set while the view cannot be written
        self._saved = 0  # the position of the view
        self._discarded = 0  # how often the view was
        self._closed = False
        self._stored = asyncio.Event()  # set after each save
        self._full = asyncio.Event()  # set while a save is waited for

    async def load(self) -> None:
        view = self.records.view
        log = await self.log.state()
        try:
            facts = await view.facts()
            if facts.log and not (
                facts.log == self.log.identity
                and page_order.is_continued(log.first_sequence, facts.position)
                and facts.position <= log.last_sequence
            ):
                events.warning("view-outdated", node=self.node, position=facts.position)
                await self.restart()
                return
            self.records.fences = facts.fences
            async for page in view.load():
                self.records.restore(page)
                await asyncio.sleep(0)
        except errors.InvalidInput as error:
            events.error("view-damaged", node=self.node, error=error)
            await self.restart()
            return
        self._saved = self.log.applied = facts.position

    async def restart(self) -> None:
        """Discard the view, and read the log from its beginning."""
        self.records.restart()
        self.freshness.restart()
        self._saved = 0
        self._discarded += 1
        await self.records.view.clear()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_EVERY_S if self.failure is None else SAVE_AGAIN_S):
                    await self._full.wait()
            try:
                await self.save()
            except errors.MusterError as error:  # such as a full disk: the node works without the view
                if self.failure is None:
                    events.error("view-not-stored", node=self.node, error=error)
                self.failure = error
                self._stored.set()
            else:
                if self.failure is not None:
                    events.warning("view-stored-again", node=self.node)
                self.failure = None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(errors.MusterError):  # the log has the unsaved changes
            await self.save()
        await self.records.view.close()

    async def wait_for_space(self) -> None:
        """Wait for a save if too many changes are unsaved."""
        while self.records.unsaved.is_full and self.failure is None:
            self._full.set()
            self._stored.clear()
            await self._stored.wait()

    async def save(self) -> None:
        """Save what has been applied until now; what is applied meanwhile waits, and may be overwritten."""
        self._full.clear()
        until = self.log.applied
        while self._saved < until <= self.log.applied:
            applied, discarded = self.log.applied, self._discarded
            taken = self.records.unsaved.first(SAVE_ENTRIES, SAVE_BYTES)
            is_all = len(taken) == len(self.records.unsaved)
            changes = await self._load_deferred(taken)
            if self._discarded != discarded:
                continue
            if not is_all or len(changes) < len(taken):
                applied = self._saved  # this commit does not contain all changes up to there
            fences = [
                each for each in self.records.fences if each.sequence <= applied
            ]  # the others come again
            await self.records.view.save(changes, log_view.ViewFacts(self.log.identity, applied, fences))
            if self._discarded != discarded:
                continue
            self._saved = applied
            for key in changes:
                self.records.unsaved.saved(key, taken[key])
            self.records.unsaved.saved_until(pages.position(applied + 1) - 1)
            self._stored.set()

    async def _load_deferred(
        self, taken: dict[str, list[unsaved.Change]]
    ) -> dict[str, list[context_log.ContextLogEntry]]:
        """Return the entries to save, reading deferred records from the log up to a size limit."""
        changes: dict[str, list[context_log.ContextLogEntry]] = {}
        size = 0
        for key, deferred in taken.items():
            changes[key] = await self.records.loaded(key, deferred)
            size += sum(map(unsaved.size, changes[key]))
            if size > SAVE_BYTES:
                break
        return changes
