"""A rolling upgrade of three machines under load: nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import network, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_machines_are_upgraded_one_after_the_other_under_load(tmp_path: Path):
    if reason := network.missing():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{table.ROOT / 'src'}:{table.ROOT}"}
    options = ["--nemesis", "rolling-upgrade", "--workload", "contexts,queues,events,resources"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults", "run", str(tmp_path), "--seconds", "5", *options],
        cwd=table.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
