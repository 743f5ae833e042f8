"""A machine under one name: its agent, the reports of its sensor, its alerts and its receivers.

They are linked by identity, which the broker proves: the machine has the name of its agent, which names the
identity of its sensor (otherwise it has the same one); its receivers are those of the agent, ``NAME/…``. A
part that the domain does not run is missing, with a note.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from muster.bus import api
from muster.core import errors, messages
from muster.manage import client, protocol, rows
from muster.monitor import client as monitor_client
from muster.notify import queries
from muster.notify import rows as notify_rows
from muster.pipeline import client as pipeline_client

WINDOW_S = 120.0  # in which it has reported
RECEIVERS_MAX = 1_000

T = TypeVar("T")


class MachineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """``report``: the last one of its sensor; its ``machine`` is the identity of the sensor. ``notes``: why
    something is missing."""

    name: str
    agent: rows.AgentRow | None = None
    resources: list[rows.ResourceRow] = []
    report: messages.NodeReport | None = None
    alerts: list[messages.Alert] = []
    receivers: list[notify_rows.ReceiverRow] = []
    notes: list[str] = []


async def describe(bus: api.Bus, name: str) -> MachineDescription:
    """`errors.NotFound` if neither an agent nor a sensor has this name."""
    notes: list[str] = []

    async def part(work: Awaitable[T], default: T) -> T:
        try:
            return await work
        except errors.MusterError as error:
            notes.append(error.message)
            return default

    fleet = client.ManageClient(bus)
    quoted = name.replace("'", "''")
    agents = await part(fleet.agents(), [])
    agent = next((agent for agent in agents if agent.name == name), None)
    hosted = await part(fleet.get(where=f"agent = '{quoted}'"), []) if agent is not None else []
    sensor = str(agent.facts.get(protocol.SENSOR, name)) if agent is not None else name
    report = await part(_report(bus, sensor), None)
    if agent is None and report is None:
        known = ", ".join(sorted(agent.name for agent in agents)[:10])
        raise errors.NotFound(
            f"no agent and no sensor is named {name!r}", hint=f"agents: {known}" if known else None
        )
    pipeline = pipeline_client.PipelineClient(bus)
    alerts = await part(pipeline.alerts(), []) if await part(pipeline.has_alerts(), False) else []
    receivers = await part(queries.list_receivers(bus, prefix=f"{name}/", limit=RECEIVERS_MAX), None)
    return MachineDescription(
        name=name,
        agent=agent,
        resources=hosted,
        report=report,
        alerts=[
            alert for alert in alerts if alert.about.partition(":")[2].partition("/")[0] in (name, sensor)
        ],
        receivers=list(receivers.receivers) if receivers is not None else [],
        notes=notes,
    )


async def _report(bus: api.Bus, sensor: str) -> messages.NodeReport | None:
    try:
        from muster.monitor import live_view
    except ImportError as error:
        raise errors.MissingDependency(f"reports need the extra `monitor`: {error}") from error
    batches = await monitor_client.recent(bus, window_s=WINDOW_S)
    nodes = live_view.latest(stored.batch for stored in batches)
    return live_view.node(nodes, sensor)
