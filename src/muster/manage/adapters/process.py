"""An operating-system process: started, watched, stopped; found again by its number and its birth.

It leads a session of its own and outlives its agent; what it started there ends with it.  Its output goes to
a file next to the agent's, which is cut to its last half when it grows over its bound.  A process that runs
already is adopted by the number in its ``pid_file``.  The process's end is known at once, from the kernel (a
pidfd), whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import resource
import signal
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from muster.bus import http
from muster.core import errors, health
from muster.manage import pids, protocol
from muster.manage.adapters import base

OUTPUT_BYTES_MAX = 8 << 20
OUTPUT_LOOK_S = 10.0
FOLLOWERS_LOOK_S = 0.05
LOG_BYTES = 64 << 10


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What says that it works. ``exit``: that it runs. The others are asked every ``every_s``."""

    kind: Literal["exit", "port", "http", "command"] = "exit"
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    url: str = ""
    command: tuple[str, ...] = ()
    every_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 2.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 2.0
    failures: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3  # in a row, before it is called down
    start_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0  # so long may it take to come up

    def __post_init__(self) -> None:
        needed = {"port": self.port, "http": self.url, "command": self.command}
        if self.kind in needed and not needed[self.kind]:
            raise ValueError(
                f"a check of kind {self.kind} needs `{'url' if self.kind == 'http' else self.kind}`"
            )


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    open_files: Annotated[int, msgspec.Meta(gt=0)] | None = None
    cpu_s: Annotated[int, msgspec.Meta(gt=0)] | None = None


Value = str | dict[str, str]  # text, or {secret: REFERENCE}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    environment: dict[str, Value] = {}
    directory: str = ""
    health: Check = msgspec.field(default_factory=Check)
    limits: Limits = msgspec.field(default_factory=Limits)
    stop_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0  # then it is killed
    pid_file: str = ""  # adopt the process whose number stands there, if it runs
    user_environment: bool = True  # start from the agent's own environment


