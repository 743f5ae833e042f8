"""What a message or a consumer costs does not depend on how many others there are: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from muster.message import destinations, messages, settings
from muster.message.dispatcher import backlog, state
from muster.message.dispatcher.log import journal, ledger, message_cache, pages

JOBS = destinations.queue("jobs")


def copy_to(destination: destinations.Destination) -> journal.JournalMessage:
    return journal.JournalMessage(destination, messages.MessageMeta(), "{}", b"", "subject")


class CountingPosition(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountingPosition.comparisons += 1
        return int(self) < other


@pytest.mark.parametrize("newer", [0, 1, 7, 1000])
def test_a_consumer_that_is_up_to_date_visits_no_cached_message(newer: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CountingPosition, "comparisons", 0)
    cache = message_cache.MessageCache(1 << 20)
    for number in range(10, 20_010, 10):
        cache.add_stored(number, copy_to(JOBS))
    last = 20_000
    assert [number for number, _ in cache.after(CountingPosition(last - 10 * newer))] == list(
        range(last - 10 * newer + 10, last + 10, 10)
    )
    assert CountingPosition.comparisons <= newer + 1


class UnvisitedBacklogs(dict[str, backlog.Backlog]):
    """Backlogs that may be looked up, but not enumerated."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("all backlogs were visited")

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def keys(self) -> Any:
        self._refuse()

    def values(self) -> Any:
        self._refuse()

    def items(self) -> Any:
        self._refuse()


async def test_a_batch_visits_only_the_backlogs_that_it_concerns():
    unused: Any = None
    shared = state.DispatcherState(unused, unused, 1, settings.MessageSettings())
    shared.ledger.backlogs = UnvisitedBacklogs({"q:other": backlog.Backlog("q:other")})
    stored: list[int] = []
    shared.on_stored = lambda placed: stored.extend(number for _, number in placed)
    for sequence in (7, 8):
        record = ledger.LogRecord(stored={"q:jobs": 1}, last_works={"ann-1": sequence})
        number = pages.number(sequence, 0)
        shared.journal._on_batch(record, sequence, [(copy_to(JOBS), number)])
        assert stored.pop() == number
    jobs = shared.ledger.backlogs["q:jobs"]
    assert jobs.live, "the log contains nothing of a queue before its first message"
    assert shared.ledger.depths == {"q:jobs": 2}
