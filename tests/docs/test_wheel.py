"""The wheel of `make build`: complete, without other files, and usable without this tree."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging import requirements

import muster
from tests.docs import blocks

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
        points = opened.read(about["entry_points.txt"]).decode()
        metadata = opened.read(about["METADATA"]).decode()
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == tree
    assert "licenses/LICENSE" in about
    assert "muster = muster.__main__:main" in points
    assert "[pytest11]" in points
    assert "Requires-Python: >=3.11" in metadata


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and what it requires, without extras."""
    environment = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for distribution in required("muster-fabric"):
        for file in distribution.files or ():
            place, installed = Path(os.path.normpath(site / file)), Path(file.locate()).resolve()
            if place.is_relative_to(environment) and not place.exists() and installed.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(installed)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    return python


def required(name: str) -> list[importlib.metadata.Distribution]:
    """What a distribution requires, with what that requires, without extras."""
    known: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        for text in distribution.requires or ():
            requirement = requirements.Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in known:
                known[requirement.name] = importlib.metadata.distribution(requirement.name)
                waiting.append(requirement.name)
    return list(known.values())


def test_installed_it_works_without_this_tree(bare: Path, tmp_path: Path):
    def output(*arguments: str | Path) -> str:
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        return subprocess.run(
            arguments, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert output(bare, "-c", "import muster; print(muster.__file__)").startswith(str(bare.parents[1]))
    assert output(bare.with_name("muster"), "version").split()[:2] == ["muster", muster.__version__]
    assert output(bare.with_name("muster"), "config", "validate", "--help")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_readmes_first_screens_work_with_the_wheel_alone(bare: Path, tmp_path: Path):
    """Up to the guarantees, but for the demonstration of the whole loop, which needs Spark."""
    start = (ROOT / "README.md").read_text().partition("\n## Guarantees")[0]
    tried = [block for block in blocks.blocks(start) if not block.text.startswith("$ make demo")]
    assert {block.language for block in tried} == {"console", "python", "yaml"}
    async with blocks.Reader(tmp_path, python=bare) as reader:
        for block in tried:
            await reader.try_(block)
