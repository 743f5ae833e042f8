"""An operating-system process: started, monitored, stopped; identified by pid and start time.

It runs in its own session under a small shell (`shim`), so the process and its exit code survive a restart of
the agent. All that it started ends with it, also what left the session (`os_process.members`). Its output
goes to a bounded file in the resource's folder (`output`). A running process is adopted by the pid in its
``pid_file``. The end of the process is reported by the kernel at once (a pidfd), whichever process started
it.

A start, a stop and a restart continue if their operation is cancelled; the next operation waits for them. So
a grace period may be longer than an operation, and nothing is started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import resource
import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from muster.core import errors, health
from muster.core.settings import sections
from muster.core.telemetry import log
from muster.manage import manifest, protocol
from muster.manage.adapters import base, health_checks, output, shell, shim, transitions
from muster.supervision import cgroups, os_process

doc = sections.field_doc

events = log.EventLog("manage")

OUTPUT_LOOK_S = 5.0
BEGIN_S = 5.0  # time for the shim to record the pid of its command
RECORD_RETRY_S = 1.0


class ProcessLimits(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Limits of the operating system for a process."""

    memory_bytes: Annotated[int, doc("Address space.", gt=0)] | None = None
    open_files: Annotated[int, doc("Open files.", gt=0)] | None = None
    cpu_s: Annotated[int, doc("CPU time, after which the process is ended.", gt=0)] | None = None


class GroupLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of a control group (version 2), for all processes of a resource together."""

    memory_bytes: Annotated[int, doc("Memory; beyond it, the kernel ends processes.", gt=0)] | None = None
    cpus: Annotated[float, doc("Share of processors, such as 0.5 or 2.", gt=0, le=4096)] | None = None
    processes: Annotated[int, doc("Number of processes and threads.", gt=0)] | None = None

    def files(self) -> dict[str, str]:
        """The values of the group's files."""
        values = {
            "memory.max": self.memory_bytes,
            "cpu.max": None if self.cpus is None else f"{max(1_000, round(self.cpus * 100_000))} 100000",
            "pids.max": self.processes,
        }
        return {file: str(value) for file, value in values.items() if value is not None}


Value = str | dict[str, str]  # text, or {secret: REFERENCE}
Conditions = tuple[dict[str, str], os_process.ProcessAccount]  # the environment and account of a run


class ProcessConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A process of the operating system."""

    command: Annotated[tuple[str, ...], doc("The program and its arguments; no shell.", min_length=1)]
    environment: Annotated[
        dict[str, Value], doc('Environment variables: text, or {secret: "store:NAME"}.')
    ] = {}
    directory: Annotated[str, doc("Working directory (default: that of the agent).")] = ""
    user: Annotated[
        str,
        doc("User to run as, by name or number (default: the agent's). Needs an agent that runs as root."),
    ] = ""
    group: Annotated[str, doc("Group to run as (default: that of the user).")] = ""
    umask: Annotated[
        str,
        doc('Mode bits that are removed from new files, such as "027".', pattern=r"^([0-7]{3,4})?$(?!\n)"),
    ] = ""
    cgroup: Annotated[
        GroupLimits, doc("Limits of a control group. Refused where the machine does not permit it.")
    ] = msgspec.field(default_factory=GroupLimits)
    health: Annotated[health_checks.HealthCheck, doc("How to determine that the process works.")] = (
        msgspec.field(default_factory=health_checks.HealthCheck)
    )
    limits: Annotated[ProcessLimits, doc("Limits of the operating system.")] = msgspec.field(
        default_factory=ProcessLimits
    )
    stop_signal: Annotated[
        Literal["TERM", "INT", "QUIT", "HUP", "USR1", "USR2"], doc("The signal that asks it to stop.")
    ] = "TERM"
    stop_s: Annotated[
        float, doc("Time between `stop_signal` and SIGKILL when it is stopped.", ge=0, le=600)
    ] = 10.0
    pid_file: Annotated[
        str, doc("Adopt the process whose pid is in this file, if it runs and wrote the file.")
    ] = ""
    user_environment: Annotated[bool, doc("Whether to start from the agent's own environment.")] = True


class ProcessAdapter(transitions.RunAdapter):
    """``context.runtime`` contains ``token``, ``leader`` and ``birth`` of the last run, and the digest
    ``config`` of its configuration.
    """

    type_name = "process"
    can_move = True
    config_type: ClassVar[type[msgspec.Struct]] = ProcessConfig
    _config: ProcessConfig | None

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._output = output.OutputLog(lambda: self.context.folder)
        self._pid = None  # pid of the session leader: the shim, or an adopted process
        self._command_pid: int | None = None
        self._spawning = False
        self._followers_may_finish = False  # during a stop
        self._has_ended = False  # the process, while what it started is being ended
        self._conditions: Conditions | None = None

    # Adapter interface

    async def create(self, config: ProcessConfig, *, start: bool) -> None:
        self._config = config
        await self._transitions.idle()
        if self._pid is None:
            await self._adopt_from_file()
        if start and self._pid is None:
            await self.do_start()

    async def put(self, config: ProcessConfig) -> None:
        before, self._config = self._config, config
        await self._transitions.idle()
        if self._pid is None:
            return
        if self.context.runtime.get("config") != _identity(config):
            await self.do_restart()
            return
        self._record_generation()
        if config != before:
            self._limit()
            self._restart_checks()

    async def delete(self) -> None:
        await self.do_stop()
        self._config = None

    async def resume(self, config: ProcessConfig) -> None:
        self._config = config
        token = self.context.runtime.get("token")
        record = await asyncio.to_thread(self._read_record)
        leader = await asyncio.to_thread(self._leader, record)
        if leader is not None:
            self._watch(leader, record.pid if token else leader)
            return
        if token and record.pid is None:  # the agent ended before the process started
            self.context.runtime.pop("ran", None)
        elif token:
            self._exit_code = record.exit_code
            self._reason = f"{ending(record.exit_code)} while its agent was not running"
            await self._kill_members(token)
        await self._adopt_from_file()

    async def close(self) -> None:
        # A start is completed: the process is found later by its pid.
        await self._transitions.close(completes=self._spawning)
        await self._end_tasks()

    # Operations

    async def do_signal(self, number: Annotated[int, msgspec.Meta(ge=1, le=64)] = signal.SIGHUP) -> None:
        if self._pid is None:
            raise errors.Conflict(f"{self.context.name} is not running")
        self._signal(self._pid, number)

    async def log_page(self, query: protocol.LogQuery) -> protocol.LogPage:
        return await asyncio.to_thread(self._output.page, query, _now_ms())

    # Transitions

    async def _start(self) -> None:
        config = self._require()
        await self._last_run_ended()
        if self._pid is not None:
            return
        configured = await self._environment(config)
        self._spawning = True
        try:
            environment, account = self._conditions = await _conditions(config, configured)
            for stale in ("leader", "birth"):
                self.context.runtime.pop(stale, None)
            self.context.runtime |= {
                "token": base.new_mark(self.context.folder and self.context.folder.parent),
                "config": _identity(config),
                "cgroup": bool(config.cgroup.files()),
            }
            self._record_generation()
            # Stored before the process exists: after a crash, it is found by its token.
            await self.context.save()
            pid = await asyncio.to_thread(self._spawn, config, environment, account)
            self._exit_code = None
            self.starts += 1
            self._begin_start()
            self._watch(pid, await self._wait_for_command())
        except (OSError, ValueError, errors.Refused) as error:
            hint = getattr(error, "hint", None)
            self._report(health.HealthState.DOWN, f"cannot start: {error}" + (f" ({hint})" if hint else ""))
            raise errors.Refused(f"{self.context.name}: {self._reason}") from error
        finally:
            self._spawning = False
        self._limit()
        await self._finish_start()

    async def _wait_for_command(self) -> int | None:
        """The pid of the command, as soon as the shim has recorded it."""
        deadline = asyncio.get_running_loop().time() + BEGIN_S
        wait_s = 0.001
        while asyncio.get_running_loop().time() < deadline and self.context.folder is not None:
            with contextlib.suppress(OSError):
                record = await asyncio.to_thread(self._read_record)
                if record.pid is not None:
                    return record.pid
            await asyncio.sleep(wait_s)
            wait_s = min(0.1, wait_s * 2)
        return None

    async def _end(self) -> None:
        pid, token = self._pid, self.mark
        if pid is None:
            await self._kill_members(token)
            await self._last_run_ended()
            return
        if self._watching is None or self._watching.done():
            self._watch(pid, self._command_pid)
        ended, loop = self._watching, asyncio.get_running_loop()
        assert ended is not None
        until = loop.time() + (self._config.stop_s if self._config else 0)
        number = signal.Signals[f"SIG{self._config.stop_signal}"] if self._config else signal.SIGTERM
        session = pid if os_process.leads_session(pid) else None
        self._followers_may_finish = True
        self._signal(pid, number)
        others = await asyncio.to_thread(os_process.members, token)
        signalled = {os_process.group_of(other) for other in (pid, self._command_pid) if other is not None}
        os_process.signal_all(
            (other for other in others if os_process.group_of(other) not in signalled), number
        )
        await asyncio.wait([ended], timeout=max(0.0, until - loop.time()))
        if not ended.done():
            if self._pid is not None:
                self._signal(pid, signal.SIGKILL)
            await asyncio.wait([ended])
        await self._kill_members(token, session, patience_s=until - loop.time())
        self._reason = "stopped"

    async def _kill_members(self, token: str, session: int | None = None, *, patience_s: float = 0.0) -> None:
        """Wait until nothing is left of a run, and kill what is left after ``patience_s``."""
        await os_process.kill_members(token, session, patience_s=patience_s)
        if token and self.context.runtime.get("cgroup"):  # with it, also what has hidden
            await asyncio.to_thread(cgroups.remove, _group_name(token))

    async def _last_run_ended(self) -> None:
        """Wait while what the last run started is being ended."""
        if self._has_ended and self._watching is not None:
            await asyncio.wait([self._watching])

    # The process

    async def _environment(self, config: ProcessConfig) -> dict[str, str]:
        """The variables of its configuration, with their secrets."""
        return {
            name: value if isinstance(value, str) else await self.context.secret(value)
            for name, value in config.environment.items()
        }

    async def _conditions_of_run(self, config: ProcessConfig) -> Conditions:
        """For what runs beside the process. Those of a run that an earlier agent started are read again."""
        if self._conditions is None:
            self._conditions = await _conditions(config, await self._environment(config))
        return self._conditions

    async def open_shell(self, command: protocol.ShellCommand) -> shell.Shell:
        """As the process: with its user, directory, environment and limits. It ends with the process."""
        config, token = self._require(), self.mark
        if self._pid is None:
            raise errors.Conflict(f"{self.context.name} is not running")
        group = cgroups.path(_group_name(token)) if self.context.runtime.get("cgroup") else None
        environment, account = await self._conditions_of_run(config)
        if token:
            environment = {**environment, os_process.MARK: token}
        try:
            return await shell.LocalShell.start(command, environment, _options(config, account, group))
        except (OSError, ValueError) as error:
            raise errors.Refused(f"{self.context.name}: cannot run {command.command[0]}: {error}") from error

    def _spawn(
        self, config: ProcessConfig, environment: dict[str, str], account: os_process.ProcessAccount
    ) -> int:
        token = self.context.runtime["token"]
        limits = config.cgroup.files()
        group = cgroups.create(_group_name(token), limits) if limits else None
        options = _options(config, account, group)
        self._output.look(_now_ms())  # where the output of this run begins
        descriptor = self._output.open()
        try:
            return shim.spawn(
                config.command,
                environment,
                token=token,
                options=options,
                output=descriptor,
                record=self._record_path(),
            )
        except OSError:
            cgroups.remove(_group_name(token))
            raise
        finally:
            os.close(descriptor)

    def _signal(self, pid: int, number: int) -> None:
        """Signal the session, and the command if it has left the session.

        SIGKILL goes to the command alone, because the shim has to record its end; other processes are ended
        after it.
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
        return None if self.context.folder is None else self.context.folder / "exit"

    @property
    def mark(self) -> str:  # type: ignore[override]
        """Of the last run; empty if its process was adopted."""
        token: str = self.context.runtime.get("token", "")
        return token

    def _read_record(self) -> shim.ShimRecord:
        return shim.read(self._record_path(), self.mark)

    def _leader(self, record: shim.ShimRecord) -> int | None:
        """The leader of the last run, if it runs."""
        runtime = self.context.runtime
        leader, birth, token = runtime.get("leader"), runtime.get("birth"), runtime.get("token")
        if isinstance(leader, int) and birth:
            return leader if os_process.start_time(leader) == birth else None
        return shim.find(token) if token and record.exit_code is None else None

    async def _adopt_from_file(self) -> None:
        config = self._require()
        if not config.pid_file:
            return
        pid = await asyncio.to_thread(
            os_process.running_by_file, pathlib.Path(config.pid_file), config.command
        )
        if pid is not None:
            self.context.runtime.pop("token", None)
            self.context.runtime["config"] = _identity(config)
            self._record_generation()
            self._watch(pid, pid)

    def _watch(self, pid: int, command_pid: int | None) -> None:
        self._pid, self._command_pid, self._followers_may_finish = pid, command_pid, False
        try:
            birth = os_process.start_time(pid)
        except OSError:  # no descriptor left: after a restart, it is found by its token
            birth = ""
        self.context.runtime |= {"leader": pid, "birth": birth}
        self._watching = self.tasks.loop("watch", functools.partial(self._wait_for_end, pid, birth))
        self._restart_checks()

    def _end_failed(self) -> None:
        if self._pid is not None:
            self._signal(self._pid, signal.SIGKILL)

    async def _probe(self, check: health_checks.HealthCheck) -> str | None:
        if check.kind != "command":
            return await health_checks.find_problem(check)
        config = self._require()
        try:
            environment, account = await self._conditions_of_run(config)
            command = _options(config, account, None).beside(check.command)
        except (errors.MusterError, OSError) as error:
            raise health_checks.InconclusiveCheck(str(error)) from error
        return await health_checks.find_problem(check, command, environment)

    async def _wait_for_end(self, pid: int, birth: str) -> None:
        leads, end = (
            os_process.leads_session(pid),
            asyncio.ensure_future(os_process.wait_for_exit(pid, birth)),
        )
        try:
            is_over = False
            while not is_over:
                await asyncio.to_thread(self._output.look, _now_ms())
                is_over = bool((await asyncio.wait([end], timeout=OUTPUT_LOOK_S))[0])
            code = end.result()
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        # Another process may get the pid from now on.
        self._pid, self._command_pid, self._has_ended = None, None, True
        if not self._followers_may_finish:  # otherwise two would run after the next start
            await self._kill_members(self.mark, pid if leads else None)
        await asyncio.to_thread(self._output.look, _now_ms())  # where the output of this run ends
        if self.mark:
            recorded = await self._recorded()
            code = shim.exit_code(code) if recorded is None else recorded
        how = self._ending(ending(code))
        self._stop_checks()
        self._exit_code, self._has_ended = code, False
        self.context.runtime.pop("leader", None)
        if self._transitions.is_underway("restart"):
            self._report(health.HealthState.STARTING, "restarting")
        else:
            self._report(health.HealthState.DOWN, how)

    async def _recorded(self) -> int | None:
        """The exit code that the shim recorded. Waits until the record can be read, because jobs depend on
        it.
        """
        while True:
            try:
                return (await asyncio.to_thread(self._read_record)).exit_code
            except OSError as error:
                events.warning("exit-code-not-read", resource=self.context.name, error=error)
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

    def _properties(self) -> dict[str, Any]:
        return {"pid": self._command_pid or self._pid}


def _identity(config: ProcessConfig) -> str:
    """The digest of the settings that a running process cannot adopt without a restart."""
    lasting = msgspec.structs.replace(
        config, health=health_checks.HealthCheck(), limits=ProcessLimits(), stop_signal="TERM", stop_s=0.0
    )
    return manifest.digest(msgspec.to_builtins(lasting))


def _options(
    config: ProcessConfig, account: os_process.ProcessAccount, group: pathlib.Path | None
) -> shim.RunOptions:
    return shim.RunOptions(
        directory=config.directory,
        umask=config.umask,
        user=account.user,
        user_group=account.group,
        control_group=group,
    )


async def _conditions(config: ProcessConfig, configured: Mapping[str, str]) -> Conditions:
    account = await asyncio.to_thread(os_process.account, config.user, config.group)
    inherited = os.environ if config.user_environment else {}
    return {**inherited, **account.environment, **configured}, account


def _group_name(token: str) -> str:
    return f"muster-{token}"


def ending(code: int | None) -> str:
    if code is None:
        return "ended"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def _now_ms() -> int:
    return int(time.time() * 1000)
