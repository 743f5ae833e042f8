"""The costs of the pipeline, fitted to its batches, and what they may be used for."""

import random

import pytest

from muster.core import errors
from muster.pipeline import cost_fit, protocol
from tests.cli import driver


def store(path, times: dict[int, float]) -> None:
    for number, (rows, batch_s) in enumerate(times.items(), start=1):
        cost_fit.append_sample(path, protocol.BatchProgress(batch=number, rows=rows, batch_s=batch_s))


def line(fixed_s: float, report_s: float, noise_s: float) -> dict[int, float]:
    chance = random.Random(5)
    return {
        1000 * number: fixed_s + 1000 * number * report_s + abs(chance.gauss(0, noise_s))
        for number in range(1, 40)
    }


def home_with(tmp_path, times: dict[int, float]):
    home = tmp_path / "home"
    folder = home / "local" / "pipeline"
    folder.mkdir(parents=True)
    (home / "muster.toml").write_text('[domain]\nname = "local"\ndata_dir = "."\n')
    store(folder / cost_fit.PROGRESS_NAME, times)
    return home


def test_the_fit_finds_the_cost_of_a_batch_and_of_a_report(tmp_path):
    path = tmp_path / "progress.jsonl"
    store(path, line(0.5, 2e-6, 0.0))
    path.write_bytes(path.read_bytes() + b'{"kind":"pipeline-prog')  # the machine failed here
    fitted = cost_fit.fit(cost_fit.read(path), trigger_s=10.0)
    assert fitted.fixed_s == pytest.approx(0.5)
    assert fitted.report_s == pytest.approx(2e-6)
    assert fitted.r2 == pytest.approx(1.0)
    assert (fitted.reports_min, fitted.reports_max) == (1000, 39_000)
    assert fitted.machines(10.0) == pytest.approx(9.5 / 2e-6)
    with pytest.raises(errors.InvalidInput, match="too few"):
        cost_fit.fit(cost_fit.read(path)[:2], trigger_s=10.0)


@pytest.mark.parametrize(
    ("times", "problem"),
    [
        (line(1.0, 0.0, 0.3), "does not grow measurably"),
        (line(1.0, -1e-5, 0.1), "does not grow measurably"),
        (line(1.0, 1.3e-5, 0.3), "explains only"),
        (line(12.0, 1e-4, 0.0), "longer than the trigger"),
    ],
)
def test_a_useless_fit_is_not_extrapolated(tmp_path, times, problem):
    home = home_with(tmp_path, times)
    shown = driver.quick("pipeline", "fit", "-o", "json", home=home)
    assert shown.code == 0
    facts = shown.json()
    assert (facts["usable"], facts["machines_max"]) == (False, None)
    assert problem in facts["problem"]
    assert "r2" in facts
    assert problem in driver.quick("pipeline", "fit", home=home).out
    refused = driver.quick("capacity", "--costs", "fitted", home=home)
    assert refused.code == errors.InvalidInput.exit_code
    assert problem in refused.err
    assert driver.quick("capacity", "-o", "json", home=home).json()["costs"] == "of the benchmarks"


def test_usable_costs_feed_the_capacity_plan(tmp_path):
    home = home_with(tmp_path, line(2.0, 5e-5, 0.01))
    facts = driver.quick("pipeline", "fit", "-o", "json", home=home).json()
    assert facts["usable"]
    limit = facts["machines_max"]
    assert limit == pytest.approx(8.0 / 5e-5, rel=0.05)
    plan = driver.quick("capacity", "--machines", str(limit), "-o", "json", home=home).json()
    assert plan["costs"].startswith("fitted to 39 batches")
    assert plan["load_of_the_root"] == pytest.approx(1.0, abs=0.01)
    others = driver.quick(
        "capacity", "--machines", str(limit), "--costs", "benchmark", "-o", "json", home=home
    )
    assert others.json()["load_of_the_root"] < 0.2
