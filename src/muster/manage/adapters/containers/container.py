"""A container of Podman or Docker: made, started, monitored and removed through the engine's own interface.

Each start makes the container anew, so it has the present image, secrets and configuration; a stopped one
stays, with its log, until the next start. Its name is ``muster-RESOURCE`` unless the configuration has
another, and a label says to which agent's folder it belongs: a container of somebody else is never touched.
The engine restarts nothing; the manager does. While the engine does not answer, the state is unknown.

One that may move to another machine has to be ended by the agent's watchdog, without the engine: it is not
started where its processes cannot be seen and signalled.

Starts, stops and restarts continue if their operation is cancelled (`transitions`).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from muster.core import errors, health
from muster.core.settings import sections
from muster.manage import manifest, protocol
from muster.manage.adapters import base, health_checks, process, shim, transitions
from muster.manage.adapters.containers import engine, log_pages, shell
from muster.manage.agent import watchdog
from muster.supervision import os_process

doc = sections.field_doc

OWNER = "muster.folder"  # the label of the containers of an agent
LOG_BYTES_MAX = "8m"
WAIT_S = 5.0  # for the end of a container, in one request; one that ended just before is seen after it
RETRY_S = 2.0  # while the engine does not answer
REMOVE_S = 60.0
PULL_S = 1_800.0
CREATED = "created"  # and never started
NOT_VISIBLE = "it may move, and this agent cannot end its processes without the engine"
VISIBLE_HINT = "use Podman as the user of the agent, an agent that runs as root, or no `reschedule`"
_PORT = re.compile(
    r"(?:(?P<ip>[0-9.]{7,15}):)?(?:(?P<host>\d{1,5}):)?(?P<port>\d{1,5})(?:/(?P<kind>tcp|udp))?\Z"
)


class ContainerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A container of Podman or Docker on the agent's machine."""

    image: Annotated[str, doc("The image, such as registry.example/shop:1.4.", min_length=1, max_length=500)]
    command: Annotated[tuple[str, ...], doc("Program and arguments (default: those of the image).")] = ()
    entrypoint: Annotated[
        tuple[str, ...], doc("The program that receives them (default: that of the image).")
    ] = ()
    environment: Annotated[
        dict[str, process.Value], doc('Environment variables: text, or {secret: "store:NAME"}.')
    ] = {}
    directory: Annotated[str, doc("Working directory (default: that of the image).")] = ""
    user: Annotated[str, doc("User, or USER:GROUP, in the container (default: that of the image).")] = ""
    ports: Annotated[
        tuple[str, ...], doc('Published ports: "8080:80", "127.0.0.1:8080:80/tcp", "53/udp".')
    ] = ()
    volumes: Annotated[tuple[str, ...], doc('Mounts: "/path:/in/it" or "NAME:/in/it", with ":ro".')] = ()
    network: Annotated[str, doc("host, none, or the name of a network (default: the engine's own).")] = ""
    limits: Annotated[process.GroupLimits, doc("Limits of its control group.")] = msgspec.field(
        default_factory=process.GroupLimits
    )
    read_only: Annotated[bool, doc("Whether its own file system is read-only.")] = False
    health: Annotated[
        health_checks.HealthCheck,
        doc("How to determine that it works; a `command` runs in the container, other kinds on the machine."),
    ] = msgspec.field(default_factory=health_checks.HealthCheck)
    pull: Annotated[
        Literal["missing", "always", "never"], doc("When the image is fetched before a start.")
    ] = "missing"
    stop_signal: Annotated[
        Literal["TERM", "INT", "QUIT", "HUP", "USR1", "USR2"], doc("The signal that asks it to stop.")
    ] = "TERM"
    stop_s: Annotated[
        float, doc("Time between `stop_signal` and SIGKILL when it is stopped.", ge=0, le=600)
    ] = 10.0
    name: Annotated[
        str,
        doc(
            "Name of the container (default: muster-RESOURCE).",
            pattern=r"^([A-Za-z0-9][\w.-]{0,127})?$(?!\n)",
        ),
    ] = ""
    socket: Annotated[
        str, doc("Socket of the engine (default: that of Podman, otherwise that of Docker).")
    ] = ""

    def __post_init__(self) -> None:
        for port in self.ports:
            if not _PORT.match(port):
                raise ValueError(
                    f'ports: {port!r} is not a port: expected "8080:80" or "127.0.0.1:8080:80/tcp"'
                )
        for volume in self.volumes:
            if not 2 <= len(volume.split(":")) <= 3:
                raise ValueError(
                    f'volumes: {volume!r} is not a mount: expected "/path:/in/it" or "NAME:/in/it:ro"'
                )


