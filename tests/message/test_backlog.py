"""The pure heart of a queue under random events: nothing lost, nothing in two hands, order kept."""

from __future__ import annotations

import random

import msgspec
import pytest

from muster.message import messages
from muster.message.dispatcher import backlog
from muster.message.dispatcher.index import groups, lines
from muster.message.dispatcher.log import ledger, message_cache
from tests.message import backlog_driver as driver


def _meta(priority: int = 4, **properties: str | int) -> messages.MessageMeta:
    return messages.MessageMeta(priority=priority, properties=dict(properties))


@pytest.mark.parametrize("seed", range(30))
def test_each_message_is_done_once_whatever_happens(seed: int):
    chance = random.Random(seed)
    one = driver.DrivenBacklog("q", in_memory=3)
    head, done = 0, list[int]()
    hands: dict[int, lines.ConsumerKey] = {}
    names = iter(range(10**6))
    total = 60

    def obey(found: list[backlog.Instruction]) -> None:
        for instruction in found:
            assert isinstance(instruction, backlog.DeliverMessage)
            assert instruction.number not in hands, "it is in somebody's hands already"
            assert instruction.number not in done, "it is done already"
            hands[instruction.number] = instruction.consumer

    def load() -> None:
        while one.consumers and one.position < head:
            one.send(one.position + 1, _meta())

    for _ in range(5000):
        match chance.randrange(6):
            case 0 if head < total:
                head += 1
            case 1 if len(one.consumers) < 3:
                one.attach(lines.BacklogConsumer((f"c{next(names)}", 0), chance.randrange(3)))
            case 2 if one.consumers:
                one.credit(chance.choice(list(one.consumers)), chance.randrange(1, 4))
            case 3 if hands:
                sequence = chance.choice(list(hands))
                assert one.holds(sequence, hands[sequence][0])
                assert one.finish(sequence)
                done.append(sequence)
                del hands[sequence]
            case 4 if hands and chance.random() < 0.3:
                sequence = chance.choice(list(hands))
                holder = hands.pop(sequence)
                obey(one.release([sequence], holder[0], counted=True))
            case 5 if one.consumers and chance.random() < 0.1:
                key = chance.choice(list(one.consumers))
                hands = {sequence: holder for sequence, holder in hands.items() if holder != key}
                obey(one.detach(key, seen=None))
                if not one.consumers:
                    one.settle(head)
                    one.unload()
        load()
        obey(one.deliver(0))
        if len(done) == total:
            break
    assert sorted(done) == list(range(1, total + 1))
    assert one.settle(head) == total


def test_priority_first_then_order_and_the_returned_take_their_old_places():
    one = driver.DrivenBacklog("q")
    for sequence, priority in enumerate((4, 9, 4, 0), 1):
        one.send(sequence, _meta(priority))
    one.attach(lines.BacklogConsumer(("c", 1), 2))
    first = [found.number for found in one.deliver(0)]
    assert first == [2, 1]
    one.release([1], "c", counted=True)
    one.credit(("c", 1), 9)
    assert [found.number for found in one.deliver(0)] == [1, 3, 4]


def test_what_nobody_selects_waits_for_somebody_who_does():
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(("c", 1), 9, "n = 1"))
    one.send(1, _meta(n=2))
    one.send(2, _meta(n=1))
    assert [found.number for found in one.deliver(0)] == [2]
    one.attach(lines.BacklogConsumer(("d", 1), 9, "n = 2"))
    assert [found.number for found in one.deliver(0)] == [1]


def test_a_group_whose_consumer_dies_goes_on_with_another_in_order():
    one = driver.DrivenBacklog("q")
    for number in range(1, 7):
        one.send(number, _meta(JMSXGroupID="g" if number % 2 else "h"))
    for name in ("a", "b"):
        one.attach(lines.BacklogConsumer((name, 1), 2))
    given = [found for found in one.deliver(0) if isinstance(found, backlog.DeliverMessage)]
    hands = {found.number: found.consumer[0] for found in given}
    assert {hands[1], hands[2]} == {"a", "b"}
    dying, other = (hands[1], 1), (hands[2], 1)
    assert one.deliver(0) == [], "the rest of each group waits for its own consumer"
    one.detach(dying, seen=None)
    one.credit(other, 9)
    taken = [
        (found.number, found.count) for found in one.deliver(0) if isinstance(found, backlog.DeliverMessage)
    ]
    assert [number for number, _ in taken if number % 2] == [1, 3, 5], "what it held comes first, in order"
    assert (1, 1) in taken, "and is marked"


