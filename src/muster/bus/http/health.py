"""The health endpoints of every Muster process: /livez, /readyz and /metrics.

- ``/livez``: the event loop of the process runs. A supervisor that gets no response should restart it.
- ``/readyz``: 200 if the process can do its work, else 503; the JSON body has the state of each part. The
  part ``tasks`` covers the background tasks.
- ``/metrics``: OpenMetrics for clients that accept it, else the classic Prometheus text.
- ``/metrics/machine``: those of all processes of the machine's domain, or of its agent.

The endpoints need no authentication.  Therefore they show no secrets, and they listen on loopback unless the
settings say otherwise.

Each process writes its address to a file in the format of Prometheus' ``file_sd_configs``; ``muster status``
reads the files too.  The file of a killed process stays until a process of the same name replaces it or
`advertised` removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.bus import api
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import link
from muster.bus.http import client, telemetry_export
from muster.bus.http import server as http_server
from muster.bus.rpc import requests
from muster.core import errors, files, health
from muster.core.settings import domain
from muster.core.telemetry import metrics as metrics_
from muster.supervision import children, tasks

PID = "__meta_pid"  # a label that Prometheus drops: a new process id must not create a new series
MACHINE = "/metrics/machine"
PAGE_S, PAGE_BYTES_MAX = 3.0, 16 << 20  # for the page of one process
TASKS = "tasks"  # the part of /readyz for background tasks


class HealthCondition(Protocol):
    """The state of one part of a process."""

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
    """The address of the health endpoints of a process."""

    process: str
    url: str
    pid: int


async def serve(
    settings: domain.HealthSettings,
    *,
    ready: Callable[[], bool],
    conditions: Callable[[], Mapping[str, HealthCondition]],
    metrics: metrics_.Metrics,
    more_routes: Mapping[str, http_server.Handler] | None = None,
) -> http_server.HttpServer | None:
    """Start the server; None if the settings disable it. ``more_routes`` adds pages of the process.

    ``/readyz`` also requires that no background task has a problem (`muster.supervision.tasks`).
    """
    if not settings.enabled:
        return None

    metrics.counter_from("task_failures", "Failures of background tasks.", ("owner", "task"), tasks.failures)
    metrics.counter_from(
        "refused_messages",
        "Messages to a service that were no valid requests.",
        ("service", "reason"),
        requests.refusals,
    )
    metrics.counter_from(
        "direct_fallbacks",
        "Messages sent to the brokers in place of a direct connection, and connections that failed.",
        ("reason",),
        direct_bus.fallbacks,
    )
    metrics.gauge("direct_connections", "Direct connections that are open.").read_from(link.number_open)
    metrics.counter_from(
        "silent_children",
        "Child processes that did not reply in time: frozen or busy ones were killed, starved ones were not.",
        ("child", "reason"),
        children.silences,
    )
    loop = asyncio.get_running_loop()
    metrics.gauge("asyncio_tasks", "Tasks of the event loop that have not ended.").read_from(
        lambda: len(asyncio.all_tasks(loop))
    )

    def readyz(_: http_server.HttpRequest) -> http_server.HttpResponse:
        problems = tasks.problems()
        is_ready = ready() and not problems
        parts = {
            name: {"state": condition.state.value, "reason": condition.reason}
            for name, condition in {**conditions(), TASKS: task_health(problems)}.items()
        }
        return http_server.json_response({"ready": is_ready, "parts": parts}, 200 if is_ready else 503)

    def exposition(request: http_server.HttpRequest) -> http_server.HttpResponse:
        content_type, text = metrics.exposition(request.headers.get("accept", ""))
        return http_server.HttpResponse(200, text, content_type)

    routes: dict[str, http_server.Handler] = {
        "/livez": lambda _: http_server.text("ok\n"),
        "/readyz": readyz,
        "/metrics": exposition,
        **(more_routes or {}),
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
    """Serve the endpoints of a process that is ready while all ``conditions`` are up; the address goes to
    ``folder``."""

    def ready() -> bool:
        return all(condition.state is health.HealthState.UP for condition in conditions().values())

    pages = {} if folder is None else {MACHINE: machine_page(folder)}
    server = await serve(settings, ready=ready, conditions=conditions, metrics=metrics, more_routes=pages)
    if server is None:
        async with telemetry_export.export_telemetry(settings, process, metrics):
            yield None
        return
    async with server, telemetry_export.export_telemetry(settings, process, metrics):
        if folder is None:
            yield server
            return
        file = await asyncio.to_thread(advertise, folder, process, server)
        try:
            yield server
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)


def machine_page(folder: Path) -> http_server.Handler:
    """The metrics of all processes that advertise their pages in ``folder``, each with its name as a label:
    one address for each machine. A process that does not reply is missing."""

    async def page_of(endpoint: HealthEndpoint) -> str:
        try:
            page = await client.get(
                f"{endpoint.url}/metrics", timeout_s=PAGE_S, body_bytes_max=PAGE_BYTES_MAX
            )
        except errors.MusterError:
            return ""
        return page.body.decode("utf-8", "replace") if page.status == 200 else ""

    async def exposition(_: http_server.HttpRequest) -> http_server.HttpResponse:
        endpoints = await asyncio.to_thread(lambda: list(advertised(folder)))
        texts = await asyncio.gather(*map(page_of, endpoints))
        pages = {endpoint.process: text for endpoint, text in zip(endpoints, texts, strict=True)}
        merged = await asyncio.to_thread(metrics_.merge_pages, pages)
        return http_server.HttpResponse(200, merged.encode(), metrics_.CLASSIC)

    return exposition


def task_health(problems: Sequence[str]) -> HealthReport:
    if not problems:
        return HealthReport()
    return HealthReport(health.HealthState.FAILED, "; ".join(problems))


def bus_health(bus: api.Bus) -> HealthReport:
    if bus.state is api.ConnectionState.CONNECTED:
        return HealthReport()
    return HealthReport(health.HealthState.DOWN, f"the connection is {bus.state.value}")


def advertise(folder: Path, process: str, server: http_server.HttpServer) -> Path:
    """Write the address of the endpoints of ``process`` to ``folder``. Blocks.

    The file is named after the process and its pid. So a reader that removes the file of a process that ended
    cannot remove the one of its successor.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in advertised(folder):
        pass  # removes the files of predecessors
    host = f"[{server.host}]" if ":" in server.host else server.host
    labels = {"process": process, PID: str(os.getpid())}
    file = folder / f"{process}-{os.getpid()}.json"
    content = json.dumps([{"targets": [f"{host}:{server.port}"], "labels": labels}]) + "\n"
    files.write(file, content.encode(), mode=files.PUBLIC)
    return file


def advertised(folder: Path) -> Iterator[HealthEndpoint]:
    """The endpoints of running processes. Files of processes that ended are removed. Blocks."""
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
            (group,) = json.loads(file.read_text())
            endpoint = HealthEndpoint(
                group["labels"]["process"], f"http://{group['targets'][0]}", int(group["labels"][PID])
            )
            if _is_running(endpoint.pid):
                yield endpoint
            else:
                file.unlink(missing_ok=True)


async def reported(folder: Path, pid: int | None) -> HealthReport | None:
    """The health that the process with this pid reports; None if it has no endpoints yet.
    `errors.Unavailable` if they do not reply."""
    for endpoint in await asyncio.to_thread(lambda: list(advertised(folder))):
        if endpoint.pid == pid:
            page = (await client.get(f"{endpoint.url}/readyz")).json()
            if page["ready"]:
                return HealthReport()
            for name, part in page["parts"].items():
                if part["state"] != health.HealthState.UP.value:
                    return HealthReport(
                        health.HealthState(part["state"]), f"{name}: {part['reason'] or part['state']}"
                    )
            return HealthReport(health.HealthState.DOWN, "not ready")
    return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True
