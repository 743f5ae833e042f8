"""Rules of `backlog`, one by one; `test_backlog` drives it at random."""

from __future__ import annotations

import time
from typing import Any

import pytest

from muster.message import messages
from muster.message.dispatcher import backlog
from muster.message.dispatcher.index import groups, lines
from tests.message import backlog_driver as driver

A, B, C = ("a", 1), ("b", 1), ("c", 1)


def meta(
    priority: int = 4, *, group: str | None = None, expires_ms: int = 0, n: int = 0
) -> messages.MessageMeta:
    properties: dict[str, str | int | float | bool | None] = {"n": n}
    if group is not None:
        properties["JMSXGroupID"] = group
    return messages.MessageMeta(priority=priority, properties=properties, expiration_ms=expires_ms)


def holding(*sequences: int, **options: Any) -> driver.DrivenBacklog:
    driven_backlog = driver.DrivenBacklog("q", **options)
    for sequence in sequences:
        driven_backlog.send(sequence, meta())
    return driven_backlog


def pump(driven_backlog: driver.DrivenBacklog, now_ms: int = 0) -> list[tuple[str, int]]:
    """What is delivered: to which connection, and which."""
    instructions = []
    for instruction in driven_backlog.deliver(now_ms):
        assert isinstance(instruction, backlog.DeliverMessage)
        instructions.append((instruction.consumer[0], instruction.number))
    return instructions


def delivered(*sequences: int, **options: Any) -> driver.DrivenBacklog:
    """One consumer has all messages."""
    driven_backlog = holding(*sequences, **options)
    driven_backlog.attach(lines.BacklogConsumer(A, len(sequences)))
    assert pump(driven_backlog) == [("a", sequence) for sequence in sequences]
    return driven_backlog


def known(driven_backlog: driver.DrivenBacklog, number: int) -> tuple[int, int]:
    """Deliveries and failures of a message."""
    held = driven_backlog.held.get(number)
    return driven_backlog.counts.get(number, (0, 0)) if held is None else (held.count, held.failures)


def test_a_new_backlog_is_empty():
    driven_backlog = driver.DrivenBacklog("q")
    assert (
        driven_backlog.floor,
        driven_backlog.position,
        driven_backlog.suspect,
        len(driven_backlog.pending),
        driven_backlog.live,
    ) == (0, 0, 0, 0, False)
    assert (
        driven_backlog.delivered,
        driven_backlog.expired,
        driven_backlog.matched,
        driven_backlog.rejected,
    ) == (0, 0, 0, 0)
    driven_backlog.send(1, meta())
    assert (known(driven_backlog, 1), driven_backlog.holds(1, "a")) == ((0, 0), True)
    driven_backlog.attach(lines.BacklogConsumer(A))
    assert pump(driven_backlog) == [], "a consumer takes nothing before it gives credit"


# What is held


def test_waiting_messages_are_ordered_by_priority_and_then_by_sequence():
    driven_backlog = driver.DrivenBacklog("q")
    for sequence, (priority, n) in enumerate(((4, 1), (4, 2), (9, 2), (4, 1), (9, 1)), 1):
        driven_backlog.send(sequence, meta(priority, n=n))
    driven_backlog.attach(lines.BacklogConsumer(A, 1, "n = 1"))
    assert pump(driven_backlog) == [("a", 5)]
    assert driven_backlog.waiting() == [3, 1, 2, 4], "also those that no consumer selects"


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (8, 9), (-1, 1), (8, 12)],
)
def test_a_higher_priority_goes_first(low: int, high: int):
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.send(1, meta(low))
    driven_backlog.send(2, meta(high))
    assert driven_backlog.waiting() == [2, 1]


@pytest.mark.parametrize(("one_priority", "other"), [(9, 12), (0, -3), (12, 9), (-3, 0)])
def test_priorities_beyond_the_scale_count_as_its_ends(one_priority: int, other: int):
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.send(1, meta(one_priority))
    driven_backlog.send(2, meta(other))
    assert driven_backlog.waiting() == [1, 2]


