"""`m.fleet`: resources and their desired state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from muster.bus import api
from muster.client import rows
from muster.manage import client, protocol
from muster.manage import rows as manage_rows

#: A manifest: its text, its file, or its content as a mapping.
Manifest = str | Path | Mapping[str, Any]


class AsyncFleet:
    """The managed resources; as `muster apply`, `get`, `exec`, ….

    >>> manifest = {"resources": [{"name": "web-1", "type": "process", "agent": "local",
    ...                            "group": "web", "config": {"command": ["sleep", "1000"]}}]}
    >>> result = await m.fleet.apply(manifest, wait_s=60)
    >>> [row.name for row in await m.fleet.resources(where="group = 'web'")]
    ['web-1']
    >>> (await m.fleet.execute("web-1", "restart"))
    >>> await m.fleet.delete("web-1", wait_s=60)
    """

    def __init__(self, bus: api.Bus) -> None:
        self._client = client.ManageClient(bus)

    async def resources(self, *names: str, where: str = "") -> rows.Rows[manage_rows.ResourceRow]:
        """The named resources, those that match ``where``, or all."""
        return rows.Rows(await self._client.get(*names, where=where))

    async def describe(self, name: str) -> manage_rows.ResourceDescription:
        """All details of a resource."""
        return await self._client.describe(name)

    async def apply(self, manifest: Manifest, *, wait_s: float | None = None) -> manage_rows.ApplyResult:
        """Apply a manifest: its text, its file as a `Path`, or its content.

        ``wait_s``: wait until all its resources are in their desired state.
        """
        return await self._client.apply(_text(manifest), wait_s=wait_s)

    async def plan(self, manifest: Manifest) -> rows.Rows[manage_rows.PlanStep]:
        """What `apply` would change."""
        return rows.Rows(await self._client.plan(_text(manifest)))

    async def delete(self, *names: str, force: bool = False, wait_s: float | None = None) -> None:
        """Delete resources. ``wait_s``: wait until they are gone. ``force``: if their machine is lost."""
        await self._client.delete(*names, force=force)
        if wait_s is not None:
            await self._client.wait_gone(*names, timeout_s=wait_s)

    async def execute(self, name: str, operation: str, /, **arguments: Any) -> Any:
        """Execute an operation on a resource; raises if it was refused or failed."""
        return await self._client.execute(name, operation, arguments)

    async def execute_many(
        self, operation: str, *names: str, where: str = "", arguments: Mapping[str, Any] | None = None
    ) -> rows.Rows[manage_rows.ExecutionRow]:
        """Execute an operation on many resources; a row with the outcome of each."""
        return rows.Rows(await self._client.exec(operation, *names, where=where, arguments=arguments))

    async def operations(self, name: str) -> list[str]:
        """The operations of a resource."""
        return await self._client.operations(name)

    async def logs(self, name: str, *, lines: int = client.LOG_LINES, since_s: float | None = None) -> str:
        """The last lines of a resource's log, or of what was written within ``since_s``."""
        return await self._client.logs(name, lines=lines, since_s=since_s)

    async def follow_logs(
        self, *names: str, where: str = "", lines: int = 0
    ) -> AsyncIterator[manage_rows.LogLine]:
        """Lines of the logs of resources as they are written, after the last ``lines``, without end."""
        async for line in self._client.log_lines(*names, where=where, lines=lines, follow=True):
            yield line

    async def wait(
        self, name: str, state: str | None = None, *, timeout_s: float = 30.0
    ) -> manage_rows.ResourceRow:
        """Wait until a resource is in this state, or without one in its desired state."""
        return await self._client.wait(name, state, timeout_s=timeout_s)

    async def watch(
        self, *names: str, where: str = ""
    ) -> AsyncIterator[protocol.ResourceStateChange | protocol.ResourceEvent]:
        """Changes of state and events of resources, without end.

        ``where``: the fields of the change or event, and the attributes that `resources` knows.
        """
        async for event in self._client.subscribe(*names, where=where):
            yield event

    async def names(self, *, where: str = "") -> list[str]:
        """The names of the resources that match ``where``, or of all."""
        return await self._client.names(where=where)

    async def agents(self) -> rows.Rows[manage_rows.AgentRow]:
        """The agents, with their machines and types of resources."""
        return rows.Rows(await self._client.agents())

    async def managers(self) -> rows.Rows[manage_rows.ManagerRow]:
        """The managers, with the number of resources of each."""
        return rows.Rows(await self._client.managers())


def _text(manifest: Manifest) -> str:
    if isinstance(manifest, Path):
        return manifest.read_text("utf-8")
    return manifest if isinstance(manifest, str) else msgspec.json.encode(manifest).decode()
