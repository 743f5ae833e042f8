"""The log of password checks: one file, through which the processes of a domain share one throttle.

Each process appends the attempts that it checked, and before each check reads what has been appended since,
by itself or by another process. So a client has one budget over web, SOAP and all AMQP gateways that share
the domain's folder, and a restart does not reset it.

The first line of the file names its generation. A file that is too long is replaced by one of a new
generation with only the attempts that still count, and readers start again.

Simultaneous attempts in two processes are not visible to each other: each may check one more password of an
address than the budget has. If the file cannot be used, each process counts by itself.

Blocking: call it in a thread.
"""

from __future__ import annotations

import pathlib
import secrets
import threading

import msgspec

from muster.core import files
from muster.trust import private_files
from muster.trust.login import throttle

BYTES_MAX = 2 << 20  # far more than the attempts that count, but in an attack

_HEAD = 33  # bytes of the first line
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(throttle.LoginAttempt).decode


class AttemptLog:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._reading = threading.Lock()
        self._generation = b""
        self._offset = 0

    def read(self) -> tuple[bool, list[throttle.LoginAttempt]]:
        """The attempts appended since the last call; True: this is the complete content, and replaces the
        previous one."""
        with self._reading:
            try:
                with self._path.open("rb") as file:
                    generation = file.read(_HEAD)
                    begins = generation != self._generation
                    if begins:
                        self._generation, self._offset = generation, len(generation)
                    file.seek(self._offset)
                    data = file.read(2 * BYTES_MAX)
            except FileNotFoundError:
                begins, data = bool(self._generation), b""
                self._generation, self._offset = b"", 0
            complete = data[: data.rfind(b"\n") + 1]
            self._offset += len(complete)
        return begins, _attempts(complete)

    def append(self, attempt: throttle.LoginAttempt, counts_from_s: float, known_from_s: float) -> None:
        """Remove attempts before these times, for wrong and right passwords."""
        private_files.make_folder(self._path.parent)
        with private_files.locked(self._path.parent):
            if not self._path.exists() or self._path.stat().st_size > BYTES_MAX:
                self._replace(counts_from_s, known_from_s)
            files.append_line(self._path, _encode(attempt))

    def _replace(self, counts_from_s: float, known_from_s: float) -> None:
        data = self._path.read_bytes()[_HEAD:] if self._path.exists() else b""
        wrong: list[throttle.LoginAttempt] = []
        right: dict[tuple[str, str], throttle.LoginAttempt] = {}
        for attempt in _attempts(data):
            if attempt.outcome == "wrong" and attempt.at_s >= counts_from_s:
                wrong.append(attempt)
            elif attempt.outcome == "right" and attempt.at_s >= known_from_s:
                right.pop((attempt.account, attempt.address), None)
                right[attempt.account, attempt.address] = attempt
        kept = [*wrong, *list(right.values())[-throttle.KNOWN_MAX :]]
        data = _lines(kept)
        while len(data) > BYTES_MAX // 2:
            kept = kept[len(kept) // 2 :]
            data = _lines(kept)
        files.write(self._path, secrets.token_hex(_HEAD // 2).encode() + b"\n" + data)


def _lines(kept: list[throttle.LoginAttempt]) -> bytes:
    return b"".join(_encode(attempt) + b"\n" for attempt in kept)


def _attempts(data: bytes) -> list[throttle.LoginAttempt]:
    attempts = []
    for line in data.splitlines():
        try:
            attempts.append(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):  # a process ended while it wrote
            continue
    return attempts