@pytest.mark.parametrize(
    ("sequence", "done", "over"),
    [
        (4, True, True),
        (5, True, True),  # the floor
        (6, True, True),  # not held, up to the position: done or not ours
        (7, False, False),  # held
        (10, True, True),
        (11, False, True),  # not held, up to the head: not ours
        (12, True, True),  # done beyond the position
        (20, False, True),
        (21, False, False),
    ],
)
def test_what_is_done_and_what_is_over(sequence: int, done: bool, over: bool):
    driven_backlog = driver.DrivenBacklog("q", floor=5)
    driven_backlog.send(7, meta())
    driven_backlog.position = 10
    driven_backlog.finish(12)
    assert driven_backlog.is_done(sequence) is done
    assert driven_backlog.is_over(sequence, head=20) is done, "what follows the position is still to be read"
    driven_backlog.live = True
    assert driven_backlog.is_over(sequence, head=20) is over


def test_what_is_done_or_held_already_does_not_arrive_again():
    driven_backlog = driver.DrivenBacklog("q", floor=5)
    driven_backlog.finish(7)
    for sequence in (4, 5, 7, 8, 8):
        driven_backlog.send(sequence, meta())
    assert (driven_backlog.waiting(), len(driven_backlog.pending), driven_backlog.position) == ([8], 1, 8)
    driven_backlog.send(6, meta())
    assert (driven_backlog.waiting(), driven_backlog.position) == ([6, 8], 8), (
        "it takes its place in the order"
    )


@pytest.mark.parametrize(
    ("sequence", "before", "count"),
    [
        (5, None, (1, 0)),  # another dispatcher may have delivered it
        (6, None, (0, 0)),
        (5, (3, 2), (3, 2)),
        (6, (3, 2), (3, 2)),
    ],
)
def test_deliveries_before_this_one_are_those_known_or_suspected(
    sequence: int, before: tuple[int, int] | None, count: tuple[int, int]
):
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.suspect = 5
    if before is not None:
        driven_backlog.counts[sequence] = before
    driven_backlog.send(sequence, meta())
    driven_backlog.attach(lines.BacklogConsumer(A, 1))
    assert pump(driven_backlog) == [("a", sequence)]
    assert known(driven_backlog, sequence) == count
    assert not driven_backlog.counts


def test_a_message_finished_while_it_arrives_is_not_delivered():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 9))
    driven_backlog.start_finish([1])
    driven_backlog.send(1, meta())
    assert pump(driven_backlog) == []
    driven_backlog.cancel_finish([1])
    assert pump(driven_backlog) == [("a", 1)]


def test_unloading_forgets_the_index_but_not_what_is_done_nor_counts():
    driven_backlog = holding(3, 4)
    driven_backlog.send(5, meta(n=2))
    driven_backlog.attach(lines.BacklogConsumer(A, 1, "n = 0"))
    assert pump(driven_backlog) == [("a", 3)]
    driven_backlog.live = True
    driven_backlog.release([3], "a", counted=True)
    driven_backlog.finish(4)
    driven_backlog.detach(A, seen=[])
    driven_backlog.unload()
    assert (list(driven_backlog.pending), driven_backlog.live, driven_backlog.position) == ([], False, 0)
    assert driven_backlog.counts == {3: (1, 1)}
    assert list(driven_backlog.done) == [(4, 4)]
    driven_backlog.attach(lines.BacklogConsumer(B, 9))
    assert pump(driven_backlog) == []
    for sequence in range(1, 10):
        driven_backlog.send(sequence, meta())
    assert driven_backlog.waiting() == [1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("state", "held", "finished", "floor", "done"),
    [
        ({}, [], [], 0, []),
        ({"live": True}, [], [], 20, []),
        ({"position": 10}, [], [], 10, []),
        ({}, [6], [], 5, []),
        ({}, [6, 9], [], 5, []),
        ({}, [6, 9], [6], 8, []),
        ({}, [6, 7, 9], [7], 5, [(7, 8)]),
        ({"live": True}, [6], [], 5, []),
        ({}, [], [1], 1, []),
        ({}, [], [1, 2, 4], 2, [(4, 4)]),
        ({"floor": 28, "live": True}, [], [], 28, []),
    ],
)
def test_the_floor_rises_to_before_the_first_that_is_not_done(
    state: dict[str, int], held: list[int], finished: list[int], floor: int, done: list[tuple[int, int]]
):
    driven_backlog = holding(*held)
    for sequence in finished:
        driven_backlog.finish(sequence)
    for name, value in state.items():
        setattr(driven_backlog, name, value)
    assert driven_backlog.settle(20) == floor
    assert driven_backlog.floor == floor
    assert driven_backlog.position >= floor
    assert list(driven_backlog.done) == done


