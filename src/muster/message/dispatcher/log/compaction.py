"""Compaction: messages that are still needed are written again, so that the rest of the log can be deleted.

At each checkpoint, the messages of shared pages are *sorted* into pages of their groups. When the log becomes
crowded, it is *packed*: the pages of a group of which less than a tenth is needed are replaced by pages that
they fill together. So a queue of which a few messages wait for long has no more of the log than ten times
their size, and an idle queue or subscription retains no messages of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from muster.bus import api
from muster.core import errors, topics
from muster.core.telemetry import log as log_
from muster.message import messages
from muster.message.dispatcher import backlog
from muster.message.dispatcher.log import journal, ledger, log_reader, message_log, pages

events = log_.EventLog("message")

SORT_BYTES: Final = 2 << 20  # sorted at one time
SORT_STEP: Final = 1000  # messages examined at one time
SORT_SHARE: Final = 0.9  # of the log that is in use: beyond, nothing is sorted
PACK_BYTES: Final = 8 << 20  # packed between two checkpoints
DENSE: Final = 10  # a page is packed if less than one of so many bytes is needed


class LogNeeds:
    """Which messages of the log are needed, as far as they were stored before this was made."""

    def __init__(self, log: message_log.MessageLog) -> None:
        self._log = log
        self._ledger = log.ledger
        self._queues: dict[str, backlog.Backlog] = {}
        self._by_pattern: dict[str, list[backlog.Backlog]] = {}
        for key, source in log.ledger.backlogs.items():
            if (subscription := log.ledger.subscriptions.get(key)) is not None:
                self._by_pattern.setdefault(subscription.topic, []).append(source)
            else:
                self._queues[log.subjects.queue(key.removeprefix(ledger.QUEUE_MARK))] = source

    def is_queue(self, subject: str) -> bool:
        return subject in self._queues

    def need(self, subject: str, number: int) -> bool:
        """Not if the queue was deleted. ``subject``: also the group of topics, if one of them may need it."""
        subjects, end = self._log.subjects, self._ledger.end
        if (source := self._queues.get(subject)) is not None:
            return not source.is_over(number, end)
        if subject.startswith(subjects.topic_prefix):
            topic = topics.Topic.from_subject(subjects.of_topic(subject))
            return any(
                not source.is_over(number, end)
                for text in self._log.patterns.matching(topic)
                for source in self._by_pattern.get(text, [])
            )
        if subject == subjects.delay:
            return number not in self._ledger.delayed_done
        return number > self.floor(subject)

    def floor(self, group: str) -> int:
        """No message of the group up to here is needed."""
        subjects = self._log.subjects
        if (source := self._queues.get(group)) is not None:
            return source.floor
        if group.startswith(subjects.transfer_prefix):
            return self._ledger.transferred.get(int(group.removeprefix(subjects.transfer_prefix)), 0)
        if subjects.group(f"{group}.") == group:
            return self._ledger.floor_of_topics()
        if group == subjects.delay:
            return 0
        return self._ledger.end


async def sort(log: message_log.MessageLog) -> None:
    """Write what is still needed of shared pages again, to pages of their destinations: then the shared pages
    are not needed any more. As far as there is room: a full log could not be trimmed.
    """
    head, needs = log.ledger.head, LogNeeds(log)
    needed: list[log_reader.Numbered] = []
    size = 0
    most = min(SORT_BYTES, log.max_bytes // 32)
    async for _, page in log.reader.several(await _to_sort(log, needs, head), log.subjects.shared):
        for number, subject, held in pages.read(page) if page is not None else ():
            if needs.need(subject, number):
                needed.append((number, subject, held))
                size += _size(needed[-1])
        if page is not None and size > most:
            if not await _write_sorted(log, needed, page.sequence):
                return
            needed, size = [], 0
    await _write_sorted(log, needed, head)


async def _to_sort(log: message_log.MessageLog, needs: LogNeeds, head: int) -> list[int]:
    """The shared pages that may contain needed messages."""
    sequences: set[int] = set()
    for group in log.shared_pages.groups():
        floor = needs.floor(group)
        for at, number in enumerate(log.shared_pages.unsorted(group, floor + 1)):
            if at % SORT_STEP == 0:
                await asyncio.sleep(0)
            sequence = pages.sequence_of(number)
            if sequence > head:
                break
            if sequence not in sequences and needs.need(group, number):
                sequences.add(sequence)
    return sorted(sequences)


async def _write_sorted(log: message_log.MessageLog, needed: list[log_reader.Numbered], to: int) -> bool:
    """Write messages of shared pages up to the sequence ``to``. False: there is no room."""
    size = sum(map(_size, needed))
    if needed and log.used_bytes + size > SORT_SHARE * log.max_bytes:
        return False
    log.used_bytes += size
    by_group: dict[str, list[log_reader.Numbered]] = {}
    for message in needed:
        by_group.setdefault(log.subjects.group(message[1]), []).append(message)
    runs = [
        _Run(group, part[0][0], part[-1][0], part)
        for group, of_group in by_group.items()
        for part in _pages_full(of_group)
    ]
    if (made := await _write_pages(log, runs)) is None:
        return False
    before = pages.end(log.shared_pages.sorted_to)
    log.shared_pages.sort(to, made)
    _forget_released(log, before + 1, pages.end(to), needed)
    return True


@dataclass(slots=True)
class _Run:
    """What is needed of the pages of a group with the numbers from ``first`` to ``last``."""

    group: str
    first: int
    last: int
    needed: list[log_reader.Numbered] = field(default_factory=list)
    size: int = 0
    stored: int = 0  # bytes of its pages
    replaced: list[int] = field(default_factory=list)  # sequences


async def _write_pages(log: message_log.MessageLog, runs: list[_Run]) -> list[ledger.SortedPage] | None:
    """A page for each run. None: there is no room, and nothing is left of them."""
    made: list[ledger.SortedPage] = []
    try:
        for run in runs:
            page = pages.MessagePage(
                held=[held for _, _, held in run.needed],
                parts=[
                    (subject, len(list(together)))
                    for subject, together in itertools.groupby(run.needed, operator.itemgetter(1))
                ],
                numbers=[number for number, _, _ in run.needed],
            )
            item = journal.JournalItem(page=(log.subjects.sorted(run.group), page))
            sequence = pages.sequence_of((await log.store(item))[0])
            log.on_moved(run.needed)
            made.append(ledger.SortedPage(run.group, run.first, run.last, sequence, len(run.needed)))
    except errors.LimitExceeded:
        for useless in made:
            await delete(log, useless.sequence)
        return None
    return made


async def delete(log: message_log.MessageLog, sequence: int) -> None:
    with contextlib.suppress(errors.NotFound):  # it was trimmed meanwhile
        await log.stream.delete(sequence)


async def delete_foreign(log: message_log.MessageLog) -> None:
    if log.foreign:
        events.warning("not-a-page", partition=log.partition, count=len(log.foreign), first=min(log.foreign))
    while log.foreign:
        await delete(log, log.foreign.pop())


def _forget_released(
    log: message_log.MessageLog, first: int, last: int, written: list[log_reader.Numbered]
) -> None:
    """Of the delayed messages with these numbers, the log contains only what was written again."""
    done, left = log.ledger.delayed_done, {number for number, _, _ in written}
    done -= {
        number for number in done if first <= number <= last and number & pages.SHARED and number not in left
    }


def _size(message: log_reader.Numbered) -> int:
    _, subject, held = message
    return len(subject) + len(held.raw) + len(held.data) + 32


def _pages_full(of_group: list[log_reader.Numbered]) -> Iterator[list[log_reader.Numbered]]:
    part: list[log_reader.Numbered] = []
    size = 0
    for message in of_group:
        size += _size(message)
        if part and size > pages.PAGE_BYTES:
            yield part
            part, size = [], _size(message)
        part.append(message)
    yield part


def _place(log: message_log.MessageLog, needs: LogNeeds, page: api.StoredMessage) -> _Run | None:
    """The page as a run. None: it is not of a group that can be packed. ``last`` 0: it is useless."""
    subjects, index = log.subjects, log.shared_pages
    if page.subject.startswith(subjects.sorted_prefix):
        entry = index.at(page.sequence)
        if entry is None:
            return _Run("", 0, 0)
        packable = not entry.group.startswith(subjects.transfer_prefix)
        return _Run(entry.group, entry.first, entry.last) if packable else None
    if not (needs.is_queue(page.subject) or page.subject.startswith(subjects.topic_prefix)):
        return None
    group, first = subjects.group(page.subject), pages.number(page.sequence, 0)
    replaced = index.covers_alone(group, first)
    return _Run("", 0, 0) if replaced else _Run(group, first, pages.end(page.sequence))


async def pack(log: message_log.MessageLog, checkpoint: Callable[[], Awaitable[None]]) -> None:
    """Reads the complete log. ``checkpoint`` writes one, which names the new pages: only then the others are
    deleted. `errors.LimitExceeded`: there is no room for it.
    """
    await checkpoint()  # from here on, a sorted page that is not in the index is useless
    packer = _Packer(log, checkpoint)
    async for page in log.reader.read_pages(1, last=log.checkpoint_head):
        await packer.add(page)
        await asyncio.sleep(0)  # other requests have their turn
    await packer.write()


class _Packer:
    def __init__(self, log: message_log.MessageLog, checkpoint: Callable[[], Awaitable[None]]) -> None:
        self._log = log
        self._needs = LogNeeds(log)
        self._checkpoint = checkpoint
        self._runs: dict[tuple[str, int], _Run] = {}  # by group, and whether they are of sorted pages
        self._complete: list[_Run] = []
        self._kept: dict[tuple[str, int], list[int]] = {}  # first numbers of pages that others do not join
        self._size = 0
        self._size_max = max(pages.PAGE_BYTES, min(PACK_BYTES, log.max_bytes // 32))

    async def add(self, page: api.StoredMessage) -> None:
        """The next page of the log."""
        log = self._log
        if page.subject == log.subjects.shared:
            if not self._needed(page):
                await delete(log, page.sequence)
            return
        if (run := _place(log, self._needs, page)) is None:
            return
        run.needed = self._needed(page) if run.last else []
        if not run.needed and run.group != log.subjects.delay:
            await delete(log, page.sequence)
            log.shared_pages.delete(filter(None, [log.shared_pages.at(page.sequence)]))
            return
        run.size, run.stored, run.replaced = sum(map(_size, run.needed)), len(page.data), [page.sequence]
        is_small = page.subject.startswith(log.subjects.sorted_prefix)  # join it with its neighbours
        if not run.needed or run.size * DENSE > (pages.PAGE_BYTES if is_small else run.stored):
            self._end(run)
            self._kept.setdefault((run.group, run.first & pages.SHARED), []).append(run.first)
        else:
            await self._extend(run)

    def _needed(self, page: api.StoredMessage) -> list[log_reader.Numbered]:
        now_ms, needs = messages.now_ms(), self._needs
        return [
            message
            for message in pages.read(page)
            if needs.need(message[1], message[0])
            and (needs.is_queue(message[1]) or not _has_expired(message[2].raw, now_ms))
        ]

    async def _extend(self, run: _Run) -> None:
        """Add a page to those of its group before it, unless others are between them."""
        key = run.group, run.first & pages.SHARED
        before = self._runs.get(key)
        if (
            before is not None
            and before.last < run.first
            and before.size + run.size <= pages.PAGE_BYTES
            and not self._is_kept_between(key, before.last, run.first)
        ):
            before.last = run.last
            before.size += run.size
            before.stored += run.stored
            before.needed += run.needed
            before.replaced += run.replaced
        else:
            self._end(run)
            self._runs[key] = run
        self._size += run.size
        if self._size > self._size_max:
            await self.write()

    def _is_kept_between(self, key: tuple[str, int], after: int, before: int) -> bool:
        """Whether another page has messages between these numbers. It may be anywhere in the log."""
        packed = self._log.shared_pages.of_kind(*key, after + 1)
        return bool(packed and packed[0].first < before) or any(
            after < first < before for first in self._kept.get(key, ())
        )

    def _end(self, run: _Run) -> None:
        """What is packed of the group ends before this."""
        key = run.group, run.first & pages.SHARED
        if (before := self._runs.pop(key, None)) is not None:
            self._complete.append(before)
            self._kept.setdefault(key, []).append(before.first)

    async def write(self) -> None:
        log, runs = self._log, [*self._complete, *self._runs.values()]
        runs = [run for run in runs if len(run.replaced) > 1 or run.size * DENSE <= run.stored]
        self._complete, self._runs, size, self._size = [], {}, self._size, 0
        if not runs or (made := await _write_pages(log, runs)) is None:
            return
        log.used_bytes += size
        log.shared_pages.add(made)
        for run in runs:
            if run.group == log.subjects.delay:
                _forget_released(log, run.first, run.last, run.needed)
        await self._checkpoint()
        for run in runs:
            for sequence in run.replaced:
                await delete(log, sequence)


def _has_expired(raw: str, now_ms: int) -> bool:
    """Whether the message has expired, so that no subscription receives it."""
    return '"exp":' in raw and 0 < messages.decode_meta(raw).expiration_ms <= now_ms
