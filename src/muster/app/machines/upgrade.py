"""An upgrade of a running domain, machine by machine, and the way back.

The machine that signs accounts is first, because it replies to the others. Each machine changes only when all
of them work and all replicas of streams are current, so that one machine is missing at a time. If a machine
does not work with the new program, those that have changed return to their former one.
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from muster.app.machines import membership, program
from muster.core import errors

SETTLE_S = 12.0  # everything has to work for so long; longer than the period of any check
LOOK_S = 0.5
WHOLE_S = 30.0  # for a domain that is not upgraded yet to be whole


class UpgradedMachines(Protocol):
    """`muster.app.components.bootstrap_client.BootstrapClient`."""

    async def machines(self) -> list[membership.MachineRow]: ...
    async def choose_program(self, machine: str, path: str) -> program.ChosenProgram: ...


def obstacle(rows: Iterable[membership.MachineRow]) -> str:
    """Why no machine may be taken away now; empty if one may."""
    return "; ".join(
        f"{row.name} is silent"
        if row.state == "silent" or row.report is None
        else f"{row.name}: {row.report.problem}"
        for row in rows
        if row.state != "up"
    )


def unchanged(row: membership.MachineRow, chosen: program.ChosenProgram) -> str:
    """Why a machine does not have its program yet; empty if it has. `errors.Refused` if it will not."""
    if row.report is None:
        return f"{row.name} has not replied since"
    if row.report.refused == chosen:
        raise errors.Refused(f"{row.name} runs its former program: {row.report.refused_reason}")
    return "" if row.report.program == chosen.path else f"{row.name} runs {row.report.program}"


async def upgrade(
    domain: UpgradedMachines, path: str, *, timeout_s: float, say: Callable[[str], None]
) -> list[membership.MachineRow]:
    """``timeout_s``: for each machine. `errors.Refused` if the machines have their former programs again."""
    if not pathlib.PurePath(path).is_absolute():
        raise errors.InvalidInput(f"{path!r} is not the absolute path of a program")
    rows = await _until(domain, lambda _: "", min(timeout_s, WHOLE_S))  # nothing has been changed yet
    changed: list[tuple[str, str]] = []
    for row in rows:
        assert row.report is not None
        if row.report.program == path:
            continue
        say(f"{row.name}: from {row.report.program} to {path}")
        changed.append((row.name, row.report.program))
        try:
            await _change(domain, row.name, path, timeout_s)
        except errors.MusterError as error:
            late: list[str] = []
            for name, former in reversed(changed):
                say(f"{name}: back to {former}")
                try:
                    await _change(domain, name, former, timeout_s)
                except errors.MusterError as second:
                    late.append(f"{name} is not back: {second.message}")
            raise errors.Refused(
                "; ".join((error.message, *(late or ["all machines run their former programs"]))),
                hint="repeat the command when the reason is removed",
            ) from error
    return await _until(domain, lambda _: "", timeout_s) if changed else rows


async def _change(domain: UpgradedMachines, name: str, path: str, timeout_s: float) -> None:
    chosen = await _patiently(lambda: domain.choose_program(name, path), timeout_s)

    def waits(rows: list[membership.MachineRow]) -> str:
        return next((unchanged(row, chosen) for row in rows if row.name == name), f"{name} is removed")

    await _until(domain, waits, timeout_s)


async def _until(
    domain: UpgradedMachines, waits: Callable[[list[membership.MachineRow]], str], timeout_s: float
) -> list[membership.MachineRow]:
    """Until ``waits`` has no reason to wait, and nothing else has for some time."""
    deadline = time.monotonic() + timeout_s
    since_s = time.monotonic()
    rows: list[membership.MachineRow] = []
    while True:
        try:
            rows = await domain.machines()
            reason = waits(rows) or obstacle(rows)
        except errors.Unavailable as error:  # the machine that replies restarts, or an election
            reason = f"the domain does not reply: {error.message}"
        now_s = time.monotonic()
        if reason:
            since_s = now_s
        elif now_s - since_s > SETTLE_S:
            return rows
        if now_s > deadline:
            raise errors.TimedOut(f"after {timeout_s:g} s: {reason or 'it works only since then'}")
        await asyncio.sleep(LOOK_S)


async def _patiently(
    ask: Callable[[], Awaitable[program.ChosenProgram]], timeout_s: float
) -> program.ChosenProgram:
    """Repeat a request while there is no reply; choosing a program again does no harm."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await ask()
        except errors.Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(LOOK_S)
