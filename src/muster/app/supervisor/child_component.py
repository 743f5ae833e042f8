"""Components as child processes: ``muster run COMPONENT``, with a configuration on its standard input.

Load and failures of such a component affect its process and not the domain's leases, heartbeats and health
pages. Its input stays open as long as the domain runs and ends with it, so the process does not outlive the
domain. Its output goes to a log file with a size limit. A process whose health page does not reply is killed
and replaced.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from muster.app import log_files
from muster.app.components import context as context_
from muster.app.supervisor import component_config
from muster.bus.http import health as http_health
from muster.core import errors, health
from muster.supervision import children

# A frozen process is replaced after at most 6 s; one that lacks processor time has 30 s for a reply.
PROBE_POLICY = children.ProbePolicy(period_s=1.0, timeout_s=2.0, failures_max=2)


class ChildComponent:
    """``log_share``: its log has this fraction of the budget for the logs of child processes. ``stop_s``: the
    time to end. ``restart_after_success`` False: it may end by itself."""

    def __init__(
        self,
        name: str,
        *,
        log_share: int,
        stop_s: float = children.STOP_S,
        restart_after_success: bool = True,
        probe_policy: children.ProbePolicy = PROBE_POLICY,
    ) -> None:
        self.name = name
        self._log_share = log_share
        self._stop_s = stop_s
        self._restart_after_success = restart_after_success
        self._probe_policy = probe_policy
        self._child: children.ChildSupervisor | None = None
        self._is_probed = False
        self._reported: tuple[int | None, http_health.HealthReport | None] = None, None  # with the pid

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def state(self) -> children.ChildState:
        return children.ChildState.STOPPED if self._child is None else self._child.state

    @property
    def reason(self) -> str:
        """Why it last ended."""
        return "" if self._child is None else self._child.reason

    @property
    def is_crash_looping(self) -> bool:
        """Whether it ended several times in a row and does not report that it works."""
        own = self._own_report()
        looping = self._child is not None and self._child.is_crash_looping
        return looping and (own is None or own.state is not health.HealthState.UP)

    def health(self) -> http_health.HealthReport:
        """Its own report; without one, whether the process runs. ``failed``: it ends again and again."""
        child = self._child
        if child is not None and self.is_crash_looping:
            return http_health.HealthReport(health.HealthState.FAILED, child.describe_loop())
        if child is None or child.state is children.ChildState.STARTING:
            return http_health.HealthReport(health.HealthState.STARTING, "starting")
        if child.state is not children.ChildState.RUNNING:
            return http_health.HealthReport(health.HealthState.DOWN, child.reason)
        if not child.is_responding:
            return http_health.HealthReport(health.HealthState.LATE, "it does not respond")
        if not self._is_probed:
            return http_health.HealthReport()
        return self._own_report() or http_health.HealthReport(health.HealthState.STARTING, "starting")

    def _own_report(self) -> http_health.HealthReport | None:
        """The last report of the process that runs now."""
        pid, report = self._reported
        return report if pid == self.pid and self._child is not None and self._child.is_responding else None

    def start(
        self,
        context: context_.ComponentContext,
        configure: Callable[[], component_config.ComponentConfig],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it in the background. ``configure`` is called before each start."""
        log_file = context.folder.logs / f"{self.name}.log"

        async def launch() -> children.ProcessHandle:
            config = configure()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "muster", "run", config.component, "--supervised"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            await asyncio.to_thread(context.record_child, self.name, process.pid)
            return log_files.CapturedProcess(process, log_file, context.settings, processes=self._log_share)

        async def describe_end(exit_code: int | None) -> errors.MusterError:
            kill = "" if self._child is None else self._child.describe_kill()
            words = await asyncio.to_thread(log_files.last_words, log_file)
            ended = ": ".join(filter(None, (f"ended with code {exit_code}", words)))
            return errors.Unavailable(kill or f"{ended}; see {log_file}")

        self._is_probed = context.settings.health.enabled

        async def responds() -> bool:
            pid = self.pid
            report = await http_health.reported(context.folder.pages, pid)
            self._reported = pid, report
            return report is not None

        self._child = children.ChildSupervisor(
            self.name,
            launch,
            restart_after_success=self._restart_after_success,
            describe_end=describe_end,
            probe=responds if self._is_probed else None,
            probe_policy=self._probe_policy,
        )
        self._child.start_soon()

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop((signal.SIGTERM, self._stop_s))
