"""Upgrades of four machines under load, back and forth: nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import network, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_machines_are_upgraded_one_after_the_other_under_load(tmp_path: Path):
    if reason := network.missing():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{table.ROOT / 'src'}:{table.ROOT}"}
    options = [
        "--nemesis",
        "failed-upgrade,rolling-upgrade",
        "--workload",
        "contexts,queues,events,resources",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults", "run", str(tmp_path), "--seconds", "5", *options],
        cwd=table.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
