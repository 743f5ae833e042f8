"""The responder: hears of alerts, and sends the notifications that the rules of responses ask for.

It keeps its place in the stream of alerts in the store, and an event's id is made of that place: after a
crash it goes on where it was, and what it sends again is recognised as a repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from muster.app import context as context_
from muster.app import responses, team
from muster.core import errors, health, messages, settings
from muster.notify import client as notify
from muster.pipeline import client as pipeline
from muster.trust import roles

IDENTITY = "responder"
COLLECTION = "responder"
POSITION = "position"
RETRY_S = 1.0


class Responder(settings.Section, frozen=True, kw_only=True):
    """What the domain does by itself about its alerts."""

    rules: Annotated[
        settings.FilePath,
        settings.doc("The file of responses: which alert sends which event to whom. Empty: none are sent."),
    ] = ""


class ResponderPart:
    name = "responder"
    depends_on: Sequence[str] = ("notify",)
    vital = False

    def __init__(self, wanted: Responder) -> None:
        self._wanted = wanted
        self._rules: tuple[responses.Rule, ...] = ()
        self._sent = 0
        self._refused = 0
        self._reason = ""

    async def start(self, context: context_.Context) -> None:
        self._rules = responses.load(await asyncio.to_thread(Path(self._wanted.rules).read_text))
        self._bus = await context.connect(IDENTITY, roles.Role.RESPONDER)
        self._counts = context.metrics.counter(
            "responses", "Notifications that alerts led to, by outcome", ("outcome",)
        )
        context.spawn(self._respond(context))

    async def stop(self) -> None:
        await self._bus.close()

    def health(self) -> team.Health:
        state = health.State.LATE if self._reason else health.State.UP
        return team.Health(state, self._reason, {"sent": self._sent, "refused": self._refused})

    async def _respond(self, context: context_.Context) -> None:
        kept = await context.store.get(COLLECTION, POSITION)
        position = int(kept.value) if kept is not None else 0
        async with notify.Parties(self._bus) as parties:
            sender = parties.sender(IDENTITY)
            while True:
                try:
                    alerts = pipeline.Client(self._bus).follow_alerts(first=position + 1)
                    async for sequence, alert in alerts:
                        await self._answer(context, sender, sequence, alert)
                        position = sequence
                        await context.store.put(COLLECTION, POSITION, str(position).encode())
                except errors.Dropped as error:
                    lost, position = error.last - position, error.last
                    self._reason = str(error)
                    self._counts.add(lost, outcome="lost")
                    context.log.warning("alerts-lost", first=error.first, last=error.last)
                except (errors.Unavailable, errors.NotFound) as error:
                    # No pipeline has run yet, or nobody answers: its place is kept, so nothing is missed.
                    self._reason = str(error)
                    await asyncio.sleep(RETRY_S)

    async def _answer(
        self, context: context_.Context, sender: notify.Party, sequence: int, alert: messages.Alert
    ) -> None:
        for index, one in enumerate(responses.due(self._rules, alert)):
            try:
                await sender.send(
                    one.type, one.content, to=one.address, durable=one.durable, id=f"alert-{sequence}-{index}"
                )
            except (errors.InvalidInput, errors.Refused) as error:
                # The rule does not fit the domain's models, or is not granted: trying again would not help.
                self._refused += 1
                self._reason = str(error)
                self._counts.add(outcome="refused")
                context.log.warning("response-refused", rule=alert.rule, event=one.type, error=error)
            else:
                self._sent += 1
                self._reason = ""
                self._counts.add(outcome="sent")
                context.log.info(
                    "responded", rule=alert.rule, about=alert.about, event=one.type, to=one.address
                )
