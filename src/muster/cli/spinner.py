"""The spinner of a command that has been silent for a second.

Commands that know their steps show a progress bar or a spinner of their own (`output.Printer`).  Any command
can be slow before that: it loads libraries, connects to a domain under load, or starts a service.  `shown`
therefore waits for the first output of a command; after `DELAY_S` without any it shows the name of the
command and the time that has passed.  The line is removed before the command writes or reads the first time.

The spinner uses neither locks nor other modules, so that it does not disturb a command that forks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY_S = 1.0
FRAME_S = 0.1
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
STREAMS = ("stdin", "stdout", "stderr")

#: What a command may ask of a stream without reading or writing.
_HARMLESS = frozenset(("isatty", "flush", "encoding", "errors", "closed", "mode", "name"))


class _Watched:
    """A standard stream that calls ``first`` before it is used."""

    def __init__(self, stream: Any, first: Callable[[], None]) -> None:
        self._stream = stream
        self._first = first

    def __getattr__(self, name: str) -> Any:
        if name not in _HARMLESS:
            self._first()
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        self._first()
        return iter(self._stream)


class _Spinner:
    def __init__(self, text: str, descriptor: int) -> None:
        self._text = text
        self._descriptor = descriptor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="spinner", daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        began = time.monotonic()
        number = 0
        pause_s = DELAY_S
        while not self._over.wait(pause_s):
            frame = FRAMES[number % len(FRAMES)]
            self._draw(f"{frame} {self._text} … {time.monotonic() - began:.0f} s")
            number += 1
            pause_s = FRAME_S
        if number:
            self._draw("")

    def _draw(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            os.write(self._descriptor, f"\r{line}\x1b[K".encode())

    def stop(self) -> None:
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Show ``text`` on the terminal of stderr until the command writes or reads the first time."""
    originals = {name: getattr(sys, name) for name in STREAMS}
    descriptor = os.dup(sys.stderr.fileno())  # the command may redirect its own
    spinner = _Spinner(text, descriptor)

    def end() -> None:
        spinner.stop()
        for name, stream in originals.items():
            if isinstance(getattr(sys, name), _Watched):
                setattr(sys, name, stream)

    for name, stream in originals.items():
        setattr(sys, name, _Watched(stream, end))
    try:
        yield
    finally:
        end()
        os.close(descriptor)
