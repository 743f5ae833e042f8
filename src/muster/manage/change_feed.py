"""Changes of resources and their events, selected by names and a condition.

A condition can name the fields of the change or event, and the attributes by which `get` selects resources:
labels, facts and labels of the machine, type, group and so on. The registry has the attributes. They are read
when a change arrives, for all waiting changes in one request, and only if the condition names such an
attribute. A resource that was deleted meanwhile has none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from muster.bus import api
from muster.core import errors, messages
from muster.manage import protocol, rows
from muster.predicates import ast
from muster.predicates.backends import python
from muster.predicates.syntax import parser

QUEUED_MAX = 65_536
BATCH_MAX = 500  # changes whose attributes are read together: the reply must fit into a message

ChangeOrEvent: TypeAlias = protocol.ResourceStateChange | protocol.ResourceEvent
ReadAttributes: TypeAlias = Callable[[Sequence[str], Sequence[str]], Awaitable[list[dict[str, Any]]]]

_STATE = protocol.STATES.removesuffix("*")


class ChangeFeed:
    """``read_attributes`` returns the given attributes of each of the given resources."""

    def __init__(self, names: Sequence[str], where: str, read_attributes: ReadAttributes) -> None:
        condition = parser.parse(where) if where else None
        self._matches = python.compile(condition) if condition else None
        keys = {name.key for name in ast.names(condition)} if condition else set()
        self._keys = sorted(keys - rows.CHANGE_FIELDS.keys() - {"what"})
        self._names = frozenset(names)
        self._read_attributes = read_attributes
        self._queue: asyncio.Queue[api.Message] = asyncio.Queue(maxsize=QUEUED_MAX)
        self.dropped = 0

    @contextlib.asynccontextmanager
    async def listening(self, bus: api.Bus) -> AsyncIterator[AsyncIterator[ChangeOrEvent]]:
        async with (
            await bus.subscribe(protocol.STATES, handler=self._enqueue),
            await bus.subscribe(protocol.EVENTS, handler=self._enqueue),
        ):
            await bus.flush()
            yield self._selected()

    def _enqueue(self, message: api.Message) -> None:
        if not self._names or message.subject.rpartition(".")[2] in self._names:
            if self._queue.full():
                self.dropped += 1
                self._queue.get_nowait()  # keep the newest
            self._queue.put_nowait(message)

    async def _selected(self) -> AsyncIterator[ChangeOrEvent]:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            events = [event for message in batch if (event := _decode(message))]
            attributes = await self._attributes(events) if self._keys else {}
            for event in events:
                fields = attributes.get(event.resource, {}) | rows.event_fields(event)
                if self._matches is None or self._matches(fields.get):
                    yield event

    async def _attributes(self, events: Sequence[ChangeOrEvent]) -> dict[str, dict[str, Any]]:
        names = list(dict.fromkeys(event.resource for event in events))
        return dict(zip(names, await self._read_attributes(names, self._keys), strict=True))


def _decode(message: api.Message) -> ChangeOrEvent | None:
    try:
        if message.subject.startswith(_STATE):
            return messages.decode(message.data, protocol.ResourceStateChange)
        return messages.decode(message.data, protocol.ResourceEvent)
    except errors.InvalidInput:
        return None  # an unknown version
