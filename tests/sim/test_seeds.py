"""The simulated domain: a dozen short seeds here, a thousand long ones in the slow suite."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT_S = "10"


def simulate(*arguments: str, source: pathlib.Path = ROOT, timeout_s: float = 550) -> str:
    """Run the simulator in an interpreter of its own, whose hashes do not differ from run to run."""
    environment = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source}", "PYTHONHASHSEED": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.stdout


@pytest.mark.timeout(600)
def test_short_seeds_keep_every_guarantee():
    output = simulate("--count", "12", "--trouble-s", SHORT_S, "--quiet")
    assert ", 0 seeds with violations" in output, output


@pytest.mark.timeout(600)
def test_a_seed_is_a_run():
    first, second = (simulate("--seed", "3", "--trouble-s", SHORT_S) for _ in range(2))
    digest = re.search(r"trace (\w+)", first)
    assert digest is not None, first
    assert digest[0] in second
    assert first.splitlines()[-10:-3] == second.splitlines()[-10:-3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_thousand_seeds(first: int):
    output = simulate("--first", str(first), "--count", "100", "--quiet", timeout_s=1700)
    assert ", 0 seeds with violations" in output, output