# Consumers


def test_consumers_take_turns():
    driven_backlog = holding(*range(1, 8))
    for key, credit in ((A, 2), (B, 3), (C, 2)):
        driven_backlog.attach(lines.BacklogConsumer(key, credit))
    assert pump(driven_backlog) == [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("b", 5), ("c", 6), ("b", 7)]


def test_one_without_credit_is_passed_over():
    driven_backlog = holding(*range(1, 5))
    for key, credit in ((A, 0), (B, 9), (C, 9)):
        driven_backlog.attach(lines.BacklogConsumer(key, credit))
    assert pump(driven_backlog) == [("b", 1), ("c", 2), ("b", 3), ("c", 4)]


def test_credit_adds_up_and_stopping_takes_it_back():
    driven_backlog = holding(*range(1, 9))
    driven_backlog.attach(lines.BacklogConsumer(A, 1))
    driven_backlog.credit(A, 2)
    driven_backlog.credit(B, 5)  # it is not there
    assert pump(driven_backlog) == [("a", 1), ("a", 2), ("a", 3)]
    driven_backlog.credit(A, 2)
    driven_backlog.stop(A)
    driven_backlog.stop(B)
    assert pump(driven_backlog) == []
    driven_backlog.credit(A, 1)
    assert pump(driven_backlog) == [("a", 4)]


def test_a_consumer_that_leaves_gives_back_what_it_holds_and_gets_no_more():
    driven_backlog = delivered(1, 2)
    driven_backlog.attach(lines.BacklogConsumer(B, 1))
    assert driven_backlog.detach(A, seen=[]) == []
    assert driven_backlog.detach(A, seen=[]) == [], "it is gone already"
    driven_backlog.send(3, meta())
    assert pump(driven_backlog) == [("b", 1)]
    assert driven_backlog.waiting() == [2, 3]


@pytest.mark.parametrize(
    ("seen", "counts"),
    [
        (None, {2: (1, 1), 3: (1, 0)}),  # all may have been seen; it failed with the oldest
        ([], {2: (0, 0), 3: (0, 0)}),
        ([2], {2: (1, 1), 3: (0, 0)}),
        ([3], {2: (0, 0), 3: (1, 1)}),
    ],
)
def test_what_a_consumer_saw_before_it_left_counts(
    seen: list[int] | None, counts: dict[int, tuple[int, int]]
):
    driven_backlog = delivered(1, 2, 3)
    driven_backlog.start_finish([1])
    driven_backlog.detach(A, seen=seen)
    assert {number: known(driven_backlog, number) for number in (2, 3)} == counts
    assert driven_backlog.waiting() == [2, 3], "whether the first is done is being stored"


# Outcomes


def test_who_may_acknowledge_a_message():
    driven_backlog = delivered(1)
    driven_backlog.send(2, meta())
    assert driven_backlog.holds(1, "a")
    assert not driven_backlog.holds(1, "b")
    assert driven_backlog.holds(2, "b"), "no consumer has it"
    assert driven_backlog.holds(7, "b"), "not loaded"
    driven_backlog.start_finish([1, 2])
    assert not driven_backlog.holds(1, "a")
    assert not driven_backlog.holds(2, "b")
    driven_backlog.finish(1)
    assert not driven_backlog.holds(1, "a")


