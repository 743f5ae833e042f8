"""Steps of a user: metrics of reports and groups, numbers of each machine, failures that stop nothing."""

import re
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from deltalake import DeltaTable

from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import settings, steps
from muster.pipeline.fleet import blocks, node_columns, rollups, shards, state
from muster.pipeline.history import rollup_rows
from muster.pipeline.job import query, query_plan
from tests.pipeline import test_history, traffic
from tests.pipeline.test_history import root  # noqa: F401 (a fixture)

#: An error without a text, and a mapping without items.
UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self): raise RuntimeError
class Unlisted(dict):
    def items(self): raise Unspeakable
"""
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "pipeline_step.py")


@pytest.fixture
def step(tmp_path):
    """Writes a step with this text; its codes."""

    def written(text: str, name: str = "own") -> tuple[steps.StepCode, ...]:
        (tmp_path / f"{name}.py").write_text(text)
        return steps.read([str(tmp_path / f"{name}.py")])

    return written


def piece(*reports, sequence: int = 1) -> blocks.ReportPiece:
    batch = columns.to_batch(list(reports))
    return blocks.ReportPiece.from_message(sequence, 1000, batch, columns.BatchInfo())


def fed(codes, fleet: state.FleetState, *pieces: blocks.ReportPiece) -> state.ShardOutput:
    """As the task of a shard does."""
    processor = query.ShardProcessor()
    processor.feed(fleet, list(pieces), [], codes)
    return processor.output


def queue(machine: str, sequence: int, value: float, **more):
    return traffic.report(machine, sequence, 1000 * sequence, metrics={"queue": value}, **more)


def plan_of(codes) -> state.FleetStatePlan:
    return state.FleetStatePlan(memory=steps.memory_columns(codes))


# As a user tests it


def test_a_step_runs_on_rows_of_a_test():
    rows = [
        {"machine": "a", "sequence": 1, "metrics": {"queue": 5}},
        {"machine": "b", "sequence": 1, "metrics": {"queue": 1.0}},
        {"machine": "a", "sequence": 2, "metrics": {"queue": 7}},
        {"machine": "a", "sequence": 2, "metrics": {"queue": 99}},  # repeated
        {"machine": "b", "sequence": 2},
    ]
    found = steps.run(EXAMPLE, rows)["queue_growth"]
    np.testing.assert_array_equal(found, [np.nan, np.nan, 2, np.nan, np.nan])
    groups = [{"scope": "group", "name": "web", "cpu_percent_max": 90.0, "cpu_percent_min": 20.0}]
    assert steps.run(EXAMPLE, groups)["cpu_spread"].tolist() == [70.0]


def test_a_step_runs_on_the_history(root, step):  # noqa: F811
    nodes = DeltaTable(str(root / "nodes")).to_pyarrow_table()
    step("from muster.pipeline import steps\nreports = lambda rows: {'q': steps.metric(rows, 'queue')}")
    found = steps.run(str(root / "own.py"), nodes)["q"]
    assert found.tolist() == [dict(row["metrics"])["queue"] for row in nodes.to_pylist()]
    assert np.isnan(steps.run(EXAMPLE, nodes)["queue_growth"]).sum() == 10  # the first report of each machine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reports = 1", "neither a function"),
        ("raise SystemExit(2)", "cannot be loaded: SystemExit: 2"),
        ("import nothing_there", "cannot be loaded: ModuleNotFoundError"),
        ("def reports(:", "cannot be loaded: SyntaxError"),
        ("MEMORY = {'a': 'b'}\ndef reports(rows, memory): pass", "cannot be loaded: ValueError"),
    ],
)
def test_a_module_that_is_no_step_is_refused_at_the_start(step, text, message):
    with pytest.raises(errors.InvalidInput, match=message):
        step(text)


def test_names_of_steps(step, tmp_path):
    with pytest.raises(errors.InvalidInput, match="cannot read"):
        steps.read([str(tmp_path / "missing.py")])
    with pytest.raises(errors.InvalidInput, match=r"'no\.such\.module' cannot be loaded"):
        steps.read(["no.such.module"])
    step("def reports(rows): return {}")
    with pytest.raises(errors.InvalidInput, match="two steps have the name 'own'"):
        steps.read([str(tmp_path / "own.py")] * 2)


# In the pipeline


def test_metrics_of_a_step_are_metrics_of_the_reports(step):
    codes = step(
        "from muster.pipeline import steps\n"
        "def reports(rows):\n"
        "    cpu = steps.metric(rows, 'cpu_percent')\n"
        "    queue = steps.metric(rows, 'queue')\n"
        "    return {'load': cpu * 2, 'queue': queue + 1, 'memory_percent': 100 - cpu}\n"
    )
    sent = piece(queue("a", 1, 5.0), traffic.report("b", 1, 1000), queue("c", 1, 7.0))
    (extended,), faults = steps.extend_reports(codes, [sent], state.FleetState(plan_of(codes)).nodes)
    assert faults == {}
    rows = extended.rows().to_pylist()
    assert [dict(row["metrics"]) for row in rows] == [
        {"load": 20.0, "queue": 6.0},
        {"load": 20.0},
        {"load": 20.0, "queue": 8.0},
    ]
    assert [row["memory_percent"] for row in rows] == [90.0] * 3
    assert blocks.ReportPiece.read(1, extended.encode()).batch.equals(extended.batch)


def test_a_step_sees_the_metrics_of_the_one_before(step):
    first = step("def reports(rows): return {'x': range(rows.num_rows)}", "first")
    text = "from muster.pipeline import steps\nreports = lambda rows: {'y': steps.metric(rows, 'x') * 10}"
    codes = first + step(text, "second")
    (extended,), _ = steps.extend_reports(
        codes, [piece(queue("a", 1, 5.0), queue("b", 1, 5.0))], state.FleetState(plan_of(codes)).nodes
    )
    assert [dict(row["metrics"])["y"] for row in extended.rows().to_pylist()] == [0.0, 10.0]


def growths(codes, fleet, *pieces) -> list[tuple[str, int, float | None]]:
    extended, faults = steps.extend_reports(codes, pieces, fleet.nodes)
    assert faults == {}
    query.ShardProcessor().feed(fleet, extended, [])
    rows = [row for part in extended for row in part.rows().to_pylist()]
    found = [(row["machine"], row["sequence"], dict(row["metrics"]).get("queue_growth")) for row in rows]
    return [entry for entry in found if entry[2] is not None]


def test_numbers_of_machines_survive_batches_restarts_and_other_shards():
    codes = steps.read([EXAMPLE])
    plan = plan_of(codes)
    fleet = state.FleetState(plan)
    assert growths(codes, fleet, piece(queue("a", 1, 5.0), queue("b", 1, 1.0))) == []
    assert growths(codes, fleet, piece(queue("a", 2, 8.0), queue("a", 3, 9.0))) == [
        ("a", 2, 3.0),
        ("a", 3, 1.0),
    ]
    fleet = state.FleetState.unpack(fleet.pack(), plan, fleet.nodes.names)
    halves = list(shards.split(fleet, 2).values())
    fleet = halves[0] if len(halves) == 1 else shards.merge(*halves)
    again = piece(queue("a", 3, 9.0), queue("a", 2, 8.0), queue("b", 2, 4.0))  # two of them are repeated
    assert growths(codes, fleet, again) == [("b", 2, 3.0)]
    # The sensor restarts: sequences begin anew.
    restarted = piece(queue("a", 1, 2.0, boot=7), queue("a", 4, 50.0), queue("a", 2, 5.0, boot=7))
    assert growths(codes, fleet, restarted) == [("a", 1, -48.0), ("a", 4, 41.0), ("a", 2, 3.0)]
    assert growths(codes, fleet, piece(queue("a", 5, 60.0))) == []  # of the former boot


def test_a_plan_without_the_step_forgets_its_numbers():
    codes = steps.read([EXAMPLE])
    fleet = state.FleetState(plan_of(codes))
    growths(codes, fleet, piece(queue("a", 1, 5.0)))
    without = state.FleetState.unpack(fleet.pack(), state.FleetStatePlan(), fleet.nodes.names)
    back = state.FleetState.unpack(without.pack(), plan_of(codes), fleet.nodes.names)
    assert growths(codes, back, piece(queue("a", 2, 8.0))) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "own failed: ZeroDivisionError: division by zero"),
        ("raise SystemExit", "own failed: SystemExit"),
        ("return None", "returned NoneType: expected up to 64 metrics"),
        ("return {'x': [1.0]}", r"x with shape \(1,\): expected \(2,\)"),
        ("return {'x': ['a', 'b']}", "x with values that are no numbers"),
        ("return {3: [1, 2]}", "a metric of the name 3"),
        ("return {str(n): [1, 2] for n in range(65)}", "expected up to 64"),
        ("return {'\\ud800': [1, 2]}", "own failed: UnicodeEncodeError"),
        ("raise ValueError('\\ud800')", r"own failed: ValueError: \\ud800"),
        ("raise Unspeakable", "own failed: Unspeakable$"),
        ("return Unlisted()", "own failed: Unspeakable$"),
        ("return {'x': [10**400, 1]}", "own failed: OverflowError"),
    ],
)
def test_a_failing_step_is_named_and_its_reports_go_on(step, body, message):
    codes = step(f"{UNSPEAKABLE}\ndef reports(rows): {body}")
    fleet = state.FleetState(plan_of(codes))
    output = fed(codes, fleet, piece(queue("a", 1, 5.0), queue("b", 1, 5.0)))
    assert output.machines == 2
    assert re.search(message, output.faults["own"])
    assert msgspec.msgpack.encode(output)  # as it goes to the driver


def test_values_that_are_masked_are_not_measured(step):
    codes = step("import numpy\ndef reports(rows): return {'x': numpy.ma.array([1, 2], mask=[0, 1])}")
    (extended,), _ = steps.extend_reports(
        codes, [piece(queue("a", 1, 5.0), queue("b", 1, 6.0))], node_columns.NodeColumns()
    )
    assert steps.metric(extended.rows(), "x").tolist() == [1.0, pytest.approx(np.nan, nan_ok=True)]


def test_a_step_that_hangs_is_left_behind_until_it_returns(step, monkeypatch):
    monkeypatch.setattr(steps, "LIMIT_S", 0.05)
    codes = step("import threading\nGO = threading.Event()\ndef reports(rows): GO.wait(30); return {}")
    fleet = state.FleetState(plan_of(codes))
    assert "took longer" in fed(codes, fleet, piece(queue("a", 1, 5.0))).faults["own"]
    assert "has not returned yet" in fed(codes, fleet, piece(queue("a", 2, 5.0))).faults["own"]
    go: threading.Event = steps.load(codes[0]).reports.__globals__["GO"]  # type: ignore[union-attr]
    go.set()
    (overdue,) = [thread for thread in threading.enumerate() if thread.name == "step own"]
    overdue.join()
    assert fed(codes, fleet, piece(queue("a", 3, 5.0))).faults == {}


def test_metrics_of_groups_are_in_reports_rules_and_the_history(step):
    codes = step(
        "from muster.pipeline import steps\n"
        "groups = lambda rows: {'spread': steps.metric(rows, 'cpu_percent_max')"
        " - steps.metric(rows, 'cpu_percent_min')}\n"
    )
    totals = []
    for name, loads in (("web", [10.0, 70.0]), ("idle", [])):
        many = rollups.ScopeTotals("group", name, test_history.T0)
        for load in loads:
            traffic.fold(many.cell, test_history._column(load))
        totals.append(many)
    assert steps.extend_groups(codes, totals) == {}
    assert rollups.facts(totals[0])["own.spread_mean"] == 60.0
    assert "own.spread_mean" not in rollups.facts(totals[1])
    assert rollups.group_report(totals[0]).metrics["spread"].max == 60.0
    stored = rollup_rows.rows(totals).column("metrics").to_pylist()
    assert dict(stored[0])["spread_mean"] == 60.0
    assert stored[1] == []
    failing = step("def groups(rows): raise KeyError('x')", "bad")
    assert steps.extend_groups(failing, totals) == {"bad": "bad failed: KeyError: 'x'"}


def test_the_plan_has_the_code_of_the_steps():
    plan = query_plan.from_settings(
        settings.PipelineSettings(steps=(EXAMPLE,)),
        (),
        (2, 2, 2),
        servers=(),
        credentials=None,
        ca=None,
        history="",
        pipeline="pipeline",
    )
    (code,) = plan.steps
    assert (code.name, code.text) == ("pipeline_step", Path(EXAMPLE).read_text())
    ((column, start),) = plan.plan.memory
    assert column == "step pipeline_step queue"
    assert np.isnan(start)
