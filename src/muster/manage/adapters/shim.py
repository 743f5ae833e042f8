"""A process whose exit code survives the agent that started it.

The kernel reports an exit code only to the parent, and an agent may be restarted while the process runs. The
parent is therefore a small shell (the shim), which leads the session, ignores the signals sent to it, and
waits. It appends two lines to a record that begins with the token of the run: the pid of the process when it
starts, and its exit code when it has ended. A record with the token alone means that the process never
started.

The agent stores a random token before it starts the shim, and the shim has the token in its environment.
After a crash between the start and its record, the shim is found by the token, and nothing is started twice.
All processes of the run inherit it, so that one that left the session ends with the others.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.supervision import os_process

SHELL = "/bin/sh"
_RECORD_FD = 3

# Children of the shell get the default for a trapped signal; an ignored one would stay ignored.
_SHIM = f"""
trap : HUP INT QUIT ABRT USR1 USR2 PIPE ALRM TERM XCPU
exec 2>/dev/null
{SHELL} -c "$0" "$@" 2>&1
code=$?
echo "$code" >&{_RECORD_FD}
exit "$code"
"""
_BEGIN = f'echo "$$" >&{_RECORD_FD}; exec {_RECORD_FD}>&-; '
_RUN = _BEGIN + 'exec "$0" "$@"'
_RUN_IN = _BEGIN + 'cd -- "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class ShimRecord:
    """``pid`` of the command; None: it never started. ``exit_code``: a signal is negative; None: unknown."""

    pid: int | None = None
    exit_code: int | None = None


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    token: str,
    directory: str,
    output: int,
    record: pathlib.Path | None,
) -> int:
    """Start the shim and return its pid. No Python object represents it, so none warns when the agent ends
    first.

    Raises `OSError` if the command cannot be executed.
    """
    _require_executable(command[0], environment, directory)
    inner = [_RUN_IN, directory, *command] if directory else [_RUN, *command]
    file = os.open(record or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{token}\n".encode())
        return os.posix_spawn(
            SHELL,
            [SHELL, "-c", _SHIM, *inner],
            {**environment, os_process.MARK: token},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
                (os.POSIX_SPAWN_DUP2, file, _RECORD_FD),
            ],
            setsid=True,
        )
    finally:
        os.close(file)


def _require_executable(program: str, environment: Mapping[str, str], directory: str) -> None:
    """Reject a command that the shim could only reject in the output file."""
    if directory and not pathlib.Path(directory).is_dir():
        raise NotADirectoryError(f"no such directory: {directory}")
    where = os.path.join(directory, program) if "/" in program else program  # the program may be absolute
    if shutil.which(where, path=environment.get("PATH", os.defpath)) is None:
        raise FileNotFoundError(f"no such program, or it is not executable: {program}")


def read(path: pathlib.Path | None, token: str) -> ShimRecord:
    """What the shim of this run has recorded; `OSError` if the record cannot be read now."""
    if path is None:
        return ShimRecord()
    try:
        first, *lines = path.read_text().split("\n")[:-1]
    except (FileNotFoundError, ValueError):
        return ShimRecord()
    if first != token:
        return ShimRecord()
    pid, code = ([int(line) for line in lines if line.isdecimal()] + [None, None])[:2]
    return ShimRecord(pid, exit_code(code))


def exit_code(status: int | None) -> int | None:
    """A shell reports a signal as 128 plus its number; here a signal is negative."""
    return 128 - status if status is not None and 128 < status < 160 else status


def find(token: str) -> int | None:
    """The shim with this ``token``, if it runs: the oldest of its processes."""
    return next(filter(os_process.leads_session, os_process.members(token)), None)
