"""Health checks of a process: a port, a URL or a command."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from muster.bus.http import client
from muster.core import errors, health
from muster.core.settings import sections
from muster.core.telemetry import log
from muster.supervision import commands

doc = sections.field_doc

events = log.EventLog("manage")

# A shortage on this machine says nothing about the checked process.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EADDRNOTAVAIL}


class InconclusiveCheck(Exception):
    """The check could not be executed."""


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to determine that a process works. ``exit``: it runs. The other kinds are checked every
    ``every_s``.
    """

    kind: Annotated[
        Literal["exit", "port", "http", "command"],
        doc("exit: it runs; port: it accepts connections; http: a status below 400; command: exit code 0."),
    ] = "exit"
    host: Annotated[str, doc("Of kind port.")] = "127.0.0.1"
    port: Annotated[int, doc("Of kind port.", ge=0, le=65535)] = 0
    url: Annotated[str, doc("Of kind http.")] = ""
    command: Annotated[
        tuple[str, ...],
        doc("Of kind command: the program and its arguments, with the user, directory and environment."),
    ] = ()
    every_s: Annotated[float, doc("Interval between checks.", gt=0, le=3600)] = 2.0
    timeout_s: Annotated[float, doc("Time limit of a check.", gt=0, le=600)] = 2.0
    failures: Annotated[int, doc("Consecutive failures before it is down.", ge=1, le=100)] = 3
    start_s: Annotated[float, doc("Time allowed for the start.", ge=0, le=3600)] = 30.0

    def __post_init__(self) -> None:
        needed = {"port": self.port, "http": self.url, "command": self.command}
        if self.kind in needed and not needed[self.kind]:
            raise ValueError(
                f"a check of kind {self.kind} needs `{'url' if self.kind == 'http' else self.kind}`"
            )


Probe = Callable[[], Awaitable[str | None]]
Report = Callable[[health.HealthState, str], None]


async def watch(
    check: HealthCheck,
    *,
    name: str,
    probe: Probe,
    state: Callable[[], tuple[health.HealthState, str]],
    report: Report,
    has_failed: Callable[[str], None],
) -> None:
    """Check what runs until it has failed. ``state``: the present one, with its reason."""
    loop = asyncio.get_running_loop()
    began, failed = loop.time(), 0
    while True:
        try:
            problem = await probe()
        except InconclusiveCheck as error:
            events.warning("not-checked", resource=name, error=error)
            await asyncio.sleep(check.every_s)
            continue
        now, reason = state()
        if problem is None:
            failed = 0
            if now is not health.HealthState.UP:
                report(health.HealthState.UP, "")
        else:
            failed += 1
            is_starting = now is health.HealthState.STARTING and loop.time() - began < check.start_s
            if is_starting and reason != problem:
                report(health.HealthState.STARTING, problem)
            if not is_starting and failed >= check.failures:
                has_failed(problem)
                return
        quick = state()[0] is health.HealthState.STARTING
        await asyncio.sleep(min(0.1, check.every_s) if quick else check.every_s)


async def find_problem(
    check: HealthCheck, command: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> str | None:
    """Why the process does not work, or None; `InconclusiveCheck` if this machine lacks resources for the
    check. ``command``: how its own is executed.
    """
    try:
        async with asyncio.timeout(check.timeout_s):
            match check.kind:
                case "port":
                    _, writer = await asyncio.open_connection(check.host, check.port)
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
                case "http":
                    status = (await client.get(check.url)).status
                    return None if status < 400 else f"{check.url} returned {status}"
                case "command":
                    done = await commands.run(*(command or check.command), environment=environment)
                    return f"{check.command[0]} exited with {done.exit_code}" if done.exit_code else None
    except TimeoutError:
        return f"no reply within {check.timeout_s:g} s"
    except (OSError, ValueError, errors.MusterError) as error:
        if _is_shortage(error):
            raise InconclusiveCheck(str(error)) from error
        return str(error)
    return None


def _is_shortage(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return True
        error = error.__cause__ or error.__context__
    return False