def test_groups_without_end_cost_no_memory_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "GROUPS_MAX", 10)
    one = driver.DrivenBacklog("q")
    for name in ("a", "b"):
        one.attach(lines.BacklogConsumer((name, 1), 1000))
    one.send(1, _meta(JMSXGroupID="held"))
    (first,) = one.deliver(0)
    for number in range(2, 200):
        one.send(number, _meta(JMSXGroupID=f"{number}"))
        one.deliver(0)
        one.finish(number)
    one.send(200, _meta(JMSXGroupID="held"))
    (again,) = one.deliver(0)
    assert isinstance(first, backlog.DeliverMessage)
    assert isinstance(again, backlog.DeliverMessage)
    assert first.consumer == again.consumer
    assert len([*one._groups]) <= 11


def test_expired_messages_are_told_and_never_delivered():
    one = driver.DrivenBacklog("q")
    one.attach(lines.BacklogConsumer(("c", 1), 9))
    meta = _meta()
    meta.expiration_ms = 1000
    one.send(1, meta)
    assert [type(found) for found in one.deliver(1000)] == [backlog.ExpireMessage]


def test_a_message_that_nobody_takes_costs_no_memory_for_what_is_done_after_it():
    one = driver.DrivenBacklog("q")
    one.live = True
    one.attach(lines.BacklogConsumer(("c", 1), 1 << 30, "n = 1"))
    one.send(1 << 10, _meta(n=2))
    last = 2000
    for page in range(2, last + 1):  # a page of one message each: its numbers have gaps
        one.send(page << 10, _meta(n=1))
        one.deliver(0)
        assert one.finish(page << 10)
        assert not one.finish(page << 10), "it is done already"
    assert len(one.pending) == 1
    assert len(one.done) == 1
    assert one.settle(last << 10) == (1 << 10) - 1
    assert list(one.done) == [((1 << 10) + 1, last << 10)]
    one.detach(("c", 1), seen=None)
    one.unload()
    assert len(one.done) == 1
    one.attach(lines.BacklogConsumer(("d", 1), 9))
    for page in range(1, last + 2):  # loaded again: only what is not done comes
        one.send(page << 10, _meta(n=2))
    assert [found.number >> 10 for found in one.deliver(0)] == [1, last + 1]


def test_a_checkpoint_of_much_that_is_done_fits_into_messages():
    first = ledger.Ledger()
    count = 2 * ledger.SPANS
    first.apply(ledger.LogRecord(stored={"q:x": count}), 1)
    first.apply(ledger.LogRecord(acked={"q:x": [number << 10 for number in range(count)][1:]}), 2)
    first.reach(count, count << 10)
    chunks = first.checkpoint()
    assert len(chunks) == 2
    assert all(len(msgspec.json.encode(one)) < 1 << 20 for one in chunks)
    second = ledger.Ledger()
    second.restore(chunks)
    assert list(second.backlogs["q:x"].done) == list(first.backlogs["q:x"].done)


def test_a_checkpoint_says_what_the_records_said():
    first = ledger.Ledger()
    subscription = ledger.DurableSubscription(
        key="s:i:c:n", name="n", topic="a/b", identity="i", client_id="c"
    )
    first.apply(ledger.LogRecord(subscribed=[subscription]), 1)
    first.apply(ledger.LogRecord(stored={"q:x": 3}, last_works={"c": 1, "d": 1}), 5)
    first.apply(ledger.LogRecord(acked={"q:x": [3]}, consumed=["q:x"], last_works={"c": 2}), 6)
    first.reach(6, 6)
    second = ledger.Ledger()
    second.restore(first.checkpoint())
    second.reach(6, 6)
    assert second.subscriptions == first.subscriptions
    assert second.depths == {"q:x": 2}
    assert list(second.last_works.items()) == [("d", 1), ("c", 2)]
    assert list(second.backlogs["q:x"].done) == [(3, 3)]
    assert second.backlogs["s:i:c:n"].floor == 1
    second.suspect()
    restored = second.backlogs["q:x"]
    restored.live = True
    restored.arrive(2, _meta())
    restored.attach(lines.BacklogConsumer(("c", 1), 1))
    (again,) = restored.pump(0, lambda _: message_cache.CachedMessage(_meta(), "", b""))
    assert isinstance(again, backlog.DeliverMessage)
    assert again.count == 1, "it may have been delivered before"
