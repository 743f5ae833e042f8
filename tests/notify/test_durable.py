from __future__ import annotations

import asyncio
import collections
import functools
import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from muster.bus.streams import group_commit
from muster.core import errors
from muster.notify import client, protocol
from muster.notify import settings as settings_
from muster.notify.notifier import durable_events
from muster.notify.notifier import notifier as notifier_notifier
from muster.notify.notifier.shards import shard as shards_shard
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.notify.conftest import MODELS

STATE: dict[str, Any] = {"application": "IIS", "load": 0.5}
WORKERS = 100


async def _define(mine: client.NotifyClient) -> None:
    for model in MODELS:
        await mine.define(model)


async def test_a_durable_event_is_kept_until_acknowledged_and_survives_its_notifier(
    notifier, receivers, connect
):
    first = await notifier("n1")
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    assert (await web.next(timeout_s=30))["threat_level"] == 1  # received, not acknowledged
    await first.stop()

    second = await notifier("n2")
    assert second.engine.state_of("farm/web") == STATE
    await eventually(lambda: second.counts["redelivered"] > 0)
    await eventually(lambda: mine.counts["repeats"] > 0)
    web.acknowledge()
    await eventually(lambda: second.counts["acknowledged"] == 1)
    assert all(not held.pending.owed for held in second.held.values())
    await mine.sender("watch").send("alert", {"threat_level": 2}, durable=True)
    assert (await web.next(timeout_s=30))["threat_level"] == 2


async def test_an_event_is_matched_once_and_later_changes_have_no_effect(notifier, receivers):
    first = await notifier("n1")
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    await mine.advertise("late", "WebServer", STATE, policy="command", durable=True)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    await web.next(timeout_s=30)
    await web.policy("command")
    late = await mine.advertise("late", "WebServer", STATE, policy="alert", durable=True)
    await first.stop()
    second = await notifier("n2")
    await eventually(lambda: second.counts["redelivered"] > 0)
    assert second.known.vocabulary.receivers
    owed = [
        receiver
        for held in second.held.values()
        for owing in held.pending.owed.values()
        for receiver in owing
    ]
    assert owed == ["farm/web"]
    assert not late._queue


async def test_a_record_that_was_not_acknowledged_is_stored_again(notifier, receivers, monkeypatch):
    """As when the leader of the stream is cut off: the record must not wait for its deadline."""
    monkeypatch.setattr(group_commit, "PATIENCE_S", 0.2)
    first = await notifier("n1")
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    wire = first.common.bus._wire
    recorded = first.held[protocol.shard_of("farm/web")].matched_subject
    send, send_all = wire.send, wire.send_all
    lost: list[str] = []

    def lose(subject: str, *rest: Any) -> bool:
        if subject == recorded and not lost:
            lost.append(subject)
            return False
        return bool(send(subject, *rest))

    def lose_batch(batch: Sequence[tuple[str, bytes, bytes]], reply: str) -> None:
        if recorded in [subject for subject, _, _ in batch] and not lost:
            lost.append(recorded)
        else:
            send_all(batch, reply)

    monkeypatch.setattr(wire, "send", lose)
    monkeypatch.setattr(wire, "send_all", lose_batch)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    assert (await web.next(timeout_s=30))["threat_level"] == 1
    assert len(lost) == 1
    assert not first.counts["record-refused"]


