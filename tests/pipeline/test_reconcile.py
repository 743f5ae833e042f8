"""After a new checkpoint, alerts of the former one end unless they are confirmed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from muster.bus.memory import network
from muster.core import errors, messages
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.job import batch_commit, batch_plan, commit_state
from muster.pipeline.source import shard_keys
from tests.pipeline import traffic

T0 = 1_700_000_000_000
RULES = """
rules:
  - {name: hot, scope: node, when: cpu_percent > 90}
"""


async def committer(folder: Path, run: str) -> batch_commit.BatchCommitter:
    (folder / "rules.yaml").write_text(RULES)
    bus = await network.SimulatedNetwork().connect("pipeline")
    return batch_commit.BatchCommitter(
        bus,
        settings.PipelineSettings(rules=str(folder / "rules.yaml")),
        history=str(folder / "history"),
        run=run,
        state_root=str(folder),
        authority=traffic.OnlyDriver(),
    )


def verdict(machine: str, on: bool, at_ms: int) -> tracker.RuleVerdict:
    return tracker.RuleVerdict("hot", f"node:{machine}", on, at_ms)


async def test_alerts_of_a_former_checkpoint_end_unless_they_are_true_again(tmp_path):
    before = await committer(tmp_path, "r1")
    before.alert_tracker.apply([verdict(name, True, T0) for name in ("kept", "gone")], T0)
    await before.save()
    same = await committer(tmp_path, "r1")
    assert same._planner.reconcile([], T0 + 10**9) == []

    after = await committer(tmp_path, "r2")
    assert after._planner.reconcile([verdict("kept", True, T0 + 10_000)], T0 + 10_000) == []
    await after.save()
    restarted = await committer(tmp_path, "r2")  # it did not have the time to see all
    assert restarted._planner.reconcile([verdict("kept", True, T0 + 20_000)], T0 + 20_000) == []
    assert restarted._planner.reconcile([], T0 + 20_000 + batch_plan.RECONCILE_MS - 1) == []
    ended = restarted._planner.reconcile([], T0 + 20_000 + batch_plan.RECONCILE_MS)
    assert [(end.about, end.on) for end in ended] == [("node:gone", False)]
    restarted.alert_tracker.apply(ended, T0 + 100_000)
    assert [alert.about for alert in restarted.alert_tracker.alerts()] == ["node:kept"]
    await restarted.save()
    stored = msgspec.json.decode(
        (tmp_path / "alerts-00000001.json").read_bytes(), type=commit_state.CommitState
    )
    assert stored.run == "r2"
    assert {alert.state for alert in restarted.alert_tracker.alerts()} == {messages.AlertState.FIRING}


# The state of the driver


SILENCE = tracker.Silence(id="s", covers="TRUE", from_ms=T0, until_ms=T0 + 60_000)


@pytest.mark.parametrize("step", ["check", "confirm"])
async def test_a_change_of_a_user_that_a_successor_may_not_have_read_is_in_doubt(tmp_path, monkeypatch, step):
    made = await committer(tmp_path, "r")

    def refuse() -> None:
        raise errors.StaleEpoch("another process is the driver", epoch=1, current=2)

    monkeypatch.setattr(made._authority, step, refuse)
    with pytest.raises(errors.TimedOut, match="not known"):
        await made.store_updates(made.alert_tracker.silence(SILENCE, T0))


async def test_of_two_saves_at_once_the_later_state_stays(tmp_path, monkeypatch):
    made = await committer(tmp_path, "r")
    save, entered, go_on = made._store.save, threading.Event(), threading.Event()

    def slow(state: bytes) -> None:
        if not entered.is_set():
            entered.set()
            go_on.wait(60)
        save(state)

    monkeypatch.setattr(made._store, "save", slow)
    first = asyncio.create_task(made.save())
    await asyncio.to_thread(entered.wait, 60)
    made.alert_tracker.silence(SILENCE, T0)
    second = asyncio.create_task(made.save())
    await asyncio.wait([second], timeout=0.2)  # without an order it is done now
    go_on.set()
    await asyncio.gather(first, second)
    assert (await committer(tmp_path, "r")).alert_tracker.silences() == [SILENCE]


async def test_the_state_is_read_between_two_changes(tmp_path, monkeypatch):
    """On the event loop: a thread could save an alert that has changed without the message about it."""
    made = await committer(tmp_path, "r")
    state, readers = made.alert_tracker.state, set[threading.Thread]()

    def read() -> tracker.AlertTrackerState:
        readers.add(threading.current_thread())
        return state()

    monkeypatch.setattr(made.alert_tracker, "state", read)
    await made.save()
    assert readers == {threading.current_thread()}


async def test_lost_messages_are_shown_for_their_time_although_the_driver_was_restarted(tmp_path):
    before = await committer(tmp_path, "r")
    before.alert_tracker.apply([before._planner.about_loss({shard_keys.LOST: 5}, T0)], T0)
    await before.save()
    after = await committer(tmp_path, "r")
    verdict_ = after._planner.about_loss({}, T0 + 10_000)
    assert (verdict_.on, verdict_.value) == (True, 5.0)
    assert not after._planner.about_loss({}, T0 + batch_plan.LOSS_SHOWN_MS).on
