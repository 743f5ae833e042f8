"""Lines of selectors: which exist, what they contain, and what is counted."""

from __future__ import annotations

from muster.message import messages
from muster.message.dispatcher import backlog
from muster.message.dispatcher.index import lines
from tests.message import backlog_driver as driver

A, B = ("a", 1), ("b", 1)
FEW, MANY = "n < 3", "n >= 3"


def filled(*, in_memory: int | None = None, count: int = 5) -> driver.DrivenBacklog:
    source = driver.DrivenBacklog("q", in_memory=in_memory)
    for number in range(1, count + 1):
        source.send(number, messages.MessageMeta(properties={"n": number}))
    return source


def selectors_of(source: backlog.Backlog) -> list[str]:
    return [line.selector for line in source._lines if line.selector is not None]


def numbers(instructions: list[backlog.Instruction]) -> list[int]:
    return [instruction.number for instruction in instructions]


def test_the_index_of_a_queue_without_consumers_is_dropped_with_its_lines():
    source = filled()
    source.attach(lines.BacklogConsumer(A, 5, FEW))
    source.deliver()
    source.detach(A, seen=[])
    assert selectors_of(source) == [FEW], "kept for the next consumer"
    source.unload()
    assert selectors_of(source) == []
    assert source.waiting() == []


def test_after_an_unload_consumers_receive_messages_that_are_indexed_again():
    source = filled()
    source.attach(lines.BacklogConsumer(A, 0, FEW))
    source.deliver()
    source.unload()
    assert selectors_of(source) == [FEW], "it has a consumer"
    for number, message in source.log.items():
        source.arrive(number, message.meta)
    source.credit(A, 5)
    assert numbers(source.deliver()) == [1, 2]


def test_a_line_that_was_not_compared_completely_is_not_kept():
    source = filled()
    source.attach(lines.BacklogConsumer(A, 5, FEW))
    assert source.unscanned_line() is not None
    source.detach(A, seen=[])
    assert selectors_of(source) == []
    assert source.unscanned_line() is None
    source.attach(lines.BacklogConsumer(A, 5, FEW))
    assert numbers(source.deliver()) == [1, 2]


def test_nothing_is_read_for_a_line_that_is_gone():
    source = filled(in_memory=2)
    source.early = True
    source.attach(lines.BacklogConsumer(A, 5, FEW))
    line = source.unscanned_line()
    assert line is not None
    source.scan(line, 1, source.log[1].meta)
    source.pump(0, lambda _: None)
    assert source.next_to_read(10, lambda _: None) == [1]
    source.detach(A, seen=[])
    assert not source.is_blocked


def test_a_message_that_no_selector_accepts_counts_as_rejected():
    source = filled()
    source.attach(lines.BacklogConsumer(A, 1, FEW))
    source.deliver()
    assert source.rejected == 3, "of those that waited before"
    source.send(6, messages.MessageMeta(properties={"n": 6}))
    source.send(7, messages.MessageMeta(properties={"n": 1}))
    assert source.rejected == 4
    source.attach(lines.BacklogConsumer(B, 0, MANY))
    source.deliver()
    source.send(8, messages.MessageMeta(properties={"n": 8}))
    assert source.rejected == 7, "those that the other consumer's selector was compared with, and no more"


def test_with_a_consumer_without_selector_nothing_is_rejected():
    source = filled()
    source.attach(lines.BacklogConsumer(B, 0))
    source.attach(lines.BacklogConsumer(A, 0, FEW))
    source.deliver()
    source.send(6, messages.MessageMeta(properties={"n": 6}))
    assert source.rejected == 0


def test_without_consumers_nothing_is_rejected():
    assert filled().rejected == 0


def test_a_line_without_consumers_still_follows_the_queue():
    source = filled(count=1)
    source.attach(lines.BacklogConsumer(A, 0, FEW))
    source.deliver()
    source.detach(A, seen=[])
    source.send(2, messages.MessageMeta(properties={"n": 2}))
    source.attach(lines.BacklogConsumer(B, 5, FEW))
    assert source.unscanned_line() is None, "it is complete: nothing has to be compared"
    assert numbers(source.deliver()) == [1, 2]


def test_a_selector_on_an_empty_queue_needs_no_comparison():
    source = driver.DrivenBacklog("q")
    source.attach(lines.BacklogConsumer(A, 5, FEW))
    assert source.unscanned_line() is None


def test_a_message_of_two_lines_goes_to_one_consumer_and_returns_to_both():
    source = filled(count=1)
    source.attach(lines.BacklogConsumer(A, 1, FEW))
    source.attach(lines.BacklogConsumer(B, 1, "n > 0"))
    assert numbers(source.deliver()) == [1]
    (held,) = source.held.values()
    source.release([1], held.holder.key[0], counted=False)
    source.detach(held.holder.key, seen=[])
    assert numbers(source.deliver()) == [1], "the other consumer receives it"


def test_a_line_stays_while_it_has_a_consumer():
    source = filled()
    for consumer in (A, B):
        source.attach(lines.BacklogConsumer(consumer, 1, FEW))
    source.detach(A, seen=[])
    assert selectors_of(source) == [FEW], "not even compared, but used"
    assert numbers(source.deliver()) == [1]


def test_the_least_recently_used_lines_without_consumers_are_dropped():
    source = filled()
    used = [f"n = {number}" for number in range(10, 22)]
    for number, selector in enumerate(used):
        source.attach(lines.BacklogConsumer(("used", number), 0, selector))
    source.deliver()
    for number in range(9):
        source.attach(lines.BacklogConsumer(A, 0, f"n > {number}"))
        source.deliver()
        source.detach(A, seen=[])
    kept = [f"n > {number}" for number in range(1, 9)]
    assert selectors_of(source) == [*used, *kept], "eight, and all that are used"


def test_after_all_messages_are_forgotten_nothing_is_left_to_compare():
    source = filled()
    source.attach(lines.BacklogConsumer(A, 0, FEW))
    assert source.unscanned_line() is not None
    source.unload()
    assert source.unscanned_line() is None
