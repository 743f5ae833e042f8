"""Run the command: inside this process (quick: parsing, errors) or as a process of its own (real)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli import main

if TYPE_CHECKING:
    import pytest  # the sweep of a wheel imports this module where it is not installed

SOURCE = Path(main.__file__).parents[2]
AGAIN_S = 60.0  # between two interrupts; the second one ends a command at once


@dataclass
class Answer:
    code: int
    out: str
    err: str
    was_interrupted: bool = False  # by a Ctrl-C after its time; a command that serves ends with 0 then

    def json(self) -> Any:
        return json.loads(self.out)


def wait_until(
    look: Callable[[], Any], *, timeout_s: float = 60.0, not_yet: tuple[type[Exception], ...] = ()
) -> Any:
    """The first true result of ``look``, for tests without an event loop (see `eventually`)."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(*not_yet):
            if result := look():
                return result
        assert time.monotonic() < deadline, f"it did not become true in {timeout_s:g} s"
        time.sleep(0.1)  # pace of looking


def environment(home: Path | None = None, **extra: str) -> dict[str, str]:
    """A user's environment with nothing of this machine's Muster in it, nor what hides a missing flush."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    clean.pop("PYTHONUNBUFFERED", None)
    clean |= {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}
    if home is not None:
        clean |= {"MUSTER_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "HOME": str(home)}
    return clean | extra


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "muster", *map(str, arguments)]


def run(*arguments: str | Path, home: Path | None = None, stdin: str = "", timeout_s: float = 150) -> Answer:
    """A real process."""
    done = subprocess.run(
        command_line(*arguments),
        input=stdin,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def _interrupted(patience_s: float, sent: list[signal.Signals]) -> Iterator[None]:
    """Ctrl-C after ``patience_s``, and again if that does not end the command. ``sent`` gets the signals."""

    def interrupt(*_: object) -> None:
        sent.append(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, patience_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # that of pytest-timeout, if it has one


def quick(
    *arguments: str | Path, home: Path | None = None, stdin: str = "", patience_s: float | None = None
) -> Answer:
    """The same as `run`, called as a function: saves the start of Python, most of a short command.

    ``patience_s``: a command that runs longer gets a Ctrl-C.
    """
    before, out, err = dict(os.environ), io.StringIO(), io.StringIO()
    sent: list[signal.Signals] = []
    os.environ.clear()
    os.environ.update(environment(home))
    was, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            words = [str(argument) for argument in arguments]
            with contextlib.nullcontext() if patience_s is None else _interrupted(patience_s, sent):
                code = main.call(words)
    except KeyboardInterrupt:  # after its end
        code = main.INTERRUPTED
    finally:
        sys.stdin = was
        os.environ.clear()
        os.environ.update(before)
    return Answer(code, out.getvalue(), err.getvalue(), was_interrupted=bool(sent))


def init(home: Path, settings: str = "[web]\nenabled = false\n") -> Path:
    """A home on free ports, by default without the web server, which takes half of the start."""
    made = quick("init", "--port", "0", home=home)
    assert made.code == 0, made.err
    with (home / "muster.toml").open("a") as file:
        file.write(f"\n{settings}")
    return home


class InProcess:
    """``muster`` called as a function, with its own streams and folders."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        self._capsys = capsys
        for name in [name for name in os.environ if name.startswith("MUSTER_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path / "user"))
        monkeypatch.chdir(tmp_path)

    def __call__(self, *arguments: str | Path) -> Answer:
        self._capsys.readouterr()
        code = main.call([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Answer(code, captured.out, captured.err)
