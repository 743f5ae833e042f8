"""The index of a queue: a million messages deep, and under random operations compared with a naive list."""

from __future__ import annotations

import bisect
import random
import tracemalloc

import pytest

from muster.message import messages
from muster.message.dispatcher import backlog
from muster.message.dispatcher.index import lines, selector_lines, sorted_numbers
from muster.message.dispatcher.log import message_cache
from tests.message import backlog_driver as driver

A, B = ("a", 1), ("b", 1)
PLAIN = messages.MessageMeta()
COMMON = messages.MessageMeta(properties={"kind": "common"})
RARE = messages.MessageMeta(properties={"kind": "rare"})
URGENT = messages.MessageMeta(priority=9)
GROUPED = messages.MessageMeta(properties={"JMSXGroupID": "g"})


def numbers_of(instructions: list[backlog.Instruction]) -> list[int]:
    return [instruction.number for instruction in instructions]


@pytest.mark.parametrize("seed", range(20))
def test_sorted_numbers_are_a_sorted_set(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sorted_numbers, "_BLOCK", 4)
    chance = random.Random(seed)
    numbers, expected = sorted_numbers.SortedNumbers(), list[int]()
    for _ in range(1500):
        number = chance.randrange(60)
        there = number in expected
        if chance.random() < 0.55:
            assert numbers.add(number) is not there
            expected = sorted({*expected, number})
        else:
            if chance.random() < 0.5:
                assert numbers.discard(number) is there
            else:
                low, high = bisect.bisect_left(expected, number), bisect.bisect_right(expected, number)
                around = (
                    expected[low - 1] if low else None,
                    expected[high] if high < len(expected) else None,
                )
                assert numbers.remove(number) == (around if there else None)
            expected = [other for other in expected if other != number]
        assert (list(numbers), len(numbers)) == (expected, len(expected))
        assert numbers.first == (expected[0] if expected else None)
        probe = chance.randrange(-1, 61)
        assert (probe in numbers) is (probe in expected)
        low, high = bisect.bisect_left(expected, probe), bisect.bisect_right(expected, probe)
        before, after = expected[low - 1] if low else None, expected[high] if high < len(expected) else None
        assert numbers.neighbours(probe) == (before, after)


def test_the_index_costs_16_bytes_for_each_message():
    source = backlog.Backlog("q")
    source.live = True
    count = 50_000
    tracemalloc.start()
    for number in range(1, count + 1):
        source.arrive(number, PLAIN)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 20 * count


