"""The responder: reads alerts and sends the notifications that the response rules define.

It stores its position in the stream of alerts, and the id of an event contains that position: after a crash
it continues from there, and repeated events are recognised.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path

from muster.app.components import component
from muster.app.components import context as context_
from muster.app.policy import response_rules
from muster.app.policy import settings as policy_settings
from muster.bus import api
from muster.core import errors, health, messages
from muster.notify import client as notify
from muster.pipeline import client as pipeline
from muster.pipeline import protocol
from muster.trust.permissions import roles

IDENTITY = "responder"
COLLECTION = "responder"
POSITION = "position"
RETRY_S = 1.0


class ResponderComponent:
    name = "responder"
    depends_on: Sequence[str] = ("notify",)
    vital = False

    def __init__(self, settings: policy_settings.ResponderSettings) -> None:
        self._settings = settings
        self._bus: api.Bus
        self._stack = contextlib.AsyncExitStack()
        self._rules: tuple[response_rules.ResponseRule, ...] = ()
        self._sent = 0
        self._refused = 0
        self._missed = 0  # alerts that the stream dropped before they were read
        self._too_old = 0
        self._reason = ""  # of the last rejected response
        self._waits = ""  # why it cannot read alerts

    async def start(self, context: context_.ComponentContext) -> None:
        self._rules = response_rules.load(await asyncio.to_thread(Path(self._settings.rules).read_text))
        self._bus = await context.connect(IDENTITY, roles.Role.RESPONDER)
        self._stack.push_async_callback(self._bus.close)
        self._counts = context.metrics.counter(
            "responses", "Notifications that alerts led to, by outcome", ("outcome",)
        )
        context.tasks.loop("responses", functools.partial(self._respond, context))

    async def stop(self) -> None:
        await self._stack.aclose()

    def health(self) -> component.ComponentHealth:
        reason = self._waits or self._reason
        counts = {
            "sent": self._sent,
            "refused": self._refused,
            "missed": self._missed,
            "too_old": self._too_old,
        }
        return component.ComponentHealth(
            health.HealthState.LATE if reason else health.HealthState.UP, reason, counts
        )

    async def _respond(self, context: context_.ComponentContext) -> None:
        position = await self._begin(context)
        async with notify.NotifyClient(self._bus) as receivers:
            sender = receivers.sender(IDENTITY)
            while True:
                try:
                    stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
                    self._waits = ""
                    alerts = pipeline.PipelineClient(self._bus).follow_alerts(first=position + 1)
                    async for sequence, alert in alerts:
                        await self._respond_to(context, sender, stream, sequence, alert)
                        position = sequence
                        await _store_position(context, position)
                except errors.Dropped as error:
                    missed = error.last - error.first + 1
                    self._missed += missed
                    self._counts.add(missed, outcome="missed")
                    context.log.error("alerts-missed", first=error.first, last=error.last)
                    position = error.last
                    await _store_position(context, position)
                except (errors.Unavailable, errors.NotFound) as error:
                    # No pipeline has run yet, or no broker replies: the position is unchanged.
                    self._waits = str(error)
                    await asyncio.sleep(RETRY_S)

    async def _begin(self, context: context_.ComponentContext) -> int:
        """The position of the last alert that was processed.

        When the responder is enabled for the first time, this is the last existing alert: rules apply to
        later alerts. In a recreated stream, all alerts are new.
        """
        kept = await context.store.get(COLLECTION, POSITION)
        while True:
            try:
                stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
                last = (await stream.state()).last_sequence
            except errors.NotFound:
                last = 0
            except errors.Unavailable as error:
                self._waits = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            if kept is not None and int(kept.value) <= last:
                return int(kept.value)
            position = last if kept is None else 0
            await _store_position(context, position)
            return position

    async def _respond_to(
        self,
        context: context_.ComponentContext,
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
        if age_s > self._settings.max_age_s:
            self._too_old += 1
            self._counts.add(outcome="too-old")
            context.log.warning("alert-too-old", rule=alert.rule, about=alert.about, age_s=round(age_s))
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
                self._refused += 1
                self._reason = str(error)
                self._counts.add(outcome="refused")
                context.log.warning("response-refused", rule=alert.rule, event=notification.type, error=error)
            else:
                self._sent += 1
                self._reason = ""
                self._counts.add(outcome="sent")
                context.log.info(
                    "responded",
                    rule=alert.rule,
                    about=alert.about,
                    event=notification.type,
                    to=notification.address,
                )


async def _store_position(context: context_.ComponentContext, position: int) -> None:
    await context.store.put(COLLECTION, POSITION, str(position).encode())
