"""The rules of `ledger`."""

from __future__ import annotations

import msgspec
import pytest

from muster.core import topics
from muster.message import messages, retries
from muster.message.dispatcher.index import lines
from muster.message.dispatcher.log import ledger
from tests.message import backlog_driver

LARGE = 1 << 50  # numbers as after years


def subscription(key: str = "s:i:c:n", **fields: str) -> ledger.DurableSubscription:
    arguments = {"key": key, "name": "n", "topic": "a/*", "identity": "i", "client_id": "c", **fields}
    return msgspec.convert(arguments, ledger.DurableSubscription)


def restored(records: ledger.Ledger) -> ledger.Ledger:
    """As the next dispatcher reads it."""
    other = ledger.Ledger()
    chunks = [
        msgspec.json.decode(msgspec.json.encode(chunk), type=ledger.LogCheckpoint)
        for chunk in records.checkpoint()
    ]
    assert {chunk.chunks for chunk in chunks} == {len(chunks)}
    assert {chunk.head for chunk in chunks} == {records.head}
    other.restore(chunks)
    other.reach(records.head, records.end)
    return other


def test_a_new_ledger_is_empty():
    records = ledger.Ledger()
    assert (records.head, records.end, records.floor_of_topics()) == (0, 0, 0)
    again = restored(records)
    assert (again.backlogs, again.subscriptions, again.last_works, again.consumed) == ({}, {}, {}, set())


def test_backlogs_are_created_once_from_the_ledger():
    policy = retries.Retry(3)
    records = ledger.Ledger(lambda _: policy)
    made = records.queue("x")
    assert (made.key, made.floor, made.policy) == ("q:x", 0, policy)
    assert records.queue("x") is made
    assert records.backlog("s:i:c:n", floor=5).floor == 5
    assert ledger.Ledger().queue("x").policy == retries.AT_ONCE


# Records


def test_a_queue_is_as_deep_as_what_was_stored_and_not_acknowledged():
    records = ledger.Ledger()
    records.apply(ledger.LogRecord(stored={"q:x": 3}), 3)
    records.apply(ledger.LogRecord(stored={"q:x": 2, "q:y": 1}), 6)
    assert (records.depths, records.stored) == ({"q:x": 5, "q:y": 1}, {"q:x": 5, "q:y": 1})
    assert set(records.backlogs) == {"q:x", "q:y"}
    records.apply(ledger.LogRecord(acked={"q:x": [1, 2, 1], "q:gone": [1]}), 6)
    records.apply(ledger.LogRecord(acked={"q:x": [2]}), 6)
    assert records.depths == {"q:x": 3, "q:y": 1}, "each counts once"
    assert records.stored == {"q:x": 5, "q:y": 1}
    assert records.queue("x").is_done(2)


def test_a_subscription_receives_messages_sent_after_it():
    records = ledger.Ledger()
    records.apply(ledger.LogRecord(subscribed=[subscription()]), 5)
    assert records.subscriptions == {"s:i:c:n": subscription()}
    assert (records.backlogs["s:i:c:n"].floor, records.created) == (5, {"s:i:c:n": 5})
    records.apply(ledger.LogRecord(acked={"s:i:c:n": [7]}), 8)
    assert records.depths == {}, "only queues have a depth"
    assert records.backlogs["s:i:c:n"].is_done(7)
    changed = subscription(topic="b/*")
    records.apply(ledger.LogRecord(subscribed=[changed]), 6)
    assert records.subscriptions == {"s:i:c:n": changed}
    assert (records.backlogs["s:i:c:n"].floor, records.created) == (6, {"s:i:c:n": 6})
    assert not records.backlogs["s:i:c:n"].is_done(7), "another subscription of the same name begins anew"


