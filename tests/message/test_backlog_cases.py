"""Rules of `backlog`, one by one; `test_backlog` drives it at random."""

from __future__ import annotations

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


def holding(*sequences: int, **options: int) -> driver.DrivenBacklog:
    one = driver.DrivenBacklog("q", **options)
    for sequence in sequences:
        one.send(sequence, meta())
    return one


def pump(one: driver.DrivenBacklog, now_ms: int = 0) -> list[tuple[str, int]]:
    """What is delivered: to which connection, and which."""
    found = []
    for instruction in one.deliver(now_ms):
        assert isinstance(instruction, backlog.DeliverMessage)
        found.append((instruction.consumer[0], instruction.number))
    return found


def delivered(*sequences: int, **options: int) -> driver.DrivenBacklog:
    """All in the hands of one consumer."""
    one = holding(*sequences, **options)
    one.attach(lines.BacklogConsumer(A, len(sequences)))
    assert pump(one) == [("a", sequence) for sequence in sequences]
    return one


def known(one: driver.DrivenBacklog, number: int) -> tuple[int, int]:
    """Deliveries and failures of a message."""
    held = one.held.get(number)
    return one.counts.get(number, (0, 0)) if held is None else (held.count, held.failures)


def test_a_new_backlog_is_empty():
    one = driver.DrivenBacklog("q")
    assert (one.floor, one.position, one.suspect, len(one.pending), one.live) == (0, 0, 0, 0, False)
    assert (one.delivered, one.expired, one.matched, one.rejected) == (0, 0, 0, 0)
    one.send(1, meta())
    assert (known(one, 1), one.holds(1, "a")) == ((0, 0), True)
    one.attach(lines.BacklogConsumer(A))
    assert pump(one) == [], "a consumer takes nothing before it gives credit"


# What is held


def test_waiting_is_what_nobody_holds_by_priority_and_then_by_sequence():
    one = driver.DrivenBacklog("q")
    for sequence, (priority, n) in enumerate(((4, 1), (4, 2), (9, 2), (4, 1), (9, 1)), 1):
        one.send(sequence, meta(priority, n=n))
    one.attach(lines.BacklogConsumer(A, 1, "n = 1"))
    assert pump(one) == [("a", 5)]
    assert one.waiting() == [3, 1, 2, 4], "also those that no consumer selects"


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (8, 9), (-1, 1), (8, 12)],
)
def test_a_higher_priority_goes_first(low: int, high: int):
    one = driver.DrivenBacklog("q")
    one.send(1, meta(low))
    one.send(2, meta(high))
    assert one.waiting() == [2, 1]


@pytest.mark.parametrize(("one_priority", "other"), [(9, 12), (0, -3), (12, 9), (-3, 0)])
def test_priorities_beyond_the_scale_count_as_its_ends(one_priority: int, other: int):
    one = driver.DrivenBacklog("q")
    one.send(1, meta(one_priority))
    one.send(2, meta(other))
    assert one.waiting() == [1, 2]


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
    one = driver.DrivenBacklog("q", floor=5)
    one.send(7, meta())
    one.position = 10
    one.finish(12)
    assert one.is_done(sequence) is done
    assert one.is_over(sequence, head=20) is done, "what follows the position is still to be read"
    one.live = True
    assert one.is_over(sequence, head=20) is over


def test_what_is_done_or_held_already_does_not_arrive_again():
    one = driver.DrivenBacklog("q", floor=5)
    one.finish(7)
    for sequence in (4, 5, 7, 8, 8):
        one.send(sequence, meta())
    assert (one.waiting(), len(one.pending), one.position) == ([8], 1, 8)
    one.send(6, meta())
    assert (one.waiting(), one.position) == ([6, 8], 8), "it takes its place in the order"


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
    one = driver.DrivenBacklog("q")
    one.suspect = 5
    if before is not None:
        one.counts[sequence] = before
    one.send(sequence, meta())
    one.attach(lines.BacklogConsumer(A, 1))
    assert pump(one) == [("a", sequence)]
    assert known(one, sequence) == count
    assert not one.counts


def test_what_is_being_finished_while_it_arrives_goes_to_nobody():
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(A, 9))
    one.start_finish([1])
    one.send(1, meta())
    assert pump(one) == []
    one.cancel_finish([1])
    assert pump(one) == [("a", 1)]


