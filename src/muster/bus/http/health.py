"""/livez, /readyz and /metrics: how every process of Muster says how it is, through this one piece of code.

- ``/livez``: the process's event loop turns. A supervisor that gets no answer should restart it.
- ``/readyz``: 200 when it can do its work, else 503; the JSON body says how each of its parts is.
- ``/metrics``: OpenMetrics, or the classic Prometheus text for those who do not ask for it.

They ask nobody who they are: so they tell no secrets, and listen on loopback unless the settings differ.

Where they are is told in a file for each process, in the form that Prometheus reads (``file_sd_configs``) and
``muster status`` shows.  A process that is killed leaves its file, until the next one of its name writes it
anew or somebody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.bus import api
from muster.bus.http import otlp_exporter
from muster.bus.http import server as http_server
from muster.core import health
from muster.core.settings import domain
from muster.core.telemetry import metrics as metrics_

PID = "__meta_pid"  # a label that Prometheus drops: a new number must not make a new series


class HealthCondition(Protocol):
    """How one part of a process is."""

    @property
    def state(self) -> health.HealthState: ...
    @property
    def reason(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HealthReport:
    state: health.HealthState = health.HealthState.UP
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HealthEndpoint:
    """Where the pages of a process are."""

    process: str
    url: str
    pid: int


async def serve(
    settings: domain.HealthSettings,
    *,
    ready: Callable[[], bool],
    health: Callable[[], Mapping[str, HealthCondition]],
    metrics: metrics_.Metrics,
    also: Mapping[str, http_server.Handler] | None = None,
) -> http_server.HttpServer | None:
    """The listening server, or None where the settings want none. ``also`` adds the process's own pages."""
    if not settings.enabled:
        return None

    def readyz(_: http_server.HttpRequest) -> http_server.HttpResponse:
        is_ready = ready()
        parts = {
            name: {"state": condition.state.value, "reason": condition.reason}
            for name, condition in health().items()
        }
        return http_server.json_response({"ready": is_ready, "parts": parts}, 200 if is_ready else 503)

    def exposition(request: http_server.HttpRequest) -> http_server.HttpResponse:
        content_type, text = metrics.exposition(request.headers.get("accept", ""))
        return http_server.HttpResponse(200, text, content_type)

    routes: dict[str, http_server.Handler] = {
        "/livez": lambda _: http_server.text("ok\n"),
        "/readyz": readyz,
        "/metrics": exposition,
        **(also or {}),
    }
    return await http_server.serve(routes, settings.host, settings.port)


@contextlib.asynccontextmanager
async def serve_process(
    settings: domain.HealthSettings,
    *,
    process: str,
    conditions: Callable[[], Mapping[str, HealthCondition]],
    metrics: metrics_.Metrics,
    folder: Path | None = None,
) -> AsyncIterator[http_server.HttpServer | None]:
    """The pages of a process that is ready when all of ``conditions`` are up, told in ``folder``."""

    def ready() -> bool:
        return all(condition.state is health.HealthState.UP for condition in conditions().values())

    server = await serve(settings, ready=ready, health=conditions, metrics=metrics)
    if server is None:
        async with otlp_exporter.otlp_export(settings, process, metrics):
            yield None
        return
    async with server, otlp_exporter.otlp_export(settings, process, metrics):
        if folder is None:
            yield server
            return
        file = await asyncio.to_thread(advertise, folder, process, server)
        try:
            yield server
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)


def bus_health(bus: api.Bus) -> HealthReport:
    if bus.state is api.ConnectionState.CONNECTED:
        return HealthReport()
    return HealthReport(health.HealthState.DOWN, f"the connection is {bus.state.value}")


def advertise(folder: Path, process: str, server: http_server.HttpServer) -> Path:
    """Write where the pages of ``process`` are. Blocks."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    host = f"[{server.host}]" if ":" in server.host else server.host
    labels = {"process": process, PID: str(os.getpid())}
    file = folder / f"{process}.json"
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps([{"targets": [f"{host}:{server.port}"], "labels": labels}]) + "\n")
    draft.rename(file)
    return file


def advertised(folder: Path) -> Iterator[HealthEndpoint]:
    """Those of processes that still run; what killed ones left is removed. Blocks."""
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError):
            (group,) = json.loads(file.read_text())
            place = HealthEndpoint(
                group["labels"]["process"], f"http://{group['targets'][0]}", int(group["labels"][PID])
            )
            if _runs(place.pid):
                yield place
            else:
                file.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, and alive
        return True
    return True
