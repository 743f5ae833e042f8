"""After a new checkpoint, alerts of the former one end unless they are confirmed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from muster.bus.memory import network
from muster.core import messages
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.job import batch_commit, commit_state
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
    before.save()
    same = await committer(tmp_path, "r1")
    assert same._reconcile([], T0 + 10**9) == []

    after = await committer(tmp_path, "r2")
    assert after._reconcile([verdict("kept", True, T0 + 10_000)], T0 + 10_000) == []
    after.save()
    restarted = await committer(tmp_path, "r2")  # it did not have the time to see all
    assert restarted._reconcile([verdict("kept", True, T0 + 20_000)], T0 + 20_000) == []
    assert restarted._reconcile([], T0 + 20_000 + batch_commit.RECONCILE_MS - 1) == []
    ended = restarted._reconcile([], T0 + 20_000 + batch_commit.RECONCILE_MS)
    assert [(end.about, end.on) for end in ended] == [("node:gone", False)]
    restarted.alert_tracker.apply(ended, T0 + 100_000)
    assert [alert.about for alert in restarted.alert_tracker.alerts()] == ["node:kept"]
    restarted.save()
    stored = msgspec.json.decode(
        (tmp_path / "alerts-00000001.json").read_bytes(), type=commit_state.CommitState
    )
    assert stored.run == "r2"
    assert {alert.state for alert in restarted.alert_tracker.alerts()} == {messages.AlertState.FIRING}
