"""The SOAP endpoints as a process: ``python -m muster.app.supervisor.soap_process``.

The domain supervises it (`muster.app.supervisor.module_process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import msgspec

from muster.app import home
from muster.app.components import soap_gateways, web
from muster.app.operations import audit
from muster.app.supervisor import server_process
from muster.bus.http import health as http_health
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.gateways.soap import server, settings
from muster.trust import keyring


async def run(
    soap_settings: settings.SoapSettings,
    *,
    listener: socket.socket,
    folder: home.DomainFolder,
    trust: keyring.Keyring,
    stop: asyncio.Event,
    health: domain.HealthSettings,
) -> None:
    measure = metrics.Metrics(process=True)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            http_health.serve_process(
                health,
                process=f"soap-{listener.getsockname()[1]}",
                conditions=dict,
                metrics=measure,
                folder=folder.pages,
            )
        )
        failed = await stack.enter_async_context(audit.FailedLogins(folder.root, "soap"))
        opened = soap_gateways.SoapGateways(
            web.DomainAddress(folder, trust).connect,
            trust.passwords(),
            callbacks=soap_settings.callbacks,
            measure=measure,
            on_failure=failed,
            forwarded_header=soap_settings.forwarded_header,
        )
        stack.push_async_callback(opened.close)
        await stack.enter_async_context(
            server.SoapServer(
                opened.application,
                listener=listener,
                certificate=soap_settings.certificate or None,
                key=soap_settings.key or None,
                behind_proxy=bool(soap_settings.forwarded_header),
            )
        )
        await stop.wait()


async def _main() -> None:
    async with server_process.supervised() as (config, stop):
        task = msgspec.json.decode(config, type=soap_gateways.Task)
        log.configure(sys.stderr, level=task.log_level, form="json")
        with server_process.inherited(task.listener) as listener:
            await run(
                task.settings,
                listener=listener,
                folder=home.DomainFolder(Path(task.root)),
                trust=await asyncio.to_thread(keyring.Keyring.open, Path(task.keys)),
                stop=stop,
                health=task.health,
            )


if __name__ == "__main__":
    asyncio.run(_main())
