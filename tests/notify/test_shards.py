"""Storage of shards: fenced logs, snapshots of any size, records that always fit."""

from __future__ import annotations

import asyncio
import itertools
import random
import types as python_types
from typing import Any

import numpy as np
import pytest

from muster.bus.memory import network
from muster.core import errors, messages
from muster.notify import authorities, client, models, protocol
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy, matcher
from muster.notify.notifier import durable_events, pending_acks
from muster.notify.notifier import notifier as notifier_notifier
from muster.notify.notifier.shards import shard as shards_shard
from muster.notify.notifier.shards import snapshots, summaries
from muster.predicates import types
from muster.predicates.syntax import parser
from muster.testing.eventually import eventually
from tests.notify.conftest import MODELS, WEB_SERVER

STATE: dict[str, Any] = {"application": "IIS", "load": 0.5, "services": frozenset({"docs"})}
POLICY = "alert AND threat_level > 2"


def _names(shard: protocol.Shard, process: str, count: int) -> list[str]:
    """Names of receivers that all belong to one shard."""
    numbered = (f"web-{number}" for number in itertools.count())
    mine = (name for name in numbered if protocol.shard_of(protocol.participant_id(process, name)) == shard)
    return list(itertools.islice(mine, count))


def _held(made: matcher.Matcher) -> dict[str, Any]:
    return {
        receiver: (
            made.state_of(receiver),
            made.policy_of(receiver),
            made.is_durable(receiver),
            made.changed_s(receiver),
        )
        for receiver in made.receivers()
    }


@pytest.fixture
def knows():
    made = authorities.AuthorityView()
    for model in MODELS:
        made.vocabulary.add(model)
    return made


def test_a_snapshot_brings_back_what_there_was(knows):
    dice = random.Random(3)
    made = matcher.Matcher(kernels=kernels_numpy)
    policies = [POLICY, "command", ""]
    for number in range(3000):
        join = protocol.JoinReceiver(
            receiver=f"web-{number}",
            model="WebServer",
            state={"load": dice.random(), "services": ("docs",)} if number % 3 else {"application": "IIS"},
            policy=dice.choice(policies),
            delivery=dice.choice(["transient", "durable"]),
        )
        snapshots.apply(made, knows, 5, f"process-{number % 700}", join, number)
    replay = snapshots.ShardReplay(matcher.Matcher(kernels=kernels_numpy), knows, 5)
    replay._engine.join("process-1/gone", WEB_SERVER, {}, None, shard=5)
    for data in snapshots.snapshot(made, 5, epoch=1):
        replay.take(data)
    replay.finish()
    assert _held(replay._engine) == _held(made)
    assert not replay.refused


def _comes_back(made: matcher.Matcher, knows: authorities.AuthorityView) -> int:
    """Whether the receivers of shard 5 come back from a snapshot; returns the number of its messages."""
    replay = snapshots.ShardReplay(matcher.Matcher(kernels=kernels_numpy), knows, 5)
    parts = list(snapshots.snapshot(made, 5, epoch=1))
    for data in parts:
        assert len(data) <= messages.MAX_BYTES
        replay.take(data)
    replay.finish()
    assert not replay.refused
    states = {receiver: made.state_of(receiver) for receiver in made.receivers()}
    assert {receiver: replay._engine.state_of(receiver) for receiver in replay._engine.receivers()} == states
    return len(parts) - 2


def test_receivers_with_much_state_are_divided_among_the_messages_of_a_snapshot(knows):
    made = matcher.Matcher(kernels=kernels_numpy)
    names = [f"p/web-{number}" for number in range(snapshots.RECEIVERS)]
    texts = [f"{number:0>300}" for number in range(snapshots.RECEIVERS)]
    columns: dict[str, Any] = {"application": texts}
    made.join_many(names, WEB_SERVER, columns, [""], np.zeros(len(names), np.int64), shard=5)
    assert _comes_back(made, knows) == 2


def test_a_receiver_that_is_larger_than_a_message_comes_back_from_a_snapshot(knows):
    attributes = {f"text_{number}": types.STRING for number in range(10)}
    large = models.Model("Large", attributes)
    knows.vocabulary.add(large)
    made = matcher.Matcher(kernels=kernels_numpy)
    made.join("p/web", large, dict.fromkeys(attributes, "x" * shards_shard.TEXT_MAX), "command", shard=5)
    assert _comes_back(made, knows) == 11


