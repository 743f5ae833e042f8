"""Supervised child processes: started, restarted after a crash or when they stop responding, ended.

    child = ChildSupervisor("web", launch, probe=responds)
    child.start_soon()        # or: await child.start(), which raises the error of the first start
    ...
    await child.stop()

``launch`` starts the process; it returns when the process runs or, if it can tell, is ready. Whatever it
started before it raises an exception it ends itself. The delay before a restart follows the policy
(`muster.core.backoff`) and is reset by a stable run.

A process can exist and do nothing: it is frozen, its disk or its event loop hangs. Only a reply proves that
it works. ``probe`` requests one and is called periodically, each time with a deadline (`ProbePolicy`). A
process that does not reply is killed and replaced. One that only lacks processor time has longer for a reply
(`muster.supervision.responsiveness`). `silences` counts both.

The supervisor survives its own errors (`muster.supervision.tasks`); the child keeps running meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from muster.core import backoff, errors
from muster.core.telemetry import log
from muster.supervision import os_process, responsiveness, tasks

events = log.EventLog("children")

POLICY = backoff.BackoffPolicy(crashes_max=None, window_s=60.0, pause_s=0.5, pause_s_max=30.0)
STOP_S = 5.0
EXIT_CHECK_S = 0.2
TURN_S = 0.02  # between turns of the event loop during a probe; with less than half of them it was late


class ProcessHandle(Protocol):
    """A running process; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int | None:
        """Wait for its end; returns the exit code (None: unknown, because it is not a child of ours)."""
        ...

    def send_signal(self, number: int, /) -> None: ...


