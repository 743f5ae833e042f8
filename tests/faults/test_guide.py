"""docs/guides/three-machines.md, typed on hosts in network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import network, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_commands_of_the_guide_work_as_typed(tmp_path: Path):
    if reason := network.missing():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{table.ROOT / 'src'}:{table.ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.guide", str(tmp_path)],
        cwd=table.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
