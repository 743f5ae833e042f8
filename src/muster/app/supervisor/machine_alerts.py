"""The alerts about machines, for the registry: predicates over resources can name them."""

from __future__ import annotations

import asyncio

from muster.bus import api
from muster.core import errors, messages
from muster.core.telemetry import log
from muster.pipeline import protocol

events = log.EventLog("manage")

RETRY_S = 30.0
ABOUT = "node:"
OVER = (messages.AlertState.RESOLVED,)


class MachineAlerts:
    """``rules``: by machine, those whose alerts have not ended. It follows the stream of alerts, which names
    a machine by the identity of its sensor."""

    def __init__(self, bus: api.Bus) -> None:
        self.rules: dict[str, set[str]] = {}
        self._bus = bus

    async def follow(self) -> None:
        """Until cancelled. Without a pipeline there are no alerts."""
        while True:
            try:
                stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
                rules = self.rules = {}
                async with stream.follow((await stream.state()).first_sequence, gaps=True) as following:
                    async for stored in following:
                        try:
                            self._apply(rules, messages.decode(stored.data, messages.Alert))
                        except errors.MusterError as error:
                            events.info("not-an-alert", error=error)
            except errors.NotFound:
                self.rules = {}
            except errors.MusterError as error:
                events.info("alerts-not-followed", error=error)
            await asyncio.sleep(RETRY_S)

    @staticmethod
    def _apply(rules: dict[str, set[str]], alert: messages.Alert) -> None:
        if not alert.about.startswith(ABOUT):
            return
        machine = alert.about.removeprefix(ABOUT)
        if alert.state not in OVER:
            rules.setdefault(machine, set()).add(alert.rule)
        elif machine in rules:
            rules[machine].discard(alert.rule)
            if not rules[machine]:
                del rules[machine]
