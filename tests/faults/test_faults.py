"""A short run of the harness: one broker is killed, then frozen, and every guarantee holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_guarantee_holds_while_a_broker_is_killed_and_frozen(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": f"{table.ROOT / 'src'}:{table.ROOT}"}
    options = ["--nemesis", "kill-broker,freeze-broker", "--seconds", "8"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults", "run", str(tmp_path), *options],
        cwd=table.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
