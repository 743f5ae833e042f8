"""Checkpoints: the sum of all records is written periodically, and the log is trimmed.

Only pages before the checkpoint's head are deleted: a later page may contain a record that a successor needs.

The log is trimmed up to the first message that is still needed. A message that no consumer selects, or a
subscription whose client is away, therefore retains everything after it. If that fills the log,
`delete_unused_pages` deletes individual pages.
"""

from __future__ import annotations

import msgspec

from muster.core import errors, topics
from muster.message import destinations, messages
from muster.message.dispatcher import backlog, state
from muster.message.dispatcher.log import journal, ledger, pages


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
    last = await shared.stream.last_for(shared.subjects.checkpoint)
    start = 1
    if last is not None:
        chunks = _chunks(last.sequence, last.data)[0].chunks
        chunks_read: list[ledger.LogCheckpoint] = []
        async for page in shared.read(last.sequence - chunks + 1, shared.subjects.checkpoint):
            chunks_read += _chunks(page.sequence, page.data)
        shared.ledger.restore(chunks_read)
        shared.checkpoint_head = chunks_read[0].head
        start = shared.checkpoint_head + 1
    async for page in shared.read(start):
        if (record := pages.record_of(page.sequence, page.data)) is not None:
            shared.ledger.apply(record, pages.end(page.sequence))
    shared.ledger.reach(head, pages.end(head))
    shared.ledger.suspect()
    shared.ledger.reserve_prepared()
    for subscription in shared.ledger.subscriptions.values():
        shared.patterns.add(subscription.topic)


async def delete_unused_pages(shared: state.DispatcherState) -> None:
    """Delete pages that are not needed, between others that are. Reads the complete log."""
    queues: dict[str, list[backlog.Backlog]] = {}
    by_pattern: dict[str, list[backlog.Backlog]] = {}
    for key, source in shared.ledger.backlogs.items():
        if (subscription := shared.ledger.subscriptions.get(key)) is not None:
            by_pattern.setdefault(subscription.topic, []).append(source)
        else:
            queues[shared.subjects.queue(key.removeprefix(ledger.QUEUE_MARK))] = [source]
    async for page in shared.read(1):
        if page.sequence > shared.checkpoint_head:
            break
        needed_by = queues.get(page.subject)
        if needed_by is None and page.subject.startswith(shared.subjects.topic_prefix):
            topic = topics.Topic.from_subject(shared.subjects.of_topic(page.subject))
            needed_by = [
                source for text in shared.patterns.matching(topic) for source in by_pattern.get(text, [])
            ]
        if needed_by is not None and all(
            all(source.is_over(number, shared.ledger.end) for source in needed_by)
            or (page.subject not in queues and _has_expired(held.raw, shared.now_ms()))
            for number, held in pages.read(page.sequence, page.data)
        ):
            await shared.stream.delete(page.sequence)


def _has_expired(raw: str, now_ms: int) -> bool:
    """Whether the message has expired, so that no subscription receives it."""
    return '"exp":' in raw and 0 < messages.decode_meta(raw).expiration_ms <= now_ms


def _chunks(sequence: int, data: bytes) -> list[ledger.LogCheckpoint]:
    return [
        msgspec.json.decode(held.data, type=ledger.LogCheckpoint) for _, held in pages.read(sequence, data)
    ]


async def write(shared: state.DispatcherState) -> None:
    target = destinations.topic("checkpoint")
    head = shared.ledger.head
    dropped = set(shared.ledger.dropped)
    copies = [
        journal.JournalMessage(
            target, messages.MessageMeta(), "{}", msgspec.json.encode(chunk), shared.subjects.checkpoint
        )
        for chunk in shared.ledger.checkpoint()
    ]
    cuts = {
        key: min(pages.sequence_of(queue.floor + 1), head + 1)
        for key, queue in shared.ledger.backlogs.items()
        if key.startswith(ledger.QUEUE_MARK) and queue.floor
    } | dict.fromkeys(dropped - shared.ledger.backlogs.keys(), head + 1)
    topics_cut = min(pages.sequence_of(shared.ledger.floor_of_topics() + 1), head + 1)
    records = shared.records
    first = pages.sequence_of((await shared.store(journal.JournalItem(copies)))[0])
    shared.records -= records
    shared.checkpoint_head = head
    shared.ledger.dropped -= dropped
    purge = shared.stream.purge
    await purge(subject=shared.subjects.checkpoint, before=first)
    await purge(subject=shared.subjects.record, before=head + 1)
    for key, before in cuts.items():
        await purge(subject=shared.subjects.queue(key.removeprefix(ledger.QUEUE_MARK)), before=before)
    await purge(subject=f"{shared.subjects.topic_prefix}>", before=topics_cut)
    for partition, number in shared.ledger.transferred.items():
        before = min(pages.sequence_of(number + 1), head + 1)
        await purge(subject=shared.subjects.transfer(partition), before=before)
