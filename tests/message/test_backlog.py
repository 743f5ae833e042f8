"""The backlog of a queue under random events: nothing lost, no message at two consumers, order kept."""

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
    driven_backlog = driver.DrivenBacklog("q", in_memory=3)
    head, done = 0, list[int]()
    holders: dict[int, lines.ConsumerKey] = {}
    returned = set[tuple[lines.ConsumerKey, int]]()
    later = list[int]()
    names = iter(range(10**6))
    total = 60

    def obey(instructions: list[backlog.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, backlog.RetryMessage):
                later.append(instruction.number)
                continue
            assert isinstance(instruction, backlog.DeliverMessage)
            assert instruction.number not in later, "it waits for its retry"
            assert instruction.number not in holders, "a consumer has it already"
            assert instruction.number not in done, "it is done already"
            place = instruction.consumer, instruction.number
            assert place not in returned, "this consumer returned it for others"
            holders[instruction.number] = instruction.consumer

    def load() -> None:
        while driven_backlog.consumers and driven_backlog.position < head:
            driven_backlog.send(driven_backlog.position + 1, _meta())

    for _ in range(5000):
        match chance.randrange(7):
            case 6 if later:
                driven_backlog.retry(later.pop(chance.randrange(len(later))))
            case 0 if head < total:
                head += 1
            case 1 if len(driven_backlog.consumers) < 3:
                driven_backlog.attach(lines.BacklogConsumer((f"c{next(names)}", 0), chance.randrange(3)))
            case 2 if driven_backlog.consumers:
                driven_backlog.credit(chance.choice(list(driven_backlog.consumers)), chance.randrange(1, 4))
            case 3 if holders:
                sequence = chance.choice(list(holders))
                assert driven_backlog.holds(sequence, holders[sequence][0])
                assert driven_backlog.finish(sequence)
                done.append(sequence)
                del holders[sequence]
            case 4 if holders and chance.random() < 0.3:
                sequence = chance.choice(list(holders))
                holder, elsewhere = holders.pop(sequence), chance.random() < 0.5
                if elsewhere:
                    returned.add((holder, sequence))
                obey(
                    driven_backlog.release(
                        [sequence],
                        holder[0],
                        counted=True,
                        elsewhere=elsewhere,
                        delay_s=chance.choice([0.0, 1.0]),
                    ),
                )
            case 5 if driven_backlog.consumers and chance.random() < 0.1:
                key = chance.choice(list(driven_backlog.consumers))
                holders = {sequence: holder for sequence, holder in holders.items() if holder != key}
                obey(driven_backlog.detach(key, seen=None))
                if not driven_backlog.consumers:
                    driven_backlog.settle(head)
                    driven_backlog.unload()
                    later.clear()
        load()
        obey(driven_backlog.deliver(0))
        if len(done) == total:
            break
    assert sorted(done) == list(range(1, total + 1))
    assert driven_backlog.settle(head) == total


def test_priority_first_then_order_and_the_returned_take_their_old_places():
    driven_backlog = driver.DrivenBacklog("q")
    for sequence, priority in enumerate((4, 9, 4, 0), 1):
        driven_backlog.send(sequence, _meta(priority))
    driven_backlog.attach(lines.BacklogConsumer(("c", 1), 2))
    first = [actual.number for actual in driven_backlog.deliver(0)]
    assert first == [2, 1]
    driven_backlog.release([1], "c", counted=True)
    driven_backlog.credit(("c", 1), 9)
    assert [actual.number for actual in driven_backlog.deliver(0)] == [1, 3, 4]


def test_a_message_without_a_matching_selector_waits_for_one():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(("c", 1), 9, "n = 1"))
    driven_backlog.send(1, _meta(n=2))
    driven_backlog.send(2, _meta(n=1))
    assert [actual.number for actual in driven_backlog.deliver(0)] == [2]
    driven_backlog.attach(lines.BacklogConsumer(("d", 1), 9, "n = 2"))
    assert [actual.number for actual in driven_backlog.deliver(0)] == [1]


