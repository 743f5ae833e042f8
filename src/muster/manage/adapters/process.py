"""An operating-system process: started, watched, stopped; found again by its number and its birth.

It runs in a session of its own under a small shell (`shim`), outlives its agent, and its exit code does too;
what it started in that session ends with it.  Its output goes to a file next to the agent's, which is cut to
its last half when it grows over its bound.  A process that runs already is adopted by the number in its
``pid_file``.  The process's end is known at once, from the kernel (a pidfd), whoever started it.

A start, a stop and a restart go on when the operation that asked for them is cancelled: the next operation
waits for the one under way.  So a grace period may be longer than an operation, and nothing is started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import resource
import secrets
import signal
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar

import msgspec

from muster.core import errors, health
from muster.core.telemetry import log
from muster.manage import manifest, protocol
from muster.manage.adapters import base, health_checks, os_process, shim

events = log.EventLog("manage")

OUTPUT_BYTES_MAX = 8 << 20
OUTPUT_LOOK_S = 10.0
FOLLOWERS_LOOK_S = 0.05
BEGIN_S = 5.0  # within which the shim records the number of its command
RECORD_RETRY_S = 1.0
PID_FILE_SLACK_S = 2.0  # clocks: the kernel counts ticks, a file system seconds
LOG_BYTES = 64 << 10


class ProcessLimits(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    open_files: Annotated[int, msgspec.Meta(gt=0)] | None = None
    cpu_s: Annotated[int, msgspec.Meta(gt=0)] | None = None


Value = str | dict[str, str]  # text, or {secret: REFERENCE}


class ProcessConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    environment: dict[str, Value] = {}
    directory: str = ""
    health: health_checks.HealthCheck = msgspec.field(default_factory=health_checks.HealthCheck)
    limits: ProcessLimits = msgspec.field(default_factory=ProcessLimits)
    stop_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0  # then it is killed
    pid_file: str = ""  # adopt the process whose number stands there, if it runs and wrote the file
    user_environment: bool = True  # start from the agent's own environment


class ProcessAdapter(base.Adapter):
    """``place.runtime``: ``token``, ``leader`` and ``birth`` of the last run, ``config`` that it was started
    with (a digest), and ``ran``, the generation that it was started for.
    """

    type_name = "process"
    config_type: ClassVar[type[msgspec.Struct]] = ProcessConfig

    def __init__(self, place: base.AdapterContext) -> None:
        super().__init__(place)
        self._config: ProcessConfig | None = None
        self._pid: int | None = None  # of the session's leader: the shim, or an adopted process
        self._command_pid: int | None = None
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._transition: asyncio.Task[None] | None = None
        self._goal = ""  # of the transition
        self._spawning = False
        self._state = health.HealthState.DOWN
        self._reason = "never started"
        self._exit_code: int | None = None
        self._problem = ""  # for which we have just ended it
        self._followers_may_finish = False  # as it is being stopped

    # What agents call

    async def create(self, config: ProcessConfig, *, start: bool) -> None:
        self._config = config
        await self._idle()
        if self._pid is None:
            await self._adopt_from_file()
        if start and self._pid is None:
            await self.do_start()

    async def put(self, config: ProcessConfig) -> None:
        before, self._config = self._config, config
        await self._idle()
        if self._pid is None:
            return
        if self.place.runtime.get("config") != _identity(config):
            await self.do_restart()
            return
        self._note_run()
        if config != before:
            self._limit()
            self._check_anew()

    async def delete(self) -> None:
        await self.do_stop()
        self._config = None

    async def observe(self) -> protocol.ObservedState:
        return self._observed(exists=self._config is not None)

    async def resume(self, config: ProcessConfig) -> None:
        self._config = config
        token = self.place.runtime.get("token")
        record = await asyncio.to_thread(self._read_record)
        leader = await asyncio.to_thread(self._leader, record)
        if leader is not None:
            self._watch(leader, record.pid if token else leader)
            return
        if token and record.pid is None:  # the agent ended before it had started it
            self.place.runtime.pop("ran", None)
        elif token:
            self._exit_code = record.exit_code
            self._reason = f"{_ending(record.exit_code)} while its agent was away"
            await asyncio.to_thread(shim.kill_rest, token)
        await self._adopt_from_file()

    async def close(self) -> None:
        if self._transition is not None:
            if not self._spawning:  # what is being started is seen through: it is found again by its number
                self._transition.cancel()
            await asyncio.wait([self._transition])
        tasks = [task for task in (self._watching, self._checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Operations

    async def do_start(self) -> None:
        await self._reach("start", self._start)

    async def do_stop(self) -> None:
        await self._reach("stop", self._stop)

    async def do_drain(self) -> None:
        await self.do_stop()

    async def do_restart(self) -> None:
        await self._reach("restart", self._restart)

    async def do_signal(self, number: int = signal.SIGHUP) -> None:
        if self._pid is None:
            raise errors.Conflict(f"{self.place.name} does not run")
        self._signal(self._pid, number)

    async def do_logs(self, bytes_max: int = LOG_BYTES) -> str:
        """The end of what it wrote."""
        return await asyncio.to_thread(_tail, self._output_path(), min(max(0, bytes_max), 512 << 10))

    # Transitions: one at a time, each in a task of its own

    async def _reach(self, goal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Carry out ``work``, or wait for the transition under way if it has the same goal."""
        if self._transition is None or self._transition.done() or self._goal != goal:
            await self._idle()
            self._goal = goal
            self._transition = asyncio.create_task(work(), name=f"{goal} {self.place.name}")
            self._transition.add_done_callback(_retrieved)
        await asyncio.shield(self._transition)

    async def _idle(self) -> None:
        """Wait for the transition under way; its outcome is for the operation that began it."""
        while self._transition is not None and not self._transition.done():
            await asyncio.wait([self._transition])

    async def _start(self) -> None:
        config = self._require()
        if self._pid is not None:
            return
        environment = dict(os.environ) if config.user_environment else {}
        for name, value in config.environment.items():
            environment[name] = value if isinstance(value, str) else await self.place.secret(value)
        self._spawning = True
        try:
            for stale in ("leader", "birth"):
                self.place.runtime.pop(stale, None)
            self.place.runtime |= {"token": secrets.token_hex(16), "config": _identity(config)}
            self._note_run()
            # Stored before the process exists: after a crash it is found again by its token.
            await self.place.save()
            pid = await asyncio.to_thread(self._spawn, config, environment)
            self._exit_code = None
            self._watch(pid, await self._begun())
        except (OSError, ValueError) as error:
            self._be(health.HealthState.DOWN, f"cannot be started: {error}")
            raise errors.Refused(f"{self.place.name}: {self._reason}") from error
        finally:
            self._spawning = False
        self._limit()

    async def _begun(self) -> int | None:
        """The number of the command, as soon as the shim has recorded it."""
        deadline = asyncio.get_running_loop().time() + BEGIN_S
        wait_s = 0.001
        while asyncio.get_running_loop().time() < deadline and self.place.folder is not None:
            with contextlib.suppress(OSError):
                record = await asyncio.to_thread(self._read_record)
                if record.pid is not None:
                    return record.pid
            await asyncio.sleep(wait_s)
            wait_s = min(0.1, wait_s * 2)
        return None

    async def _stop(self) -> None:
        pid, config = self._pid, self._config
        if pid is None:
            return
        if self._watching is None or self._watching.done():
            self._watch(pid, self._command_pid)
        ended, loop = self._watching, asyncio.get_running_loop()
        assert ended is not None
        until = loop.time() + (config.stop_s if config else 0)
        leads, self._followers_may_finish = os_process.leads_session(pid), True
        self._signal(pid, signal.SIGTERM)
        await asyncio.wait([ended], timeout=until - loop.time())
        if not ended.done():
            self._signal(pid, signal.SIGKILL)
            await asyncio.wait([ended])
        while leads and await asyncio.to_thread(os_process.has_session_members, pid):
            if loop.time() > until:
                os_process.signal_session_members(pid, signal.SIGKILL)
            await asyncio.sleep(FOLLOWERS_LOOK_S)
        self._reason = "stopped"

    async def _restart(self) -> None:
        await self._stop()
        await self._start()

    # The process

    def _require(self) -> ProcessConfig:
        if self._config is None:
            raise errors.NotFound(f"{self.place.name} does not exist")
        return self._config

    def _note_run(self) -> None:
        """The run, present or next, is for the generation that the agent was last told of."""
        self.place.runtime["ran"] = max(self.place.runtime.get("ran", 0), self.place.generation)

    def _spawn(self, config: ProcessConfig, environment: dict[str, str]) -> int:
        output = self._open_output()
        try:
            return shim.spawn(
                config.command,
                environment,
                token=self.place.runtime["token"],
                directory=config.directory,
                output=output,
                record=self._record_path(),
            )
        finally:
            os.close(output)

    def _signal(self, pid: int, number: int) -> None:
        """To the session, and to the command if it has left it.

        The command alone is killed, as the shim is to record that; what else runs there is ended after it.
        """
        command = self._command_pid
        if number == signal.SIGKILL and command not in (None, pid):
            os_process.signal_session(command, number)
            os_process.signal_session(pid, signal.SIGCONT)
            return
        if command is not None and os_process.group_of(command) not in (None, os_process.group_of(pid)):
            os_process.signal_session(command, number)
        os_process.signal_session(pid, number)

    def _record_path(self) -> pathlib.Path | None:
        return None if self.place.folder is None else self.place.folder / "exit"

    def _read_record(self) -> shim.ShimRecord:
        return shim.read(self._record_path(), self.place.runtime.get("token", ""))

    def _output_path(self) -> pathlib.Path:
        return (self.place.folder or pathlib.Path(os.devnull).parent) / (
            "output" if self.place.folder else "null"
        )

    def _open_output(self) -> int:
        path = self._output_path()
        if self.place.folder is not None:
            self.place.folder.mkdir(parents=True, exist_ok=True)
            _cut(path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _leader(self, record: shim.ShimRecord) -> int | None:
        """The leader of the last run, if it runs."""
        runtime = self.place.runtime
        leader, birth, token = runtime.get("leader"), runtime.get("birth"), runtime.get("token")
        if isinstance(leader, int) and birth:
            return leader if os_process.start_time(leader) == birth else None
        return shim.find(token) if token and record.exit_code is None else None

    async def _adopt_from_file(self) -> None:
        config = self._require()
        if not config.pid_file:
            return
        pid = await asyncio.to_thread(_running_by, config)
        if pid is not None:
            self.place.runtime.pop("token", None)
            self.place.runtime["config"] = _identity(config)
            self._note_run()
            self._watch(pid, pid)

    def _watch(self, pid: int, command_pid: int | None) -> None:
        self._pid, self._command_pid, self._followers_may_finish = pid, command_pid, False
        try:
            birth = os_process.start_time(pid)
        except OSError:  # no descriptor left: after a restart it is found again by its token
            birth = ""
        self.place.runtime |= {"leader": pid, "birth": birth}
        self._watching = asyncio.create_task(
            self._until_it_ends(pid, birth), name=f"process {self.place.name}"
        )
        self._check_anew()

    def _check_anew(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        if self._require().health.kind == "exit":
            self._be(*self._when_it_runs())
        else:
            self._be(health.HealthState.STARTING, "not checked yet")
            self._checking = asyncio.create_task(self._check_always(), name=f"check {self.place.name}")

    def _when_it_runs(self) -> tuple[health.HealthState, str]:
        """What it is, where that it runs is all that counts."""
        return health.HealthState.UP, ""

    async def _until_it_ends(self, pid: int, birth: str) -> None:
        leads, end = (
            os_process.leads_session(pid),
            asyncio.ensure_future(os_process.wait_for_exit(pid, birth)),
        )
        try:
            while not (await asyncio.wait([end], timeout=OUTPUT_LOOK_S))[0]:
                if self.place.folder is not None:
                    await asyncio.to_thread(_cut, self._output_path())
            code = end.result()
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        if leads and not self._followers_may_finish:  # or two would be at work when it is started again
            os_process.signal_session_members(pid, signal.SIGKILL)
        if "token" in self.place.runtime:
            recorded = await self._recorded()
            code = shim.exit_code(code) if recorded is None else recorded
        how = _ending(code)
        if self._problem:
            how, self._problem = f"it was ended because it did not work: {self._problem}", ""
        if self._checking is not None:
            self._checking.cancel()
        self._pid, self._command_pid, self._exit_code = None, None, code
        self.place.runtime.pop("leader", None)
        if self._goal == "restart" and self._transition is not None and not self._transition.done():
            self._be(health.HealthState.STARTING, "it is being restarted")
        else:
            self._be(health.HealthState.DOWN, how)

    async def _recorded(self) -> int | None:
        """The exit code that the shim recorded. Waits until the record can be read: a job depends on it."""
        while True:
            try:
                return (await asyncio.to_thread(self._read_record)).exit_code
            except OSError as error:
                events.warning("exit-code-not-read", resource=self.place.name, error=error)
                await asyncio.sleep(RECORD_RETRY_S)

    def _limit(self) -> None:
        limits, pid = self._require().limits, self._command_pid or self._pid
        for what, value in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_CPU, limits.cpu_s),
        ):
            if value is not None and pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, what, (value, value))

    def _be(self, state: health.HealthState, reason: str) -> None:
        self._state, self._reason = state, reason
        self.place.changed(self._observed(exists=True))

    def _observed(self, *, exists: bool) -> protocol.ObservedState:
        properties: dict[str, Any] = {"pid": self._command_pid or self._pid}
        if self._exit_code is not None:
            properties["exit_code"] = self._exit_code
        ran = self.place.runtime.get("ran", 0)
        return protocol.ObservedState(exists, self._state, self._reason, properties=properties, ran=ran)

    # Health

    async def _check_always(self) -> None:
        check = self._require().health
        loop = asyncio.get_running_loop()
        began, failed = loop.time(), 0
        while True:
            try:
                problem = await health_checks.find_problem(check)
            except health_checks.InconclusiveCheck as error:
                events.warning("not-checked", resource=self.place.name, error=error)
                await asyncio.sleep(check.every_s)
                continue
            if problem is None:
                failed = 0
                if self._state is not health.HealthState.UP:
                    self._be(health.HealthState.UP, "")
            else:
                failed += 1
                starting = self._state is health.HealthState.STARTING and loop.time() - began < check.start_s
                if not starting and failed >= check.failures and self._pid is not None:
                    # It runs and does not work: it is ended, so that its manager starts it anew.
                    self._problem = problem
                    self._signal(self._pid, signal.SIGKILL)
                    return
            quick = self._state is health.HealthState.STARTING
            await asyncio.sleep(min(0.1, check.every_s) if quick else check.every_s)