class ContainerAdapter(transitions.RunAdapter):
    """``context.runtime`` contains the digest ``config`` of the configuration of the last run, its ``token``,
    and the id of the ``container``."""

    type_name = "container"
    can_move = True
    config_type: ClassVar[type[msgspec.Struct]] = ContainerConfig
    can_be_renamed = False  # the container has its name
    _config: ContainerConfig | None

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._pid: int = 0
        self._run = ""  # the id and the start of the run that is watched
        self._is_visible = True  # whether its processes can be found and signalled without the engine

    # Adapter interface

    async def create(self, config: ContainerConfig, *, start: bool) -> None:
        self._config = config
        await self._transitions.idle()
        if start:
            await self.do_start()
        else:
            self.watch(self._watch_forever)

    async def put(self, config: ContainerConfig) -> None:
        before, self._config = self._config, config
        await self._transitions.idle()
        if self.context.runtime.get("config") not in (None, _identity(config)):
            former = before or config
            known = await self._inspect(former)  # what is not seen now may run as before
            if (former.name, former.socket) != (config.name, config.socket):
                await self._remove(former)
            if known is not None and known["State"]["Running"]:
                await self.do_restart()
            return
        self._record_generation()
        self._run = ""  # checked anew
        self.watch(self._watch_forever)

    async def delete(self) -> None:
        if self._config is not None and "config" in self.context.runtime:  # otherwise none was ever made
            await self.do_stop()
            await self._remove(self._config)
        await self._end_tasks()
        self._config = None

    async def observe(self) -> protocol.ObservedState:
        if self._config is not None and not self._transitions.is_underway():
            await self._look()
        return self._observed()

    async def resume(self, config: ContainerConfig) -> None:
        self._config = config
        self.watch(self._watch_forever)
        await self._look()

    async def close(self) -> None:
        await self._transitions.close(completes=False)
        await self._end_tasks()

    # Operations

    async def do_signal(self, number: int = 1) -> None:
        await self._engine().send("POST", f"{self._path()}/kill", signal=number)

    async def log_page(self, query: protocol.LogQuery) -> protocol.LogPage:
        container, known = await self._entries(query.cursor)
        if not container:
            return protocol.LogPage(text="", cursor=query.cursor or f"{'0' * 12}:0:0")
        return await asyncio.to_thread(log_pages.page, container, known, query, time.time())

    # Transitions

    async def _start(self) -> None:
        config = self._require()
        try:
            known = await self._inspect(config)
            if known is not None and known["State"]["Running"]:
                self.watch(self._watch_forever)
                await self._look()
                return
            environment = {}
            for name, value in config.environment.items():
                environment[name] = value if isinstance(value, str) else await self.context.secret(value)
            await self._provide_image(config)
            await self._remove(config)
            token = base.new_mark(self.context.folder and self.context.folder.parent)
            self.context.runtime |= {"config": _identity(config), "token": token}
            self._is_visible = True
            self._record_generation()
            await self.context.save()
            environment[os_process.MARK] = token
            made = await self._engine().json(
                "POST", "/containers/create", self._definition(config, environment), name=self._name(config)
            )
            self.context.runtime["container"] = made["Id"]
            await self.context.save()  # before it starts, so that the watchdog knows it
            await self._engine().send("POST", f"/containers/{made['Id']}/start")
            self.starts += 1
            self._begin_start()
        except errors.MusterError as error:
            self._report(health.HealthState.DOWN, f"cannot start: {error}")
            raise errors.Refused(f"{self.context.name}: {self._reason}") from error
        self.watch(self._watch_forever)
        await self._look()
        if self.context.may_move() and not self.can_be_ended:
            await self._look()  # it may have ended meanwhile
        if self.context.may_move() and not self.can_be_ended:
            await self._remove(config)
            await self._look()
            self._report(health.HealthState.DOWN, f"cannot start: {NOT_VISIBLE}")
            raise errors.Refused(f"{self.context.name}: {self._reason}", hint=VISIBLE_HINT)
        await self._finish_start()

    @property
    def mark(self) -> str:  # type: ignore[override]
        return str(self.context.runtime.get("token", "")) if self._is_visible else ""

    @property
    def can_be_ended(self) -> bool:  # type: ignore[override]
        return not self._pid or self._is_visible

    async def _end(self) -> None:
        config = self._require()
        if await self._inspect(config) is not None:
            await self._engine().send(
                "POST",
                f"{self._path()}/stop",
                timeout_s=config.stop_s + engine.TIMEOUT_S,
                t=round(config.stop_s),
            )
        await self._look()
        self._report(health.HealthState.DOWN, "stopped")

    async def _provide_image(self, config: ContainerConfig) -> None:
        if config.pull != "always" and await self._engine().exists(config.image):
            return
        if config.pull == "never":
            raise errors.NotFound(f"this machine has no image {config.image}, and `pull` is never")
        self._report(health.HealthState.STARTING, f"pulling {config.image}")
        await self._engine().pull(config.image, timeout_s=PULL_S)

    async def _remove(self, config: ContainerConfig) -> None:
        if await self._inspect(config) is not None:
            await engine.ContainerEngine(config.socket).send(
                "DELETE", f"/containers/{self._name(config)}", timeout_s=REMOVE_S, force=1, v=1
            )

    # The container

    def _engine(self) -> engine.ContainerEngine:
        return engine.ContainerEngine(self._require().socket)

    def _name(self, config: ContainerConfig) -> str:
        return config.name or f"muster-{self.context.name}"

    def _path(self) -> str:
        return f"/containers/{self._name(self._require())}"

    async def _inspect(self, config: ContainerConfig) -> dict[str, Any] | None:
        """What the engine knows of the container; `errors.Conflict` if it is not ours."""
        name = self._name(config)
        try:
            known: dict[str, Any] = await engine.ContainerEngine(config.socket).json(
                "GET", f"/containers/{name}/json"
            )
        except errors.NotFound:
            return None
        if (known["Config"].get("Labels") or {}).get(OWNER) != self._owner():
            raise errors.Conflict(
                f"the container {name} does not belong to this resource: remove it, or set another `name`"
            )
        return known

    def _owner(self) -> str:
        return str(self.context.folder or self.context.name)

    def _definition(self, config: ContainerConfig, environment: dict[str, str]) -> dict[str, Any]:
        limits = config.limits
        ports: dict[str, list[dict[str, str]]] = {}
        for port in config.ports:
            match = _PORT.match(port)
            assert match is not None
            target = f"{match['port']}/{match['kind'] or 'tcp'}"
            ports.setdefault(target, []).append(
                {"HostIp": match["ip"] or "", "HostPort": match["host"] or ""}
            )
        definition: dict[str, Any] = {
            "Image": config.image,
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "WorkingDir": config.directory,
            "User": config.user,
            "StopSignal": f"SIG{config.stop_signal}",
            "Labels": {OWNER: self._owner(), "muster.resource": self.context.name},
            "ExposedPorts": {port: {} for port in ports},
            "HostConfig": {
                "Binds": list(config.volumes),
                "PortBindings": ports,
                "NetworkMode": config.network or "default",
                "ReadonlyRootfs": config.read_only,
                "RestartPolicy": {"Name": "no"},
                "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_BYTES_MAX}},
                **({"Memory": limits.memory_bytes} if limits.memory_bytes else {}),
                **({"NanoCpus": round(limits.cpus * 1e9)} if limits.cpus else {}),
                **({"PidsLimit": limits.processes} if limits.processes else {}),
            },
        }
        if config.command:
            definition["Cmd"] = list(config.command)
        if config.entrypoint:
            definition["Entrypoint"] = list(config.entrypoint)
        return definition

    # Observation

    async def _watch_forever(self) -> None:
        """The engine answers when the container has ended; it may also be gone, and the engine too."""
        while self._config is not None:
            try:
                if not self._transitions.is_underway():
                    await self._look()
                if self._pid:
                    # Podman uses most of a core while it waits for any other condition.
                    await self._engine().send(
                        "POST", f"{self._path()}/wait", timeout_s=WAIT_S, condition="next-exit"
                    )
                else:
                    await asyncio.sleep(RETRY_S)
            except errors.TimedOut:
                continue
            except errors.NotFound:
                await asyncio.sleep(0.1)
            except errors.MusterError as error:  # it may be running
                self._report(health.HealthState.UNKNOWN, str(error))
                self._run = ""
                await asyncio.sleep(RETRY_S)

    async def _look(self) -> None:
        known = await self._inspect(self._require())
        state = known["State"] if known is not None else {}
        self._pid = int(state.get("Pid") or 0) if state.get("Running") else 0
        run = f"{known['Id']} {state.get('StartedAt')}" if known is not None and self._pid else ""
        if run:
            if run != self._run or self._state is health.HealthState.UNKNOWN:
                self._run, self._exit_code = run, None
                marks = {run.split()[0].encode()}
                if token := self.context.runtime.get("token"):
                    marks.add(watchdog.MARK + token.encode())
                self._is_visible = await asyncio.to_thread(_can_end, self._pid, marks)
                self._restart_checks()
            return
        self._run = ""
        self._stop_checks()
        if known is None:
            if self.context.runtime.get("config") or self._state is health.HealthState.UNKNOWN:
                self._report(health.HealthState.DOWN, "its container does not exist")
            return
        self._exit_code = shim.exit_code(state.get("ExitCode"))
        reason = "out of memory" if state.get("OOMKilled") else process.ending(self._exit_code)
        reason = self._ending(reason)
        if state.get("Status") == CREATED:
            reason, self._exit_code = state.get("Error") or "made, and not started", None
        if self._reason != "stopped" or self._state is not health.HealthState.DOWN:
            self._report(health.HealthState.DOWN, reason)

    async def _probe(self, check: health_checks.HealthCheck) -> str | None:
        if check.kind != "command":
            return await health_checks.find_problem(check)
        try:
            async with asyncio.timeout(check.timeout_s):
                code = await self._run_inside(check.command)
        except TimeoutError:
            return f"no reply within {check.timeout_s:g} s"
        except errors.Unavailable as error:
            raise health_checks.InconclusiveCheck(str(error)) from error
        except errors.MusterError as error:
            return str(error)
        return None if code == 0 else f"{check.command[0]} exited with {code}"

    async def _run_inside(self, command: tuple[str, ...]) -> int:
        definition = {"Cmd": list(command), "AttachStdout": True, "AttachStderr": True}
        made = await self._engine().json("POST", f"{self._path()}/exec", definition)
        reader, writer = await self._engine().attach(f"/exec/{made['Id']}/start", {"Detach": False})
        try:
            while await reader.read(65_536):
                pass
        finally:
            writer.close()
        return int((await self._engine().json("GET", f"/exec/{made['Id']}/json"))["ExitCode"])

    async def open_shell(self, command: protocol.ShellCommand) -> shell.ContainerShell:
        if not self._pid:
            raise errors.Conflict(f"{self.context.name} is not running")
        name = self._name(self._require())
        return await shell.ContainerShell.start(self._engine(), name, self._pid, command)

    def _end_failed(self) -> None:
        self.tasks.spawn("kill", self._engine().send("POST", f"{self._path()}/kill"))

    def _properties(self) -> dict[str, Any]:
        return {"pid": self._pid or None, "container": self._run[:12] or None}

    # Its log

    async def _entries(self, cursor: str = "") -> tuple[str, list[log_pages.ContainerLogLine]]:
        """The id of the container, and the lines since the second of the cursor."""
        known = await self._inspect(self._require())
        if known is None:
            return "", []
        place = log_pages.place_in(cursor, known["Id"])
        query: dict[str, Any] = {"stdout": 1, "stderr": 1, "timestamps": 1}
        if place is not None and place.second:
            query["since"] = place.second
        data = await self._engine().send("GET", f"/containers/{known['Id']}/logs", **query)
        return known["Id"], await asyncio.to_thread(log_pages.entries, data)


def _can_end(pid: int, marks: set[bytes]) -> bool:
    """Whether this process can find and signal the process of a container. Blocks."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid in watchdog.processes_of(marks, set())


def _identity(config: ContainerConfig) -> str:
    """The digest of the settings that a running container cannot adopt."""
    lasting = msgspec.structs.replace(config, health=health_checks.HealthCheck(), pull="missing", stop_s=0.0)
    return manifest.digest(msgspec.to_builtins(lasting))
