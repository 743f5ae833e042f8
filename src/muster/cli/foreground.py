"""What commands that run a service share: a connection with its identity, and the wait for a signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli import command, connection
from muster.cli.domain import config
from muster.client import location

if TYPE_CHECKING:
    from muster.bus import api
    from muster.core.settings import domain
    from muster.core.telemetry import metrics
    from muster.trust.permissions import roles


async def connect_as(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    name: str,
    role: roles.Role,
    measure: metrics.Metrics | None = None,
) -> api.Bus:
    """Connect as ``name``. In a home, credentials for ``role`` are issued if there are none."""
    from muster import connection as muster_connection
    from muster.app import home
    from muster.trust.permissions import own_names, roles

    if to.servers and to.creds is None:
        return await muster_connection.connect(to.servers, identity=name, measure=measure)
    if to.names_server or to.creds or invocation.profile:
        return await connection.connect(invocation, to, measure)
    own_names.check(name, roles.Role.USER)  # the domain may run a part of this name
    return await location.connect_as(home.Home.find(invocation.home).root, name, role, measure)


@contextlib.asynccontextmanager
async def serve_until_signal(
    invocation: command.Invocation,
    bus: api.Bus | None,
    measure: metrics.Metrics,
    *,
    process: str | None = None,
    folder: Path | None = None,
) -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets, and the health pages of a process (`muster.bus.http.health`).

    ``folder``: where the address of the pages is published; default: the folder of the home's domain.
    """
    from muster.app.supervisor import component_process
    from muster.bus.http import health

    async with health.serve_process(
        _health_settings(),
        process=process or (bus.identity if bus is not None else "muster"),
        conditions=lambda: {} if bus is None else {"bus": health.bus_health(bus)},
        metrics=measure,
        folder=folder or _pages_folder(invocation),
    ) as server:
        if server is not None:
            invocation.printer.note(f"health pages: {server.url}")
        async with component_process.until_signal() as stop:
            yield stop


def _pages_folder(invocation: command.Invocation) -> Path | None:
    from muster.app import home

    if not home.Home.find(invocation.home).settings_file.is_file():
        return None
    return home.DomainFolder(config.load(invocation).domain.folder).pages


def _health_settings() -> domain.HealthSettings:
    import os

    from muster.app import settings
    from muster.core.settings import loader

    return loader.load(settings.Settings, env=os.environ).health
