"""Revocation list of sessions, in a file that all web processes of the domain share.

The signature of a session makes it valid (`muster.web.auth.sessions`), so a session that ends early is listed
here until it would have expired, and for a day longer: the clock may be set back.  Entries are never dropped
to save space: a login with too many entries cannot start another session until some expire.  The file is
changed under a lock and replaced atomically; a process reads it again after another process replaced it.  A
damaged file is an error and is never treated as empty.

All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from muster.core import errors, files
from muster.web.auth import sessions

PER_NAME_MAX = 10_000
CLOCK_STEP_S = 86400  # an entry is kept for so long after the expiry of its session

Ends = dict[str, dict[str, int]]  # name: session id: expiry of the session, in seconds
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
        """End a session for all web processes. The entry is on disk when this returns."""
        with files.locked(self._lock):
            dropped_s = time.time() - CLOCK_STEP_S
            ends = {
                name: kept
                for name, ids in self.read().items()
                if (kept := {id: until for id, until in ids.items() if until > dropped_s})
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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.Refused(
                f"{self._path} is damaged, so ended sessions cannot be recognized: {error}",
                hint="delete it and the file `key` beside it, and restart; all users have to log in again",
            ) from error
        self._loaded = (stamp, ends)
        return ends


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size
