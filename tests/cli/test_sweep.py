"""No command line ends in a traceback or in exit code 70, which stands for a bug."""

from __future__ import annotations

import os
import random
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from muster.cli import main
from muster.core import errors
from tests.cli import driver, sweep

BUG = errors.InvariantViolation.exit_code
PATIENCE_S = 10.0  # then a command that serves, or waits, is interrupted
#: A command that is known to wait is interrupted sooner, and later one of several of its lines is tried.
PATIENCE_AGAIN_S, WAITED_MAX, WAITED_EVERY = 0.3, 10, 5
EVERY = int(os.environ.get("SWEEP_EVERY", "3"))  # of the 18,000 lines with a running domain one of three
COMMANDS = dict(sweep.commands())
STOPS = ("down",)  # swept last
SERVES = {"web serve", "pipeline"}  # with a home they serve until they are interrupted, or start Spark


def _serving() -> set[tuple[str, ...]]:
    return {path for path in COMMANDS if SERVES & {path[0], " ".join(path)}}


def _sweep(
    path: tuple[str, ...], command: click.Command, home: Path, folder: Path, *, every: int, mixed: int
) -> list[str]:
    """The command lines that fail, with their messages; one of ``every`` line is tried."""
    rng = random.Random(" ".join(path))
    failures = []
    waited = 0
    for number, words in enumerate(sweep.lines(path, command, sweep.files(folder), rng, mixed)):
        if number > 1 and number % (every if waited < WAITED_MAX else every * WAITED_EVERY):
            continue
        try:
            patience_s = PATIENCE_AGAIN_S if waited else PATIENCE_S
            answer = driver.quick(*words, home=home, patience_s=patience_s)
        except BaseException as error:  # noqa: BLE001  (whatever escapes is a finding)
            failures.append(f"{words}: {type(error).__name__}: {error}")
            continue
        waited += answer.code == main.INTERRUPTED
        if answer.code == BUG or "Traceback" in answer.err:
            failures.append(f"{words}: {answer.code}: {answer.err[:300]}")
    return failures


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
@pytest.mark.may_leak("files", reason="the first use of Proton opens a pipe for the process")
def test_without_a_home_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failures = _sweep(path, COMMANDS[path], tmp_path / "none", tmp_path, every=13, mixed=2)
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose domain does not run."""
    return driver.init(tmp_path_factory.mktemp("stopped") / "home")


@pytest.mark.parametrize("path", sorted(set(COMMANDS) - _serving()), ids=" ".join)
def test_with_a_stopped_domain_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch, stopped):
    monkeypatch.chdir(tmp_path)
    failures = _sweep(path, COMMANDS[path], stopped, tmp_path, every=23, mixed=2)
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = driver.init(tmp_path_factory.mktemp("running") / "home")
    started = driver.run("up", "--detach", "--timeout", "120s", home=home)
    assert started.code == 0, started.err
    yield home
    driver.run("down", home=home)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_leak("files", reason="the first use of Proton opens a pipe for the process")
@pytest.mark.parametrize(
    "path", sorted(set(COMMANDS) - _serving(), key=lambda path: (path == STOPS, path)), ids=" ".join
)
def test_with_a_running_domain_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch, running):
    monkeypatch.chdir(tmp_path)
    failures = _sweep(path, COMMANDS[path], running, tmp_path, every=EVERY, mixed=20)
    assert not failures, "\n".join(failures)
    if path != STOPS:
        status = driver.quick("status", home=running)
        assert status.code == 0, f"the domain is not up any more: {status.out} {status.err}"


@pytest.mark.parametrize("server", ["", "x", "nats://", "http://[", "nats://127.0.0.1:99999", "tls://:1"])
def test_an_unusable_address_is_named(server, tmp_path):
    answer = driver.quick("get", "--server", server, home=tmp_path)
    assert answer.code not in (0, BUG), answer.err


def test_an_argument_that_is_no_text_is_refused(tmp_path):
    answer = driver.quick("pub", "orders", "\udcff", home=tmp_path)
    assert (answer.code, "is not valid UTF-8 text" in answer.err) == (2, True)


@pytest.mark.parametrize("command", ["apply", "plan", "diff"])
def test_a_manifest_that_is_no_text_is_named(command, tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    answer = driver.quick(command, "-f", tmp_path / "binary", home=tmp_path)
    assert (answer.code, "is not UTF-8 text" in answer.err) == (2, True), answer.err


def test_settings_of_init_have_their_types(tmp_path):
    home = tmp_path / "home"
    words = ("--set", "web.port=26080", "--set", "web.enabled=false", "--set", "bus.host=127.0.0.1")
    assert driver.quick("init", *words, home=home).code == 0
    settings = tomllib.loads((home / "muster.toml").read_text())
    assert settings["web"] == {"port": 26080, "enabled": False}
    assert settings["bus"]["host"] == "127.0.0.1"
    refused = driver.quick("init", "--set", "web.port=no", home=tmp_path / "other")
    assert refused.code == errors.InvalidInput.exit_code
    assert not (tmp_path / "other").exists()


def test_a_character_that_the_terminal_lacks_does_not_stop_a_command(tmp_path):
    home = driver.init(tmp_path / "é")
    environment = driver.environment(home, PYTHONIOENCODING="ascii")
    done = subprocess.run(
        driver.command_line("status"), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == errors.Unavailable.exit_code, done.stderr
    assert "\\xe9" in done.stdout
