"""The guard of a change of programs (`muster.app.machines.program`), as a process of the former program."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import sys
import time

import msgspec

from muster.app import home, process
from muster.app.machines import program

SERVES_S = 120.0  # until the new program serves
LOOK_S = 0.2


def watch(task: program.GuardTask) -> None:
    """Wait until the new program serves, or return to the former one."""
    folder = home.DomainFolder(pathlib.Path(task.folder))
    deadline = time.monotonic() + SERVES_S
    reason = "it ended at its start"
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(task.pid), "rb", buffering=0) as new:
        while not select.select([new], [], [], LOOK_S)[0]:
            running = folder.running()
            if running is not None and running.pid == task.pid and running.started_at_s != task.former_s:
                _store(task, program.ProgramRecord(path=task.chosen.path))
                return
            if time.monotonic() > deadline:
                reason = f"it did not serve within {SERVES_S:g} s"
                _refuse(task, reason)  # first: a service manager starts the former program at once
                signal.pidfd_send_signal(new.fileno(), signal.SIGKILL)
                select.select([new], [], [], process.STOP_S)
                break
    _refuse(task, reason)
    if not task.supervised:
        process.detach(task.arguments, folder, timeout_s=SERVES_S)


def _refuse(task: program.GuardTask, reason: str) -> None:
    why = f"{task.chosen.path}: {reason}; see the logs in {task.folder}/logs"
    _store(task, program.ProgramRecord(path=task.former, refused=task.chosen, reason=why))


def _store(task: program.GuardTask, record: program.ProgramRecord) -> None:
    program.ProgramChoice(home.Home(pathlib.Path(task.home))).store(record)


if __name__ == "__main__":
    watch(msgspec.json.decode(sys.argv[1], type=program.GuardTask))