async def test_a_repeated_send_is_one_event(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for level in (1, 1, 2):
        await mine.sender("watch").send("alert", {"threat_level": level}, durable=True, id=f"e{level}")
    assert [(await web.next(timeout_s=30))["threat_level"] for _ in range(2)] == [1, 2]
    assert not web._queue


@pytest.mark.parametrize(
    "events", [300, pytest.param(8000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_kill_9_of_a_notifier_at_1000_events_a_second_loses_and_doubles_nothing(
    broker, connect, start_process, events
):
    """Workload: events that are due at 1,000/s. Nemesis: SIGKILL, in the long run also one more notifier.
    Checker: each event at its receivers, once."""

    async def start(name: str) -> child_process.ChildProcess:
        command = (sys.executable, "-m", "tests.notify.run_notifier", broker.url, name)
        child: child_process.ChildProcess = await start_process(*command)
        return child

    doomed, _ = await start("n1"), await start("n2")
    got: collections.Counter[tuple[str, str]] = collections.Counter()

    def on_event(names: Sequence[str], event: client.ReceivedEvent) -> None:
        got.update((name, event.id) for name in names)

    names = [f"web-{number}" for number in range(20)]
    loop = asyncio.get_running_loop()
    async with client.NotifyClient(await connect("farm"), on_event=on_event) as mine:
        await _define(mine)
        await asyncio.gather(
            *(
                mine.advertise(
                    name, "WebServer", {**STATE, "servicePort": place % 10}, policy="alert", durable=True
                )
                for place, name in enumerate(names)
            )
        )
        acknowledged: list[int] = []
        started = loop.time()

        async def send(worker: int) -> None:
            for number in range(worker, events, WORKERS):
                due = loop.create_future()
                loop.call_at(started + number / 1000, due.set_result, None)
                await due
                await mine.send(
                    f"watch-{worker}",
                    "alert",
                    {"threat_level": number},
                    to=f"servicePort = {number % 10}",
                    durable=True,
                    id=str(number),
                    timeout_s=300,
                )
                acknowledged.append(number)

        workers = asyncio.gather(*map(send, range(WORKERS)))
        await eventually(lambda: len(acknowledged) >= events // 4, timeout_s=120)
        if events > 1000:
            await start("n3")
        await eventually(lambda: len(acknowledged) >= events // 2, timeout_s=120)
        doomed.signal(signal.SIGKILL)
        await workers
        assert sorted(acknowledged) == list(range(events))
        expected = {
            (name, str(number))
            for number in range(events)
            for place, name in enumerate(names)
            if place % 10 == number % 10
        }
        await eventually(lambda: expected <= set(got), timeout_s=200)
        assert set(got) == expected
        assert set(got.values()) == {1}
        assert len(mine._receipts) <= 3 * len(expected) // 4  # what is settled is forgotten


def _settled(served: notifier_notifier.Notifier, number: int) -> bool:
    return served.counts["acknowledged"] == number


async def test_what_was_settled_is_not_remembered_for_ever(notifier, receivers):
    """A receiver drops the ids of events that the shard will not deliver again."""
    settings = settings_.NotifySettings(lease_s=3.0, ack_wait_s=0.5, beat_s=0.1)
    served = await notifier(settings=settings)
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for number in range(200):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
        assert (await web.next(timeout_s=30))["threat_level"] == number
        web.acknowledge()
        await eventually(functools.partial(_settled, served, number + 1))
    assert len(mine._receipts) < 20


async def test_events_are_forgotten_when_everybody_has_acknowledged(notifier, receivers, connect):
    served = await notifier()
    mine = await receivers("farm", on_event=lambda names, event: None)
    await _define(mine)
    await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for number in range(50):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
    await eventually(lambda: served.counts["acknowledged"] == 50)
    stream = await (await connect("reader")).open_stream(protocol.STREAM_EVENTS)

    async def is_empty() -> bool:
        return bool((await stream.state()).messages == 0)

    await eventually(is_empty)


async def test_events_that_retention_dropped_before_they_were_matched_are_counted(
    notifier, receivers, connect
):
    first = await notifier("n1")
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    await web.next(timeout_s=30)
    await first.stop()
    stream = await (await connect("other")).open_stream(protocol.STREAM_EVENTS)
    sequences = [await stream.publish(durable_events.EVENT, b"") for _ in range(3)]
    await stream.purge(before=sequences[-1])
    second = await notifier("n2")
    await eventually(lambda: second.counts["events-lost"])
    assert second.counts["events-lost"] == 2


async def test_a_slow_receiver_is_given_durable_events_again(notifier, receivers):
    await notifier()
    mine = await receivers("farm", queue_max=5)
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for number in range(12):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
    await eventually(lambda: mine.counts["put-off"] > 0)
    actual = {(await web.next(timeout_s=30))["threat_level"] for _ in range(12)}
    assert actual == set(range(12))
    assert not web.dropped


async def test_a_durable_event_reaches_a_transient_party_once(notifier, receivers):
    await notifier()
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")
    for number in range(3):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
    assert [(await web.next(timeout_s=30))["threat_level"] for _ in range(3)] == [0, 1, 2]
    assert not web._queue


async def test_shards_that_are_behind_by_more_and_less_all_catch_up(notifier, receivers):
    """Two that come in the same moment: neither may make the other miss what is between their positions."""
    served = await notifier()
    mine = await receivers("farm")
    await _define(mine)
    names = {protocol.shard_of(f"farm/web-{number}"): f"web-{number}" for number in range(300)}
    far, near = sorted(names)[:2]
    for shard in (far, near):
        await mine.advertise(names[shard], "WebServer", STATE, policy="alert", durable=True)
    mine._receivers.clear()  # no receiver acknowledges
    for number in range(20):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
    await eventually(lambda: {held.recorded for held in served.held.values()} == {20})
    for shard, position in ((far, 5), (near, 10)):
        served.held[shard].pending.owed.clear()
        served.held[shard].pending.position = position
        served._durable.follow()
    await eventually(lambda: {held.pending.position for held in served.held.values()} == {20})
    assert list(served.held[far].pending.owed) == list(range(6, 21))
    assert list(served.held[near].pending.owed) == list(range(11, 21))


def test_an_absent_receiver_does_not_delay_one_that_returns():
    """However much it is owed: what was delivered again a moment ago lets pass what is behind it."""
    held = shards_shard.Shard(3, None)  # type: ignore[arg-type]  # no lease is asked
    for sequence in range(1, 101):
        held.pending.match(sequence, ["farm/away", "farm/back"])
    held.recorded = 90
    came: set[int] = set()
    for turn in range(1, 30):  # each as long as a fifth of the time to acknowledge
        for sequence in held.due(turn - 5, 10):
            held.sent_at[sequence] = turn
            held.pending.acknowledge(sequence, "farm/back")
            came.add(sequence)
    assert came == set(range(1, 91))


async def test_an_event_that_cannot_be_read_at_once_ends_nothing(notifier, receivers, monkeypatch):
    """It was put out of mind, and its stream does not answer for a moment."""
    monkeypatch.setattr(durable_events, "EVENTS_REMEMBERED", 0)
    served = await notifier()
    mine = await receivers("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert")
    real = served._durable._events.get

    async def away(sequence: int) -> Any:
        monkeypatch.setattr(served._durable._events, "get", real)
        raise errors.TimedOut("no answer")

    monkeypatch.setattr(served._durable._events, "get", away)
    for number in range(2):
        await mine.sender("s").send("alert", {"threat_level": number}, durable=True)
    assert (await web.next(timeout_s=30))["threat_level"] == 1
    assert not served.common.tasks.failures


async def test_a_process_that_never_acknowledges_does_not_use_up_the_limit_of_all(
    notifier, receivers, monkeypatch
):
    monkeypatch.setattr(durable_events, "OWING_MAX", 30)
    monkeypatch.setattr(durable_events, "OWING_OF_PROCESS_MAX", 10)
    monkeypatch.setattr(durable_events, "GIVE_UP_AFTER_WAITS", 0)
    first = await notifier("n1")
    silent, other = await receivers("silent"), await receivers("other")
    await _define(silent)
    await silent.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    web = await other.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    sender = other.sender("watch")

    def owed(of: notifier_notifier.Notifier) -> list[tuple[int, str]]:
        return sorted(
            (sequence, receiver)
            for held in of.held.values()
            for sequence, owing in held.pending.owed.items()
            for receiver in owing
        )

    for number in range(40):
        await sender.send("alert", {"threat_level": number}, durable=True)
        assert (await web.next(timeout_s=30))["threat_level"] == number
        web.acknowledge()
        await eventually(lambda: len(owed(first)) <= 10)
    assert [receiver for _, receiver in owed(first)] == ["silent/web"] * 10
    assert owed(first)[0][0] == 31, "the oldest are given up"
    assert first.counts["given-up"] == 30
    await first.stop()
    second = await notifier("n2")  # which may give up the last one again
    await eventually(lambda: [sequence for sequence, _ in owed(second)] == list(range(31, 41)))


async def test_a_process_with_many_pending_acknowledgements_has_time_to_acknowledge(
    notifier, receivers, monkeypatch
):
    monkeypatch.setattr(durable_events, "OWING_OF_PROCESS_MAX", 10)
    monkeypatch.setattr(durable_events, "GIVE_UP_AFTER_WAITS", 1000)
    served = await notifier()
    late = await receivers("late")
    await _define(late)
    web = await late.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for number in range(30):
        await late.sender("s").send("alert", {"threat_level": number}, durable=True)
    await eventually(lambda: served.counts["redelivered"] > 60)  # the limit was applied in between
    levels = []
    for _ in range(30):
        levels.append((await web.next(timeout_s=30))["threat_level"])
        web.acknowledge()
    assert sorted(levels) == list(range(30))
    await eventually(lambda: not any(held.pending.owed for held in served.held.values()))
    assert served.counts["given-up"] == 0
