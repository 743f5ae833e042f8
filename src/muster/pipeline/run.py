"""The pipeline as a process: ``python -m muster.pipeline.run OPTIONS.json``; ends on SIGTERM and SIGINT.

It ends after the batch it works on.  A second signal ends it at once; like ``kill -9`` that costs nothing but
the time to do the batch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from muster import connecting
from muster.core import errors, log
from muster.pipeline import protocol, service
from muster.pipeline import settings as settings_


class Options(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    servers: tuple[str, ...]
    credentials: str | None = None
    ca: str | None = None
    history_max_bytes: int = 0
    history_max_age_s: float = 0.0
    settings: settings_.Pipeline = msgspec.field(default_factory=settings_.Pipeline)


async def run(options: Options, *, on_progress: Callable[[protocol.Progress], None] | None = None) -> None:
    places = service.Places(
        Path(options.folder),
        options.servers,
        options.credentials,
        options.ca,
        options.history_max_bytes,
        options.history_max_age_s,
    )
    tls = ssl.create_default_context(cafile=options.ca) if options.ca else None
    identity = None if options.credentials else options.settings.name
    async with await connecting.connect(
        options.servers, identity=identity, creds=options.credentials, tls=tls
    ) as bus:
        running = await asyncio.to_thread(
            service.Service, bus, options.settings, places, on_progress=on_progress
        )
        with _stopping(running):
            await running.run()


@contextlib.contextmanager
def _stopping(running: service.Service) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(130)
        running.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def main(path: str) -> int:
    end_log = log.configure(sys.stderr)
    try:
        asyncio.run(run(msgspec.json.decode(Path(path).read_bytes(), type=Options)))
    except errors.MusterError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    finally:
        end_log()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
