"""The harness, the result files, and the figures in the texts."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from benchmarks import goals, harness, markers, measure, plots
from muster.core import errors

KEYS = {
    "metric", "ours", "unit", "better", "paper", "peer", "peer_name", "ratio", "goal", "met",
    "samples", "peer_samples", "load",
}  # fmt: skip
RESULTS = sorted(harness.RESULTS.glob("*.json"))

ROWS = [
    harness.Row(
        metric="speed", ours=9000, unit="messages/s", better="higher", paper=5000, peer=10_000,
        peer_name="nats-py", goal=0.8, goal_is="ratio",
    ),
    harness.Row(metric="slow start", ours=4.0, unit="s", better="lower", goal=3.0),
    harness.Row(metric="round trip", ours=0.2, unit="ms", better="lower", peer=0.25, peer_name="nats-py"),
]  # fmt: skip


def test_ratio_and_met_follow_from_the_figures():
    speed, start, trip = ROWS
    assert (speed.ratio, speed.met) == (0.9, True)
    assert (start.ratio, start.met) == (None, False)
    assert trip.ratio == pytest.approx(1.25)
    assert trip.met is None


def test_the_table_shows_a_missed_goal_as_missed():
    lines = harness.table(ROWS).splitlines()
    assert "MISSED" in lines[3]
    assert "≤ 3" in lines[3]
    assert "≥ 0.8 × peer" in lines[2]


@pytest.mark.parametrize(
    ("metric", "count", "of_peer", "shown"),
    [
        ("request p50", 1000, None, "1,000"),
        ("request p50", 999, None, "999 (few)"),
        ("request p99", 5000, 60, "5,000; peer 60 (few)"),
        ("request p99", 5000, 5000, "5,000"),
        ("request p99", None, None, "not counted"),
        ("messages", 3, None, "3"),
        ("messages", None, None, "–"),
    ],
)
def test_a_percentile_of_few_samples_is_flagged(
    metric: str, count: int | None, of_peer: int | None, shown: str, tmp_path: Path
):
    row = harness.Row(
        metric=metric, ours=1.0, unit="ms", better="lower", peer=2.0, samples=count, peer_samples=of_peer
    )
    assert f"  {shown}" in harness.table([row]).splitlines()[2]
    path = harness.write("example", [row], quick=True, results=tmp_path)
    (written,) = json.loads(path.read_text())["rows"]
    assert (written["samples"], written["peer_samples"]) == (count, of_peer)
    assert f"| {shown} |" in markers.markdown(json.loads(path.read_text()))


def test_the_load_of_each_row_is_printed_once_below_the_table(tmp_path: Path):
    few, many = "10 subscribers, 512 B", "100 subscribers, 512 B"
    rows = harness.under(many, [ROWS[0], harness.under(few, [ROWS[1]])[0], ROWS[2]])
    lines = harness.table(rows).splitlines()
    assert [line.split()[-1] for line in lines[2:5]] == ["L1", "L2", "L1"]
    assert lines[5:] == [f"L1: {many}", f"L2: {few}"]
    shown = markers.markdown(json.loads(harness.write("example", rows, True, tmp_path).read_text()))
    assert f"- L1: {many}\n- L2: {few}\n" in shown


def test_a_result_file_has_the_agreed_form_and_names_no_machine(tmp_path: Path):
    written = json.loads(harness.write("example", ROWS, quick=True, results=tmp_path).read_text())
    assert set(written) == {"name", "machine", "rows"}
    assert all(set(row) == KEYS for row in written["rows"])
    assert written["rows"][1]["met"] is False
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "python", "nats_server", "date", "run"}


@pytest.mark.may_leak("files", reason="matplotlib keeps its fonts open")
def test_the_plot_is_a_small_picture(tmp_path: Path):
    plots.draw("example", ROWS, tmp_path / "example.png")
    content = (tmp_path / "example.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 100_000


def test_markers_are_filled_from_the_files(tmp_path: Path):
    harness.write("example", ROWS, quick=False, results=tmp_path)
    text = (
        "fast: <!-- bench:example:speed -->?<!-- /bench -->, "
        "<!-- bench:example:speed:ratio -->?<!-- /bench --> of the peer's "
        "<!-- bench:example:speed:peer --><!-- /bench -->\n"
    )
    filled = markers.fill(text, tmp_path)
    assert "-->9,000 messages/s<!-- /bench" in filled
    assert "-->0.9<!-- /bench" in filled
    assert "-->10,000 messages/s<!--" in filled
    assert markers.fill(filled, tmp_path) == filled


def test_a_table_shows_missed_goals(tmp_path: Path):
    result = json.loads(harness.write("example", ROWS, quick=False, results=tmp_path).read_text())
    assert "| slow start, s | 4 | – | – | – | 3 | **missed** | – | – |" in markers.markdown(result)


def test_a_figure_of_any_size_and_the_date_are_filled(tmp_path: Path):
    row = harness.Row(metric="fleet, 7,000 machines: CPU", ours=95.7, unit="µs", better="lower")
    harness.write("example", [row], quick=False, results=tmp_path)
    text = (
        "<!-- bench:example:fleet, * machines: CPU -->?<!-- /bench --> "
        "<!-- bench-date:example -->?<!-- /bench-date -->"
    )
    date = harness.machine(quick=False)["date"]
    assert "-->95.7 µs<!--" in markers.fill(text, tmp_path)
    assert f"-->{date}<!--" in markers.fill(text, tmp_path)


@pytest.mark.parametrize("marker", ["nothing:speed", "example:nothing"])
def test_a_marker_without_a_figure_is_an_error(tmp_path: Path, marker: str):
    harness.write("example", ROWS, quick=False, results=tmp_path)
    with pytest.raises(errors.NotFound):
        markers.fill(f"<!-- bench:{marker} --><!-- /bench -->", tmp_path)


def test_a_run_that_lacks_a_figure_of_a_text_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "README.md").write_text("<!-- bench:bus:speed, * machines:goal -->2<!-- /bench -->")
    assert markers.missing("bus", ["speed, 5 machines"], tmp_path) == []
    assert markers.missing("store", [], tmp_path) == []
    assert markers.missing("bus", ["size"], tmp_path) == ["speed, * machines"]
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "QUICK_RESULTS", tmp_path / "quick")
    monkeypatch.setattr(harness, "_short", str)
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    monkeypatch.setattr(markers, "missing", lambda name, metrics: ["speed"])
    bench = types.ModuleType("benchmarks.bus", "Speed.")
    bench.run = lambda quick: []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.bus", bench)
    assert harness.main(["bus"]) == 1
    assert "not stored: the texts show 'speed'" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("path", markers.texts(), ids=lambda path: path.name)
def test_figures_in_the_texts_are_the_files(path: Path):
    text = path.read_text()
    assert markers.fill(text, harness.RESULTS) == text, "make bench fills them"
    assert text.count("<!-- bench") == text.count("<!-- /bench")


@pytest.mark.parametrize("path", markers.texts(), ids=lambda path: path.name)
def test_figures_in_the_texts_have_the_date_of_their_run(path: Path):
    assert markers.figure_names(path.read_text()) == markers.date_names(path.read_text())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_goals_of_the_results_are_those_listed(path: Path):
    result = json.loads(path.read_text())
    assert not goals.differences(path.stem, result["rows"], are_stored=True)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_state_their_load_and_samples(path: Path):
    rows = json.loads(path.read_text())["rows"]
    assert any(row["load"] for row in rows)
    assert not [
        row["metric"] for row in rows if markers.samples(row["metric"], row["samples"]) == "not counted"
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_files_are_whole(path: Path):
    result = json.loads(path.read_text())
    assert set(result) == {"name", "machine", "rows"}
    assert result["name"] == path.stem
    assert result["name"] in harness.names()
    assert path.with_suffix(".png").exists()
    for row in result["rows"]:
        assert set(row) == KEYS
        assert row["better"] in ("lower", "higher")
        assert (row["goal"] is None) == (row["met"] is None)


@pytest.mark.parametrize("path", sorted(harness.RESULTS.iterdir()), ids=lambda path: path.name)
def test_every_result_file_is_shown(path: Path):
    shown = (markers.ROOT / "docs" / "benchmarks.md").read_text()
    assert f"(../benchmarks/results/{path.name})" in shown


def test_percentiles_are_values_that_occurred():
    values = list(range(1, 101))
    assert measure.percentile(values, 50) == 50
    assert measure.percentile(values, 99) == 99
    assert measure.percentile([7.0], 99) == 7.0


def test_sides_take_turns_and_stop_when_time_is_up():
    order: list[str] = []
    measure.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert "".join(order) == "abbaab"
    order.clear()
    measure.in_turns({"a": lambda: order.append("a")}, rounds=3, seconds_max=-1)
    assert order == ["a"]


def test_a_call_is_timed_with_few_and_bounded_calls():
    calls = 0

    def small() -> None:
        nonlocal calls
        calls += 1

    assert measure.nanoseconds_a_call(small, rounds=2, round_s=0.001, calls_max=1000) > 0
    assert calls <= 5000


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert harness.main(["nonsense"]) == 2
    assert "no benchmark is called 'nonsense'; there are:" in capsys.readouterr().err
