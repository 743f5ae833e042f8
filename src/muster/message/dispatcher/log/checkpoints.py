"""Checkpoints: the sum of all records is written periodically, and the log is trimmed.

Only pages before the checkpoint's head are deleted: a later page may contain a record that a successor needs.

Shared pages are sorted first, so they are all deleted. The pages of a destination are trimmed up to the first
message that is still needed; `compaction.pack` deletes what is useless after it when the log becomes crowded.
"""

from __future__ import annotations

import bisect

import msgspec

from muster.bus import api
from muster.core import errors
from muster.message import destinations, messages
from muster.message.dispatcher.log import compaction, journal, ledger, message_log, pages


async def recover(log: message_log.MessageLog) -> None:
    """Restore the state from the last checkpoint and the records after it.

    First, an own page is written. From then on the previous owner of the log cannot write, and everything it
    wrote is before that page. Without it, a broker that has just become the leader may not know the end of
    the log.
    """
    try:
        head = await log.stream.publish(log.subjects.record, pages.encode(pages.MessagePage()))
    except errors.LimitExceeded:
        head = (await log.stream.state()).last_sequence
    log.journal.head = head
    index = log.shared_pages
    chunks: list[ledger.LogCheckpoint] = []
    async for page in log.reader.read_pages(1, log.subjects.checkpoint):
        chunks += _chunks(page)
    start = 1
    if chunks:
        chunks = chunks[-chunks[-1].chunks :]  # of the last checkpoint
        log.ledger.restore(chunks)
        log.checkpoint_head = chunks[0].head
        sorted_to = chunks[0].sorted_to
        sorted_to = log.checkpoint_head if sorted_to is None else sorted_to
        index.sort(sorted_to, [page for chunk in chunks for page in chunk.sorted_pages])
        start = sorted_to + 1
    async for page in log.reader.read_pages(start):
        cover = pages.cover(page)
        if page.subject == log.subjects.shared:
            index.stored(page.sequence, cover.parts)
        if page.sequence <= log.checkpoint_head:
            continue
        if page.subject.startswith(log.subjects.sorted_prefix):  # no checkpoint names it
            await log.stream.delete(page.sequence)
        if cover.record is not None:
            log.ledger.apply(cover.record, pages.end(page.sequence))
    log.ledger.reach(head, pages.end(head))
    log.ledger.suspect()
    log.ledger.reserve_prepared()
    for subscription in log.ledger.subscriptions.values():
        log.patterns.add(subscription.topic)


def _chunks(page: api.StoredMessage) -> list[ledger.LogCheckpoint]:
    return [msgspec.json.decode(held.data, type=ledger.LogCheckpoint) for _, _, held in pages.read(page)]


def _delayed_done(log: message_log.MessageLog) -> dict[ledger.SortedPage, list[int]]:
    """The sorted pages of which all delayed messages have been released or cancelled, with their numbers."""
    done = sorted(number for number in log.ledger.delayed_done if number & pages.SHARED)
    by_page: dict[ledger.SortedPage, list[int]] = {}
    for page in log.shared_pages.sorted_pages(log.subjects.delay):
        of_page = done[bisect.bisect_left(done, page.first) : bisect.bisect_right(done, page.last)]
        if len(of_page) == page.count:
            by_page[page] = of_page
    return by_page


async def write(log: message_log.MessageLog) -> None:
    await compaction.sort(log)
    target = destinations.topic("checkpoint")
    head, index, needs = log.ledger.head, log.shared_pages, compaction.LogNeeds(log)
    obsolete = index.obsolete({page.group: needs.floor(page.group) for page in index})
    index.delete(obsolete)
    dropped = set(log.ledger.dropped)
    copies = [
        journal.JournalMessage(
            target, messages.MessageMeta(), "{}", msgspec.json.encode(chunk), log.subjects.checkpoint
        )
        for chunk in log.ledger.checkpoint(index.sorted_to, index)
    ]
    cuts = {
        key: min(pages.sequence_of(queue.floor + 1), head + 1)
        for key, queue in log.ledger.backlogs.items()
        if key.startswith(ledger.QUEUE_MARK) and queue.floor
    } | dict.fromkeys(dropped - log.ledger.backlogs.keys(), head + 1)
    topics_cut = min(pages.sequence_of(log.ledger.floor_of_topics() + 1), head + 1)
    delayed_done = _delayed_done(log)
    shared_cut = min(index.sorted_to, head) + 1
    records = log.records
    first = pages.sequence_of((await log.store(journal.JournalItem(copies)))[0])
    log.records -= records
    log.checkpoint_head = head
    log.ledger.dropped -= dropped
    purge = log.stream.purge
    await purge(subject=log.subjects.checkpoint, before=first)
    await purge(subject=log.subjects.record, before=head + 1)
    await purge(subject=log.subjects.shared, before=shared_cut)
    for key, before in cuts.items():
        await purge(subject=log.subjects.queue(key.removeprefix(ledger.QUEUE_MARK)), before=before)
    await purge(subject=f"{log.subjects.topic_prefix}>", before=topics_cut)
    for group in {page.group for page in obsolete}:
        left = min((page.sequence for page in index if page.group == group), default=head + 1)
        await purge(subject=log.subjects.sorted(group), before=left)
        for page in obsolete:
            if page.group == group and page.sequence > left:
                await compaction.delete(log, page.sequence)
    for page, numbers in delayed_done.items():
        await compaction.delete(log, page.sequence)
        index.delete([page])
        log.ledger.delayed_done.difference_update(numbers)
    for partition, number in log.ledger.transferred.items():
        before = min(pages.sequence_of(number + 1), head + 1)
        await purge(subject=log.subjects.transfer(partition), before=before)