def test_what_is_being_finished_waits_for_the_store():
    driven_backlog = delivered(1)
    driven_backlog.send(2, meta())
    driven_backlog.start_finish([1, 2, 7])
    assert driven_backlog.waiting() == []
    driven_backlog.credit(A, 9)
    assert pump(driven_backlog) == []
    driven_backlog.cancel_finish([1, 2, 7, 8])
    assert driven_backlog.holds(1, "a"), "the consumer still has it"
    assert driven_backlog.waiting() == [2]
    driven_backlog.cancel_finish([2])
    assert driven_backlog.waiting() == [2], "once"
    assert pump(driven_backlog) == [("a", 2)]


def test_what_is_finished_is_gone_from_all_places():
    driven_backlog = delivered(1, 2)
    driven_backlog.send(3, meta())
    driven_backlog.counts[9] = (1, 1)
    assert [driven_backlog.finish(sequence) for sequence in (1, 3, 9)] == [True, True, True]
    assert [driven_backlog.finish(sequence) for sequence in (1, 3, 9)] == [False, False, False]
    assert (list(driven_backlog.pending), list(driven_backlog.consumers[A].held), driven_backlog.counts) == (
        [2],
        [2],
        {},
    )
    assert driven_backlog.waiting() == []
    assert list(driven_backlog.done) == [(3, 3), (9, 9)]
    driven_backlog.send(9, meta())
    assert driven_backlog.waiting() == []


def test_a_finish_that_comes_twice_ends_the_waiting_for_it():
    driven_backlog = driver.DrivenBacklog("q", floor=5)
    driven_backlog.start_finish([3])
    assert not driven_backlog.finish(3)
    driven_backlog.start_finish([8])
    assert driven_backlog.finish(8)
    driven_backlog.cancel_finish([8])
    assert driven_backlog.is_done(8)


def test_a_message_without_a_matching_selector_can_be_finished():
    driven_backlog = holding(1)
    driven_backlog.attach(lines.BacklogConsumer(A, 1, "n = 1"))
    assert pump(driven_backlog) == []
    assert driven_backlog.finish(1)
    assert driven_backlog.waiting() == []


def test_only_the_connection_that_holds_a_message_gives_it_back():
    driven_backlog = delivered(1, 2)
    driven_backlog.send(3, meta())
    assert driven_backlog.release([1, 3, 7], "b", counted=True) == []
    assert driven_backlog.release([3, 7], "a", counted=True, reason="poison") == []
    assert driven_backlog.waiting() == [3]
    assert driven_backlog.release([1], "a", counted=False) == []
    assert known(driven_backlog, 1) == (0, 0)
    assert driven_backlog.release([2], "a", counted=True) == []
    assert known(driven_backlog, 2) == (1, 1)
    assert driven_backlog.waiting() == [1, 2, 3]
    assert list(driven_backlog.consumers[A].held) == []


def test_what_is_rejected_with_a_reason_is_a_dead_letter():
    driven_backlog = delivered(1, 2)
    (dead,) = driven_backlog.release([1], "a", counted=True, reason="poison")
    assert isinstance(dead, backlog.DeadLetterMessage)
    assert (dead.number, dead.reason) == (1, "poison")
    assert (driven_backlog.waiting(), list(driven_backlog.consumers[A].held)) == ([], [2])
    assert not driven_backlog.holds(1, "a"), "that it is done is being stored"
    driven_backlog.start_finish([2])
    assert driven_backlog.release([2], "a", counted=True, reason="poison") == [], "it was acknowledged before"
    driven_backlog.cancel_finish([1, 2])
    assert driven_backlog.waiting() == [1, 2]


