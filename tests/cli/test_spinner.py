"""A command that is silent for a while shows that it works, on a terminal only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from muster.cli import command, main
from tests.cli import driver

#: A command that works until the file is opened for writing. Then it prints, reads or fails.
PROGRAM = """
import sys
import click
from muster.cli import command, main, spinner
from muster.cli.tool import profile
spinner.DELAY_S = 0.05

@profile.profile.command("probe")
@click.argument("gate")
@click.argument("end")
@command.pass_invocation
def probe(invocation, gate, end):
    open(gate).read()
    if end == "print":
        invocation.printer.done({"answer": 42}, "the answer is 42")
    elif end == "prompt":
        click.echo(f"hello {click.prompt('name')}")
    elif end == "read":
        click.echo(f"read {sys.stdin.readline().strip()}")
    else:
        raise click.UsageError("no such end")

sys.exit(main.call())
"""


class Terminal:
    """A program at a terminal, and what a person sees there."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self._near, far = pty.openpty()
        clean = {**driver.environment(), "TERM": "xterm", "NO_COLOR": "", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "profile", "probe", *map(str, arguments)],
            env=clean,
            stdin=far,
            stdout=far,
            stderr=far,
        )
        os.close(far)
        self.seen = ""

    def read_until(self, text: str) -> None:
        while text not in self.seen:
            self._read()

    def _read(self) -> None:
        piece = os.read(self._near, 65536)
        assert piece, self.seen
        self.seen += piece.decode()

    def write(self, text: str) -> None:
        os.write(self._near, text.encode())

    def read_to_end(self) -> str:
        try:
            while True:
                self._read()
        except OSError:  # the program closed the terminal
            self.process.wait(timeout=30)
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._near)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture
def terminal(gate: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    program = Terminal(gate, *request.param)
    yield program
    program.close()


def screen(seen: str) -> list[str]:
    """The lines that stay: a carriage return and an erased line remove what was drawn before."""
    lines = seen.replace("\r\n", "\n").strip("\n").split("\n")
    return [line.rpartition("\r\x1b[K")[2].strip() for line in lines]


@pytest.mark.parametrize(
    ("terminal", "shown", "reply", "expected"),
    [
        (["print"], "42", "", ["the answer is 42"]),
        (["prompt"], "name: ", "ann\n", ["name: ann", "hello ann"]),
        (["read"], "\r\x1b[K", "a line\n", ["a line", "read a line"]),
    ],
    indirect=["terminal"],
    ids=["print", "prompt", "read"],
)
def test_a_silent_command_shows_its_name_and_the_time_until_it_writes_or_reads(
    terminal: Terminal, gate: Path, shown: str, reply: str, expected: list[str]
):
    terminal.read_until("muster profile probe … 0 s")
    gate.write_text("")
    terminal.read_until(shown)
    terminal.write(reply)
    assert screen(terminal.read_to_end()) == expected
    assert terminal.process.returncode == 0


@pytest.mark.parametrize("terminal", [["fail"]], indirect=True)
def test_the_spinner_is_removed_before_an_error(terminal: Terminal, gate: Path):
    terminal.read_until("muster profile probe … 0 s")
    gate.write_text("")
    lines = screen(terminal.read_to_end())
    assert "no such end" in lines[0]
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "environment"), [(("-o", "json"), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})]
)
def test_no_spinner_for_programs_or_without_colours(gate: Path, options, environment):
    program = Terminal(gate, "print", *options, **environment)
    try:
        gate.write_text("")
        seen = program.read_to_end()
    finally:
        program.close()
    assert "…" not in seen
    assert "42" in seen


def test_without_a_terminal_only_the_data_is_written(gate: Path):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "profile", "probe", gate, "print"],
        env={**driver.environment(), "NO_COLOR": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    gate.write_text("")
    assert program.communicate(timeout=30) == ("the answer is 42\n", "")


def test_all_commands_have_it():
    """The spinner belongs to `command.MusterCommand`."""

    def leaves(group: click.Command) -> Iterator[click.Command]:
        if isinstance(group, click.Group):
            context = click.Context(group)
            for name in group.list_commands(context):
                inner = group.get_command(context, name)
                assert inner is not None
                yield from leaves(inner)
        else:
            yield group

    commands = list(leaves(main.muster))
    assert len(commands) > 100
    assert [inner.name for inner in commands if not isinstance(inner, command.MusterCommand)] == []
