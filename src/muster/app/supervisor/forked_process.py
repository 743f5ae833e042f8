"""A process of the fork server: one that ends, or whose health page does not reply, is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.app import log_files
from muster.app.supervisor import child_component, worker_config
from muster.bus.http import health as http_health
from muster.core import errors, health
from muster.supervision import children, os_process

if TYPE_CHECKING:
    from muster.app.components import context as context_


class ForkedProcess:
    """``configure`` is called before each start, and may block. ``ready``: it serves."""

    def __init__(
        self,
        context: context_.ComponentContext,
        name: str,
        configure: Callable[[], worker_config.WorkerConfig],
    ) -> None:
        self.ready = asyncio.Event()
        self._context = context
        self.name = name
        self._configure = configure
        self._reported: http_health.HealthReport | None = None
        self.child = children.ChildSupervisor(
            name,
            self._launch,
            describe_end=self._describe_end,
            probe=self._responds if context.settings.health.enabled else None,
            probe_policy=child_component.PROBE_POLICY,
        )

    @property
    def problem(self) -> http_health.HealthReport | None:
        """Why the process does not serve."""
        if self.child.state is not children.ChildState.RUNNING or not self.ready.is_set():
            if self.child.is_crash_looping:
                return http_health.HealthReport(health.HealthState.FAILED, self.child.describe_loop())
            return http_health.HealthReport(health.HealthState.LATE, self.child.reason or "starting")
        if not self.child.is_responding:
            return http_health.HealthReport(health.HealthState.LATE, f"{self.name} does not respond")
        return None

    def health(self) -> http_health.HealthReport:
        """Its own report, if it serves."""
        return self.problem or self._reported or http_health.HealthReport()

    async def _launch(self) -> children.ProcessHandle:
        self.ready.clear()
        self._reported = None
        config = await asyncio.to_thread(self._configure)
        pid = await self._context.fork_server.spawn(self.name, config, lambda _: self.ready.set())
        await asyncio.to_thread(self._context.folder.record_child, self.name, pid)
        return os_process.ForeignProcess(pid)

    async def _responds(self) -> bool:
        self._reported = await http_health.reported(self._context.folder.pages, self.child.pid)
        return self._reported is not None

    async def _describe_end(self, _: int | None) -> errors.MusterError:
        log_file = self._context.folder.logs / f"{self.name}.log"
        words = await asyncio.to_thread(log_files.last_words, log_file)
        ended = self.child.describe_kill() or ": ".join(filter(None, ("ended", words)))
        return errors.Unavailable(f"{ended}; see {log_file}")