def test_one_that_failed_too_often_is_a_dead_letter():
    driven_backlog = delivered(1, max_deliveries=2)
    assert driven_backlog.release([1], "a", counted=True) == []
    driven_backlog.credit(A, 1)
    pump(driven_backlog)
    assert driven_backlog.release([1], "a", counted=False) == []
    driven_backlog.credit(A, 1)
    pump(driven_backlog)
    (dead,) = driven_backlog.detach(A, seen=None)
    assert isinstance(dead, backlog.DeadLetterMessage)
    assert dead.reason == "delivered 2 times without being acknowledged"
    assert driven_backlog.waiting() == []


def test_one_that_failed_waits_for_its_retry_while_others_overtake_it():
    driven_backlog = delivered(1, 2, delay_s=1.0)
    assert driven_backlog.release([1], "a", counted=False) == [], "nobody failed"
    driven_backlog.credit(A, 1)
    assert pump(driven_backlog) == [("a", 1)]
    assert driven_backlog.release([1], "a", counted=True) == [backlog.RetryMessage(1, 1.0)]
    assert driven_backlog.release([2], "a", counted=True, delay_s=9.0) == [backlog.RetryMessage(2, 9.0)]
    driven_backlog.send(3, meta())
    driven_backlog.credit(A, 9)
    assert pump(driven_backlog) == [("a", 3)]
    driven_backlog.retry(1)
    driven_backlog.retry(1)
    assert pump(driven_backlog) == [("a", 1)]
    assert driven_backlog.release([1], "a", counted=True) == [backlog.RetryMessage(1, 2.0)]
    assert driven_backlog.withdraw(2), "it can be purged or moved meanwhile"
    driven_backlog.finish(2)
    driven_backlog.retry(2)
    assert pump(driven_backlog) == []
    driven_backlog.finish(3)
    assert driven_backlog.settle(3) == 0, "1 is not done"
    driven_backlog.unload()
    driven_backlog.retry(1)
    assert driven_backlog.waiting() == []


def test_the_last_error_is_in_the_reason_of_a_dead_letter():
    driven_backlog = delivered(1, max_deliveries=1)
    (dead,) = driven_backlog.release([1], "a", counted=True, error="ValueError: x")
    assert isinstance(dead, backlog.DeadLetterMessage)
    assert dead.reason.endswith("; last error: ValueError: x")


def test_what_one_consumer_returns_for_others_goes_to_another():
    driven_backlog = delivered(1, 2)
    driven_backlog.release([1], "a", counted=True, elsewhere=True)
    driven_backlog.credit(A, 9)
    driven_backlog.send(3, meta())
    assert pump(driven_backlog) == [("a", 3)], "it does not hold up what follows"
    driven_backlog.attach(lines.BacklogConsumer(B, 9, "n = 1"))
    assert pump(driven_backlog) == [], "this one does not select it"
    driven_backlog.attach(lines.BacklogConsumer(C, 1))
    assert pump(driven_backlog) == [("c", 1)]
    assert known(driven_backlog, 1) == (1, 1)
    driven_backlog.finish(1)
    assert not driven_backlog._excluded


def test_what_is_returned_for_others_leaves_its_group():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 9))
    driven_backlog.send(1, meta(group="g"))
    assert pump(driven_backlog) == [("a", 1)]
    driven_backlog.attach(lines.BacklogConsumer(B, 9))
    driven_backlog.release([1], "a", counted=False, elsewhere=True)
    driven_backlog.send(2, meta(group="g"))
    assert pump(driven_backlog) == [("b", 1), ("a", 2)]


def test_what_is_set_aside_can_be_purged():
    driven_backlog = delivered(1)
    driven_backlog.release([1], "a", counted=False, elsewhere=True)
    driven_backlog.credit(A, 9)
    assert pump(driven_backlog) == []
    assert driven_backlog.withdraw(1)
    driven_backlog.attach(lines.BacklogConsumer(B, 9))
    assert pump(driven_backlog) == []
    driven_backlog.cancel_finish([1])
    assert pump(driven_backlog) == [("b", 1)]


