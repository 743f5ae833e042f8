"""The reference page agrees with the code."""

import re
from pathlib import Path

from muster.core import messages
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import state
from muster.pipeline.history import tables
from muster.pipeline.job import query, window_rows
from muster.pipeline.source import shard_keys

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "pipeline.md").read_text()


def test_the_rules_shown_are_rules():
    shown = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    assert [rule.name for rule in rules.parse(shown[1])] == ["hot", "silent", "odd", "no-data"]


def test_everything_a_rule_may_ask_is_named():
    metrics = set(columns.STANDARD_METRICS)
    for name in set(rules.MODELS["node"]) - metrics - {f"{metric}{rules.Z}" for metric in metrics}:
        assert f"`{name}`" in TEXT, name
    for name in rules.MODELS["group"]:
        metric = next((item for item in metrics if name.startswith(f"{item}_")), None)
        assert f"`{name.removeprefix(metric or '')}`" in TEXT, name


def test_every_reason_and_every_folder_is_named():
    reasons = [
        state.FUTURE,
        state.LATE,
        state.DUPLICATED,
        query.HISTORY_LOST,
        window_rows.HISTORY_FULL,
        window_rows.HISTORY_FAILED,
        state.TRUNCATED,
        state.UNGROUPED,
        shard_keys.LOST,
        messages.MalformedMessage.code,
        messages.MessageTooLarge.code,
        columns.ReportSchemaMismatch.code,
        columns.ReportVersionMismatch.code,
    ]
    assert [reason for reason in reasons if reason not in protocol.COUNTED] == []
    assert [reason for reason in protocol.COUNTED if f"`{reason}`" not in TEXT] == []
    source = "".join(path.read_text() for path in Path(query.__file__).parent.glob("*.py"))
    counted = set(re.findall(r"(?:committer|self|output)\.count\(\"([a-z-]+)\"", source))
    assert len(counted) > 5
    assert counted - set(protocol.COUNTED) == set()
    assert [name for name in tables.definitions() if f"\n{name}/" not in TEXT] == []
