"""The regional controllers of the outbreak: they follow alerts and send commands to the affected servers.

Each acts for its own region only, with the attributes that the trust manager granted to it.  Policies of
servers in other regions do not accept its commands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.bus import api
from muster.core import errors, messages
from muster.notify import client as notify
from muster.notify import queries
from muster.pipeline import client as pipeline
from muster.predicates.syntax import printer

RULE = "infection"
ROUND_S = 1.0
COMMAND_S = 4.0  # time for a command to take effect before the next one
NEEDS = {"isolate": ("infected",), "patch": ("healthy", "isolated")}  # operation -> conditions

Report = Callable[[str, str, Mapping[str, Any]], None]


class RegionalControllers:
    def __init__(self, report: Report, after_s: Callable[[], float]) -> None:
        self._report = report
        self._after_s = after_s
        self._attacked: set[str] = set()  # versions
        self._needed: dict[tuple[str, str], int] = {}  # by controller and operation
        self.alerted: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.commands = 0

    @property
    def needed(self) -> int:
        """Servers that still needed a command at the last check."""
        return sum(self._needed.values())

    async def run(self, region: str, bus: api.Bus, sender: notify.ReceiverHandle) -> None:
        """Run the controller of a region: from the first alert of any region on, it sends commands to the
        servers of its own region that need them.
        """
        alerts = pipeline.PipelineClient(bus)
        first: int | None = None
        defence: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    async for sequence, alert in alerts.follow_alerts(first=first):
                        first = sequence + 1
                        if self._fired(region, alert) and defence is None:
                            defence = tasks.create_task(self._defend(region, bus, sender))
                except errors.Dropped as error:
                    first = error.last + 1
                except (errors.Unavailable, errors.NotFound):
                    await asyncio.sleep(ROUND_S)  # no pipeline yet

    def _fired(self, region: str, alert: messages.Alert) -> bool:
        kind, _, group = alert.about.partition(":")
        if alert.rule != RULE or kind != "group" or alert.state is not messages.AlertState.FIRING:
            return False
        where, _, version = group.rpartition("-")
        self._attacked.add(version)
        if not self.alerted.done():
            self.alerted.set_result(time.time())
        if where == region:
            self._report("alert", alert.reason, {"about": alert.about, "after_s": self._after_s()})
        return True

    async def _defend(self, region: str, bus: api.Bus, sender: notify.ReceiverHandle) -> None:
        while True:
            await asyncio.gather(*(self._command(region, operation, bus, sender) for operation in NEEDS))
            await asyncio.sleep(COMMAND_S)

    async def _command(
        self, region: str, operation: str, bus: api.Bus, sender: notify.ReceiverHandle
    ) -> None:
        """Send a command to the servers of the region that need it now, if there are any."""
        versions, conditions = sorted(self._attacked), NEEDS[operation]
        address = (
            f"region = {printer.quoted(region)} AND application_version IN ({_listed(versions)}) "
            f"AND condition IN ({_listed(conditions)})"
        )
        try:
            count = (await queries.match_receivers(bus, address, limit=1)).count
            self._needed[sender.name, operation] = count
            if not count:
                return
            await sender.send("command", {"operation": operation}, to=address, durable=True)
        except errors.Unavailable:
            return  # the next round repeats it
        self.commands += 1
        self._report(
            "command",
            f"{region}: {operation} {count:,} {' or '.join(conditions)} (version {', '.join(versions)})",
            {"operation": operation, "by": sender.name, "count": count, "address": address},
        )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(printer.quoted, words))
