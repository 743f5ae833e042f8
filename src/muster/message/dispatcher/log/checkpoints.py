"""Checkpoints: the sum of all records is written periodically, and the log is trimmed.

Only pages before the checkpoint's head are deleted: a later page may contain a record that a successor needs.

The pages of a destination are trimmed up to the first message that is still needed. A message that no
consumer selects, or a subscription whose client is away, therefore retains everything after it. If that
fills the log, `delete_unused_pages` deletes individual pages. Shared pages are sorted first, so they retain
nothing.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections.abc import Iterator
from typing import Final

import msgspec

from muster.bus import api
from muster.core import errors, topics
from muster.message import destinations, messages
from muster.message.dispatcher import backlog, state
from muster.message.dispatcher.log import journal, ledger, log_reader, pages

SORT_BYTES: Final = 2 << 20  # sorted at one time
SORT_STEP: Final = 1000  # messages examined at one time
SORT_SHARE: Final = 0.9  # of the log that is in use: beyond, nothing is sorted


async def recover(shared: state.DispatcherState) -> None:
    """Restore the state from the last checkpoint and the records after it.

    First, an own page is written. From then on the previous owner of the log cannot write, and everything it
    wrote is before that page. Without it, a broker that has just become the leader may not know the end of
    the log.
    """
    try:
        head = await shared.stream.publish(shared.subjects.record, pages.encode(pages.LogPage()))
    except errors.LimitExceeded:
        head = (await shared.stream.state()).last_sequence
    shared.journal.head = head
    index = shared.shared_pages
    last = await shared.stream.last_for(shared.subjects.checkpoint)
    start = 1
    if last is not None:
        count = _chunks(last)[0].chunks
        chunks: list[ledger.LogCheckpoint] = []
        async for page in shared.log.read_pages(last.sequence - count + 1, shared.subjects.checkpoint):
            chunks += _chunks(page)
        shared.ledger.restore(chunks)
        shared.checkpoint_head = chunks[0].head
        sorted_to = chunks[0].sorted_to
        sorted_to = shared.checkpoint_head if sorted_to is None else sorted_to
        index.sort(sorted_to, [page for chunk in chunks for page in chunk.sorted_pages])
        start = sorted_to + 1
    async for page in shared.log.read_pages(start):
        cover = pages.cover(page)
        if page.subject == shared.subjects.shared:
            index.stored(page.sequence, cover.parts)
        if page.sequence <= shared.checkpoint_head:
            continue
        if page.subject.startswith(shared.subjects.sorted_prefix):  # no checkpoint names it
            await shared.stream.delete(page.sequence)
        if cover.record is not None:
            shared.ledger.apply(cover.record, pages.end(page.sequence))
    shared.ledger.reach(head, pages.end(head))
    shared.ledger.suspect()
    shared.ledger.reserve_prepared()
    for subscription in shared.ledger.subscriptions.values():
        shared.patterns.add(subscription.topic)


def _chunks(page: api.StoredMessage) -> list[ledger.LogCheckpoint]:
    return [msgspec.json.decode(held.data, type=ledger.LogCheckpoint) for _, _, held in pages.read(page)]


class _Needs:
    """Which messages of the log are needed, as far as they were stored before this was made."""

    def __init__(self, shared: state.DispatcherState) -> None:
        self._state = shared
        self._ledger = shared.ledger
        self._queues: dict[str, backlog.Backlog] = {}
        self._by_pattern: dict[str, list[backlog.Backlog]] = {}
        for key, source in shared.ledger.backlogs.items():
            if (subscription := shared.ledger.subscriptions.get(key)) is not None:
                self._by_pattern.setdefault(subscription.topic, []).append(source)
            else:
                self._queues[shared.subjects.queue(key.removeprefix(ledger.QUEUE_MARK))] = source

    def is_queue(self, subject: str) -> bool:
        return subject in self._queues

    def need(self, subject: str, number: int) -> bool:
        """Not if the queue was deleted. ``subject``: also the group of topics, if one of them may need it."""
        subjects, end = self._state.subjects, self._ledger.end
        if (source := self._queues.get(subject)) is not None:
            return not source.is_over(number, end)
        if subject.startswith(subjects.topic_prefix):
            topic = topics.Topic.from_subject(subjects.of_topic(subject))
            return any(
                not source.is_over(number, end)
                for text in self._state.patterns.matching(topic)
                for source in self._by_pattern.get(text, [])
            )
        if subject == subjects.delay:
            return number not in self._ledger.delayed_done
        return number > self.floor(subject)

    def floor(self, group: str) -> int:
        """No message of the group up to here is needed."""
        subjects = self._state.subjects
        if (source := self._queues.get(group)) is not None:
            return source.floor
        if group.startswith(subjects.transfer_prefix):
            return self._ledger.transferred.get(int(group.removeprefix(subjects.transfer_prefix)), 0)
        if subjects.group(f"{group}.") == group:
            return self._ledger.floor_of_topics()
        if group == subjects.delay:
            return 0
        return self._ledger.end


async def sort(shared: state.DispatcherState) -> None:
    """Write what is still needed of shared pages again, to pages of their destinations: then the shared pages
    are not needed any more. As far as there is room: a full log could not be trimmed.
    """
    head, needs = shared.ledger.head, _Needs(shared)
    needed: list[log_reader.Numbered] = []
    size = 0
    most = min(SORT_BYTES, shared.max_bytes // 32)
    async for _, page in shared.log.several(await _to_sort(shared, needs, head), shared.subjects.shared):
        for number, subject, held in pages.read(page) if page is not None else ():
            if needs.need(subject, number):
                needed.append((number, subject, held))
                size += _size(needed[-1])
        if page is not None and size > most:
            if not await _write_sorted(shared, needed, page.sequence):
                return
            needed, size = [], 0
    await _write_sorted(shared, needed, head)


async def _to_sort(shared: state.DispatcherState, needs: _Needs, head: int) -> list[int]:
    """The shared pages that may contain needed messages."""
    sequences: set[int] = set()
    for group in shared.shared_pages.groups():
        floor = needs.floor(group)
        for at, number in enumerate(shared.shared_pages.unsorted(group, floor + 1)):
            if at % SORT_STEP == 0:
                await asyncio.sleep(0)
            sequence = pages.sequence_of(number)
            if sequence > head:
                break
            if sequence not in sequences and needs.need(group, number):
                sequences.add(sequence)
    return sorted(sequences)


async def _write_sorted(shared: state.DispatcherState, needed: list[log_reader.Numbered], to: int) -> bool:
    """Write messages of shared pages up to the sequence ``to``. False: there is no room."""
    size = sum(map(_size, needed))
    if needed and shared.used_bytes + size > SORT_SHARE * shared.max_bytes:
        return False
    shared.used_bytes += size
    by_group: dict[str, list[log_reader.Numbered]] = {}
    for message in needed:
        by_group.setdefault(shared.subjects.group(message[1]), []).append(message)
    made: list[ledger.SortedPage] = []
    try:
        for group, of_group in by_group.items():
            for part in _pages_full(of_group):
                page = pages.LogPage(
                    held=[held for _, _, held in part],
                    parts=[
                        (subject, len(list(run)))
                        for subject, run in itertools.groupby(part, lambda one: one[1])
                    ],
                    numbers=[number for number, _, _ in part],
                )
                item = journal.JournalItem(page=(shared.subjects.sorted(group), page))
                sequence = pages.sequence_of((await shared.store(item))[0])
                made.append(ledger.SortedPage(group, part[0][0], part[-1][0], sequence, len(part)))
    except errors.LimitExceeded:
        for useless in made:
            await shared.stream.delete(useless.sequence)
        return False
    before, index = pages.end(shared.shared_pages.sorted_to), shared.shared_pages
    written = {number for number, _, _ in needed}
    index.sort(to, made)
    done = shared.ledger.delayed_done
    done -= {
        number
        for number in done
        if before < number <= pages.end(to) and number & pages.SHARED and number not in written
    }
    return True


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


def _delayed_done(shared: state.DispatcherState) -> dict[ledger.SortedPage, list[int]]:
    """The sorted pages of which all delayed messages have been released or cancelled, with their numbers."""
    done = sorted(number for number in shared.ledger.delayed_done if number & pages.SHARED)
    found: dict[ledger.SortedPage, list[int]] = {}
    for page in shared.shared_pages.sorted_pages(shared.subjects.delay):
        of_page = done[bisect.bisect_left(done, page.first) : bisect.bisect_right(done, page.last)]
        if len(of_page) == page.count:
            found[page] = of_page
    return found


async def delete_unused_pages(shared: state.DispatcherState) -> None:
    """Delete pages that are not needed, between others that are. Reads the complete log."""
    subjects, needs = shared.subjects, _Needs(shared)
    async for page in shared.log.read_pages(1):
        if page.sequence > shared.checkpoint_head:
            break
        is_sorted = page.subject.startswith(subjects.sorted_prefix)
        if page.subject == subjects.sorted(subjects.delay):
            continue  # checkpoints delete them
        if (
            is_sorted
            or page.subject == subjects.shared
            or page.subject.startswith(subjects.topic_prefix)
            or needs.is_queue(page.subject)
        ) and not any(
            needs.need(subject, number)
            and (needs.is_queue(subject) or not _has_expired(held.raw, shared.now_ms()))
            for number, subject, held in pages.read(page)
        ):
            await shared.stream.delete(page.sequence)
            if is_sorted:
                shared.shared_pages.delete(page.sequence)


def _has_expired(raw: str, now_ms: int) -> bool:
    """Whether the message has expired, so that no subscription receives it."""
    return '"exp":' in raw and 0 < messages.decode_meta(raw).expiration_ms <= now_ms


async def write(shared: state.DispatcherState) -> None:
    await sort(shared)
    target = destinations.topic("checkpoint")
    head, index = shared.ledger.head, shared.shared_pages
    dropped = set(shared.ledger.dropped)
    copies = [
        journal.JournalMessage(
            target, messages.MessageMeta(), "{}", msgspec.json.encode(chunk), shared.subjects.checkpoint
        )
        for chunk in shared.ledger.checkpoint(index.sorted_to, index)
    ]
    cuts = {
        key: min(pages.sequence_of(queue.floor + 1), head + 1)
        for key, queue in shared.ledger.backlogs.items()
        if key.startswith(ledger.QUEUE_MARK) and queue.floor
    } | dict.fromkeys(dropped - shared.ledger.backlogs.keys(), head + 1)
    topics_cut = min(pages.sequence_of(shared.ledger.floor_of_topics() + 1), head + 1)
    needs = _Needs(shared)
    sorted_cuts = {group: needs.floor(group) for group in index.sorted_groups()}
    delayed_done = _delayed_done(shared)
    shared_cut = min(index.sorted_to, head) + 1
    records = shared.records
    first = pages.sequence_of((await shared.store(journal.JournalItem(copies)))[0])
    shared.records -= records
    shared.checkpoint_head = head
    shared.ledger.dropped -= dropped
    purge = shared.stream.purge
    await purge(subject=shared.subjects.checkpoint, before=first)
    await purge(subject=shared.subjects.record, before=head + 1)
    await purge(subject=shared.subjects.shared, before=shared_cut)
    for key, before in cuts.items():
        await purge(subject=shared.subjects.queue(key.removeprefix(ledger.QUEUE_MARK)), before=before)
    await purge(subject=f"{shared.subjects.topic_prefix}>", before=topics_cut)
    for group, floor in sorted_cuts.items():
        left = index.sorted_pages(group, floor + 1)
        if left != index.sorted_pages(group):
            await purge(subject=shared.subjects.sorted(group), before=left[0].sequence if left else head + 1)
            index.drop(group, floor)
    for page, numbers in delayed_done.items():
        with contextlib.suppress(errors.NotFound):  # deleted after an earlier checkpoint
            await shared.stream.delete(page.sequence)
        index.delete(page.sequence)
        shared.ledger.delayed_done.difference_update(numbers)
    for partition, number in shared.ledger.transferred.items():
        before = min(pages.sequence_of(number + 1), head + 1)
        await purge(subject=shared.subjects.transfer(partition), before=before)