def test_unloading_forgets_the_index_but_not_what_is_done_nor_counts():
    one = holding(3, 4)
    one.send(5, meta(n=2))
    one.attach(lines.BacklogConsumer(A, 1, "n = 0"))
    assert pump(one) == [("a", 3)]
    one.live = True
    one.release([3], "a", counted=True)
    one.finish(4)
    one.detach(A, seen=[])
    generation = one.generation
    one.unload()
    assert (list(one.pending), one.live, one.position) == ([], False, 0)
    assert one.generation == generation + 1
    assert one.counts == {3: (1, 1)}
    assert list(one.done) == [(4, 4)]
    one.attach(lines.BacklogConsumer(B, 9))
    assert pump(one) == []
    for sequence in range(1, 10):
        one.send(sequence, meta())
    assert one.waiting() == [1, 2, 3, 5, 6, 7, 8, 9]


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
    one = holding(*held)
    for sequence in finished:
        one.finish(sequence)
    for name, value in state.items():
        setattr(one, name, value)
    assert one.settle(20) == floor
    assert one.floor == floor
    assert one.position >= floor
    assert list(one.done) == done


# Consumers


def test_consumers_take_turns():
    one = holding(*range(1, 8))
    for key, credit in ((A, 2), (B, 3), (C, 2)):
        one.attach(lines.BacklogConsumer(key, credit))
    assert pump(one) == [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("b", 5), ("c", 6), ("b", 7)]


def test_one_without_credit_is_passed_over():
    one = holding(*range(1, 5))
    for key, credit in ((A, 0), (B, 9), (C, 9)):
        one.attach(lines.BacklogConsumer(key, credit))
    assert pump(one) == [("b", 1), ("c", 2), ("b", 3), ("c", 4)]


def test_credit_adds_up_and_stopping_takes_it_back():
    one = holding(*range(1, 9))
    one.attach(lines.BacklogConsumer(A, 1))
    one.credit(A, 2)
    one.credit(B, 5)  # it is not there
    assert pump(one) == [("a", 1), ("a", 2), ("a", 3)]
    one.credit(A, 2)
    one.stop(A)
    one.stop(B)
    assert pump(one) == []
    one.credit(A, 1)
    assert pump(one) == [("a", 4)]


def test_a_consumer_that_leaves_gives_back_what_it_holds_and_gets_no_more():
    one = delivered(1, 2)
    one.attach(lines.BacklogConsumer(B, 1))
    assert one.detach(A, seen=[]) == []
    assert one.detach(A, seen=[]) == [], "it is gone already"
    one.send(3, meta())
    assert pump(one) == [("b", 1)]
    assert one.waiting() == [2, 3]


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
    one = delivered(1, 2, 3)
    one.start_finish([1])
    one.detach(A, seen=seen)
    assert {number: known(one, number) for number in (2, 3)} == counts
    assert one.waiting() == [2, 3], "whether the first is done is being stored"


# Outcomes


def test_who_may_acknowledge_a_message():
    one = delivered(1)
    one.send(2, meta())
    assert one.holds(1, "a")
    assert not one.holds(1, "b")
    assert one.holds(2, "b"), "in nobody's hands"
    assert one.holds(7, "b"), "not loaded"
    one.start_finish([1, 2])
    assert not one.holds(1, "a")
    assert not one.holds(2, "b")
    one.finish(1)
    assert not one.holds(1, "a")


def test_what_is_being_finished_waits_for_the_store():
    one = delivered(1)
    one.send(2, meta())
    one.start_finish([1, 2, 7])
    assert one.waiting() == []
    one.credit(A, 9)
    assert pump(one) == []
    one.cancel_finish([1, 2, 7, 8])
    assert one.holds(1, "a"), "it is still in its hands"
    assert one.waiting() == [2]
    one.cancel_finish([2])
    assert one.waiting() == [2], "once"
    assert pump(one) == [("a", 2)]