def _retrieved(task: asyncio.Task[None]) -> None:
    """A transition whose operation was cancelled has nobody to raise to; its state tells of it."""
    if not task.cancelled():
        task.exception()


def _identity(config: ProcessConfig) -> str:
    """The digest of all that a running process cannot take over without a restart."""
    lasting = msgspec.structs.replace(
        config, health=health_checks.HealthCheck(), limits=ProcessLimits(), stop_s=0.0
    )
    return manifest.digest(msgspec.to_builtins(lasting))


def _ending(code: int | None) -> str:
    if code is None:
        return "it ended"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def _running_by(config: ProcessConfig) -> int | None:
    """The process that wrote the pid file, if it runs.

    A process that was started after the file was written only got the number again; but one with exactly
    this command is taken, as the wall clock may have been set meanwhile.
    """
    path = pathlib.Path(config.pid_file)
    with contextlib.suppress(OSError, ValueError):
        written_at_s, pid = path.stat().st_mtime, int(path.read_text().strip())
        started_at_s = os_process.started_at_s(pid) if pid > 1 and pid != os.getpid() else None
        if started_at_s is None:
            return None
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        same_command = words == [os.fsencode(word) for word in config.command]
        return pid if same_command or started_at_s <= written_at_s + PID_FILE_SLACK_S else None
    return None


def _cut(path: pathlib.Path) -> None:
    """To its last half if it is too long; whoever writes to it appends, and goes on."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > OUTPUT_BYTES_MAX:
            kept = _tail(path, OUTPUT_BYTES_MAX // 2).encode()
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.ftruncate(file, 0)
                os.write(file, kept)
            finally:
                os.close(file)


def _tail(path: pathlib.Path, bytes_max: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - bytes_max))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
