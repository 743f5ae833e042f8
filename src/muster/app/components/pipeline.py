"""The pipeline as a component: with the domain a separate process, because it is large.

It is not vital: messaging, notification and management work without it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from muster.app import settings
from muster.app.components import component, supervised
from muster.app.components import context as context_
from muster.bus import api
from muster.pipeline import protocol
from muster.pipeline.history import storage
from muster.supervision import children, tasks
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.pipeline.job import progress, service

STOP_S = 60.0
# A frozen driver is replaced after 30 s. Spark starts slowly, and a batch may keep the interpreter busy.
PROBE_POLICY = children.ProbePolicy(period_s=5.0, timeout_s=5.0, failures_max=3, grace_s=120.0, busy_s=60.0)
GC_OBJECTS = 100_000  # created before the garbage collector looks for cycles


class PipelineComponent:
    """The driver of the Spark job, in any process. It ends after the batch during which it is stopped; if it
    is killed, the batch is repeated."""

    name = "pipeline"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, all_settings: settings.Settings, identity: str = "") -> None:
        self._all_settings = all_settings
        self._settings = all_settings.pipeline
        self._identity = identity or self._settings.name
        self._bus: api.Bus | None = None
        self._service: service.PipelineService | None = None
        self._job: asyncio.Task[None] | None = None
        self._tasks = tasks.TaskSupervisor("pipeline")
        self._measured: progress.ProgressMetrics

    async def start(self, context: context_.ComponentContext) -> None:
        from muster.pipeline.job import progress, service

        # The results of thousands of groups are many small objects without cycles.
        gc.set_threshold(GC_OBJECTS, 20, 20)
        retention = self._all_settings.retention
        access = context.access
        credentials = await access.credentials_file(self._identity, roles.Role.PIPELINE)
        where = await access.locate()
        self._bus = await access.connect(self._identity, roles.Role.PIPELINE)
        paths = service.PipelinePaths(
            context.folder.root,
            where.servers,
            str(credentials) if credentials is not None else None,
            where.ca or None,
            retention.history.max_bytes,
            retention.history.max_age_s,
            tuple(
                protocol.streams(
                    system_max_bytes=retention.system.max_bytes,
                    alerts_max_bytes=retention.alerts.max_bytes,
                    alerts_max_age_s=retention.alerts.max_age_s,
                    replicas=self._all_settings.bus.replicas,
                )
            ),
        )
        self._measured = progress.ProgressMetrics(context.metrics)
        self._service = await asyncio.to_thread(
            service.PipelineService, self._bus, self._settings, paths, on_progress=self._measured.update
        )
        self._job = self._tasks.spawn("job", self._service.run())
        context.tasks.spawn("end", self._wait_for_end(context), on_failure=tasks.OnFailure.FATAL)

    async def _wait_for_end(self, context: context_.ComponentContext) -> None:
        assert self._job is not None
        await asyncio.shield(self._job)  # which stops by itself, later than this task
        context.finish()

    async def stop(self) -> None:
        if self._service is not None and self._job is not None:
            self._service.stop()
            await asyncio.wait((self._job,))
        await self._tasks.close()
        if self._bus is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        report = self._measured.report()
        return component.ComponentHealth(report.state, report.reason)


def supervised_pipeline(all_settings: settings.Settings) -> supervised.SupervisedComponent:
    """With the domain: a process of its own."""

    def watch(context: context_.ComponentContext) -> None:
        history = storage.local_path(all_settings.pipeline.history_root(context.folder.root))
        if history is not None:
            context.watch_folder("history", history, all_settings.retention.history.max_bytes)

    return supervised.SupervisedComponent(
        supervised.Supervision(
            "pipeline",
            prepare=watch,
            log_share=4,
            stop_s=STOP_S,
            restart_after_success=False,
            probe_policy=PROBE_POLICY,
        )
    )
