"""The table of commands: complete, with the help of each command, which is imported only when it runs."""

from __future__ import annotations

import contextlib
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from muster.cli import command as cli_command
from muster.cli import main
from muster.core import errors
from tests.cli import driver
from tools.reference import cli as reference

COMMANDS = {tuple(context.command_path.split()[1:]): context.command for context in reference.walk()}


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_summary_in_the_table_is_the_command_s_own(name):
    command = COMMANDS[(name,)]
    assert (command.help or "").strip().split("\n")[0] == main.COMMANDS[name].summary


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples_and_the_common_options(path, muster):
    answer = muster(*path, "--help")
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert "--home" in answer.out
    assert "--output" in answer.out
    command = COMMANDS[path]
    assert isinstance(command, cli_command.MusterCommand | cli_command.MusterGroup)
    for line, _ in command.examples:
        assert line.startswith(("muster ", "echo ", "kill ")), line


def commands_in(line: str) -> Iterator[list[str]]:
    """The words of each ``muster …`` of a shell's line."""
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)", "x", line), posix=True, punctuation_chars="<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for token in (*lexer, "|"):
        if token in ("|", "&&"):
            if words[:1] == ["muster"]:
                yield words[1:]
            words = []
        elif token in ("<", ">", ">>"):
            skip = True
        elif skip:
            skip = False
        else:
            words.append(token)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_example_can_be_typed(path, muster, tmp_path):
    shown = COMMANDS[path]
    assert isinstance(shown, cli_command.MusterCommand)
    for line, _ in shown.examples:
        for word in shlex.split(line):
            if re.fullmatch(r"[\w-]+\.\w+", word):  # files that are to be there
                Path(word).touch()
        typed = list(commands_in(line))
        assert typed, line
        for words in typed:
            words = [word.replace("/safe/place", str(tmp_path)) for word in words]
            (tmp_path / "lab.tar.gz").touch()
            context: click.Context = main.muster.make_context(
                "muster", list(words), obj=cli_command.Invocation()
            )
            command: click.Command = main.muster
            while isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
                name, actual, rest = command.resolve_command(context, rest)
                assert actual is not None, line
                command = actual
                with contextlib.suppress(errors.MissingDependency):  # an extra that is not installed
                    context = actual.make_context(name, rest, parent=context)


def test_help_imports_no_command_and_nothing_heavy():
    listing = (
        "import sys; from muster.cli import main; main.call(['--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing], env=driver.environment(), capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    heavy = {"asyncio", "nats", "numpy", "rich", "yaml", "msgspec", "cryptography", "prometheus_client"}
    assert not heavy & loaded
    commands = {f"muster.cli.{entry.module}" for entry in main.COMMANDS.values()}
    assert not commands & loaded


def test_the_way_to_the_domain_imports_no_service(tmp_path):
    """Every command that connects takes it; the settings of all services would double its time."""
    home = driver.init(tmp_path / "home")
    listing = (
        "import sys; from muster.client import location\n"
        "from muster.core import errors\n"
        "try: location.find()\n"
        "except errors.Unavailable: print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", listing],
        env=driver.environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    services = {f"muster.{name}" for name in ("manage", "message", "inform", "notify", "pipeline", "web")}
    assert services.isdisjoint(done.stdout.split())
    assert "muster.app.home" in done.stdout.split()


def test_help_answers_quickly():
    """Under 300 ms on an idle machine; on a busy one, measured against what Python itself needs."""

    def took_s(*arguments: str) -> float:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], env=driver.environment(), stdout=subprocess.DEVNULL, check=True
        )
        return time.perf_counter() - began

    pairs = [(took_s("-c", "pass"), took_s("-m", "muster", "--help")) for _ in range(5)]
    best_s = min(ours for _, ours in pairs)
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    assert best_s < 0.3 or ratio < 15, f"{best_s * 1000:.0f} ms, {ratio:.1f} times `python -c pass`"
