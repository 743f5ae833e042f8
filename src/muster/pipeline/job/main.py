"""The pipeline as a process: ``python -m muster.pipeline.job.main OPTIONS.json``; ends on SIGTERM and SIGINT.

It ends after the current batch.  A second signal ends it at once; as with ``kill -9``, the batch is then
repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from muster import connection
from muster.bus.client import client
from muster.bus.http import health as http_health
from muster.core import errors
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.pipeline import protocol
from muster.pipeline import settings as settings_
from muster.pipeline.job import progress_metrics, service
from muster.supervision import tasks

GC_OBJECTS = 100_000  # created before the garbage collector looks for cycles


class PipelineOptions(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    servers: tuple[str, ...]
    credentials: str | None = None
    ca: str | None = None
    history_max_bytes: int = 0
    history_max_age_s: float = 0.0
    system_max_bytes: int = 256 << 20
    alerts_max_bytes: int = 256 << 20
    alerts_max_age_s: float = 30 * 86400.0
    replicas: int = 1
    health: domain.HealthSettings = msgspec.field(default_factory=domain.HealthSettings)
    pages: str | None = None  # the folder in which it writes the address of its pages
    lifeline: bool = False  # ends with its standard input, so that no orphan process remains
    settings: settings_.PipelineSettings = msgspec.field(default_factory=settings_.PipelineSettings)


async def run(
    options: PipelineOptions, *, on_progress: Callable[[protocol.BatchProgress], None] | None = None
) -> None:
    paths = service.PipelinePaths(
        Path(options.folder),
        options.servers,
        options.credentials,
        options.ca,
        options.history_max_bytes,
        options.history_max_age_s,
        tuple(
            protocol.streams(
                system_max_bytes=options.system_max_bytes,
                alerts_max_bytes=options.alerts_max_bytes,
                alerts_max_age_s=options.alerts_max_age_s,
                replicas=options.replicas,
            )
        ),
    )
    tls = ssl.create_default_context(cafile=options.ca) if options.ca else None
    identity = None if options.credentials else options.settings.name
    measure = metrics.Metrics(process=True)
    measured = progress_metrics.ProgressMetrics(measure)
    bus: client.NatsBus | None = None

    def on_batch(progress: protocol.BatchProgress) -> None:
        measured.update(progress)
        if on_progress is not None:
            on_progress(progress)

    async with http_health.serve_process(
        options.health,
        process=options.settings.name,
        conditions=lambda: measured.conditions(bus),
        metrics=measure,
        folder=Path(options.pages) if options.pages else None,
    ):
        bus = await connection.connect(
            options.servers, identity=identity, creds=options.credentials, tls=tls, measure=measure
        )
        async with bus:
            running = await asyncio.to_thread(
                service.PipelineService, bus, options.settings, paths, on_progress=on_batch
            )
            with _stopping(running):
                supervisor = tasks.TaskSupervisor("lifeline")
                if options.lifeline:
                    supervisor.loop("input", functools.partial(_stop_at_end_of_input, running))
                try:
                    await running.run()
                finally:
                    await supervisor.close()


async def _stop_at_end_of_input(running: service.PipelineService) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    # A copy: closing the transport must not close the input of the next run.
    copy = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), copy)
    try:
        await reader.read()
        running.stop()
    finally:
        transport.close()


@contextlib.contextmanager
def _stopping(running: service.PipelineService) -> Iterator[None]:
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
    # The results of thousands of groups are many small objects without cycles.
    gc.set_threshold(GC_OBJECTS, 20, 20)
    end_log = log.configure(sys.stderr)
    try:
        asyncio.run(run(msgspec.json.decode(Path(path).read_bytes(), type=PipelineOptions)))
    except errors.MusterError as error:
        # One line, the last one of the log: the domain shows it as the reason why the process ended.
        reason = f"error: {error}" + (f" ({error.hint})" if error.hint else "")
        sys.stderr.write(" ".join(reason.split()) + "\n")
        return error.exit_code
    finally:
        end_log()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