def test_a_summary_fits_into_a_message_whatever_receivers_state(knows):
    made = matcher.Matcher(kernels=kernels_numpy)
    for number in range(20):
        state = {"application": f"{number:0>{shards_shard.TEXT_MAX}}"}
        made.join(f"p/web-{number}", WEB_SERVER, state, "command", shard=5)
    assert "application" not in summaries.summary_words(made), "not listed: any word"
    assert summaries.summary_accepts(made) == ("command",)


def test_the_number_of_models_is_limited(knows, monkeypatch):
    monkeypatch.setattr(models, "MODELS_MAX", len(knows.vocabulary.receivers))
    known, new = (authorities.define_of(models.Model(name, {})) for name in ("WebServer", "Another"))
    with pytest.raises(errors.LimitExceeded, match="models of this kind"):
        knows.model_key(new)
    monkeypatch.setattr(knows.vocabulary, "require_growth", lambda _: None)
    assert knows.model_key(known) == "model.receiver.WebServer"


@pytest.mark.virtual_time
async def test_a_definition_concerns_its_own_model_only(monkeypatch):
    defined: list[str] = []
    define = matcher.Matcher.define

    def counted(self: matcher.Matcher, model: models.Model) -> None:
        defined.append(model.name)
        define(self, model)

    monkeypatch.setattr(matcher.Matcher, "define", counted)
    net = network.SimulatedNetwork(1)
    async with (
        await net.connect("n1") as bus,
        await net.connect("ann") as own,
        notifier_notifier.Notifier(bus, settings_.NotifySettings(), kernels=kernels_numpy),
        client.NotifyClient(own) as receivers,
    ):
        names = [f"Model{number}" for number in range(5)]
        for name in names:
            await receivers.define(models.Model(name, {}))
        await receivers.define(models.Model("news", {}, models.ModelKind.EVENT))
    assert defined == names


def test_a_text_that_does_not_fit_is_refused(knows):
    checker = shards_shard.ChangeValidator(matcher.Matcher(kernels=kernels_numpy), knows, lambda _: None)
    text = "x" * (shards_shard.TEXT_MAX + 1)
    (name,) = _names(5, "p", 1)
    changes: list[protocol.Change] = [
        protocol.JoinReceiver(receiver=name, model="WebServer", state={"application": text}),
        protocol.JoinReceivers(receivers=(name,), model="WebServer", values={"application": [text]}),
        protocol.JoinReceiver(receiver=name, model="WebServer", state={"application": text[1:]}),
        protocol.UpdateReceivers(receivers=(name,), values={"application": [text]}),
    ]
    accepted, refused = checker.check("p", changes, 5)
    assert (len(accepted), [place for place, _ in refused]) == (1, [0, 1, 3])
    assert {fault.code for _, fault in refused} == {errors.LimitExceeded.code}


def test_the_longest_policy_is_longer_in_a_snapshot_and_comes_back(knows):
    flags = [f"flag_{'x' * 50}_{number}" for number in range(250)]
    policy = " OR ".join(flags)
    knows.vocabulary.add(
        models.Model("alert_of_flags", dict.fromkeys(flags, types.BOOL), models.ModelKind.EVENT)
    )
    assert len(policy) <= models.POLICY_LIMITS.text_length < len(knows.vocabulary.policy_text(policy))
    made = matcher.Matcher(kernels=kernels_numpy)
    join = protocol.JoinReceiver(receiver="web", model="WebServer", state={"load": 0.5}, policy=policy)
    snapshots.apply(made, knows, 5, "farm", join, 1)
    replay = snapshots.ShardReplay(matcher.Matcher(kernels=kernels_numpy), knows, 5)
    for data in snapshots.snapshot(made, 5, epoch=1):
        replay.take(data)
    replay.finish()
    assert not replay.refused
    assert replay._engine.match({flags[7]: True}, parser.parse("TRUE")) == ["farm/web"]


def test_a_snapshot_that_was_cut_short_is_passed_over(knows):
    made = matcher.Matcher(kernels=kernels_numpy)
    made.join("p/other", WEB_SERVER, {"load": 0.1}, None)
    parts = list(snapshots.snapshot(made, 0, epoch=1))
    assert len(parts) == 3
    joined = protocol.JoinReceiver(receiver="web", model="WebServer", state={"load": 0.5})
    changed = protocol.UpdateReceivers(receivers=("web",), values={"load": [0.7]})
    before, after = (
        snapshots.encode_applied([("p", [joined])], 1),
        snapshots.encode_applied([("p", [changed])], 2),
    )
    for log, expected in (
        ([before, *parts[:2], after], {"p/web": 0.7}),
        ([before, parts[0], *parts], {"p/other": 0.1}),
        ([before, *parts], {"p/other": 0.1}),
        ([before, *parts[1:], after], {"p/web": 0.7}),
    ):
        replay = snapshots.ShardReplay(matcher.Matcher(kernels=kernels_numpy), knows, 0)
        for data in log:
            replay.take(data)
        replay.finish()
        actual = {
            receiver: replay._engine.state_of(receiver)["load"] for receiver in replay._engine.receivers()
        }
        assert actual == expected


