"""The web as a process of its own: ``python -m muster.app.webserver``.

It reads what to be from its first line of input, and lives until the input ends: the domain holds the other
end, so it does not outlive it.  ``muster web`` calls `run` in its own process instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from muster.app import home, web
from muster.bus import pages
from muster.core import ground, log, metrics
from muster.trust import keyring
from muster.web import server
from muster.web import settings as settings_


async def run(
    wanted: settings_.Web,
    *,
    listener: socket.socket,
    domain: str,
    folder: home.Folder,
    trust: keyring.Trust,
    history: Path,
    callbacks: Sequence[str],
    stop: asyncio.Event,
    health: ground.Health,
) -> None:
    door = web.Door(folder, trust)
    measure = metrics.Metrics(process=True)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            pages.of_process(
                health,
                process=f"web-{listener.getsockname()[1]}",
                conditions=dict,
                metrics=measure,
                folder=folder.pages,
            )
        )
        beside: dict[str, ASGIApp] = {}
        with contextlib.suppress(ModuleNotFoundError):  # without the extra `soap` there are no SOAP doors
            from muster.app import doors

            opened = doors.Doors(door.connect, trust.passwords(), callbacks=callbacks, measure=measure)
            stack.push_async_callback(opened.close)
            beside = dict.fromkeys(opened.application.paths, opened.application)
        await server.serve(
            wanted,
            door=door,
            trust=trust,
            domain=domain,
            folder=folder.root / "web",
            history=history,
            listener=listener,
            stop=stop,
            doors=beside,
        )


async def _main() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    task = msgspec.json.decode(await reader.readline(), type=web.Task)
    log.configure(sys.stderr, level=task.log_level, form="json")

    async def leash() -> None:
        await reader.read()
        stop.set()

    holding = asyncio.create_task(leash())
    try:
        with socket.socket(fileno=os.dup(task.listener)) as listener:
            os.close(task.listener)
            await run(
                task.settings,
                listener=listener,
                domain=task.domain,
                folder=home.Folder(Path(task.root)),
                trust=await asyncio.to_thread(keyring.Trust.open, Path(task.keys)),
                history=Path(task.history),
                callbacks=task.callbacks,
                stop=stop,
                health=task.health,
            )
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main())
