"""No command line ends in a traceback or in exit code 70, which stands for a bug."""

from __future__ import annotations

import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from muster.core import errors
from tests.cli import driver, sweep

COMMANDS = dict(sweep.commands())


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
@pytest.mark.may_leak("files", reason="the first use of Proton opens a pipe for the process")
def test_without_a_home_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failures = sweep.failures(path, COMMANDS[path], tmp_path / "none", tmp_path, every=13, mixed=2)
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose domain does not run."""
    return driver.init(tmp_path_factory.mktemp("stopped") / "home")


@pytest.mark.parametrize("path", sorted(set(COMMANDS) - sweep.serving(COMMANDS)), ids=" ".join)
def test_with_a_stopped_domain_every_command_line_ends_with_a_message(path, tmp_path, monkeypatch, stopped):
    monkeypatch.chdir(tmp_path)
    failures = sweep.failures(path, COMMANDS[path], stopped, tmp_path, every=23, mixed=2)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("server", ["", "x", "nats://", "http://[", "nats://127.0.0.1:99999", "tls://:1"])
def test_an_unusable_address_is_named(server, tmp_path):
    answer = driver.quick("get", "--server", server, home=tmp_path)
    assert answer.code not in (0, sweep.BUG), answer.err


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


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_stop_a_command(closed, tmp_path):
    command = shlex.join(driver.command_line("creds", "list"))
    environment = driver.environment(driver.init(tmp_path / "home"))
    done = subprocess.run(
        f"{command} {closed}", shell=True, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr


def test_an_argument_is_utf_8_in_every_locale(tmp_path):
    other = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = driver.environment(tmp_path / "none", **other)
    done = subprocess.run(
        [argument.encode() for argument in driver.command_line("profile", "use", "café")],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "'caf\\xe9' cannot be a name" in done.stderr


def test_a_character_that_the_terminal_lacks_does_not_stop_a_command(tmp_path):
    home = driver.init(tmp_path / "é")
    environment = driver.environment(home, PYTHONIOENCODING="ascii")
    done = subprocess.run(
        driver.command_line("status"), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == errors.Unavailable.exit_code, done.stderr
    assert "\\xe9" in done.stdout