def test_nothing_is_left_of_what_was_unsubscribed_or_dropped():
    records = ledger.Ledger()
    records.apply(
        ledger.LogRecord(subscribed=[subscription()], stored={"q:x": 1}, consumed=["s:i:c:n", "q:x"]), 5
    )
    assert records.consumed == {"s:i:c:n", "q:x"}
    records.apply(ledger.LogRecord(unsubscribed=["s:i:c:n"]), 6)
    assert (records.subscriptions, records.created, records.consumed) == ({}, {}, {"q:x"})
    assert set(records.backlogs) == {"q:x"}
    records.apply(ledger.LogRecord(dropped=["q:x"]), 7)
    assert (records.backlogs, records.depths, records.stored, records.consumed) == ({}, {}, {}, set())
    assert records.dropped == {"q:x"}


def test_delayed_messages_that_are_done_belong_to_no_backlog():
    records = ledger.Ledger()
    records.apply(ledger.LogRecord(acked={ledger.DELAY_KEY: [3, 5]}), 6)
    assert (records.delayed_done, records.backlogs) == ({3, 5}, {})


def test_what_has_consumers_is_known_until_it_is_idle():
    records = ledger.Ledger()
    records.apply(ledger.LogRecord(consumed=["q:x", "q:y"]), 1)
    records.apply(ledger.LogRecord(idle=["q:x"]), 2)
    assert records.consumed == {"q:y"}


def test_the_last_work_of_the_latest_connections_is_known(monkeypatch):
    monkeypatch.setattr(ledger, "WORKS_KEPT", 3)
    records = ledger.Ledger()
    for connection, number in (("a", 1), ("b", 1), ("c", 4), ("a", 2), ("c", 3)):
        records.apply(ledger.LogRecord(last_works={connection: number}), 1)
    assert list(records.last_works.items()) == [("b", 1), ("a", 2), ("c", 4)], (
        "a late record takes nothing back"
    )
    records.apply(ledger.LogRecord(last_works={"d": 1}), 1)
    assert list(records.last_works.items()) == [("a", 2), ("c", 4), ("d", 1)]


def test_the_last_message_of_the_latest_channels_is_known(monkeypatch):
    monkeypatch.setattr(ledger, "CHANNELS_KEPT", 3)
    records = ledger.Ledger()
    for channel, number in (("a", 1), ("b", 1), ("c", 4), ("a", 2), ("c", 3)):
        records.apply(ledger.LogRecord(received={channel: number}), 1)
    assert list(records.received.items()) == [("b", 1), ("a", 2), ("c", 4)], (
        "a late record takes nothing back"
    )
    records.apply(ledger.LogRecord(received={"d": 0}), 1)
    assert list(records.received.items()) == [("a", 2), ("c", 4), ("d", 0)]


def test_what_concerns_other_partitions_is_known_until_it_is_done():
    records = ledger.Ledger()
    first, second = (ledger.PreparedAcks(attempt, 1, "c", {"q:x": [3]}) for attempt in ("first", "second"))
    records.apply(ledger.LogRecord(prepared=[first, second], decided={"d1": [0, 1], "d2": [2]}), 1)
    records.apply(ledger.LogRecord(transferred={1: 5, 2: 6}, bodies=["b1", "b2"]), 2)
    assert records.prepared == {"first": first, "second": second}
    records.apply(ledger.LogRecord(resolved=["first", "unknown"], completed=["d1", "unknown"]), 3)
    records.apply(ledger.LogRecord(transferred={1: 9}, deleted_bodies=["b1", "unknown"]), 4)
    assert records.prepared == {"second": second}
    assert records.decided == {"d2": [2]}
    assert records.transferred == {1: 9, 2: 6}
    assert records.bodies == {"b2"}


def test_no_consumer_receives_what_a_transaction_has_prepared():
    records = ledger.Ledger()
    records.backlogs["q:x"] = source = backlog_driver.DrivenBacklog("q:x")
    prepared = ledger.PreparedAcks("attempt", 1, "c", {"q:x": [2, 3]})
    records.apply(ledger.LogRecord(stored={"q:x": 4}, prepared=[prepared]), 4)
    records.reserve_prepared()
    for number in range(1, 5):
        source.send(number, messages.MessageMeta())
    source.attach(lines.BacklogConsumer(("c", 1), 9))
    assert [instruction.number for instruction in source.deliver()] == [1, 4]


