"""Commands that run to their end: a check, a call of a system tool."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from muster.supervision import children, os_process, tasks


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    output: bytes = b""
    errors: bytes = b""


async def run(
    *command: str, capture: bool = False, environment: Mapping[str, str] | None = None
) -> CommandResult:
    """Run a command without input, in its own session; ``capture`` its output. The processes that it started
    end with it, also if the caller is cancelled: then all that carry the mark of this run."""
    mark = secrets.token_hex(16)
    kept = asyncio.subprocess.PIPE if capture else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=kept,
        stderr=kept,
        env={**(os.environ if environment is None else environment), os_process.MARK: mark},
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate()
    except BaseException:
        await tasks.finish(_kill(process, mark))
        raise
    os_process.signal_group(process.pid, signal.SIGKILL)
    assert process.returncode is not None
    return CommandResult(process.returncode, output or b"", errors or b"")


async def _kill(process: asyncio.subprocess.Process, mark: str) -> None:
    await os_process.kill_members(mark, process.pid)
    await children.exit_code(process)
