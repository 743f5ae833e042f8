"""The responder: reads alerts and sends the notifications that the response rules define.

It stores its position in the stream of alerts, and the id of an event contains that position: after a crash
it continues from there, and repeated events are recognised.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from muster.bus import api
from muster.core import errors, messages
from muster.core.telemetry import log, metrics
from muster.loop import response_rules
from muster.notify import client as notify
from muster.pipeline import client as pipeline
from muster.pipeline import protocol

events = log.EventLog("loop")

IDENTITY = "responder"
RETRY_S = 1.0


class PositionStore(Protocol):
    """Stores the sequence number of the last alert that was processed."""

    async def load(self) -> int | None:
        """None if none was stored."""
        ...

    async def store(self, position: int) -> None: ...


class Responder:
    """``responses`` counts notifications by outcome; an alert older than ``max_age_s`` leads to none."""

    def __init__(
        self,
        bus: api.Bus,
        rules: tuple[response_rules.ResponseRule, ...],
        positions: PositionStore,
        responses: metrics.Counter,
        *,
        max_age_s: float,
    ) -> None:
        self._bus = bus
        self._rules = rules
        self._positions = positions
        self._responses = responses
        self._max_age_s = max_age_s
        self.counts = {"sent": 0, "refused": 0, "missed": 0, "too_old": 0}  # missed: dropped by the stream
        self._rejection = ""  # why the last response was rejected
        self._waiting = ""  # why no alerts can be read

    @property
    def problem(self) -> str:
        return self._waiting or self._rejection

    async def run(self) -> None:
        position = await self._begin()
        async with notify.NotifyClient(self._bus) as receivers:
            sender = receivers.sender(IDENTITY)
            while True:
                try:
                    stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
                    self._waiting = ""
                    alerts = pipeline.PipelineClient(self._bus).follow_alerts(first=position + 1)
                    async for sequence, alert in alerts:
                        await self._respond_to(sender, stream, sequence, alert)
                        position = sequence
                        await self._positions.store(position)
                except errors.Dropped as error:
                    missed = error.last - error.first + 1
                    self._count("missed", missed)
                    events.error("alerts-missed", first=error.first, last=error.last)
                    position = error.last
                    await self._positions.store(position)
                except (errors.Unavailable, errors.NotFound) as error:
                    # No pipeline has run yet, or no broker replies: the position is unchanged.
                    self._waiting = str(error)
                    await asyncio.sleep(RETRY_S)

    async def _begin(self) -> int:
        """The position of the last alert that was processed.

        When the responder is enabled for the first time, this is the last existing alert: rules apply to
        later alerts. In a recreated stream, all alerts are new.
        """
        stored = await self._positions.load()
        while True:
            try:
                stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
                last = (await stream.state()).last_sequence
            except errors.NotFound:
                last = 0
            except errors.Unavailable as error:
                self._waiting = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            if stored is not None and stored <= last:
                return stored
            position = last if stored is None else 0
            await self._positions.store(position)
            return position

    async def _respond_to(
        self,
        sender: notify.ReceiverHandle,
        stream: api.Stream,
        sequence: int,
        alert: messages.Alert,
    ) -> None:
        due = response_rules.matching_notifications(self._rules, alert)
        if not due:
            return
        # Not by the clock of this machine: a wrong one would end all responses.
        age_s = (await stream.state()).now_ns / 1e9 - alert.at_ms / 1000
        if age_s > self._max_age_s:
            self._count("too_old")
            events.warning("alert-too-old", rule=alert.rule, about=alert.about, age_s=round(age_s))
            return
        for index, notification in enumerate(due):
            id = f"alert-{sequence}-{alert.at_ms}-{index}"
            try:
                await sender.send(
                    notification.type,
                    notification.content,
                    to=notification.address,
                    durable=notification.durable,
                    id=id,
                )
            except errors.Unavailable:
                raise  # retried under the same id
            except errors.MusterError as error:
                # The rule does not match the domain's models, or is not granted: a retry would not help.
                self._rejection = str(error)
                self._count("refused")
                events.warning("response-refused", rule=alert.rule, event=notification.type, error=error)
            else:
                self._rejection = ""
                self._count("sent")
                events.info(
                    "responded",
                    rule=alert.rule,
                    about=alert.about,
                    event=notification.type,
                    to=notification.address,
                )

    def _count(self, outcome: str, count: int = 1) -> None:
        self.counts[outcome] += count
        self._responses.add(count, outcome=outcome.replace("_", "-"))
