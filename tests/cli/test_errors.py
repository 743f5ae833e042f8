"""Errors are on stderr with a hint, and the exit code gives their kind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from typing import Any

import pytest

from muster import __version__
from muster.cli import main, output
from muster.core import errors
from tests.cli import driver


def test_the_version_is_printed(muster):
    answer = muster("--version")
    assert (answer.code, answer.out) == (0, f"muster {__version__}\n")


def test_a_misspelt_command_is_answered_with_the_nearest(muster):
    answer = muster("conifg")
    assert answer.code == 2
    assert "Did you mean 'config'?" in answer.err
    assert "hint: see `muster --help`" in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ("queue",),
            "did you mean `muster message` (Send, receive and browse JMS",
        ),
        (("stop",), "`muster down` (Stop the domain of a home)"),
        (("message", "list"), "its commands are udp, send, receive,"),
    ],
)
def test_a_command_that_resembles_none_is_answered_with_those_about_it(muster, words, hint):
    answer = muster(*words)
    assert answer.code == 2
    assert hint in answer.err


def test_a_misspelt_choice_is_answered_with_the_nearest(muster):
    answer = muster("creds", "issue", "ann", "--role", "oprator")
    assert answer.code == 2
    assert "Did you mean 'operator'?" in answer.err
    assert "Did you mean 'monitoring'?" in muster("up", "--with", "web,montoring").err
    assert "Did you mean" not in muster("creds", "issue", "ann", "--role", "zzz").err


def test_an_unknown_option_names_the_page_that_helps(muster):
    answer = muster("config", "print", "--wat")
    assert answer.code == 2
    assert "muster config print --help" in answer.err


def test_without_a_home_the_error_names_the_command_that_creates_it(muster, tmp_path):
    answer = muster("config", "print", "--home", tmp_path / "none")
    assert answer.code == errors.NotFound.exit_code
    assert f"hint: create one with `muster init --home {tmp_path / 'none'}`" in answer.err


def test_with_json_output_the_error_is_json_too(muster, tmp_path):
    answer = muster("-o", "json", "config", "print", "--home", tmp_path / "none")
    load = json.loads(answer.err)["error"]
    assert load["code"] == "not-found"
    assert "muster init" in load["hint"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--creds", "not a credentials file: it is not UTF-8 text"),
        ("--ca", "not a certificate in PEM format"),
    ],
)
def test_a_file_of_bytes_is_not_an_option_of_a_connection(muster, tmp_path, option, message):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)))
    answer = muster("get", "--server", "nats://127.0.0.1:9", option, file)
    assert (answer.code, answer.err) == (errors.InvalidInput.exit_code, f"error: {file}: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "stream", "code"),
    [
        (["version"], "stdout", errors.LimitExceeded.exit_code),
        (["-o", "json", "version"], "stdout", errors.LimitExceeded.exit_code),
        (["conifg"], "stderr", errors.InvalidInput.exit_code),
    ],
)
def test_a_full_disk_below_a_stream_changes_no_exit_code_to_that_of_a_bug(arguments, stream, code):
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        program = subprocess.Popen(
            driver.command_line(*arguments), env=driver.environment(), text=True, **streams
        )
        out, err = program.communicate(timeout=60)
    assert program.returncode == code
    assert "Traceback" not in f"{out}{err}"


def test_a_secret_is_not_read_from_a_file_without_end(muster):
    answer = muster("secret", "set", "large", "--file", "/dev/zero")
    assert answer.code == errors.LimitExceeded.exit_code
    assert answer.err == "error: a secret has at most 65536 bytes\n"


@pytest.mark.parametrize("number", ["nan", "inf", "0", "-1"])
def test_an_amount_is_a_positive_number(muster, number):
    answer = muster("capacity", "--cores", number)
    assert answer.code == errors.InvalidInput.exit_code
    assert "--cores" in answer.err


def test_a_timeout_without_a_message_is_described():
    error = main.from_os_error(TimeoutError())
    assert (error.code, error.exit_code) == (errors.TimedOut.code, 5)
    assert error.message


@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [
        (errno.ENOSPC, errors.LimitExceeded, "no space left"),
        (errno.EACCES, errors.Forbidden, "permission denied"),
        (errno.EADDRINUSE, errors.Unavailable, "in use"),
        (errno.ENOENT, errors.NotFound, "no such file"),
    ],
)
def test_errors_of_the_operating_system_are_described(number, kind, word):
    error = main.from_os_error(OSError(number, os.strerror(number), "/some/file"))
    assert type(error) is kind
    assert word in error.message
    assert "/some/file" in error.message


def run_a_command_that(raises: BaseException, muster, monkeypatch, *options: str) -> driver.Answer:
    def fail(*_: object) -> None:
        raise raises

    monkeypatch.setattr(output.Printer, "facts", fail)
    answer: driver.Answer = muster("version", *options)
    return answer


def test_a_bug_is_reported_as_such_without_a_traceback(muster, monkeypatch):
    answer = run_a_command_that(ZeroDivisionError("oh"), muster, monkeypatch)
    assert answer.code == 70
    assert "Traceback" not in answer.err
    assert "this is a bug in Muster: run it again with --debug" in answer.err


def test_text_that_is_not_unicode_is_an_error_of_the_input(muster, monkeypatch):
    with pytest.raises(UnicodeEncodeError) as caught:
        "\ud800".encode()
    answer = run_a_command_that(caught.value, muster, monkeypatch)
    assert answer.code == errors.InvalidInput.exit_code
    assert r"\ud800 is not a character" in answer.err


def test_a_variable_that_is_not_unicode_is_refused(muster, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "/\udcff")  # short: an error shows the beginning of a text
    answer = muster("init")
    assert answer.code == errors.InvalidInput.exit_code
    assert r"\udcff' is not valid UTF-8 text" in answer.err


def test_debug_shows_the_traceback(muster, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_a_command_that(ZeroDivisionError("oh"), muster, monkeypatch, "--debug")


def test_a_parse_error_points_at_the_character(muster, monkeypatch):
    fault = errors.ParseError("expected a value", text="a = ", position=3)
    answer = run_a_command_that(fault, muster, monkeypatch)
    assert answer.code == 2
    assert "    a = \n       ^" in answer.err


def test_an_interrupt_has_its_own_code(muster, monkeypatch):
    assert run_a_command_that(KeyboardInterrupt(), muster, monkeypatch).code == main.INTERRUPTED


def test_a_reader_that_goes_away_is_not_an_error():
    """As in ``muster completion bash | head -1``: no complaint, no traceback."""
    writer = subprocess.Popen(
        driver.command_line("completion", "bash"),
        env=driver.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout is not None
    writer.stdout.close()
    _, err = writer.communicate(timeout=30)
    assert err == b""
    assert writer.returncode == 0


def test_a_token_given_in_place_of_its_file_is_not_printed(muster, tmp_path):
    secret = "eyJ" + "a" * 300
    answer = muster("join", secret, "--home", str(tmp_path / "other"))
    assert answer.code == 4
    assert secret not in answer.err
    assert "'-' reads the token itself from stdin" in answer.err
    assert "t: no such file" in muster("join", "t", "--home", str(tmp_path / "other")).err


def test_a_destination_without_its_kind_is_shown_with_one(muster):
    assert "such as queue:orders" in muster("message", "send", "orders", "x").err
    assert "such as queue:orders" in muster("message", "send", "queu:orders", "x").err