NUMBERED = [f"of-partition-{number}" for number in range(500)]


@pytest.mark.parametrize(
    "record",
    [
        ledger.LogRecord(acked={"q:x": [LARGE + number for number in range(500)]}),
        ledger.LogRecord(acked={f"s:client-{number}:name": [LARGE] for number in range(500)}),
        ledger.LogRecord(stored={f"q:queue-{number}": 1_000 for number in range(500)}),
        ledger.LogRecord(last_works={f"connection-{number}": 1_000 for number in range(500)}),
        *(
            msgspec.convert({field: [f"q:queue-{number}" for number in range(500)]}, ledger.LogRecord)
            for field in ("unsubscribed", "consumed", "idle", "dropped", "resolved", "completed", "bodies")
        ),
        ledger.LogRecord(deleted_bodies=NUMBERED),
        ledger.LogRecord(received=dict.fromkeys(NUMBERED, 1_000)),
        ledger.LogRecord(transferred=dict.fromkeys(range(256), LARGE)),
        ledger.LogRecord(decided={attempt: [0, 1, 2] for attempt in NUMBERED}),
        *(
            ledger.LogRecord(prepared=[ledger.PreparedAcks("a" * attempt, 1, "c" * connection, acks)] * 50)
            for attempt, connection, acks in (
                (900, 30, {"q:x": [LARGE]}),
                (30, 900, {"q:x": [LARGE]}),
                (30, 30, {"q:" + "x" * 900: [LARGE]}),
                (30, 30, {"q:x": [LARGE + number for number in range(100)]}),
            )
        ),
        *(
            ledger.LogRecord(subscribed=[subscription(**{"topic": "a/b", field: "x" * 900})] * 50)
            for field in ("key", "name", "topic", "identity", "selector")
        ),
    ],
)
def test_the_estimated_size_of_a_record_is_not_below_its_size_and_not_far_above(record: ledger.LogRecord):
    size = len(msgspec.msgpack.encode(record))
    assert size <= ledger.estimate_bytes(record) <= 3 * size
    assert ledger.estimate_bytes(ledger.LogRecord()) == 0


# Checkpoints


def everything() -> ledger.Ledger:
    records = ledger.Ledger()
    other = subscription("g:all", selector="n = 1")
    records.apply(ledger.LogRecord(subscribed=[subscription(), other], last_works={"a": 1, "b": 7}), 4)
    records.apply(ledger.LogRecord(stored={"q:x": 9}, consumed=["q:x", "g:all"], last_works={"a": 2}), 20)
    records.apply(ledger.LogRecord(acked={"q:x": [12, 14], "g:all": [9], ledger.DELAY_KEY: [3, 8, 5]}), 21)
    prepared = ledger.PreparedAcks("p1", 2, "c", {"q:x": [15]})
    partitions = ledger.LogRecord(
        prepared=[prepared], decided={"d1": [0, 2]}, transferred={1: 5}, received={"b": 3, "a": 8}
    )
    records.apply(partitions, 21)
    records.apply(ledger.LogRecord(bodies=["b2", "b1"]), 21)
    records.queue("empty")
    records.reach(21, 30)
    return records


def same(records: ledger.Ledger, other: ledger.Ledger) -> None:
    plain = ("subscriptions", "created", "consumed", "delayed_done", "head", "end", "bodies", "transferred")
    for name in (*plain, "prepared", "decided"):
        assert getattr(records, name) == getattr(other, name), name
    assert list(records.last_works.items()) == list(other.last_works.items())
    assert list(records.received.items()) == list(other.received.items())
    assert records.backlogs.keys() == other.backlogs.keys()
    for key, theirs in other.backlogs.items():
        assert (records.backlogs[key].floor, list(records.backlogs[key].done)) == (
            theirs.floor,
            list(theirs.done),
        )