async def test_the_log_of_a_large_shard_is_replaced_too(notifier, receivers, connect, monkeypatch):
    """A snapshot of more messages than the broker takes at once."""
    monkeypatch.setattr(snapshots, "RECEIVERS", 1)
    settings = settings_.NotifySettings(lease_s=3.0, beat_s=0.1, snapshot_changes=10)
    first = await notifier("n1", settings)
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    names = _names(3, "farm", 1200)
    joins = protocol.JoinReceivers(
        receivers=tuple(names),
        model="WebServer",
        values={"load": [0.5] * len(names)},
        policies=(POLICY, ""),
        which=[number % 2 for number in range(len(names))],
        durable=[0],
    )
    await mine.change([joins])
    for number in range(12):
        await mine.update(names[:2], load=[number / 100, 0.9])
    await eventually(lambda: first.counts["snapshots"] == 1)
    stream = await (await connect("reader")).open_stream(protocol.STREAM_RECEIVERS)
    state = await stream.state()
    held = first.held[3]
    kept = [message async for message in stream.read(state.first_sequence, subject=held.subject)]
    assert (
        messages.decode(kept[0].data, protocol.AppliedChanges).snapshot == "begin"
    )  # nothing from before it is left
    await first.stop()
    second = await notifier("n2", settings)
    assert len(second.engine) == len(names)
    assert second.engine.state_of(f"farm/{names[0]}") == {"load": 0.11}
    assert second.engine.policy_of(f"farm/{names[0]}")
    assert not second.engine.policy_of(f"farm/{names[1]}")
    assert second.engine.is_durable(f"farm/{names[0]}")
    assert second.engine.changed_s(f"farm/{names[5]}") > 0


async def test_a_full_log_refuses_changes_until_there_is_room(notifier, receivers):
    settings = settings_.NotifySettings(
        lease_s=3.0, beat_s=0.1, stream_bytes=200_000, snapshot_changes=100_000
    )
    served = await notifier("n1", settings)
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    [name] = _names(0, "farm", 1)
    await mine.advertise(name, "WebServer", STATE)
    big = {"application": ["x" * 30_000], "application_version": ["y" * 30_000]}
    for _ in range(12):  # together far more than the stream holds
        await mine.update([name], **big)
    assert served.counts["snapshots"] > 0
    others = [name for shard in range(1, protocol.SHARDS) for name in _names(shard, "farm", 1)]

    async def fill() -> None:
        for other in others:
            await mine.advertise(other, "WebServer", {"application": "x" * 30_000})

    with pytest.raises(errors.LimitExceeded):
        await fill()
    await mine.sender("s").send("alert", {"threat_level": 1})
    assert served.counts["shard-lost"] == 0


async def test_a_holder_that_was_deposed_cannot_store_any_more(notifier, receivers, connect):
    first = await notifier("n1")
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    [name] = _names(7, "farm", 1)
    await mine.advertise(name, "WebServer", STATE, policy="alert", durable=True)
    old = first.held[7]
    await first.stop()
    await notifier("n2")
    bus = await connect("n1-again")
    for stream_name, subject, sequence in (
        (protocol.STREAM_RECEIVERS, old.subject, old.sequence),
        (protocol.STREAM_MATCHES, old.matched_subject, old.matched_sequence),
    ):
        stream = await bus.open_stream(stream_name)
        with pytest.raises(errors.Conflict):
            await stream.publish(subject, b"late", expected_last_subject_sequence=sequence)


def test_records_are_cut_to_fit_and_read_back_the_same(monkeypatch):
    monkeypatch.setattr(protocol, "RECORD_BYTES", 200)
    made = pending_acks.PendingAcks()
    made.match(5, [f"farm/web-{number}" for number in range(50)])
    made.match(6, ["farm/web-1"])
    made.forget("farm/web-1")
    made.match(9, [])
    records = made.records(1)
    assert len(records) > 5
    assert all(sum(map(len, item.matched.values())) < 10 for item in records)
    full_records = made.full_records(1)
    for log in (records, full_records, [*records, *full_records]):
        again = pending_acks.PendingAcks()
        for record in log:
            again.replay(record)
        assert (again.owed, again.position, len(again)) == (made.owed, 9, 49)