def test_credit_does_not_cost_a_look_at_all_that_is_set_aside():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 20_000))
    for number in range(1, 10_001):
        driven_backlog.send(number, meta())
    pump(driven_backlog)
    driven_backlog.release(range(1, 10_001), "a", counted=False, elsewhere=True)
    assert pump(driven_backlog) == []
    began_s = time.process_time()
    for _ in range(2_000):
        driven_backlog.credit(A, 1)
    assert time.process_time() - began_s < 0.5
    driven_backlog.attach(lines.BacklogConsumer(B, 0))
    driven_backlog.credit(B, 2)
    assert pump(driven_backlog) == [("b", 1), ("b", 2)]
    driven_backlog.credit(B, 1)
    assert pump(driven_backlog) == [("b", 3)]


def test_what_all_consumers_returned_fails_too_often_at_last():
    driven_backlog = delivered(1, max_deliveries=2)
    assert driven_backlog.release([1], "a", counted=True, elsewhere=True) == []
    driven_backlog.attach(lines.BacklogConsumer(B, 9))
    assert pump(driven_backlog) == [("b", 1)]
    (instruction,) = driven_backlog.release([1], "b", counted=True, elsewhere=True)
    assert isinstance(instruction, backlog.DeadLetterMessage)


def test_without_a_limit_nothing_fails_too_often():
    driven_backlog = delivered(1)
    for _ in range(100):
        assert driven_backlog.release([1], "a", counted=True) == []
        driven_backlog.credit(A, 1)
        assert pump(driven_backlog) == [("a", 1)]
    assert known(driven_backlog, 1) == (100, 100)


def test_only_undelivered_messages_are_withdrawn():
    driven_backlog = delivered(1)
    driven_backlog.send(2, meta())
    assert [driven_backlog.withdraw(sequence) for sequence in (1, 2, 2, 7)] == [False, True, False, True]
    assert driven_backlog.waiting() == []
    assert not driven_backlog.holds(7, "a")
    driven_backlog.cancel_finish([2])
    assert driven_backlog.waiting() == [2]


def test_a_message_that_is_being_purged_is_delivered_to_no_consumer_when_it_is_loaded():
    """A purge or a move takes messages that are not in memory; consumers load them before it is stored."""
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 5))
    assert driven_backlog.withdraw(1)
    for sequence in (1, 2):
        driven_backlog.send(sequence, meta())
    assert pump(driven_backlog) == [("a", 2)]
    driven_backlog.cancel_finish([1])
    assert pump(driven_backlog) == [("a", 1)]


def test_what_the_other_side_still_holds_after_its_consumer_left_can_be_given_back_no_more():
    driven_backlog = delivered(1)
    driven_backlog.detach(A, seen=[])
    assert driven_backlog.release([1], "a", counted=True) == []
    assert known(driven_backlog, 1) == (0, 0)


# Delivery


def test_without_credit_nothing_is_looked_at():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.send(1, meta(expires_ms=5))
    assert driven_backlog.deliver(10) == []
    driven_backlog.attach(lines.BacklogConsumer(A))
    assert driven_backlog.deliver(10) == []
    driven_backlog.credit(A, 1)
    assert [type(actual) for actual in driven_backlog.deliver(10)] == [backlog.ExpireMessage]


def test_what_expired_is_finished_and_costs_no_credit():
    driven_backlog = driver.DrivenBacklog("q")
    for expires_ms in (10, 11, 0):
        driven_backlog.send(driven_backlog.position + 1, meta(expires_ms=expires_ms))
    driven_backlog.attach(lines.BacklogConsumer(A, 2))
    expired, *rest = driven_backlog.deliver(10)
    assert isinstance(expired, backlog.ExpireMessage)
    assert expired.number == 1
    assert [actual.number for actual in rest] == [2, 3]
    assert (driven_backlog.expired, driven_backlog.delivered) == (1, 2)
    assert not driven_backlog.holds(1, "a"), "that it is done is being stored"
    assert driven_backlog.deliver(10) == []


