"""No command line ends in a traceback or in exit code 70 beside a running domain, or stops it.

The cases are spread over all workers, each with a domain of its own: most of their time is spent waiting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import driver, sweep

COMMANDS = dict(sweep.commands())
STOPS = ("down",)
EVERY = int(os.environ.get("SWEEP_EVERY", "3"))  # one of so many of the 18,000 lines is tried
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.may_leak("files", reason="the first use of Proton opens a pipe for the process"),
    # An interrupted command leaves pipes of its workers to the end of its process, which is this one.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def _start(home: Path) -> Path:
    started = driver.run("up", "--detach", "--timeout", "120s", home=driver.init(home))
    assert started.code == 0, started.err
    return home


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = _start(tmp_path_factory.mktemp("running") / "home")
    yield home
    driver.run("down", home=home)


@pytest.mark.parametrize("path", sorted(set(COMMANDS) - sweep.serving(COMMANDS) - {STOPS}), ids=" ".join)
def test_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch, running):
    monkeypatch.chdir(tmp_path)
    failures = sweep.failures(path, COMMANDS[path], running, tmp_path, every=EVERY, mixed=20)
    assert not failures, "\n".join(failures)
    status = driver.quick("status", home=running)
    assert status.code == 0, f"the domain is not up any more: {status.out} {status.err}"


def test_every_line_that_stops_the_domain_ends_with_a_message(tmp_path, monkeypatch):
    home = _start(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    failures = sweep.failures(STOPS, COMMANDS[STOPS], home, tmp_path, every=EVERY, mixed=20)
    assert not failures, "\n".join(failures)
    assert driver.run("down", home=home).code == 0
