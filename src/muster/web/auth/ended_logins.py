"""Logins that were ended before they expired, in one file that all web processes of the domain share.

A session is valid by its seal alone (`muster.web.auth.sessions`), so the end of one has to be remembered
until it would have expired.  No end is ever dropped to save space: a name with too many of them cannot begin
another session until some expire.  The file is changed under a lock and replaced atomically; it is read again
when another process replaced it.  A damaged file is an error and never means that no login was ended.

All of this blocks: call it in a thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from muster.core import errors, files
from muster.web.auth import sessions

PER_NAME_MAX = 10_000

Ends = dict[str, dict[str, int]]  # name: session id: when the session would have expired, in seconds
_Stamp = tuple[int, int, int]


class EndedLogins:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "ended.json"
        self._lock = folder / "ended.lock"
        self._loaded: tuple[_Stamp | None, Ends] = (None, {})

    def has(self, session: sessions.LoginSession) -> bool:
        return session.id in self.read().get(session.name, {})

    def is_full(self, name: str) -> bool:
        now_s = time.time()
        return sum(until > now_s for until in self.read().get(name, {}).values()) >= PER_NAME_MAX

    def add(self, session: sessions.LoginSession) -> None:
        """When this returns, the end is on disk, and holds for all web processes."""
        with files.locked(self._lock):
            now_s = time.time()
            ends = {
                name: kept
                for name, ids in self.read().items()
                if (kept := {id: until for id, until in ids.items() if until > now_s})
            }
            ends[session.name] = {**ends.get(session.name, {}), session.id: session.until}
            files.write(self._path, msgspec.json.encode(ends))

    def read(self) -> Ends:
        try:
            stamp = _stamp(self._path.stat())
            loaded_stamp, ends = self._loaded
            if stamp == loaded_stamp:
                return ends
            with self._path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                ends = msgspec.json.decode(file.read(), type=Ends)
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise errors.Refused(
                f"{self._path} is damaged, so it is unknown which logins were ended: {error}",
                hint="remove it and the file `key` beside it, and restart: everyone has to log in again",
            ) from error
        self._loaded = (stamp, ends)
        return ends


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size