@pytest.mark.parametrize("depth", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_deep_queue_is_delivered_by_priority_and_selector(depth: int):
    """A selector that matches one in 100,000 of a million messages is compared with each of them once."""
    step = depth // 10
    source = backlog.Backlog("q")
    source.live = True
    rare = dict.fromkeys(range(step, depth + 1, step), RARE)
    for number in range(1, depth + 1):
        source.arrive(number, rare.get(number, COMMON))
    source.attach(lines.BacklogConsumer(A, 3, "kind = 'rare'"))
    looked_up: list[int] = []

    def get(number: int) -> message_cache.CachedMessage:
        looked_up.append(number)
        return message_cache.CachedMessage(rare.get(number, COMMON), "", b"")

    assert source.pump(0, get) == [], "the selector has not been compared with the messages"
    line = source.unscanned_line()
    assert line is not None
    for number in source.pending:
        source.scan(line, number, rare.get(number, COMMON))
    source.scanned(line)
    assert numbers_of(source.pump(0, get)) == looked_up == [step, 2 * step, 3 * step]
    source.arrive(depth + 1, COMMON)
    source.arrive(depth + 2, RARE)
    source.credit(A, 99)
    assert source.pump(0, lambda number: None) == []
    assert source.next_to_read(3, lambda number: None) == [4 * step, 5 * step, 6 * step]
    source.unblock()
    rare[depth + 2] = RARE
    assert numbers_of(source.pump(0, get)) == [*range(4 * step, depth + 1, step), depth + 2]
    source.detach(A, seen=[])
    source.attach(lines.BacklogConsumer(B, 1, "kind = 'rare'"))
    assert source.unscanned_line() is None, "the result is kept for the next consumer"
    assert numbers_of(source.pump(0, get)) == [step]
    rare[depth + 3] = URGENT
    source.arrive(depth + 3, URGENT)
    source.attach(lines.BacklogConsumer(A, 3))
    assert numbers_of(source.pump(0, get)) == [depth + 3, 1, 2]
    source.release([1], "a", counted=True)
    source.credit(A, 2)
    assert numbers_of(source.pump(0, get)) == [1, 3]
    for number in (5 * step, 3, 2):  # in any order
        assert source.finish(number)
    assert list(source.done) == [(2, 3), (5 * step, 5 * step)]
    assert source.finish(1)
    assert (source.settle(depth + 3), list(source.done)) == (3, [(5 * step, 5 * step)])


def test_messages_of_a_group_whose_consumer_is_busy_are_passed_over_once():
    source = backlog.Backlog("q")
    source.live = True
    source.attach(lines.BacklogConsumer(A, 1))
    for number in range(1, 20_001):
        source.arrive(number, GROUPED)
    looked_up: list[int] = []
    others: dict[int, messages.MessageMeta] = {}

    def get(number: int) -> message_cache.CachedMessage:
        looked_up.append(number)
        return message_cache.CachedMessage(others.get(number, GROUPED), "", b"")

    assert numbers_of(source.pump(0, get)) == [1]
    source.attach(lines.BacklogConsumer(B, 99))
    for number in range(20_001, 20_011):
        others[number] = PLAIN
        source.arrive(number, PLAIN)
        assert numbers_of(source.pump(0, get)) == [number]
    assert len(looked_up) == 20_010
    source.credit(A, 2)
    assert numbers_of(source.pump(0, get)) == [2, 3]
    source.detach(A, seen=[])
    assert numbers_of(source.pump(0, get))[:5] == [1, 2, 3, 4, 5], "the group has another consumer now"


def test_lines_do_not_keep_messages_that_other_consumers_finished(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backlog, "COMPACT_AFTER", 50)
    source = driver.DrivenBacklog()
    source.attach(lines.BacklogConsumer(A, 0, "kind = 'rare'"))
    source.attach(lines.BacklogConsumer(B, 1 << 30))
    for number in range(1, 1001):
        source.send(number, RARE)
        assert numbers_of(source.deliver()) == [number]
        source.finish(number)
    assert len(source._lines["kind = 'rare'"].numbers) <= 51
    source.send(1001, RARE)
    source.credit(A, 1)
    source.stop(B)
    assert numbers_of(source.deliver()) == [1001]


def test_of_unused_selectors_the_latest_are_kept():
    source = driver.DrivenBacklog()
    source.send(1, COMMON)
    for n in range(20):
        source.attach(lines.BacklogConsumer(A, 1, f"n = {n}"))
        assert source.deliver() == []
        source.detach(A, seen=[])
    kept = [line.selector for line in source._lines if line.selector is not None]
    assert kept == [f"n = {n}" for n in range(20 - selector_lines.UNUSED_MAX, 20)]


class Naive:
    """What each consumer may receive next, found by looking at every message."""

    def __init__(self) -> None:
        self.metas: dict[int, messages.MessageMeta] = {}
        self.waiting: set[int] = set()

    def order(self) -> list[int]:
        return sorted(self.waiting, key=lambda number: (-lines.level_of(self.metas[number]), number))

    def first_for(self, n: int | None) -> int | None:
        return next((at for at in self.order() if n is None or self.metas[at].properties["n"] == n), None)


@pytest.mark.parametrize("in_memory", [None, 1, 3])
@pytest.mark.parametrize("seed", range(15))
def test_one_consumer_at_a_time_receives_what_a_search_of_all_messages_finds(
    seed: int, in_memory: int | None
):
    """Random messages, selectors, releases, acknowledgements, purges and unloads."""
    chance = random.Random(seed)
    source, naive = driver.DrivenBacklog(in_memory=in_memory), Naive()
    held: list[int] = []
    number = 0
    for _ in range(400):
        match chance.randrange(8):
            case 0 | 1 | 2:
                number += chance.randrange(1, 3)  # others belong to other queues
                meta = messages.MessageMeta(
                    priority=chance.choice((0, 4, 4, 9)), properties={"n": chance.randrange(3)}
                )
                naive.metas[number] = meta
                naive.waiting.add(number)
                source.send(number, meta)
            case 3 | 4:
                n = chance.choice((None, 0, 1, 2))
                source.attach(lines.BacklogConsumer(A, 1, None if n is None else f"n = {n}"))
                delivered = numbers_of(source.deliver())
                expected = naive.first_for(n)
                assert delivered == ([] if expected is None else [expected])
                if expected is not None:
                    naive.waiting.remove(expected)
                    if chance.random() < 0.5:
                        assert source.finish(expected)
                    else:
                        held.append(expected)
                assert source.detach(A, seen=[]) == []
                naive.waiting.update(held)
                held.clear()
            case 5 if naive.waiting:
                gone = chance.choice(sorted(naive.waiting))
                assert source.withdraw(gone)
                if chance.random() < 0.7:
                    assert source.finish(gone)
                    naive.waiting.remove(gone)
                else:
                    source.cancel_finish([gone])
            case 6:
                source.settle(number)
            case 7 if chance.random() < 0.2:
                source.settle(number)
                source.unload()
                for known, meta in sorted(naive.metas.items()):
                    source.arrive(known, meta)
        assert source.waiting() == naive.order()
        assert all(source.is_done(known) is (known not in naive.waiting) for known in naive.metas)
        assert len(source.done) <= len(naive.waiting) + 1
