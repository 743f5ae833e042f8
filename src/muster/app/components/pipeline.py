"""The pipeline as a component of a domain: a separate process, because it is large, restarted when it ends.

It is not vital: messaging, notification and management work without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.app import home, identities, log_files
from muster.app.components import component
from muster.app.components import context as context_
from muster.core import files, health
from muster.core.settings import domain
from muster.pipeline import settings as settings_
from muster.trust import keyring
from muster.trust.permissions import roles

STOP_S = 60.0
WAIT_MAX_S = 60.0
OPTIONS_NAME = "options.json"
LOG_NAME = "pipeline.log"
PROCESSES = 2  # its share of the log budget, equal to that of all management processes


def pipeline_options(
    settings: domain.BaseSettings,
    pipeline: settings_.PipelineSettings,
    folder: home.DomainFolder,
    trust: keyring.Keyring,
    running: home.RunningDomain,
) -> dict[str, Any]:
    """The options of `muster.pipeline.job.main`; issues the pipeline's credentials. Blocks."""
    return {
        "folder": str(folder.root),
        "servers": running.servers,
        "credentials": str(identities.credentials_file(trust, pipeline.name, roles.Role.PIPELINE)),
        "ca": running.ca,
        "history_max_bytes": settings.retention.history.max_bytes,
        "history_max_age_s": settings.retention.history.max_age_s,
        "system_max_bytes": settings.retention.system.max_bytes,
        "alerts_max_bytes": settings.retention.alerts.max_bytes,
        "alerts_max_age_s": settings.retention.alerts.max_age_s,
        "replicas": settings.bus.replicas,
        "health": msgspec.structs.replace(settings.health, port=0),
        "pages": str(folder.pages),
        "settings": pipeline,
    }


class PipelineComponent:
    name = "pipeline"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.PipelineSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._log: asyncio.Task[None] | None = None
        self._restarts = 0
        self._reason = "starting"

    async def start(self, context: context_.ComponentContext) -> None:
        history = Path(self._settings.history_dir or context.folder.root / "history")
        context.watch_folder("history", history, context.settings.retention.history.max_bytes)
        self._task = context.spawn(self._keep_running(context))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._log is not None:
            await log_files.end_captures(self._log)

    def health(self) -> component.ComponentHealth:
        if self._process is not None and self._process.returncode is None:
            return component.ComponentHealth()
        return component.ComponentHealth(state=health.HealthState.DOWN, reason=self._reason)

    async def _keep_running(self, context: context_.ComponentContext) -> None:
        wait_s = 1.0
        while True:
            path = await self._write_options(context)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "muster.pipeline.job.main",
                str(path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            assert self._process.stdout is not None
            file = context.folder.logs / LOG_NAME
            self._log = asyncio.create_task(
                log_files.capture_output(self._process.stdout, file, context.settings, processes=PROCESSES)
            )
            code = await self._process.wait()
            await log_files.end_captures(self._log)
            if code == 0:
                self._reason = "stopped on request"
                return
            self._restarts += 1
            self._reason = f"ended with code {code}; see {file}"
            context.log.error("pipeline-ended", code=code, restarts=self._restarts)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, WAIT_MAX_S)

    async def _write_options(self, context: context_.ComponentContext) -> Path:
        while True:  # the domain publishes its addresses when all components have started
            running = await asyncio.to_thread(context.folder.running)
            if running is not None:
                return await asyncio.to_thread(self._prepare, context, running)
            await asyncio.sleep(0.1)

    def _prepare(self, context: context_.ComponentContext, running: home.RunningDomain) -> Path:
        options = pipeline_options(context.settings, self._settings, context.folder, context.trust, running)
        path = context.folder.root / "pipeline" / OPTIONS_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.encode(options | {"lifeline": True}))
        return path
