"""The wheel of `make build`: complete, without other files, and usable without this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import muster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (made,) = folder.glob("muster_fabric-*.whl")
    return made


def test_it_contains_the_package_its_licence_and_its_entry_points(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2]: name for name in opened.namelist() if name not in names}
        doors = opened.read(about["entry_points.txt"]).decode()
        metadata = opened.read(about["METADATA"]).decode()
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "muster").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == tree
    assert "licenses/LICENSE" in about
    assert "muster = muster.__main__:main" in doors
    assert "[pytest11]" in doors
    assert "Requires-Python: >=3.11" in metadata


def test_installed_it_works_without_this_tree(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *install], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "HOME": str(tmp_path)}

    def say(*arguments: str) -> str:
        done = subprocess.run(
            arguments, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert say(sys.executable, "-c", "import muster; print(muster.__file__)").startswith(str(site))
    assert say(str(site / "bin" / "muster"), "version").split()[:2] == ["muster", muster.__version__]
    assert say(str(site / "bin" / "muster"), "config", "validate", "--help")
