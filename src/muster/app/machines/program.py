"""Which installation of Muster runs a machine of a domain.

`muster machine upgrade` names a program for a machine. The domain stops, and its process continues as that
program (``exec``), so that a service manager keeps it. Meanwhile a guard, a process of the former program,
waits until the new one serves. If it does not, the guard ends it, and the former program runs again: the
guard or the service manager starts it.

``program.json`` in the home has the choice once it serves, so that `muster up` of any installation hands over
to it, also after a reboot. Until then it has the former one: after a power cut, or without its guard, the
machine returns to that and tries again.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from muster.app import home, service_manager
from muster.core import errors, files

FILE = "program.json"
GUARD = "muster.app.machines.program_guard"
VARIABLE = "MUSTER_PROGRAM"  # the program that another installation has handed over to
CHECK_S = 60.0  # to print its version


class ChosenProgram(msgspec.Struct, frozen=True):
    """``since_s`` distinguishes a choice from an earlier one that failed."""

    path: str
    since_s: float


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``refused``: a choice with which the machine did not work, and why."""

    path: str = ""
    refused: ChosenProgram | None = None
    reason: str = ""


class GuardTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard watches. ``former_s``: when the domain was started with the former program."""

    home: str
    folder: str
    pid: int
    former_s: float
    former: str
    chosen: ChosenProgram
    arguments: list[str]
    supervised: bool  # a service manager starts the former program again


class ProgramChanged(errors.MusterError):
    """The domain stops, to continue as another program."""

    code = "program-changed"

    def __init__(self, chosen: ChosenProgram) -> None:
        super().__init__(f"the domain continues as {chosen.path}")
        self.chosen = chosen


_HANDED_OVER = os.environ.pop(VARIABLE, "")
_CURRENT = _HANDED_OVER or str(pathlib.Path(sys.executable).with_name("muster"))


def current() -> str:
    """The program that runs this process."""
    return _CURRENT


class ProgramChoice:
    """The choice of a home. All methods block."""

    def __init__(self, place: home.Home, arguments: Sequence[str] = ()) -> None:
        """``arguments``: those with which the domain was started."""
        self._file = place.root / FILE
        self._arguments = list(arguments)

    def load(self) -> ProgramRecord:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=ProgramRecord)
        except FileNotFoundError:
            return ProgramRecord()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidInput(
                f"{self._file}: {error}",
                hint="delete it: then any program that is started runs the home",
            ) from error

    def store(self, record: ProgramRecord) -> None:
        files.write(self._file, msgspec.json.encode(record), mode=files.PUBLIC)

    def hand_over(self) -> None:
        """Continue as the chosen program, if that is another one. Returns if it is this one."""
        path = self.load().path
        if _HANDED_OVER or path in ("", current()):
            return
        if not os.access(path, os.X_OK):
            raise errors.NotFound(
                f"this home is run by {path}, which does not exist or is not executable",
                hint=f"install it, or delete {self._file} to run it with {current()}",
            )
        self._become(path)

    def check(self, chosen: ChosenProgram) -> bool:
        """Whether the domain has to change to this program. One that does not work is refused here."""
        record = self.load()
        if chosen.path == current() or chosen == record.refused:
            return False
        if problem := problem_of(chosen.path):
            self.store(msgspec.structs.replace(record, refused=chosen, reason=problem))
            return False
        return True

    def change(self, chosen: ChosenProgram, folder: home.DomainFolder, former_s: float) -> None:
        """Continue as this program, with a guard. The domain has stopped; does not return."""
        supervised = service_manager.is_present(os.environ)
        task = GuardTask(
            home=str(self._file.parent),
            folder=str(folder.root),
            pid=os.getpid(),
            former_s=former_s,
            former=current(),
            chosen=chosen,
            arguments=self._arguments,
            supervised=supervised,
        )
        with files.open_private(folder.logs / "guard.err", "wb") as output:
            subprocess.Popen(
                [sys.executable, "-m", GUARD, msgspec.json.encode(task).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
            )
        self._become(chosen.path)

    def _become(self, path: str) -> None:
        sys.stdout.flush()
        os.execve(path, [path, *self._arguments], {**os.environ, VARIABLE: path})


def problem_of(path: str) -> str:
    """Why this program cannot run; empty if it prints its version. Blocks."""
    try:
        done = subprocess.run(
            [path, "version", "-o", "json"],
            env={**os.environ, VARIABLE: path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_S,
            check=True,
        )
        json.loads(done.stdout)["muster"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, RecursionError) as error:
        words = getattr(error, "stderr", None) or b""
        return f"{path} does not print its version: {words.decode(errors='replace').strip() or error}"
    return ""
