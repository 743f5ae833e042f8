"""Completion of the names of a running domain, in real shells, and `muster watch`."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from muster.cli import live_names
from muster.core import errors
from tests import debian
from tests.cli import driver

MANIFEST = """
resources:
  - {name: web-1, type: process, agent: local, config: {command: [sleep, "3600"]}}
  - {name: web-2, type: process, agent: local, labels: {team: red}, config: {command: [sleep, "3600"]}}
"""
WAIT_S = 60.0
PATIENT = f"from muster.cli import live_names, main; live_names.PATIENCE_S = {WAIT_S}; main.main()"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A domain with two resources, a queue, a context, a login and subscribed topics."""
    home = driver.init(tmp_path_factory.mktemp("completed") / "home")
    assert driver.run("up", "--detach", home=home).code == 0
    for words in (
        ("apply", "-f", "-", "--wait", "60s"),
        ("message", "send", "queue:orders", "four chairs"),
        ("inform", "put", "servers/web", "north"),
    ):
        answer = driver.quick(*words, home=home, stdin=MANIFEST)
        assert answer.code == 0, answer.err
    made = driver.quick("web", "password", "ann", home=home, stdin="a long enough secret")
    assert made.code == 0, made.err
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(
                subprocess.Popen(
                    driver.command_line("sub", topic),
                    env=driver.environment(home),
                    stdout=subprocess.DEVNULL,
                )
            )
            for topic in ("chairs/>", "chairs/red")
        ]
        driver.wait_until(lambda: len(completed("muster sub ch", home)) == len(listeners))
        yield home
        for listener in listeners:
            listener.send_signal(signal.SIGINT)
    assert driver.quick("delete", "web-1", "web-2", "--wait", "60s", home=home).code == 0
    driver.run("down", home=home)


def completed(line: str, home: Path) -> list[str]:
    """What the script of bash gets for a line; nothing may go to stderr, which is the user's prompt.

    It waits for the domain longer than a user would: a busy machine does not change the result.
    """
    done = subprocess.run(
        [sys.executable, "-c", PATIENT],
        env=driver.environment(home, _MUSTER_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "names"),
    {
        "muster describe ": ["machine", "web-1", "web-2"],
        "muster describe machine l": ["local"],
        "muster get web-1 web-": ["web-1", "web-2"],
        "muster watch web-2": ["web-2"],
        "muster exec web-1 re": ["restart"],
        "muster exec --where \"name = 'web-1'\" sig": ["signal"],
        "muster rollout start web-1 re": ["restart"],
        "muster drain l": ["local"],
        "muster sub ch": ["chairs/>", "chairs/red"],
        "muster pub ch": ["chairs/red"],
        "muster request ch": ["chairs/red"],
        "muster creds issue someone --topic ch": ["chairs/>", "chairs/red"],
        "muster message browse ": ["orders"],
        "muster message send q": ["queue:", "queue:orders"],
        "muster message receive queue:o": ["queue:orders"],
        "muster message send topic:c": ["topic:chairs/red"],
        "muster inform get serv": ["servers/web"],
        "muster creds show ad": ["admin"],
        "muster web password a": ["ann"],
        "muster web forget ": ["ann"],
        "muster web token create ": ["ann"],
        "muster web token list ": ["ann"],
        "muster gateway password a": ["ann"],
        "muster chaos kill agent": ["agent-local"],
        "muster describe nothing-like-it": [],
    }.items(),
)
def test_names_of_the_running_domain_are_offered(line, names, up):
    assert completed(line, up) == names


def test_a_completion_leaves_no_record_in_the_activity_log(up):
    assert completed("muster exec web-1 re", up) == ["restart"]
    assert driver.quick("exec", "web-1", "start", home=up).code == 0
    reasons = [record["why"] for record in driver.quick("activity", "-o", "json", home=up).json()]
    assert "admin requested start" in reasons
    assert "admin requested enumerate" not in reasons


def test_a_domain_that_does_not_run_offers_nothing(tmp_path):
    for line in ("muster describe ", "muster sub ", "muster message send q", "muster creds show "):
        assert completed(line, tmp_path / "none") == []
    stopped = driver.init(tmp_path / "stopped")
    assert completed("muster describe ", stopped) == []


