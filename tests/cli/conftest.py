from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import driver


@pytest.fixture
def muster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> driver.InProcess:
    return driver.InProcess(monkeypatch, capsys, tmp_path)
