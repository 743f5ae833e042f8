"""Deliberate bugs, kept as patches: the simulator has to find each of them."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

from tests.sim import test_seeds

BUGS = sorted((pathlib.Path(__file__).parent / "bugs").glob("*.patch"))


def apply(patch: pathlib.Path, folder: pathlib.Path, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", *options, str(patch)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{patch.name} has to be made again: {done.stderr}"


def field(patch: pathlib.Path, name: str) -> str:
    """A line such as ``Parts: contexts`` of the text above the patch."""
    line = re.search(rf"^{name}: (.+)$", patch.read_text(), re.MULTILINE)
    assert line is not None, f"{patch.name} does not name its {name.lower()}"
    return line[1]


def test_there_are_twelve():
    assert len(BUGS) == 12


@pytest.mark.parametrize("patch", BUGS, ids=lambda patch: patch.stem)
def test_a_bug_still_applies(patch: pathlib.Path):
    apply(patch, test_seeds.ROOT, "--check")
    assert field(patch, "Parts")
    assert int(field(patch, "Seeds")) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("patch", BUGS, ids=lambda patch: patch.stem)
def test_a_bug_is_found(patch: pathlib.Path, tmp_path: pathlib.Path):
    shutil.copytree(test_seeds.ROOT / "src", tmp_path / "src")
    shutil.copytree(test_seeds.ROOT / "tests", tmp_path / "tests")
    apply(patch, tmp_path)
    output = test_seeds.simulate(
        "--parts",
        field(patch, "Parts"),
        "--count",
        field(patch, "Seeds"),
        "--stop",
        "--quiet",
        source=tmp_path,
        timeout_s=850,
    )
    assert "1 seeds with violations" in output, output
