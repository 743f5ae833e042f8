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
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.supervision import os_process

SHELL = "/bin/sh"
SETPRIV = "setpriv"
_RECORD_FD = 3

# Children of the shell get the default for a trapped signal; an ignored one would stay ignored. The inner
# shell redirects its errors itself: with a redirection here, this one would write "Terminated" into the log.
_SHIM = f"""
trap : HUP INT QUIT ABRT USR1 USR2 PIPE ALRM TERM XCPU
exec 2>/dev/null
{SHELL} -c "$0" "$@"
code=$?
echo "$code" >&{_RECORD_FD}
exit "$code"
"""
_BEGIN = f'exec 2>&1; echo "$$" >&{_RECORD_FD}; exec {_RECORD_FD}>&-; '
_NAME = "muster"  # in messages of the inner shell


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is set before the command is executed. ``user`` and ``user_group``: to become, by number; -1: the
    agent's own. ``control_group``: to join."""

    directory: str = ""
    umask: str = ""
    user: int = -1
    user_group: int = -1
    control_group: pathlib.Path | None = None

    def script(self) -> str:
        steps = []
        if self.control_group is not None:
            steps.append(f"echo 0 >{shlex.quote(str(self.control_group / 'cgroup.procs'))} || exit 126; ")
        if self.umask:
            steps.append(f"umask {self.umask}; ")
        if self.directory:
            steps.append(f"cd -- {shlex.quote(self.directory)} || exit 126; ")
        return "".join(steps) + 'exec "$@"'

    def command(self, command: Sequence[str]) -> list[str]:
        """The command as the user; `OSError` if this machine lacks the program for it."""
        if self.user < 0 and self.user_group < 0:
            return list(command)
        program = shutil.which(SETPRIV)
        if program is None:
            raise FileNotFoundError(f"`user` and `group` need the program {SETPRIV} (util-linux)")
        become = [program, "--clear-groups" if self.user < 0 else "--init-groups"]
        become += [f"--reuid={self.user}"] if self.user >= 0 else []
        become += [f"--regid={self.user_group}"] if self.user_group >= 0 else []
        return [*become, "--", *command]

    def beside(self, command: Sequence[str]) -> list[str]:
        """A command under these conditions, without a shim."""
        return [SHELL, "-c", self.script(), _NAME, *self.command(command)]


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
    options: RunOptions,
    output: int,
    record: pathlib.Path | None,
) -> int:
    """Start the shim and return its pid. No Python object represents it, so none warns when the agent ends
    first.

    Raises `OSError` if the command cannot be executed.
    """
    _require_executable(command[0], environment, options.directory)
    inner = [_BEGIN + options.script(), _NAME, *options.command(command)]
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
            setsigdef=os_process.DEFAULT_SIGNALS,
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