class ChildState(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"  # it crashed; the next start is scheduled
    FINISHED = "finished"  # it ended with code 0, which ends the supervision if so declared
    FAILED = "failed"  # it crashed too often; no further restart


#: False, a MusterError, an OSError or no result before the deadline: the child does not respond.
Probe = Callable[[], Awaitable[bool]]


ProbePolicy = responsiveness.ProbePolicy
_silences: Counter[tuple[str, ...]] = Counter()


def silences() -> Counter[tuple[str, ...]]:
    """How often a child did not reply in time, by name and `responsiveness.SilenceReason`."""
    return _silences


class ChildSupervisor:
    """Keeps one process running.

    ``on_change`` is called after each change of `state`. ``describe_end`` explains an end, given the exit
    code. ``restart_after_success`` False: a child that ends with code 0 is not restarted.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Awaitable[ProcessHandle]],
        *,
        policy: backoff.BackoffPolicy = POLICY,
        probe: Probe | None = None,
        probe_policy: ProbePolicy = ProbePolicy(),  # noqa: B008  (immutable)
        restart_after_success: bool = True,
        describe_end: Callable[[int | None], Awaitable[errors.MusterError]] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.state = ChildState.STOPPED
        self.failure: errors.MusterError | None = None  # of the last crash or failed start
        self.starts = 0
        self.restarts = 0  # starts after a crash
        self.killed_for: responsiveness.SilenceReason | None = None  # without a reply
        self._launch = launch
        self._policy = policy
        self._crashes = backoff.CrashHistory(policy)
        self._probe = probe
        self._probe_policy = probe_policy
        self._restart_after_success = restart_after_success
        self._describe_end = describe_end or self._default_description
        self._on_change = on_change
        self._process: ProcessHandle | None = None
        self._started_at_s = 0.0
        self._probes = responsiveness.ProbeHistory(probe_policy)
        self._tasks = tasks.TaskSupervisor(f"child {name}")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def process(self) -> ProcessHandle | None:
        return self._process

    @property
    def crashes(self) -> int:
        """In a row, since the last stable run."""
        return self._crashes.count

    @property
    def is_crash_looping(self) -> bool:
        return self.state is ChildState.FAILED or self._crashes.is_looping(asyncio.get_running_loop().time())

    @property
    def is_responding(self) -> bool:
        """False from the first failed probe on. True before the first reply, and without a probe."""
        return not self._probes.failures

    @property
    def reason(self) -> str:
        """Why it last ended or could not be started."""
        return "" if self.failure is None else str(self.failure)

    async def start(self) -> None:
        """Start the child; raises the error of this first start and supervises nothing then."""
        self._set(ChildState.STARTING)
        try:
            self._record_start(await self._launch())
        except BaseException:
            self._set(ChildState.STOPPED)
            raise
        self._supervise()

    def start_soon(self, process: ProcessHandle | None = None) -> None:
        """Start the child in the background, or supervise ``process``, which runs already. A start that fails
        is repeated like one after a crash."""
        if process is None:
            self._set(ChildState.STARTING)
        else:
            self._record_start(process)
        self._supervise()

    async def stop(self, *steps: tuple[int, float], kill: bool = True) -> None:
        """End the supervision, then the child: each signal with the seconds to wait for its effect, finally
        SIGKILL. Without ``steps``: SIGTERM for `STOP_S`. ``kill`` False: a child that ignores all steps is
        left alone. If the caller is cancelled, SIGKILL follows at once."""
        try:
            await self._tasks.close()
            if self._process is not None:
                await end_process(self._process, *(steps or ((signal.SIGTERM, STOP_S),)), kill=kill)
        except asyncio.CancelledError:
            if kill:
                await tasks.finish(self._kill())
            raise
        await self.release()

    async def _kill(self) -> None:
        await self._tasks.close()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):  # a process may hang in the kernel: it stays known
                    await end_process(self._process)
                    await self.release()

    async def release(self) -> ProcessHandle | None:
        """End the supervision and leave the child alone; returns it."""
        await self._tasks.close()
        process, self._process = self._process, None
        self._set(ChildState.STOPPED)
        return process

    def _supervise(self) -> None:
        self._crashes = backoff.CrashHistory(self._policy)
        self._crashes.started(asyncio.get_running_loop().time())
        self._tasks.loop("supervision", self._run)
        if self._probe is not None:
            self._tasks.loop("probe", self._probe_forever)

    async def _run(self) -> None:
        while self.state not in (ChildState.FAILED, ChildState.FINISHED):
            if self._process is None:
                await self._start_again()
            else:
                exit_code = await self._process.wait()
                await self._handle_end(exit_code)

    async def _start_again(self) -> None:
        try:
            process = await self._launch()
        except (errors.MusterError, OSError) as error:
            failure = error if isinstance(error, errors.MusterError) else errors.Unavailable(str(error))
            await self._handle_crash(failure)
        else:
            self.restarts += self.state is ChildState.RESTARTING
            self._record_start(process)

    def _record_start(self, process: ProcessHandle) -> None:
        self._process = process
        self._started_at_s = asyncio.get_running_loop().time()
        self._crashes.started(self._started_at_s)
        self.killed_for = None
        self._probes.replied()
        self.starts += 1
        events.debug("child-started", child=self.name, pid=process.pid)
        self._set(ChildState.RUNNING)

    async def _handle_end(self, exit_code: int | None) -> None:
        if exit_code == 0 and not self._restart_after_success:
            self._process = None
            self.failure = None
            self._set(ChildState.FINISHED)
            return
        failure = await self._describe_end(exit_code)
        self._process = None
        await self._handle_crash(failure)

    async def _handle_crash(self, failure: errors.MusterError) -> None:
        self.failure = failure
        delay_s = self._crashes.crashed(asyncio.get_running_loop().time())
        events.error("child-ended", child=self.name, restart_s=delay_s, error=failure)
        if delay_s is None:
            self._set(ChildState.FAILED)
            return
        self._set(ChildState.RESTARTING)
        await asyncio.sleep(delay_s)

    def describe_loop(self) -> str:
        return f"{self.name} ended {self.crashes} times in a row: {self.reason}"

    def describe_kill(self) -> str:
        """Why it was killed; empty if it ended by itself."""
        match self.killed_for:
            case None:
                return ""
            case responsiveness.SilenceReason.BUSY:
                return f"it was busy without a reply for {self._probe_policy.busy_s:g} s and was killed"
            case _:
                return "it did not respond and was killed"

    async def _default_description(self, exit_code: int | None) -> errors.MusterError:
        ended = "ended" if exit_code is None else f"ended with code {exit_code}"
        return errors.Unavailable(self.describe_kill() or ended)

    async def _probe_forever(self) -> None:
        policy, loop = self._probe_policy, asyncio.get_running_loop()
        probed: ProcessHandle | None = None
        responded = False
        last: responsiveness.ProcessActivity | None = None  # at the end of the last probe, if it failed
        while True:
            await asyncio.sleep(policy.period_s)
            if self._process is not probed:
                probed, responded, last = self._process, False, None
                self._probes.replied()
            if probed is None:
                continue
            began_s = loop.time()
            responds, at_first = await self._responds(probed)
            if responds:
                responded, last = True, None
                self._probes.replied()
            elif responds is None:
                continue
            elif responded or loop.time() - self._started_at_s > policy.grace_s:
                before, last = last or at_first, os_process.activity(probed.pid, loop.time())
                progress = responsiveness.makes_progress(before, last)
                silence = self._probes.failed(began_s, loop.time(), progress=progress)
                if silence is not None and self._process is probed:
                    self._handle_silence(silence, probed)

    def _handle_silence(self, silence: responsiveness.SilenceReason, process: ProcessHandle) -> None:
        facts = {"child": self.name, "pid": process.pid, "probes": self._probes.failures}
        if silence is not responsiveness.SilenceReason.STARVED:
            _silences[self.name, silence.value] += 1
            events.error("child-unresponsive", reason=silence.value, **facts)
            self.killed_for = silence
            send_signal(process, signal.SIGKILL)
        elif self._probes.failures == self._probe_policy.failures_max:  # once until it replies
            _silences[self.name, silence.value] += 1
            events.warning("child-starved", busy_s_max=self._probe_policy.busy_s, **facts)

    async def _responds(
        self, process: ProcessHandle
    ) -> tuple[bool | None, responsiveness.ProcessActivity | None]:
        """Whether it replies, and the activity of the process when the reply was late first.

        None: the failure proves nothing, because this process itself hardly ran meanwhile. It was frozen,
        suspended, or busy with other work."""
        assert self._probe is not None
        loop, timeout_s = asyncio.get_running_loop(), self._probe_policy.timeout_s
        began_s, turns = loop.time(), 0
        at_first: responsiveness.ProcessActivity | None = None
        timer = loop.call_later(TURN_S, lambda: take_turn())

        def take_turn() -> None:
            nonlocal at_first, turns, timer
            if not turns:
                at_first = os_process.activity(process.pid, loop.time())
            turns += 1
            timer = loop.call_later(TURN_S, take_turn)

        try:
            async with asyncio.timeout(timeout_s):
                return await self._probe(), at_first
        except (errors.MusterError, OSError):  # a TimeoutError is an OSError
            due = int((loop.time() - began_s) / TURN_S)
            return (None if turns < due // 2 else False), at_first
        finally:
            timer.cancel()

    def _set(self, state: ChildState) -> None:
        self.state = state
        if self._on_change is not None:
            self._on_change()


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process. Its own `wait` also waits until all its pipes are closed, and children
    that survive it hold them open."""
    while process.returncode is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_CHECK_S):
                await process.wait()
    return process.returncode


async def end_process(process: ProcessHandle, *steps: tuple[int, float], kill: bool = True) -> None:
    """Send each signal and wait for its effect for the given seconds; finally SIGKILL if ``kill``. A step of
    0 seconds is skipped."""
    ended = asyncio.ensure_future(process.wait())
    try:
        for number, patience_s in steps:
            if patience_s > 0 and not ended.done():
                send_signal(process, number)
                await asyncio.wait((ended,), timeout=patience_s)
        if kill and not ended.done():
            send_signal(process, signal.SIGKILL)
            await asyncio.wait((ended,))
    except asyncio.CancelledError:
        if kill and not ended.done():
            send_signal(process, signal.SIGKILL)
        raise
    finally:
        ended.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended


def send_signal(process: ProcessHandle, number: int) -> None:
    """Signal a process if it runs. The method of asyncio's processes asks for their end first: if it is the
    first to see that, asyncio does not, and reports 255 as the exit code."""
    with contextlib.suppress(ProcessLookupError):
        if not isinstance(process, asyncio.subprocess.Process):
            process.send_signal(number)
        elif process.returncode is None:
            os.kill(process.pid, number)
