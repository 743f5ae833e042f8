"""A quick run measures and prints, and changes neither the kept results nor any text."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from benchmarks import harness, markers, plots


@pytest.mark.parametrize("quick", [True, False])
def test_only_a_full_run_changes_results_and_texts(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = harness.Row(metric="speed", ours=3.0, unit="messages/s", better="higher")
    example = types.ModuleType("benchmarks.example", "An example.")
    example.__dict__["run"] = lambda _: [row]
    filled: list[bool] = []

    def fill_all() -> list[Path]:
        filled.append(True)
        return []

    monkeypatch.setitem(sys.modules, "benchmarks.example", example)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(harness, "QUICK_RESULTS", tmp_path / "benchmarks" / "quick")
    monkeypatch.setattr(markers, "fill_all", fill_all)
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    (tmp_path / "benchmarks").mkdir()
    harness.run_one("example", quick)
    assert (tmp_path / "benchmarks" / "results" / "example.json").exists() is not quick
    assert (tmp_path / "benchmarks" / "quick" / "example.json").exists() is quick
    assert bool(filled) is not quick
    assert "speed" in capsys.readouterr().out
