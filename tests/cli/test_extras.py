"""Commands whose optional dependencies are missing: the error names the extra, and the others work."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from muster.cli import extras
from muster.core import errors

ROOT = Path(__file__).parents[2]
MODULES = {
    "python-qpid-proton": {"proton", "cproton"},
    "protobuf": {"google"},
    "pyjwt": {"jwt"},
    "pytest-asyncio": set(),
    "blockbuster": set(),
}

#: Runs a command line in a process in which the optional modules cannot be imported.
WITHOUT = """
import sys

sys.modules.update(dict.fromkeys({modules!r}))  # None: it cannot be imported
from muster.cli import main
sys.exit(main.call(sys.argv[1:]))
"""


def declared() -> dict[str, set[str]]:
    """The modules of each extra, as pyproject.toml declares them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras_by_module = {}
    for extra, requirements in project["optional-dependencies"].items():
        names = [re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in requirements]  # type: ignore[index]
        extras_by_module[extra] = set().union(*(MODULES.get(name, {name}) for name in names))
    return extras_by_module


def test_each_optional_module_is_listed_with_an_extra_that_installs_it():
    of_extra = declared()
    indirect = {"numpy"}  # pyarrow's and numba's
    assert set(extras.EXTRAS) - indirect == set().union(*of_extra.values())
    assert {
        m for m, extra in extras.EXTRAS.items() if m not in indirect and m not in of_extra[extra]
    } == set()


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("run channel --server nats://127.0.0.1:1", "monitor"),
        ("run sensor --server nats://127.0.0.1:1", "monitor"),
        ("history", "history"),
        ("run pipeline", "spark"),
        ("demo worm", "spark"),
        ("simulate sensors --server nats://127.0.0.1:1", "monitor"),
        ("run amqp", "amqp"),
    ],
)
def test_a_command_without_its_dependencies_names_the_extra(command, extra, tmp_path):
    done = _run(command.split(), tmp_path)
    assert done.returncode == errors.MissingDependency.exit_code, done.stderr
    assert f"pip install 'muster-fabric[{extra}]'" in done.stderr


@pytest.mark.parametrize("command", ["--help", "version", "init --home {home}", "config validate --help"])
def test_a_command_that_needs_none_works_without_any(command, tmp_path):
    done = _run(command.format(home=tmp_path / "home").split(), tmp_path)
    assert done.returncode == 0, done.stderr


def _run(arguments: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(modules=set(extras.EXTRAS))
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=place,
        env={"HOME": str(place), "PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
