"""A component in a process of its own: what ``muster run COMPONENT`` does.

Three start such a process, with the same configuration (`component_config`): a user or a service manager, by
the command; the domain, by the same command (`child_component`), which then reads its configuration from
standard input; and the fork server, for the many small processes of management and the information service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from muster.app import access, home, service_manager
from muster.app.components import component, context, factories
from muster.app.supervisor import component_config
from muster.bus import api
from muster.bus.http import health as http_health
from muster.bus.rpc import admission
from muster.core import errors, health
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import keyring

CONFIG_BYTES_MAX = 1 << 20
FORCED = 130

#: Called with the component when it serves, and the address of its health pages, if it has any.
Started = Callable[[component.Component, str], None]


async def run(config: component_config.ComponentConfig, stop: asyncio.Event, started: Started) -> None:
    """Run the component until ``stop`` is set or it has done its work. Raises the error with which it
    failed."""
    admission.of_loop(asyncio.get_running_loop()).share = config.settings.bus.share_per_identity
    member = factories.serving(config)
    folder = home.DomainFolder(config.settings.domain.folder.absolute())
    await asyncio.to_thread(folder.create)
    measure = metrics.Metrics(process=True)
    buses: list[api.Bus] = []
    reaches = await asyncio.to_thread(access_of, config, folder, measure, buses.append)
    failures: list[BaseException] = []

    def failed(_: component.Component, error: BaseException) -> None:
        failures.append(error)
        stop.set()

    def context_for(_: component.Component, supervisor: tasks.TaskSupervisor) -> context.ComponentContext:
        return context.ComponentContext(
            settings=config.settings,
            folder=folder,
            access=reaches,
            metrics=measure,
            log=log.EventLog("app", in_component=member.name),
            tasks=supervisor,
            template=lambda: config,
            listener=config.listener,
            finish=stop.set,
        )

    group = component.ComponentGroup([member], context_for=context_for, on_failure=failed)
    async with contextlib.AsyncExitStack() as stack:
        pages = await stack.enter_async_context(
            http_health.serve_process(
                config.settings.health,
                process=config.name,
                conditions=lambda: {**_bus_conditions(buses), **group.health()},
                metrics=measure,
                folder=folder.pages,
            )
        )
        stack.push_async_callback(group.stop)
        starting, stopping = asyncio.create_task(group.start()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not failures:
                starting.result()
                started(member, "" if pages is None else pages.url)
                await stopping
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
    if failures:
        raise failures[0]


def _bus_conditions(buses: list[api.Bus]) -> dict[str, http_health.HealthReport]:
    """Of the connections of the component itself, the first one that is lost."""
    reports = [http_health.bus_health(bus) for bus in buses if bus.state is not api.ConnectionState.CLOSED]
    lost = (report for report in reports if report.state is not health.HealthState.UP)
    return {"bus": next(lost, reports[0])} if reports else {}


def access_of(
    config: component_config.ComponentConfig,
    folder: home.DomainFolder,
    measure: metrics.Metrics,
    connected: Callable[[api.Bus], None] = lambda _: None,
) -> access.DomainAccess:
    """Blocks."""
    settings = config.settings
    servers = config.servers or (() if config.locator else settings.bus.servers)

    async def locate() -> access.DomainAddress:
        if servers or config.locator:
            return access.DomainAddress(
                servers, config.ca, config.locator, settings.bus.proxy, in_order=settings.bus.on_machines
            )
        running = await asyncio.to_thread(folder.running)
        if running is None:
            raise errors.NotConnected(
                f"the domain {settings.domain.name} is not running",
                hint="start it with `muster up`, or name its brokers with --server",
            )
        return access.DomainAddress(
            running.servers,
            config.ca or running.ca or "",
            proxy=settings.bus.proxy,
            run=(running.pid, running.started_at_s),
            in_order=settings.bus.on_machines,
        )

    return access.DomainAccess(
        locate,
        keys=keyring.Keyring.open(settings.keys_folder) if settings.keys_folder.is_dir() else None,
        creds=Path(config.creds) if config.creds else None,
        measure=measure,
        connect_timeout_s=settings.bus.connect_timeout_s,
        connected=connected,
    )


async def run_in_front(config: component_config.ComponentConfig, started: Started) -> None:
    """Run until a signal. Reports to systemd, if it started this process."""
    manager = service_manager.ServiceManager(os.environ)

    def serves(member: component.Component, pages: str) -> None:
        manager.notify(service_manager.READY)
        started(member, pages)

    async with manager.reporting(), until_signal() as stop:
        try:
            await run(config, stop, serves)
        finally:
            manager.notify(service_manager.STOPPING)


async def run_supervised() -> None:
    """Run what the configuration on standard input says, until the input ends: with the process at its other
    end, so that none is left behind."""
    async with supervised() as (line, stop):
        config = msgspec.json.decode(line, type=component_config.ComponentConfig)
        log.configure(sys.stderr, level=config.settings.log.level, form="json")
        await run(config, stop, lambda *_: None)


def last_words(error: errors.MusterError) -> str:
    """One line, the last one of the log: the domain shows it as the reason why the process ended."""
    return " ".join(f"error: {error}{f' ({error.hint})' if error.hint else ''}".split())


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[tuple[bytes, asyncio.Event]]:
    """The first line of the input, and an event that is set at its end or by a signal."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CONFIG_BYTES_MAX)
    # A copy: closing the transport must not close the input of the next run.
    copy = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), copy)
    supervisor = tasks.TaskSupervisor("lifeline")
    try:
        async with until_signal() as stop:
            line = await reader.readline()

            async def wait_for_end() -> None:
                await reader.read()
                stop.set()

            supervisor.loop("input", wait_for_end)
            yield line, stop
    finally:
        await supervisor.close()
        transport.close()


@contextlib.asynccontextmanager
async def until_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets; a second signal ends the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(FORCED)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
