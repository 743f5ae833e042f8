"""`m.fleet`: resources and their desired state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.client import rows
from muster.core import errors, messages
from muster.manage import client, protocol
from muster.manage import rows as manage_rows
from muster.notify import rows as notify_rows

REPORTED_S = 120.0  # a report of a machine is current for this time
RECEIVERS_MAX = 1_000

T = TypeVar("T")
#: A manifest: its text, its file, or its content as a mapping.
Manifest = str | Path | Mapping[str, Any]


class MachineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A machine under one name: its agent, the reports of its sensor, its alerts and its receivers.

    They are linked by identity, which the broker proves: the machine has the name of its agent, which names
    the identity of its sensor (otherwise it has the same one); its receivers are those of the agent,
    ``NAME/…``. A part that the domain does not run is missing, with a note.
    """

    name: str
    agent: manage_rows.AgentRow | None = None
    resources: list[manage_rows.ResourceRow] = []
    report: messages.NodeReport | None = None  # the last one; its ``machine`` is the identity of the sensor
    alerts: list[messages.Alert] = []
    receivers: list[notify_rows.ReceiverRow] = []
    notes: list[str] = []


class CompletedCommand(msgspec.Struct, frozen=True):
    """The end of a command inside a resource."""

    exit_code: int  # negative: the number of the signal that ended it
    output: bytes
    errors: bytes

    @property
    def text(self) -> str:
        """Its output as text."""
        return self.output.decode(errors="replace")


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
        self._bus = bus
        self._client = client.ManageClient(bus)

    def __repr__(self) -> str:
        return "<the resources of the domain>"

    async def resources(self, *names: str, where: str = "") -> rows.Rows[manage_rows.ResourceRow]:
        """The named resources, those that match ``where``, or all."""
        return rows.Rows(await self._client.get(*names, where=where))

    async def describe(self, name: str) -> manage_rows.ResourceDescription:
        """All details of a resource."""
        return await self._client.describe(name)

    async def machine(self, name: str) -> MachineDescription:
        """The agent of this name with its resources, and the reports, alerts and receivers of its machine.

        `errors.NotFound` if neither an agent nor a sensor has this name.
        """
        from muster.notify import queries
        from muster.pipeline import client as pipeline_client

        notes: list[str] = []

        async def part(work: Awaitable[T], default: T) -> T:
            try:
                return await work
            except errors.MusterError as error:
                notes.append(error.message)
                return default

        quoted = name.replace("'", "''")
        agents = await part(self._client.agents(), [])
        agent = next((agent for agent in agents if agent.name == name), None)
        hosted = await part(self._client.get(where=f"agent = '{quoted}'"), []) if agent is not None else []
        sensor = str(agent.facts.get(protocol.SENSOR, name)) if agent is not None else name
        report = await part(self._report(sensor), None)
        if agent is None and report is None:
            known = ", ".join(sorted(agent.name for agent in agents)[:10])
            raise errors.NotFound(
                f"no agent and no sensor is named {name!r}", hint=f"agents: {known}" if known else None
            )
        pipeline = pipeline_client.PipelineClient(self._bus)
        alerts = await part(pipeline.alerts(), []) if await part(pipeline.has_alerts(), False) else []
        receivers = await part(
            queries.list_receivers(self._bus, prefix=f"{name}/", limit=RECEIVERS_MAX), None
        )
        return MachineDescription(
            name=name,
            agent=agent,
            resources=hosted,
            report=report,
            alerts=[alert for alert in alerts if _machine_of(alert) in (name, sensor)],
            receivers=list(receivers.receivers) if receivers is not None else [],
            notes=notes,
        )

    async def _report(self, sensor: str) -> messages.NodeReport | None:
        from muster.monitor import client as monitor_client

        try:
            from muster.monitor import live_view
        except ImportError as error:
            raise errors.MissingDependency(f"reports need the extra `monitor`: {error}") from error
        batches = await monitor_client.recent(self._bus, window_s=REPORTED_S)
        return live_view.node(live_view.latest(stored.batch for stored in batches), sensor)

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

    async def run_inside(self, name: str, *command: str, data: bytes = b"") -> CompletedCommand:
        """Run a command inside a resource, with ``data`` as its input; as `muster exec NAME -- COMMAND`."""
        received = {1: bytearray(), 2: bytearray()}

        async def write() -> None:
            with contextlib.suppress(errors.NotFound):  # it ended without reading all
                await session.write(data)
                await session.end_input()

        async with self._client.run_inside(name, *command) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    writing = group.create_task(write())
                    async for number, part in session.output():
                        received[number] += part
                    writing.cancel()
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        assert session.exit_code is not None
        return CompletedCommand(session.exit_code, bytes(received[1]), bytes(received[2]))

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


def _machine_of(alert: messages.Alert) -> str:
    return alert.about.partition(":")[2].partition("/")[0]


def _text(manifest: Manifest) -> str:
    if isinstance(manifest, Path):
        return manifest.read_text("utf-8")
    if isinstance(manifest, str) and manifest.endswith((".yaml", ".yml", ".json")):
        raise errors.InvalidInput(
            f"{manifest!r} is no manifest but the name of a file", hint=f"pass Path({manifest!r})"
        )
    return manifest if isinstance(manifest, str) else msgspec.json.encode(manifest).decode()
