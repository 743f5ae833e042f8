"""Export of the activity log to another system: follows the log, and continues after an interruption.

The position in the log is stored when an entry was delivered, so an entry may be delivered twice, with the
same ``id``, and is not skipped.  Entries from before the export was enabled are not sent.
"""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Sequence

from muster.app import positions
from muster.app.components import component
from muster.app.components import context as context_
from muster.core import errors, health, messages

RETRY_S = 1.0
SEVERITY = {
    messages.DecisionOutcome.FAILED: "error",
    messages.DecisionOutcome.IN_DOUBT: "warning",
    messages.DecisionOutcome.REFUSED: "warning",
}


def facts_of(entry: messages.Decision, domain: str) -> dict[str, str]:
    """The fields of an entry that have a value, without its time and its text."""
    facts = {
        "id": entry.id,
        "domain": domain,
        "who": entry.who,
        "on_behalf_of": entry.on_behalf_of,
        "target": entry.target,
        "outcome": entry.outcome.value,
        "trace": entry.trace_id,
        **entry.details,
    }
    return {name: value for name, value in facts.items() if value}


def text_of(entry: messages.Decision) -> str:
    actor = entry.on_behalf_of or entry.who
    return f"{actor}: {entry.what} {entry.target}: {entry.outcome.value} ({entry.why})"


class ActivityExport(abc.ABC):
    """A component. ``name`` is also that of its position."""

    name: str
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._problem = ""
        self._sent = 0
        self._missed = 0  # entries that the log dropped before they were sent

    async def _open(self) -> None:  # noqa: B027  (optional)
        """Connect; `OSError` or `errors.Unavailable` if that is not possible now."""

    @abc.abstractmethod
    async def _deliver(self, entry: messages.Decision, domain: str) -> None:
        """Returns when the entry is delivered; errors as `_open`."""

    async def _close(self) -> None:  # noqa: B027  (optional)
        """End the connection, if there is one."""

    async def start(self, context: context_.ComponentContext) -> None:
        context.tasks.loop(self.name, functools.partial(self._export, context))

    async def stop(self) -> None:
        await self._close()

    def health(self) -> component.ComponentHealth:
        state = health.HealthState.LATE if self._problem else health.HealthState.UP
        counts = {f"{self.name}_sent": self._sent, f"{self.name}_missed": self._missed}
        return component.ComponentHealth(state, self._problem, counts)

    async def _export(self, context: context_.ComponentContext) -> None:
        while True:
            try:
                await self._follow(context)
            except errors.Dropped as error:
                self._missed += error.last - error.first + 1
                context.log.error("activities-not-exported", first=error.first, last=error.last)
                await self._position(context).store(error.last)
            except (OSError, TimeoutError, errors.Unavailable, errors.NotFound) as error:
                self._problem = f"{self._url}: {error or 'no connection'}"
                await self._close()
                await asyncio.sleep(RETRY_S)

    async def _follow(self, context: context_.ComponentContext) -> None:
        stored = await self._position(context).load()
        try:
            stream = await context.bus.open_stream(messages.DECISIONS_STREAM)
        except errors.NotFound:
            if stored is None:  # the log has no entry yet: the first one is exported
                await self._position(context).store(0)
            raise
        last = (await stream.state()).last_sequence
        position = last if stored is None else stored
        if position > last:  # the log was created anew
            position = 0
        await self._position(context).store(position)
        await self._close()
        await self._open()
        self._problem = ""
        async with stream.follow(position + 1, gaps=True) as following:
            async for item in following:
                try:
                    entry = messages.decode(item.data, messages.Decision)
                except errors.MusterError:
                    continue
                await self._deliver(entry, context.settings.domain.name)
                self._sent += 1
                await self._position(context).store(item.sequence)

    def _position(self, context: context_.ComponentContext) -> positions.StoredPosition:
        return positions.StoredPosition(context.folder.root, self.name)