def test_what_is_finished_is_gone_from_all_places():
    one = delivered(1, 2)
    one.send(3, meta())
    one.counts[9] = (1, 1)
    assert [one.finish(sequence) for sequence in (1, 3, 9)] == [True, True, True]
    assert [one.finish(sequence) for sequence in (1, 3, 9)] == [False, False, False]
    assert (list(one.pending), list(one.consumers[A].held), one.counts) == ([2], [2], {})
    assert one.waiting() == []
    assert list(one.done) == [(3, 3), (9, 9)]
    one.send(9, meta())
    assert one.waiting() == []


def test_a_finish_that_comes_twice_ends_the_waiting_for_it():
    one = driver.DrivenBacklog("q", floor=5)
    one.start_finish([3])
    assert not one.finish(3)
    one.start_finish([8])
    assert one.finish(8)
    one.cancel_finish([8])
    assert one.is_done(8)


def test_what_nobody_selects_can_be_finished():
    one = holding(1)
    one.attach(lines.BacklogConsumer(A, 1, "n = 1"))
    assert pump(one) == []
    assert one.finish(1)
    assert one.waiting() == []


def test_only_the_connection_that_holds_a_message_gives_it_back():
    one = delivered(1, 2)
    one.send(3, meta())
    assert one.release([1, 3, 7], "b", counted=True) == []
    assert one.release([3, 7], "a", counted=True, reason="poison") == []
    assert one.waiting() == [3]
    assert one.release([1], "a", counted=False) == []
    assert known(one, 1) == (0, 0)
    assert one.release([2], "a", counted=True) == []
    assert known(one, 2) == (1, 1)
    assert one.waiting() == [1, 2, 3]
    assert list(one.consumers[A].held) == []


def test_what_is_rejected_with_a_reason_is_a_dead_letter():
    one = delivered(1, 2)
    (dead,) = one.release([1], "a", counted=True, reason="poison")
    assert isinstance(dead, backlog.DeadLetterMessage)
    assert (dead.number, dead.reason) == (1, "poison")
    assert (one.waiting(), list(one.consumers[A].held)) == ([], [2])
    assert not one.holds(1, "a"), "that it is done is being stored"
    one.start_finish([2])
    assert one.release([2], "a", counted=True, reason="poison") == [], "it was acknowledged before"
    one.cancel_finish([1, 2])
    assert one.waiting() == [1, 2]


def test_one_that_failed_too_often_is_a_dead_letter():
    one = delivered(1, max_deliveries=2)
    assert one.release([1], "a", counted=True) == []
    one.credit(A, 1)
    pump(one)
    assert one.release([1], "a", counted=False) == []
    one.credit(A, 1)
    pump(one)
    (dead,) = one.detach(A, seen=None)
    assert isinstance(dead, backlog.DeadLetterMessage)
    assert dead.reason == "delivered 2 times without being acknowledged"
    assert one.waiting() == []


def test_without_a_limit_nothing_fails_too_often():
    one = delivered(1)
    for _ in range(100):
        assert one.release([1], "a", counted=True) == []
        one.credit(A, 1)
        assert pump(one) == [("a", 1)]
    assert known(one, 1) == (100, 100)


def test_only_what_is_in_nobodys_hands_is_withdrawn():
    one = delivered(1)
    one.send(2, meta())
    assert [one.withdraw(sequence) for sequence in (1, 2, 2, 7)] == [False, True, False, True]
    assert one.waiting() == []
    assert not one.holds(7, "a")
    one.cancel_finish([2])
    assert one.waiting() == [2]


def test_a_message_that_is_being_purged_is_delivered_to_no_consumer_when_it_is_loaded():
    """A purge or a move takes messages that are not in memory; consumers load them before it is stored."""
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(A, 5))
    assert one.withdraw(1)
    for sequence in (1, 2):
        one.send(sequence, meta())
    assert pump(one) == [("a", 2)]
    one.cancel_finish([1])
    assert pump(one) == [("a", 1)]


def test_what_the_other_side_still_holds_after_its_consumer_left_can_be_given_back_no_more():
    one = delivered(1)
    one.detach(A, seen=[])
    assert one.release([1], "a", counted=True) == []
    assert known(one, 1) == (0, 0)


# Delivery