def test_a_group_whose_consumer_dies_goes_on_with_another_in_order():
    driven_backlog = driver.DrivenBacklog("q")
    for number in range(1, 7):
        driven_backlog.send(number, _meta(JMSXGroupID="g" if number % 2 else "h"))
    for name in ("a", "b"):
        driven_backlog.attach(lines.BacklogConsumer((name, 1), 2))
    arguments = [actual for actual in driven_backlog.deliver(0) if isinstance(actual, backlog.DeliverMessage)]
    holders = {actual.number: actual.consumer[0] for actual in arguments}
    assert {holders[1], holders[2]} == {"a", "b"}
    dying, other = (holders[1], 1), (holders[2], 1)
    assert driven_backlog.deliver(0) == [], "the rest of each group waits for its own consumer"
    driven_backlog.detach(dying, seen=None)
    driven_backlog.credit(other, 9)
    taken = [
        (actual.number, actual.count)
        for actual in driven_backlog.deliver(0)
        if isinstance(actual, backlog.DeliverMessage)
    ]
    assert [number for number, _ in taken if number % 2] == [1, 3, 5], "what it held comes first, in order"
    assert (1, 1) in taken, "and is marked"


def test_groups_without_end_cost_no_memory_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "GROUPS_MAX", 10)
    driven_backlog = driver.DrivenBacklog("q")
    for name in ("a", "b"):
        driven_backlog.attach(lines.BacklogConsumer((name, 1), 1000))
    driven_backlog.send(1, _meta(JMSXGroupID="held"))
    (first,) = driven_backlog.deliver(0)
    for number in range(2, 200):
        driven_backlog.send(number, _meta(JMSXGroupID=f"{number}"))
        driven_backlog.deliver(0)
        driven_backlog.finish(number)
    driven_backlog.send(200, _meta(JMSXGroupID="held"))
    (again,) = driven_backlog.deliver(0)
    assert isinstance(first, backlog.DeliverMessage)
    assert isinstance(again, backlog.DeliverMessage)
    assert first.consumer == again.consumer
    assert len([*driven_backlog._groups]) <= 11


def test_expired_messages_are_reported_and_never_delivered():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.attach(lines.BacklogConsumer(("c", 1), 9))
    meta = _meta()
    meta.expiration_ms = 1000
    driven_backlog.send(1, meta)
    assert [type(actual) for actual in driven_backlog.deliver(1000)] == [backlog.ExpireMessage]


def test_an_unconsumed_message_costs_no_memory_for_later_finished_ones():
    driven_backlog = driver.DrivenBacklog("q")
    driven_backlog.live = True
    driven_backlog.attach(lines.BacklogConsumer(("c", 1), 1 << 30, "n = 1"))
    driven_backlog.send(1 << 10, _meta(n=2))
    last = 2000
    for page in range(2, last + 1):  # a page of one message each: its numbers have gaps
        driven_backlog.send(page << 10, _meta(n=1))
        driven_backlog.deliver(0)
        assert driven_backlog.finish(page << 10)
        assert not driven_backlog.finish(page << 10), "it is done already"
    assert len(driven_backlog.pending) == 1
    assert len(driven_backlog.done) == 1
    assert driven_backlog.settle(last << 10) == (1 << 10) - 1
    assert list(driven_backlog.done) == [((1 << 10) + 1, last << 10)]
    driven_backlog.detach(("c", 1), seen=None)
    driven_backlog.unload()
    assert len(driven_backlog.done) == 1
    driven_backlog.attach(lines.BacklogConsumer(("d", 1), 9))
    for page in range(1, last + 2):  # loaded again: only what is not done comes
        driven_backlog.send(page << 10, _meta(n=2))
    assert [actual.number >> 10 for actual in driven_backlog.deliver(0)] == [1, last + 1]


def test_a_checkpoint_of_much_that_is_done_fits_into_messages():
    first = ledger.Ledger()
    count = 2 * ledger.SPANS
    first.apply(ledger.LogRecord(stored={"q:x": count}), 1)
    first.apply(ledger.LogRecord(acked={"q:x": [number << 10 for number in range(count)][1:]}), 2)
    first.reach(count, count << 10)
    chunks = first.checkpoint()
    assert len(chunks) == 2
    assert all(len(msgspec.json.encode(chunk)) < 1 << 20 for chunk in chunks)
    second = ledger.Ledger()
    second.restore(chunks)
    assert list(second.backlogs["q:x"].done) == list(first.backlogs["q:x"].done)


def test_a_checkpoint_has_the_content_of_the_records():
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