def test_what_is_counted():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 9, "n = 1"))
    for n in (1, 2, 3, 1):
        driven_backlog.send(driven_backlog.position + 1, meta(n=n))
    assert pump(driven_backlog) == [("a", 1), ("a", 4)]
    assert (driven_backlog.delivered, driven_backlog.matched, driven_backlog.rejected) == (2, 2, 2)
    driven_backlog.attach(lines.BacklogConsumer(B, 1))
    assert pump(driven_backlog) == [("b", 2)]
    assert (driven_backlog.delivered, driven_backlog.matched, driven_backlog.rejected) == (3, 2, 2)
    assert driven_backlog.consumers[B].credit == 0
    assert list(driven_backlog.consumers[A].held) == [1, 4]


def test_a_message_that_waits_for_one_consumer_does_not_hold_up_another():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 0, "n = 1"))
    driven_backlog.attach(lines.BacklogConsumer(B, 2, "n = 2"))
    for n in (1, 2, 1, 3, 2):
        driven_backlog.send(driven_backlog.position + 1, meta(n=n))
    assert pump(driven_backlog) == [("b", 2), ("b", 5)]
    assert driven_backlog.waiting() == [1, 3, 4]
    driven_backlog.credit(A, 9)
    assert pump(driven_backlog) == [("a", 1), ("a", 3)]
    assert driven_backlog.rejected == 1, "4; 1 and 3 only waited"


def test_what_is_left_when_credit_ends_stays_in_order():
    driven_backlog = holding(1, 2, 3, 4)
    driven_backlog.attach(lines.BacklogConsumer(A, 2))
    assert pump(driven_backlog) == [("a", 1), ("a", 2)]
    assert driven_backlog.waiting() == [3, 4]
    driven_backlog.credit(A, 9)
    assert pump(driven_backlog) == [("a", 3), ("a", 4)]


# Groups


def grouped(*groups: str | None) -> driver.DrivenBacklog:
    driven_backlog = driver.DrivenBacklog("q")
    for sequence, group in enumerate(groups, 1):
        driven_backlog.send(sequence, meta(group=group))
    return driven_backlog


def test_a_group_stays_with_its_consumer_although_others_have_credit():
    driven_backlog = grouped("g", "g", "h", None, "g")
    driven_backlog.attach(lines.BacklogConsumer(A, 2))
    driven_backlog.attach(lines.BacklogConsumer(B, 9))
    assert pump(driven_backlog) == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    assert driven_backlog.waiting() == [5]
    driven_backlog.credit(A, 1)
    assert pump(driven_backlog) == [("a", 5)]
    assert driven_backlog.rejected == 0


def test_a_group_goes_on_with_another_where_its_consumer_does_not_select_the_message():
    driven_backlog = driver.DrivenBacklog("q")
    for n in (1, 2, 2):
        driven_backlog.send(driven_backlog.position + 1, meta(group="g", n=n))
    driven_backlog.attach(lines.BacklogConsumer(A, 9, "n = 1"))
    driven_backlog.attach(lines.BacklogConsumer(B, 9, "n = 2"))
    assert pump(driven_backlog) == [("a", 1), ("b", 2), ("b", 3)]


def test_of_too_many_groups_the_half_that_was_used_least_is_forgotten(monkeypatch):
    monkeypatch.setattr(groups, "GROUPS_MAX", 6)
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(A, 1000))

    def use(group: str, *, finish: bool = True) -> None:
        sequence = driven_backlog.position + 1
        driven_backlog.send(sequence, meta(group=group))
        pump(driven_backlog)
        if finish:
            driven_backlog.finish(sequence)

    for group in "abcdef":
        use(group)
    assert [*driven_backlog._groups] == [*"abcdef"]
    use("a")
    use("b", finish=False)
    use("g")
    assert [*driven_backlog._groups] == [*"fabg"]
    for group in "hij":
        use(group, finish=group != "h")
    assert [*driven_backlog._groups] == [*"bghij"], "consumers have b and h"
