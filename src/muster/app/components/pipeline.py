"""The pipeline as a component of a domain: a separate process, because it is large, restarted when it ends.

It is not vital: messaging, notification and management work without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.app import home, identities
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import module_process
from muster.core import files, health
from muster.core.settings import domain
from muster.pipeline import settings as settings_
from muster.pipeline.history import storage
from muster.supervision import children
from muster.trust import keyring
from muster.trust.permissions import roles

STOP_S = 60.0
OPTIONS_NAME = "options.json"
# A frozen driver is replaced after 30 s. Spark starts slowly, and a batch may keep the interpreter busy.
PROBE_POLICY = children.ProbePolicy(period_s=5.0, timeout_s=5.0, failures_max=3, grace_s=120.0, busy_s=60.0)


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
        self._process = module_process.ModuleProcess(
            "pipeline",
            "muster.pipeline.job.main",
            log_share=4,
            stop_s=STOP_S,
            restart_after_success=False,
            probe_policy=PROBE_POLICY,
        )

    async def start(self, context: context_.ComponentContext) -> None:
        history = storage.local_path(self._settings.history_root(context.folder.root))
        if history is not None:
            context.watch_folder("history", history, context.settings.retention.history.max_bytes)

        async def arguments() -> list[str]:
            return [str(await self._write_options(context))]

        self._process.start(context, arguments=arguments)

    async def stop(self) -> None:
        await self._process.stop()

    def health(self) -> component.ComponentHealth:
        if self._process.state is children.ChildState.FINISHED:
            return component.ComponentHealth(health.HealthState.DOWN, "stopped on request")
        report = self._process.health()
        return component.ComponentHealth(report.state, report.reason)

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
