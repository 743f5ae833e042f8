"""Calls every command of the installed `muster`: its help, and a line with plausible arguments.

    python -m tools.wheel_sweep        in the environment to check, with a running domain in MUSTER_HOME

Prints each line that ends as a defect does (a traceback, or the exit code of an internal error). A command
that serves or waits is ended after some seconds. Missing optional dependencies are not a defect: the command
names the extra then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from muster.cli import main
from muster.core import errors
from tests.cli import sweep

PATIENCE_S = 5.0
ENDS = ("down", "restore")  # they end the domain, or need a home without one


def lines() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = sweep.files(Path(folder))
        for path, command in sweep.commands():
            yield [*path, "--help"]
            if path[0] not in ENDS:
                _, plausible, *_ = sweep.lines(path, command, paths, random.Random(0), 0)
                yield plausible


def call(words: list[str]) -> tuple[int, str]:
    """The exit code and the output of a command, in a process of its own."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = main.call(words)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        ends_s = time.monotonic() + PATIENCE_S
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > ends_s:
                os.killpg(child, signal.SIGKILL)
                status = os.waitpid(child, 0)
                break
            time.sleep(0.02)
        output.seek(0)
        return os.waitstatus_to_exitcode(status[1]), output.read()


if __name__ == "__main__":
    for words in lines():
        code, text = call(words)
        fails = code == errors.InvariantViolation.exit_code or "Traceback" in text
        if fails or (words[-1] == "--help" and code):
            print(*words, f"exit code {code}:", " ".join(text[-500:].split()))
