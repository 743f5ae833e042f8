"""A further process for message dispatchers: ``python -m muster.app.supervisor.dispatcher_process``.

It receives its share of the partitions from the domain's other processes. The domain supervises it
(`muster.app.supervisor.module_process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import msgspec

from muster.app import home
from muster.app.components import dispatcher, web
from muster.app.supervisor import server_process
from muster.bus import api
from muster.bus.http import health as http_health
from muster.bus.rpc import admission
from muster.core import errors
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import keyring
from muster.trust.permissions import roles

CONNECT_S = 0.5  # between attempts, while the domain starts


async def run(task: dispatcher.DispatcherTask, stop: asyncio.Event) -> None:
    admission.of_loop(asyncio.get_running_loop()).share = task.share_per_identity
    measure = metrics.Metrics(process=True)
    folder = home.DomainFolder(Path(task.root))
    trust = await asyncio.to_thread(keyring.Keyring.open, Path(task.keys))
    conditions: dict[str, http_health.HealthReport] = {}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            http_health.serve_process(
                task.health,
                process=task.name,
                conditions=lambda: conditions,
                metrics=measure,
                folder=folder.pages,
            )
        )
        connecting = asyncio.ensure_future(_connect(web.DomainAddress(folder, trust)))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((connecting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            return
        bus = await stack.enter_async_context(connecting.result())
        supervisor = tasks.TaskSupervisor(task.name)
        stack.push_async_callback(supervisor.close)
        service = dispatcher.leadership_of(
            bus,
            task.settings,
            trust,
            max_bytes=task.max_bytes,
            replicas=task.replicas,
            lease_ttl_s=task.lease_ttl_s,
            measure=measure,
        )
        supervisor.loop("leadership", service.run)
        await stopping


async def _connect(address: web.DomainAddress) -> api.Bus:
    while True:
        try:
            return await address.connect(dispatcher.IDENTITY, roles.Role.GATEWAY)
        except errors.Unavailable:
            await asyncio.sleep(CONNECT_S)


async def _main() -> None:
    async with server_process.supervised() as (config, stop):
        task = msgspec.json.decode(config, type=dispatcher.DispatcherTask)
        log.configure(sys.stderr, level=task.log_level, form="json")
        await run(task, stop)


if __name__ == "__main__":
    asyncio.run(_main())
