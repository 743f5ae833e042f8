"""The search for anything by a part of its name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from muster.core import errors
from muster.web.auth import sessions

if TYPE_CHECKING:
    from muster.web.data import read_model

EACH_MAX = 10


class FoundThing(msgspec.Struct, frozen=True, kw_only=True):
    """Something whose name contains the text. ``about``: its state or place."""

    kind: str
    name: str
    about: str = ""


class FoundThings(msgspec.Struct, frozen=True, kw_only=True):
    """At most ten of each kind. ``missing``: the kinds that could not be searched, with the reason."""

    items: list[FoundThing]
    missing: dict[str, str] = {}


class ThingFinder:
    def __init__(self, source: read_model.ReadModel) -> None:
        self._source = source

    async def find(self, person: sessions.LoginSession, text: str) -> FoundThings:
        text = text.strip()
        if not text:
            return FoundThings(items=[])
        searches: dict[str, Callable[[], Awaitable[list[FoundThing]]]] = {
            "machine": lambda: self._machines(text),
            "resource": lambda: self._resources(text),
            "context": lambda: self._contexts(person, text),
            "queue": lambda: self._queues(person, text),
            "alert": lambda: self._alerts(text),
            "receiver": lambda: self._receivers(text),
        }
        things = FoundThings(items=[])
        answers = await asyncio.gather(*(ask() for ask in searches.values()), return_exceptions=True)
        for kind, answer in zip(searches, answers, strict=True):
            match answer:
                case errors.MusterError():
                    things.missing[kind] = answer.message
                case BaseException():
                    raise answer
                case _:
                    things.items.extend(answer[:EACH_MAX])
        return things

    async def _machines(self, text: str) -> list[FoundThing]:
        names = await self._source.feed.machines.named(text, EACH_MAX)
        return [FoundThing(kind=kind, name=name, about=about) for kind, name, about in names]

    async def _resources(self, text: str) -> list[FoundThing]:
        page = await self._source.resources(where=f"name LIKE {_pattern(text)}", limit=EACH_MAX)
        return [FoundThing(kind="resource", name=row.name, about=row.state) for row in page.items]

    async def _contexts(self, person: sessions.LoginSession, text: str) -> list[FoundThing]:
        page = await self._source.inform.contexts(person, f"key LIKE {_pattern(text)}", limit=EACH_MAX)
        return [
            FoundThing(kind="context", name=row.key, about=f"version {row.version}") for row in page.items
        ]

    async def _queues(self, person: sessions.LoginSession, text: str) -> list[FoundThing]:
        return [
            FoundThing(kind="queue", name=row.queue, about=f"{row.depth:,} waiting")
            for row in await self._source.queues(person)
            if text.lower() in row.queue.lower()
        ]

    async def _alerts(self, text: str) -> list[FoundThing]:
        return [
            FoundThing(kind="alert", name=f"{alert.rule} {alert.about}", about=alert.state.value)
            for alert in await self._source.alerts()
            if text.lower() in f"{alert.rule} {alert.about}".lower()
        ]

    async def _receivers(self, text: str) -> list[FoundThing]:
        listed = await self._source.receivers("", prefix=text, limit=EACH_MAX)
        return [FoundThing(kind="receiver", name=row.receiver, about=row.policy) for row in listed.receivers]


def _pattern(text: str) -> str:
    """A literal of LIKE for names that contain the text."""
    escaped = "".join(f"\\{letter}" if letter in "%_\\" else letter for letter in text)
    return "'%" + escaped.replace("'", "''") + "%' ESCAPE '\\'"