def test_what_is_recorded_decides_from_where_the_next_holder_needs_events():
    made = pending_acks.PendingAcks()
    made.match(3, ["a", "b"])
    made.match(4, [])
    assert made.floor == 3
    made.acknowledge(3, "a")
    made.acknowledge(3, "b")
    assert made.floor == 5


def test_pending_acknowledgements_are_counted_by_process_and_the_oldest_given_up():
    made = pending_acks.PendingAcks()
    for sequence in range(1, 5):
        made.match(sequence, ["farm/a", "farm/b", "mill/a"])
    made.acknowledge(1, "farm/a")
    assert made.owing_of == {"farm": 7, "mill": 4}
    assert made.give_up("farm", 3) == 3
    assert made.owed == {
        1: {"mill/a"},
        2: {"mill/a"},
        3: {"farm/a", "farm/b", "mill/a"},
        4: {"farm/a", "farm/b", "mill/a"},
    }
    again = pending_acks.PendingAcks()
    for record in made.records(1):
        again.replay(record)
    assert (again.owed, again.owing_of) == (made.owed, made.owing_of)
    assert made.give_up("farm", 100) == 4
    assert made.owing_of == {"mill": 4}


async def test_shards_that_are_read_while_others_are_shortened_are_not_lost(notifier, receivers):
    """The streams are common to all shards: what one takes from the front must not end another's reading."""
    first = await notifier("n1")
    mine = await receivers("farm")
    for model in MODELS:
        await mine.define(model)
    await mine.change([protocol.JoinReceiver(receiver=f"web-{n}", model="WebServer") for n in range(200)])
    await first.stop()
    second = await notifier("n2")
    assert second.counts["shard-lost"] == 0
    assert len(second.engine) == 200


def test_policies_that_were_checked_take_bounded_memory_however_they_are_written(knows, monkeypatch):
    """Blanks make many long texts of one short policy."""
    monkeypatch.setattr(models, "REMEMBERED_MAX", 50_000)
    for number in range(100):
        assert knows.vocabulary.policy_text(f"alert{' ' * (1000 + number)}") == knows.vocabulary.policy_text(
            "alert"
        )
        assert len(knows.vocabulary._checked._texts) < 70


@pytest.mark.virtual_time
async def test_a_holder_whose_lease_is_lost_while_it_reads_its_logs_does_not_append(simulated_network):
    """A stale holder that replays would knock out the one that took over."""
    settings = settings_.NotifySettings(lease_s=4.0)
    bus = await simulated_network.connect("n1")
    async with notifier_notifier.Notifier(bus, settings, kernels=kernels_numpy) as made:
        await made.serving()
        logs = [simulated_network.log(name) for name in (protocol.STREAM_RECEIVERS, protocol.STREAM_MATCHES)]
        before = [log.last for log in logs]
        stale: Any = python_types.SimpleNamespace(epoch=1, held=False)
        for replay in (made._shards._replay, made._durable.replay):
            with pytest.raises(errors.Unavailable):
                await replay(shards_shard.Shard(3, stale))
        assert [log.last for log in logs] == before


@pytest.mark.virtual_time
async def test_what_matched_while_the_lease_was_suspended_is_recorded_when_it_is_held_again(monkeypatch):
    lease = python_types.SimpleNamespace(held=False, epoch=1)
    held = shards_shard.Shard(3, lease)  # type: ignore[arg-type]
    held.pending.match(1, ["ann/r"])
    common = python_types.SimpleNamespace(held={3: held}, settings=settings_.NotifySettings())
    durable = durable_events.DurableEvents(common, None, None, None, None)  # type: ignore[arg-type]
    stored: list[protocol.MatchRecord] = []

    async def record(held: shards_shard.Shard) -> None:
        stored.extend(held.pending.records(held.lease.epoch))

    monkeypatch.setattr(durable, "_record", record)
    running = [asyncio.create_task(durable.record_all()), asyncio.create_task(durable.redeliver())]
    durable._dirty.set()
    await asyncio.sleep(5)
    assert not stored
    lease.held = True
    await eventually(lambda: stored, timeout_s=2)
    assert stored[0].matched == {1: ("ann/r",)}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
