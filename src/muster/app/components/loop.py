"""Responses and reactions as components of a domain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from muster.app import positions
from muster.app.components import component
from muster.app.components import context as context_
from muster.core import files, health
from muster.loop import reaction_rules, reactions, responder, response_rules, settings
from muster.trust.permissions import roles

MARK = "reactions"  # a file in the domain's folder while there may be receivers


class ResponderComponent:
    name = "responder"
    depends_on: Sequence[str] = ("notify",)
    vital = False

    def __init__(self, settings: settings.ResponderSettings) -> None:
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self._responder: responder.Responder | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        rules = response_rules.load(await asyncio.to_thread(Path(self._settings.rules).read_text))
        bus = await context.connect(responder.IDENTITY, roles.Role.RESPONDER)
        self._stack.push_async_callback(bus.close)
        self._responder = responder.Responder(
            bus,
            rules,
            positions.StoredPosition(context.folder.root, self.name),
            context.metrics.counter(
                "responses", "Notifications that alerts led to, by outcome", ("outcome",)
            ),
            max_age_s=self._settings.max_age_s,
        )
        context.tasks.loop("responses", self._responder.run)

    async def stop(self) -> None:
        await self._stack.aclose()

    def health(self) -> component.ComponentHealth:
        if self._responder is None:
            return component.ComponentHealth(health.HealthState.LATE, "starting")
        problem = self._responder.problem
        state = health.HealthState.LATE if problem else health.HealthState.UP
        return component.ComponentHealth(state, problem, dict(self._responder.counts))


class ReactionComponent:
    name = "reactions"
    depends_on: Sequence[str] = ("notify",)
    vital = False

    def __init__(self, settings: settings.ReactionSettings) -> None:
        self._settings = settings
        self._problem = "starting"
        self._receivers = 0
        self._mark: Path

    async def start(self, context: context_.ComponentContext) -> None:
        self._mark = context.folder.root / MARK
        rules: Sequence[reaction_rules.ReactionSpec] = ()
        if self._settings.rules:
            rules = reaction_rules.load(await asyncio.to_thread(Path(self._settings.rules).read_text))
            await asyncio.to_thread(files.write, self._mark, b"")
        receivers = reactions.ResourceReceivers(context.bus, rules, self._report)
        context.tasks.loop("reactions", receivers.run)

    async def stop(self) -> None: ...

    def health(self) -> component.ComponentHealth:
        state = health.HealthState.LATE if self._problem else health.HealthState.UP
        return component.ComponentHealth(state, self._problem, {"reaction_receivers": self._receivers})

    def _report(self, receivers: int, problem: str) -> None:
        self._receivers, self._problem = receivers, problem
        if not self._settings.rules and not problem:
            self._mark.unlink(missing_ok=True)  # all have left


def reactions_are_due(settings: settings.ReactionSettings, folder: Path) -> bool:
    """Whether there are rules, or receivers of earlier rules are to leave."""
    return bool(settings.rules) or (folder / MARK).exists()