def test_without_credit_nothing_is_looked_at():
    one = driver.DrivenBacklog("q")
    one.send(1, meta(expires_ms=5))
    assert one.deliver(10) == []
    one.attach(lines.BacklogConsumer(A))
    assert one.deliver(10) == []
    one.credit(A, 1)
    assert [type(found) for found in one.deliver(10)] == [backlog.ExpireMessage]


def test_what_expired_is_finished_and_costs_no_credit():
    one = driver.DrivenBacklog("q")
    for expires_ms in (10, 11, 0):
        one.send(one.position + 1, meta(expires_ms=expires_ms))
    one.attach(lines.BacklogConsumer(A, 2))
    expired, *rest = one.deliver(10)
    assert isinstance(expired, backlog.ExpireMessage)
    assert expired.number == 1
    assert [found.number for found in rest] == [2, 3]
    assert (one.expired, one.delivered) == (1, 2)
    assert not one.holds(1, "a"), "that it is done is being stored"
    assert one.deliver(10) == []


def test_what_is_counted():
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(A, 9, "n = 1"))
    for n in (1, 2, 3, 1):
        one.send(one.position + 1, meta(n=n))
    assert pump(one) == [("a", 1), ("a", 4)]
    assert (one.delivered, one.matched, one.rejected) == (2, 2, 2)
    one.attach(lines.BacklogConsumer(B, 1))
    assert pump(one) == [("b", 2)]
    assert (one.delivered, one.matched, one.rejected) == (3, 2, 2)
    assert one.consumers[B].credit == 0
    assert list(one.consumers[A].held) == [1, 4]


def test_a_message_that_waits_for_one_consumer_does_not_hold_up_another():
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(A, 0, "n = 1"))
    one.attach(lines.BacklogConsumer(B, 2, "n = 2"))
    for n in (1, 2, 1, 3, 2):
        one.send(one.position + 1, meta(n=n))
    assert pump(one) == [("b", 2), ("b", 5)]
    assert one.waiting() == [1, 3, 4]
    one.credit(A, 9)
    assert pump(one) == [("a", 1), ("a", 3)]
    assert one.rejected == 1, "4; 1 and 3 only waited"


def test_what_is_left_when_credit_ends_stays_in_order():
    one = holding(1, 2, 3, 4)
    one.attach(lines.BacklogConsumer(A, 2))
    assert pump(one) == [("a", 1), ("a", 2)]
    assert one.waiting() == [3, 4]
    one.credit(A, 9)
    assert pump(one) == [("a", 3), ("a", 4)]


# Groups


def grouped(*groups: str | None) -> driver.DrivenBacklog:
    one = driver.DrivenBacklog("q")
    for sequence, group in enumerate(groups, 1):
        one.send(sequence, meta(group=group))
    return one


def test_a_group_stays_with_its_consumer_although_others_have_credit():
    one = grouped("g", "g", "h", None, "g")
    one.attach(lines.BacklogConsumer(A, 2))
    one.attach(lines.BacklogConsumer(B, 9))
    assert pump(one) == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    assert one.waiting() == [5]
    one.credit(A, 1)
    assert pump(one) == [("a", 5)]
    assert one.rejected == 0


def test_a_group_goes_on_with_another_where_its_consumer_does_not_select_the_message():
    one = driver.DrivenBacklog("q")
    for n in (1, 2, 2):
        one.send(one.position + 1, meta(group="g", n=n))
    one.attach(lines.BacklogConsumer(A, 9, "n = 1"))
    one.attach(lines.BacklogConsumer(B, 9, "n = 2"))
    assert pump(one) == [("a", 1), ("b", 2), ("b", 3)]


def test_of_too_many_groups_the_half_that_was_used_least_is_forgotten(monkeypatch):
    monkeypatch.setattr(groups, "GROUPS_MAX", 6)
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(A, 1000))

    def use(group: str, *, finish: bool = True) -> None:
        sequence = one.position + 1
        one.send(sequence, meta(group=group))
        pump(one)
        if finish:
            one.finish(sequence)

    for group in "abcdef":
        use(group)
    assert [*one._groups] == [*"abcdef"]
    use("a")
    use("b", finish=False)
    use("g")
    assert [*one._groups] == [*"fabg"]
    for group in "hij":
        use(group, finish=group != "h")
    assert [*one._groups] == [*"bghij"], "b and h are in somebody's hands"
