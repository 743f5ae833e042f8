"""What registers with the dispatchers under a name: a JMS connection, or the shared outboxes of a login.

The queues of a domain are divided into partitions (`muster.message.partitions`). A registrant has a
`PartitionLink` to each partition that it uses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Final

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.message import errors as message_errors
from muster.message import partitions, protocol
from muster.message.client import partition_link
from muster.supervision import tasks

events = log.EventLog("message")

IN_DOUBT_S: Final = 60.0  # how long a work is retried before its outcome counts as unknown


class Registrant:
    def __init__(self, bus: api.Bus, client_id: str | None = None) -> None:
        self.bus = bus
        self.client_id = client_id
        self._unique = secrets.token_hex(8)
        self.name = f"{bus.identity}-{self._unique}"
        self.closed = False
        self.in_doubt_s = IN_DOUBT_S
        self.on_error: Callable[[errors.MusterError], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._partition_count = 0  # unknown
        self.supervisor = tasks.TaskSupervisor(f"JMS connection {self.name}", handles=self._handle_error)
        self.home = partition_link.PartitionLink(self, partitions.HOME)
        self._links = {partitions.HOME: self.home}

    def check_open(self) -> None:
        if self.closed:
            raise message_errors.IllegalState("the connection is closed")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.supervisor.spawn("task", work)

    def _handle_error(self, error: BaseException) -> bool:
        """Errors of requests are reported to the user of the connection."""
        if isinstance(error, errors.MusterError):
            self.report(error)
            return True
        return False

    def report(self, error: errors.MusterError) -> None:
        if self.on_error is not None:
            self.on_error(error)
        else:
            events.warning("connection-error", connection=self.name, error=error)

    def link(self, partition: int) -> partition_link.PartitionLink:
        link = self._links.get(partition)
        if link is None:
            link = self._links[partition] = partition_link.PartitionLink(self, partition)
        return link

    async def partition_count(self) -> int:
        """The number of partitions; registers with the dispatcher of the first."""
        if not self._partition_count:
            await self.home.request(protocol.Ping(self.name))
        return self._partition_count

    def set_partition_count(self, count: int) -> None:
        """A dispatcher replied. The number never changes."""
        self._partition_count = count

    async def unregister(self, *, lost: bool) -> None:
        """End the links and all tasks."""
        self.closed = True
        for link in self._links.values():
            await link.disconnect(lost=lost)
        await self.supervisor.close()

    # What a link asks of a registrant with consumers.

    def seen_by_application(self) -> dict[str, list[int]]:
        """Messages the application received, by backlog: unacknowledged, or being acknowledged."""
        return {}

    def seen_with(self, held: list[dict[str, list[int]]]) -> dict[str, list[int]]:
        """Acknowledgements in progress, which may not be stored, together with ``held``."""
        return {}
