"""The web server as a process: ``python -m muster.app.supervisor.web_process``.

The domain supervises it (`muster.app.supervisor.module_process`). ``muster web`` calls `serve_web` in its own
process instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import msgspec

from muster.app import home
from muster.app.components import web
from muster.app.supervisor import server_process
from muster.bus.http import health as http_health
from muster.core.settings import domain as settings_domain
from muster.core.telemetry import log, metrics
from muster.trust import keyring
from muster.web import server, settings


async def serve_web(
    web_settings: settings.WebSettings,
    *,
    listener: socket.socket,
    domain: str,
    folder: home.DomainFolder,
    trust: keyring.Keyring,
    history: str,
    stop: asyncio.Event,
    health: settings_domain.HealthSettings,
) -> None:
    address = web.DomainAddress(folder, trust)
    measure = metrics.Metrics(process=True)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            http_health.serve_process(
                health,
                process=f"web-{listener.getsockname()[1]}",
                conditions=dict,
                metrics=measure,
                folder=folder.pages,
            )
        )
        await server.serve(
            web_settings,
            location=address,
            trust=trust,
            domain=domain,
            folder=folder.root / "web",
            history=history,
            listener=listener,
            stop=stop,
            measure=measure,
        )


async def _main() -> None:
    async with server_process.supervised() as (config, stop):
        task = msgspec.json.decode(config, type=web.WebProcessConfig)
        log.configure(sys.stderr, level=task.log_level, form="json")
        with server_process.inherited(task.listener) as listener:
            await serve_web(
                task.settings,
                listener=listener,
                domain=task.domain,
                folder=home.DomainFolder(Path(task.root)),
                trust=await asyncio.to_thread(keyring.Keyring.open, Path(task.keys)),
                history=task.history,
                stop=stop,
                health=task.health,
            )


if __name__ == "__main__":
    asyncio.run(_main())
