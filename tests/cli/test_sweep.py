"""No command line ends in a traceback or in exit code 70, which stands for a bug."""

from __future__ import annotations

import random
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
import pytest

from muster.core import errors
from tests.cli import driver, sweep

BUG = errors.InvariantViolation.exit_code
PATIENCE_S = 10.0  # then a command that serves, or waits, is interrupted
COMMANDS = dict(sweep.commands())
SERVES = {"web serve", "pipeline"}  # with a home they serve until they are interrupted, or start Spark


def _serving() -> set[tuple[str, ...]]:
    return {path for path in COMMANDS if SERVES & {path[0], " ".join(path)}}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupts a command that runs until Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _sweep(
    path: tuple[str, ...], command: click.Command, home: Path, folder: Path, *, every: int, mixed: int
) -> list[str]:
    """The command lines that fail, with their messages; one of ``every`` line is tried."""
    rng = random.Random(" ".join(path))
    failures = []
    for number, words in enumerate(sweep.lines(path, command, sweep.files(folder), rng, mixed)):
        if number > 1 and number % every:
            continue
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        try:
            answer = driver.quick(*words, home=home)
        except BaseException as error:  # noqa: BLE001  (whatever escapes is a finding)
            failures.append(f"{words}: {type(error).__name__}: {error}")
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if answer.code == BUG or "Traceback" in answer.err:
            failures.append(f"{words}: {answer.code}: {answer.err[:300]}")
    return failures


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
@pytest.mark.usefixtures("interrupted")
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
@pytest.mark.usefixtures("interrupted")
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
@pytest.mark.timeout(3600)
@pytest.mark.may_leak("files", reason="the first use of Proton opens a pipe for the process")
@pytest.mark.parametrize("path", sorted(set(COMMANDS) - _serving()), ids=" ".join)
@pytest.mark.usefixtures("interrupted")
def test_with_a_running_domain_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch, running):
    monkeypatch.chdir(tmp_path)
    failures = _sweep(path, COMMANDS[path], running, tmp_path, every=1, mixed=20)
    assert not failures, "\n".join(failures)


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
