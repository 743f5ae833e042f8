"""A notifier in a process of its own: ``python -m tests.soak.notifier_process HOME NAME``."""

from __future__ import annotations

import asyncio
import pathlib
import sys

from muster.app import home, identities
from muster.app import settings as app_settings
from muster.bus.client import client
from muster.bus.http import health
from muster.core.settings import loader
from muster.core.telemetry import log, metrics
from muster.notify.notifier import notifier
from muster.trust.permissions import roles


async def main(root: pathlib.Path, name: str) -> None:
    settings = loader.load(app_settings.Settings, file=root / "muster.toml")
    folder = home.DomainFolder(settings.domain.folder)
    running = await asyncio.to_thread(folder.running)
    assert running is not None
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    creds = await asyncio.to_thread(identities.credentials, trust, name, roles.Role.NOTIFIER)
    measure = metrics.Metrics(process=True)
    async with (
        await client.connect(running.servers, creds=creds, measure=measure) as bus,
        notifier.Notifier(
            bus,
            settings.notify,
            root=await asyncio.to_thread(trust.root_of_grants),
            domain=settings.domain.name,
            replicas=settings.bus.replicas,
            measure=measure,
        ),
        health.serve_process(
            settings.health,
            process=name,
            conditions=lambda: {"bus": health.bus_health(bus)},
            metrics=measure,
            folder=folder.pages,
        ),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    log.configure(sys.stderr, form="json")
    asyncio.run(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
