"""A manager or an agent in a process of its own: ``python -m tests.app.run_worker HOME KIND NAME``."""

from __future__ import annotations

import asyncio
import pathlib
import sys

import muster
from muster.app import home, identities
from muster.app import settings as app_settings
from muster.app.supervisor import worker, worker_config
from muster.core.settings import loader
from muster.trust.permissions import roles


async def main(root: pathlib.Path, kind: str, name: str) -> None:
    flags = {"manage.beat_s": 1.0, "health.port": 0}
    settings = loader.load(app_settings.Settings, file=root / "muster.toml", flags=flags)
    folder = home.DomainFolder(settings.domain.folder)
    running = folder.running()
    assert running is not None
    creds = identities.credentials_file(identities.open_keyring(settings), name, roles.Role(kind))
    task = worker_config.WorkerConfig(
        component=kind,
        identity=name,
        settings=settings,
        servers=running.servers,
        creds=str(creds),
        folder=str(folder.root / f"agent-{name}"),
    )

    def ready() -> None:
        sys.stdout.write(f"{name} is ready: Muster {muster.__version__}\n")
        sys.stdout.flush()

    await worker.run(task, asyncio.Event(), ready)


if __name__ == "__main__":
    asyncio.run(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
