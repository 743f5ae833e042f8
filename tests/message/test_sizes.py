"""All records fit into messages of the bus."""

from __future__ import annotations

import msgspec

from muster.message import destinations, messages, partitions
from muster.message.dispatcher.log import journal, ledger, pages

BUS_BYTES_MAX = 1 << 20


def _copy(size: int) -> journal.JournalMessage:
    queue = destinations.queue("x")
    return journal.JournalMessage(
        queue, messages.MessageMeta(), "{}", bytes(size), partitions.LogSubjects().queue(queue.name)
    )


def _record(acks: int) -> ledger.LogRecord:
    return ledger.LogRecord(
        acked={"q:x": [(number << 40) + 1023 for number in range(acks)]}, last_works={"c" * 16: 10**6}
    )


def test_a_record_stands_alone_where_its_page_would_become_too_large():
    for size, acks in ((900 << 10, 10), (900 << 10, 20_000), (100, 50_000), (400 << 10, 50_000)):
        item = journal.JournalItem([_copy(size)], _record(acks))
        batch, _ = journal._build_pages(item.copies, item.record, item.record_bytes, partitions.LogSubjects())
        encoded = [pages.encode(page) for _, page in batch]
        assert max(map(len, encoded)) < BUS_BYTES_MAX - 500
        assert len(pages.encode(pages.MessagePage(item.record))) <= item.record_bytes + 100
        assert [page.record for _, page in batch if page.record is not None] == [item.record]


async def test_a_batch_takes_no_more_acknowledgements_than_fit_into_a_page():
    writer = journal.Journal(None, 0, lambda record, last, placed: None)  # type: ignore[arg-type] # none is written
    for _ in range(40):
        writer.add(journal.JournalItem([], _record(5_000)))
    while len(writer):
        taken = writer._next_batch()
        record = journal._merge_records([item.record for item in taken])
        assert len(pages.encode(pages.MessagePage(record))) < BUS_BYTES_MAX - 500


def test_a_checkpoint_of_very_many_subscriptions_and_works_fits_into_messages():
    first = ledger.Ledger()
    for number in range(20_000):
        selector = f"n = {number}" + " OR x = 1" * (2_000 if number < 20 else 1)
        subscription = ledger.DurableSubscription(
            key=f"s:i:client-{number}:all",
            name="all",
            topic="news/sport",
            identity="i",
            client_id=f"c{number}",
            selector=selector,
        )
        first.apply(
            ledger.LogRecord(
                subscribed=[subscription], consumed=[subscription.key], last_works={f"{number:016}": 9}
            ),
            number,
        )
    first.reach(20_000, 20_000 << 10)
    chunks = first.checkpoint()
    assert all(len(msgspec.json.encode(chunk)) < BUS_BYTES_MAX - 500 for chunk in chunks)
    second = ledger.Ledger()
    second.restore(chunks)
    assert second.subscriptions == first.subscriptions
    assert second.consumed == first.consumed
    assert list(second.last_works) == list(first.last_works)
