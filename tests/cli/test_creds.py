"""``muster creds issue`` without a running domain."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli import driver


@pytest.fixture
def home(muster: driver.InProcess, tmp_path: Path) -> Path:
    assert muster("init", "--home", tmp_path / "home").code == 0
    return tmp_path / "home"


def test_a_permission_that_subjects_cannot_express_is_refused(muster, home):
    answer = muster("creds", "issue", "meter", "--topic", "Region=north,Kind=meter", "--home", home)
    assert answer.code == 2
    assert "cannot be a permission" in answer.err
    assert "semicolons" in answer.err
    assert muster("creds", "show", "meter", "--home", home).code == 4  # nothing was issued
    for name, topic in (("both", "Kind=meter;Region=north"), ("one", "Region=north")):
        assert muster("creds", "issue", name, "--topic", topic, "--home", home).code == 0


def test_credentials_written_over_a_readable_file_are_private(muster, home, tmp_path):
    to = tmp_path / "ann.creds"
    to.write_text("old")
    to.chmod(0o644)
    assert muster("creds", "issue", "ann", "--to", to, "--home", home).code == 0
    assert "NKEY" in to.read_text()
    assert stat.S_IMODE(to.stat().st_mode) == 0o600