LOAD = {
    "bash": ("--norc", "-i"),
    "zsh": ("-f", "-i"),
    "fish": ("--no-config", "-i"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", LOAD)
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("muster describe web-1\t", "describe web-1"),
        ("muster exec web-2 rest\t", "exec web-2 restart"),
        ("muster message browse or\t", "message browse orders"),
        ("muster message browse --where 'a = 1' or\t", "message browse --where a = 1 orders"),
        ("muster message purge --where=a or\t", "message purge --where=a orders"),
        ("muster message receive queue:o\t", "message receive queue:orders"),
        ("muster sub chairs/r\t", "sub chairs/red"),
        ("muster web forget a\t", "web forget ann"),
    ],
)
def test_a_real_shell_completes_them(shell, typed, line, up, tmp_path):
    """A program `muster` that prints its words, except where the shell asks it for completions."""
    if shell != "bash":
        debian.SHELLS.require()
    program = tmp_path / "muster"
    replied = tmp_path / "replied"
    real = shlex.join([sys.executable, "-c", PATIENT])
    completes = f'[ -n "$_MUSTER_COMPLETE" ] && {{ {real} "$@"; touch {replied}; exit; }}'
    program.write_text(f'#!/bin/sh\n{completes}\necho "ran: $*"\n')
    program.chmod(0o755)
    script = tmp_path / f"completion.{shell}"
    script.write_text(driver.quick("completion", shell).out)
    extra = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
    prepare = "autoload -U compinit; compinit -u -D; " if shell == "zsh" else ""
    output = _type(
        [shutil.which(shell) or shell, *LOAD[shell]],
        driver.environment(up, **extra),
        f"{prepare}source {script}; echo loa''ded\n",
        typed,
        replied,
    )
    assert f"ran: {line}" in output, output


def _type(command: list[str], environment: dict[str, str], prepare: str, typed: str, replied: Path) -> str:
    """Type into an interactive shell on a terminal; Enter follows when the file ``replied`` is there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment)
    text = ""
    try:
        text += _read(terminal, lambda text: "loaded" in text, send=prepare)
        text += _read(terminal, lambda _: replied.exists(), send=typed, quiet_s=2.0)
        text += _read(terminal, lambda text: "ran: " in text, send="\r")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def _read(terminal: int, is_done, *, send: str, quiet_s: float = 0.5) -> str:
    """What the shell prints after ``send``, until it is done and then quiet."""
    os.write(terminal, send.encode())
    text, deadline = "", time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], quiet_s)[0]:
            try:
                text += os.read(terminal, 65_536).decode(errors="replace")
            except OSError:  # the shell has ended
                break
        elif is_done(text):
            break
    return text


def test_watch_prints_the_changes_of_the_named_resources_that_match(up):
    """Of two killed resources only the named one is printed, and only its chosen states."""
    words = {
        "named": ("watch", "web-1"),
        "matching": ("watch", "--where", "name = 'web-2' AND team = 'red' AND state = 'up'"),
        "both": ("watch", "web-1", "web-2", "--where", "state <> 'up'"),
    }
    watching = {
        name: subprocess.Popen(
            driver.command_line("-o", "json", *line),
            env=driver.environment(up),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, line in words.items()
    }
    lines: dict[str, list[str]] = {name: [] for name in words}

    def look() -> bool:
        for name in ("web-1", "web-2"):
            driver.quick("exec", name, "signal", "--argument", "number=9", home=up)
        for name, process in watching.items():
            assert process.stdout is not None
            while select.select([process.stdout], [], [], 0.3)[0] and (line := process.stdout.readline()):
                lines[name].append(line)
        return all(lines.values())

    try:
        driver.wait_until(look, timeout_s=120)
    finally:
        for process in watching.values():
            process.terminate()
            process.communicate()
    assert {row for line in lines["named"] for row in re.findall(r'"resource": "([^"]+)"', line)} == {"web-1"}
    assert all('"resource": "web-2"' in line and '"state": "up"' in line for line in lines["matching"])
    assert not any('"state": "up"' in line for line in lines["both"])


def test_watch_refuses_a_predicate_that_cannot_be_read(up):
    answer = driver.quick("watch", "--where", "state = ", home=up)
    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize(
    ("line", "similar"),
    {
        "describe wbe-1": "web-1",
        "get web-1 web2": "web-2",
        "exec wbe-2 restart": "web-2",
        "inform get servers/wbe": "servers/web",
        "drain locl": "local",
        "creds show adminn": "admin",
        "message browse ordres": "orders",
        "message purge ordres": "orders",
        "message move queue:ordres --to queue:later": "orders",
        "web forget anm": "ann",
    }.items(),
)
def test_a_misspelt_name_is_followed_by_a_similar_one(line, similar, up, monkeypatch):
    monkeypatch.setattr(live_names, "PATIENCE_S", WAIT_S)
    answer = driver.quick(*line.split(), home=up)
    assert answer.code == errors.NotFound.exit_code
    assert re.search(rf"hint: did you mean .*\b{similar}\b.*\?", answer.err), answer.err


def test_a_name_that_exists_is_no_hint():
    """An alert is named by its rule and what it is about: only one of them may be wrong."""
    rule = click.Argument(["rule"], shell_complete=lambda *_: ["silent", "silence"])
    context = click.Context(click.Command("resolve", params=[rule]))
    context.params = {"rule": "silent"}
    assert live_names.similar_to(context, "no alert of 'silent'") == "did you mean silence?"


def test_a_name_unlike_all_others_has_no_hint(up):
    assert "hint" not in driver.quick("describe", "nothing-like-it", home=up).err