class Process(base.Adapter):
    type_name = "process"
    config_type: ClassVar[type[msgspec.Struct]] = Config

    def __init__(self, place: base.Place) -> None:
        super().__init__(place)
        self._config: Config | None = None
        self._pid: int | None = None
        self._watching: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._state = health.State.DOWN
        self._reason = "never started"
        self._exit_code: int | None = None
        self._problem = ""  # for which we have just ended it
        self._followers_may_finish = False  # as it is being stopped

    # What agents call

    async def create(self, config: Config, *, start: bool) -> None:
        self._config = config
        if self._pid is None:
            await self._adopt_from_file()
        if start and self._pid is None:
            await self.do_start()

    async def put(self, config: Config) -> None:
        before, self._config = self._config, config
        if self._pid is None or before is None:
            return
        quiet = ("health", "stop_s", "limits")
        if msgspec.structs.replace(before, **{name: getattr(config, name) for name in quiet}) == config:
            self._limit()
            self._check_anew()
            return
        await self.do_restart()

    async def delete(self) -> None:
        await self.do_stop()
        self._config = None

    async def observe(self) -> protocol.Observed:
        properties: dict[str, Any] = {"pid": self._pid}
        if self._exit_code is not None:
            properties["exit_code"] = self._exit_code
        return protocol.Observed(self._config is not None, self._state, self._reason, properties=properties)

    async def resume(self, config: Config) -> None:
        self._config = config
        pid, birth = self.place.runtime.get("pid"), self.place.runtime.get("birth")
        if isinstance(pid, int) and birth and pids.birth(pid) == birth:
            self._watch(pid)
        else:
            self._reason = "it ended while its agent was away"
            await self._adopt_from_file()

    async def close(self) -> None:
        await self._unwatch()

    # Operations

    async def do_start(self) -> None:
        config = self._require()
        if self._pid is not None:
            return
        environment = dict(os.environ) if config.user_environment else {}
        for name, value in config.environment.items():
            environment[name] = value if isinstance(value, str) else await self.place.secret(value)
        try:
            pid = await asyncio.to_thread(self._spawn, config, environment)
        except (OSError, ValueError) as error:
            self._state, self._reason = health.State.DOWN, f"cannot be started: {error}"
            raise errors.Refused(f"{self.place.name}: {self._reason}") from error
        self._exit_code = None
        self._watch(pid)
        self._limit()

    async def do_stop(self) -> None:
        pid, config = self._pid, self._config
        if pid is None:
            return
        ended, loop = self._watching, asyncio.get_running_loop()
        until = loop.time() + (config.stop_s if config else 0)
        leads, self._followers_may_finish = pids.leads_session(pid), True
        pids.signal_session(pid, signal.SIGTERM)
        if ended is not None:
            await asyncio.wait([ended], timeout=until - loop.time())
            if not ended.done():
                pids.signal_session(pid, signal.SIGKILL)
                await asyncio.wait([ended], timeout=5)
        while leads and await asyncio.to_thread(pids.has_followers, pid):
            if loop.time() > until:
                pids.signal_followers(pid, signal.SIGKILL)
            await asyncio.sleep(FOLLOWERS_LOOK_S)
        self._reason = "stopped"

    async def do_drain(self) -> None:
        await self.do_stop()

    async def do_restart(self) -> None:
        await self.do_stop()
        await self.do_start()

    async def do_signal(self, number: int = signal.SIGHUP) -> None:
        if self._pid is None:
            raise errors.Conflict(f"{self.place.name} does not run")
        pids.signal_session(self._pid, number)

    async def do_logs(self, bytes_max: int = LOG_BYTES) -> str:
        """The end of what it wrote."""
        return await asyncio.to_thread(_tail, self._output_path(), min(max(0, bytes_max), 512 << 10))

    # The process

    def _require(self) -> Config:
        if self._config is None:
            raise errors.NotFound(f"{self.place.name} does not exist")
        return self._config

    def _spawn(self, config: Config, environment: dict[str, str]) -> int:
        """No object of ours stands for the child, so none complains when the agent ends before it."""
        command = list(config.command)
        if config.directory:
            command = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', config.directory, *command]
        output = self._open_output()
        try:
            return os.posix_spawnp(
                command[0],
                command,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(output)

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

    async def _adopt_from_file(self) -> None:
        config = self._require()
        if not config.pid_file:
            return
        with contextlib.suppress(OSError, ValueError):
            text = await asyncio.to_thread(pathlib.Path(config.pid_file).read_text)
            pid = int(text.strip())
            if pids.birth(pid):
                self._watch(pid)

    def _watch(self, pid: int) -> None:
        self._pid, self._followers_may_finish = pid, False
        self.place.runtime |= {"pid": pid, "birth": pids.birth(pid)}
        self._watching = asyncio.create_task(self._until_it_ends(pid), name=f"process {self.place.name}")
        self._check_anew()

    def _check_anew(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        if self._require().health.kind == "exit":
            self._be(*self._when_it_runs())
        else:
            self._be(health.State.STARTING, "not checked yet")
            self._checking = asyncio.create_task(self._check_always(), name=f"check {self.place.name}")

    def _when_it_runs(self) -> tuple[health.State, str]:
        """What it is, where that it runs is all that counts."""
        return health.State.UP, ""

    async def _until_it_ends(self, pid: int) -> None:
        leads, end = pids.leads_session(pid), asyncio.ensure_future(pids.end_of(pid))
        try:
            while not (await asyncio.wait([end], timeout=OUTPUT_LOOK_S))[0]:
                if self.place.folder is not None:
                    await asyncio.to_thread(_cut, self._output_path())
            code = end.result()
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        if leads and not self._followers_may_finish:  # or two would be at work when it is started again
            pids.signal_followers(pid, signal.SIGKILL)
        how = "it ended" if code is None else f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        if self._problem:
            how, self._problem = f"it was ended because it did not work: {self._problem}", ""
        if self._checking is not None:
            self._checking.cancel()
        self._pid, self._exit_code = None, code
        self.place.runtime.pop("pid", None)
        self._be(health.State.DOWN, how)

    async def _unwatch(self) -> None:
        tasks = [task for task in (self._watching, self._checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _limit(self) -> None:
        limits = self._require().limits
        for what, value in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_CPU, limits.cpu_s),
        ):
            if value is not None and self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(self._pid, what, (value, value))

    def _be(self, state: health.State, reason: str) -> None:
        self._state, self._reason = state, reason
        properties: dict[str, Any] = {"pid": self._pid}
        if self._exit_code is not None:
            properties["exit_code"] = self._exit_code
        self.place.changed(protocol.Observed(True, state, reason, properties=properties))

    # Health

    async def _check_always(self) -> None:
        check = self._require().health
        loop = asyncio.get_running_loop()
        began, failed = loop.time(), 0
        while True:
            problem = await _problem(check)
            if problem is None:
                failed = 0
                if self._state is not health.State.UP:
                    self._be(health.State.UP, "")
            else:
                failed += 1
                starting = self._state is health.State.STARTING and loop.time() - began < check.start_s
                if not starting and failed >= check.failures and self._pid is not None:
                    # It runs and does not work: it is ended, so that its manager starts it anew.
                    self._problem = problem
                    pids.signal_session(self._pid, signal.SIGKILL)
                    return
            quick = self._state is health.State.STARTING
            await asyncio.sleep(min(0.1, check.every_s) if quick else check.every_s)


async def _problem(check: Check) -> str | None:
    """Why it does not work, or None."""
    try:
        async with asyncio.timeout(check.timeout_s):
            match check.kind:
                case "port":
                    _, writer = await asyncio.open_connection(check.host, check.port)
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
                case "http":
                    status = (await http.get(check.url)).status
                    return None if status < 400 else f"{check.url} answers {status}"
                case "command":
                    return await _command_problem(check.command)
    except TimeoutError:
        return f"no answer in {check.timeout_s:g} s"
    except (OSError, errors.MusterError) as error:
        return str(error)
    return None


async def _command_problem(command: tuple[str, ...]) -> str | None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return None if code == 0 else f"{command[0]} exits with {code}"


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