def test_a_checkpoint_restores_everything():
    first = everything()
    assert len(first.checkpoint()) == 1
    second = restored(first)
    same(second, first)
    assert second.depths == {"q:x": 7, "q:empty": 0}
    same(restored(second), first)


def test_a_large_checkpoint_is_cut_into_chunks_of_about_the_same_size(monkeypatch):
    monkeypatch.setattr(ledger, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(ledger, "SPANS", 100)
    first = everything()
    works = {f"connection-{number}": LARGE for number in range(2_000)}
    first.apply(ledger.LogRecord(last_works=works), 30)
    first.apply(ledger.LogRecord(acked={ledger.DELAY_KEY: [LARGE + number for number in range(2_001)]}), 30)
    for number in range(100):
        key = f"s:client-{number}:name"
        first.apply(ledger.LogRecord(subscribed=[subscription(key, selector="n = 1 OR " * 20)]), 30)
        first.apply(ledger.LogRecord(acked={key: [LARGE + 2 * number for number in range(5 * number)]}), 30)
    first.apply(ledger.LogRecord(received=dict.fromkeys(NUMBERED, LARGE), bodies=NUMBERED), 30)
    first.apply(ledger.LogRecord(decided={attempt: [0, 1, 2, 3] for attempt in NUMBERED}), 30)
    sizes = [len(msgspec.json.encode(chunk)) for chunk in first.checkpoint()]
    assert max(sizes) < 21_000
    assert sum(sizes) / len(sizes) > 8_000
    same(restored(first), first)


def test_a_chunk_is_filled_up_to_its_estimated_size(monkeypatch):
    """A number costs `ACK_BYTES` with what is around it, a stretch of numbers four times that."""
    monkeypatch.setattr(ledger, "SPANS", 8)
    works, delayed, queues = ledger.Ledger(), ledger.Ledger(), ledger.Ledger()
    works.apply(ledger.LogRecord(last_works={"c" * 29 + f"{number}": 1 for number in range(6)}), 1)
    delayed.apply(ledger.LogRecord(acked={ledger.DELAY_KEY: list(range(48))}), 1)
    for number in range(6):
        queues.apply(ledger.LogRecord(stored={f"q:{number:08}": 8}), 1)
        queues.apply(ledger.LogRecord(acked={f"q:{number:08}": [LARGE + 2 * at for at in range(8)]}), 1)
    received, decided, bodies, prepared = (ledger.Ledger() for _ in range(4))
    names = ["n" * 29 + f"{number}" for number in range(6)]
    received.apply(ledger.LogRecord(received=dict.fromkeys(names, 1)), 1)
    decided.apply(ledger.LogRecord(decided={name: [0, 1] for name in names}), 1)
    bodies.apply(ledger.LogRecord(bodies=names), 1)
    acks = {"q:x": [1, 2], "q:yy": [3]}
    prepared.apply(
        ledger.LogRecord(prepared=[ledger.PreparedAcks(name, 1, "conn", acks) for name in names]), 1
    )
    for records, size in (
        (works, 30 + 20),
        (delayed, 8 * 40),
        (queues, 10 + (8 + 2) * 40),
        (received, 30 + 20),
        (decided, 30 + 30),
        (bodies, 30 + 10),
        (prepared, 30 + 4 + (3 + 30) + (4 + 20) + 100),
    ):
        for chunk_bytes, chunks in ((2 * size, 3), (2 * size - 1, 6), (3 * size - 1, 3), (3 * size, 2)):
            monkeypatch.setattr(ledger, "CHUNK_BYTES", chunk_bytes)
            assert len(records.checkpoint()) == chunks
    monkeypatch.setattr(ledger, "CHUNK_BYTES", 10 + 2 * 40 + 20)
    for consumed, chunks in ((["q:00000000"], 1), (["q:000000001"], 2)):
        records = ledger.Ledger()
        records.apply(ledger.LogRecord(stored={consumed[0]: 1}, consumed=consumed), 1)
        assert len(records.checkpoint()) == chunks


# What subscriptions want


@pytest.mark.parametrize(
    ("no_local", "origin", "sequence", "wants"),
    [
        (None, None, 0, True),
        (None, "c", 0, True),
        ("c", "c", 0, False),
        ("c", "d", 0, True),
        ("c", None, 0, True),
        (None, "c", 5, False),  # delayed, and sent before the subscription was made
        (None, "c", 6, True),
        ("c", "c", 6, False),
    ],
)
def test_what_a_subscription_wants(no_local: str | None, origin: str | None, sequence: int, wants: bool):
    records = ledger.Ledger()
    expected = subscription() if no_local is None else subscription(no_local=no_local)
    records.apply(ledger.LogRecord(subscribed=[expected]), 5)
    assert records.wants("s:i:c:n", messages.MessageMeta(origin=origin, sequence=sequence)) is wants


def test_a_subscription_of_unknown_age_wants_delayed_messages():
    records = ledger.Ledger()
    records.subscriptions["s:i:c:n"] = subscription()
    assert records.wants("s:i:c:n", messages.MessageMeta(sequence=1))


def test_what_had_consumers_is_suspect_up_to_the_end_of_the_log():
    records = everything()
    records.consumed.add("q:gone")
    records.suspect()
    assert {key: made.suspect for key, made in records.backlogs.items()} == {
        "s:i:c:n": 0,
        "g:all": 30,
        "q:x": 30,
        "q:empty": 0,
    }


def test_the_log_is_needed_from_the_lowest_floor_of_a_subscription():
    records = ledger.Ledger()
    records.apply(ledger.LogRecord(stored={"q:x": 1}), 3)
    records.reach(9, 30)
    assert records.floor_of_topics() == 30, "queues do not count"
    for key, end in (("s:c:a", 20), ("s:c:b", 10), ("s:c:c", 25)):
        records.apply(ledger.LogRecord(subscribed=[subscription(key)]), end)
    assert records.floor_of_topics() == 10


# Keys and patterns


def test_keys_of_different_things_differ():
    assert ledger.queue_key("x") == "q:x"
    named = [("c", "n"), ("c:n", "n"), ("c", "n:n"), ("c%3An", "n"), ("c%", "n")]
    keys = {ledger.subscription_key(identity, *item) for identity in ("i", "j") for item in named}
    assert len(keys) == 2 * len(named)
    assert ledger.subscription_key("i", "a:b%", "n:m") == "s:i:a%3Ab%25:n:m"
    assert ledger.subscription_key("i", None, "n") == ledger.subscription_key("j", None, "n") == "g:n"


def test_the_pattern_of_a_subscription_is_that_of_its_topic():
    assert subscription().pattern.matches(topics.Topic.parse("a/b"))
    assert not subscription().pattern.matches(topics.Topic.parse("b/b"))


def test_a_pattern_matches_until_it_was_removed_as_often_as_it_was_added():
    index = ledger.TopicPatternIndex()
    topic = topics.Topic.parse("a/b")
    assert index.matching(topic) == ()
    for _ in range(3):
        index.add("a/*")
    index.add("a/b")
    index.add("b/*")
    assert sorted(index) == ["a/*", "a/b", "b/*"]
    assert sorted(index.matching(topic)) == ["a/*", "a/b"]
    index.remove("a/b")
    assert index.matching(topic) == ("a/*",)
    for left in (("a/*",), ("a/*",), ()):
        index.remove("a/*")
        assert index.matching(topic) == left
    assert list(index) == ["b/*"]


def test_what_is_remembered_of_topics_is_bounded():
    index = ledger.TopicPatternIndex()
    index.add("a/*")
    for number in range(10_500):
        assert index.matching(topics.Topic.parse(f"a/{number}")) == ("a/*",)
    assert 0 < len(index._found) <= 10_001
