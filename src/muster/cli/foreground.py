"""What commands that run a service share: a connection with its identity, and the wait for a signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import command, connection
from muster.cli.domain import config
from muster.client import signals

if TYPE_CHECKING:
    from muster.app import settings as app_settings
    from muster.bus import api
    from muster.core.settings import domain
    from muster.core.telemetry import metrics
    from muster.trust.permissions import roles


def parse_pairs(arguments: tuple[str, ...], option: str) -> dict[str, str]:
    split = [argument.partition("=") for argument in arguments]
    for name, equals, value in split:
        if not (name and equals and value):
            raise click.BadParameter(f"{name!r} is not NAME=VALUE", param_hint=option)
    return {name: value for name, _, value in split}


async def connect_as(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    name: str,
    role: roles.Role,
    measure: metrics.Metrics | None = None,
) -> api.Bus:
    """Connect as ``name``. In a home, credentials for ``role`` are issued if there are none."""
    from muster import connection as muster_connection

    if to.servers and to.creds is None:
        return await muster_connection.connect(to.servers, identity=name, measure=measure)
    if to.servers or to.creds or invocation.profile:
        return await connection.connect(invocation, to, measure)
    return await _from_home(invocation, name, role, measure)


async def _from_home(
    invocation: command.Invocation, name: str, role: roles.Role, measure: metrics.Metrics | None
) -> api.Bus:
    import ssl

    from muster import connection as muster_connection
    from muster.app import home, identities
    from muster.core import errors
    from muster.trust.permissions import own_names, roles

    own_names.check(name, role, of_machine=True)
    settings = config.load(invocation)
    running = home.DomainFolder(settings.domain.folder).running()
    if running is None:
        raise errors.Unavailable(
            f"the domain {settings.domain.name} is not running",
            hint="start it with `muster up`, or select another bus with --server or --profile",
        )
    if role is roles.Role.CHANNEL:
        await _refuse_second_channel(settings, running.health_url, name)
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    creds = await asyncio.to_thread(identities.credentials, trust, name, role)
    tls = ssl.create_default_context(cafile=running.ca) if running.ca else None
    return await muster_connection.connect(running.servers, creds=creds, tls=tls, measure=measure)


async def _refuse_second_channel(settings: app_settings.Settings, health_url: str | None, name: str) -> None:
    """Two channels of one name would both forward every report."""
    from muster.app.components import monitor
    from muster.cli.domain import status
    from muster.core import errors

    own = monitor.ChannelComponent(settings.channel, settings.manage.machine_suffix)
    if name == own.identity and health_url:
        page = await status.fetch(health_url)
        if any(part["name"] == own.name for part in page.get("components", ())):
            raise errors.Conflict(
                f"the domain runs the channel {name!r} itself", hint="choose another --name"
            )


@contextlib.asynccontextmanager
async def serve_until_signal(
    invocation: command.Invocation,
    bus: api.Bus | None,
    measure: metrics.Metrics,
    *,
    process: str | None = None,
    folder: Path | None = None,
) -> AsyncIterator[asyncio.Event]:
    """As `signals.until_signal`, with the health pages of a process (`muster.bus.http.health`).

    ``folder``: where the address of the pages is published; default: the folder of the home's domain.
    """
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
        async with signals.until_signal() as stop:
            yield stop


def pages_of_processes(invocation: command.Invocation) -> Path | None:
    """Where processes publish the addresses of their health pages; None if they have none."""
    return _pages_folder(invocation) if _health_settings().enabled else None


def _pages_folder(invocation: command.Invocation) -> Path | None:
    from muster.app import home

    if not home.Home.find(invocation.home).settings_file.is_file():
        return None
    return home.DomainFolder(config.load(invocation).domain.folder).pages


def _health_settings() -> domain.HealthSettings:
    import os

    from muster.app import settings as app_settings
    from muster.core.settings import loader

    return loader.load(app_settings.Settings, env=os.environ).health
