"""The adapter interface: the code that operates one resource.

Write an adapter as a class with a ``type_name``, a ``config_type`` (a msgspec struct against which manifests
are checked) and the coroutines below, and name it in the entry points ``muster.adapters`` of its
distribution. It may rely on the following:

- Calls come one at a time, from one event loop, each with a deadline; cancellation means that the time is up.
- Each call must be idempotent: after a crash, the same call may come again.
- `AdapterContext.runtime` is stored when a call returns and is available in `resume` after a restart of the
  agent. `AdapterContext.save` stores it at once, for data that must be on disk before the adapter continues.
- Changes of the resource between calls are reported with `AdapterContext.report_state` as soon as they are
  noticed.

``do_NAME`` coroutines are operations for `muster exec RESOURCE NAME`; managers call ``start``, ``stop`` and
``drain`` too. An adapter with only ``do_start`` and ``do_stop`` drains by a stop, and restarts by both.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import functools
import inspect
import os
import pathlib
import secrets
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from muster.bus.brokers import config
from muster.core import errors, health
from muster.core.settings import loader
from muster.manage import field_hints, protocol
from muster.manage.adapters import shell
from muster.supervision import tasks

OPERATION_PREFIX = "do_"
_COMPOSED = {"drain": ("stop",), "restart": ("stop", "start")}  # of adapters without their own
HOOK_CHUNKS, HOOK_TEXT_MAX = 8, 500  # of the output of a hook
HOOK_OUTPUT_S = 0.5  # for the rest of its output, which other processes may hold open


async def _nothing_to_save() -> None: ...


def new_mark(folder: pathlib.Path | None) -> str:
    """For a run of a resource of the agent with this folder: it is recognised even if the record is lost."""
    return f"{marks_of(folder) if folder is not None else ''}{secrets.token_hex(16)}"


def marks_of(folder: pathlib.Path) -> str:
    """What the marks of an agent begin with: another folder, such as that of a container, has another one."""
    try:
        about = folder.stat()
    except FileNotFoundError:
        return ""
    return f"{about.st_dev:x}.{about.st_ino:x}."


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """What a broker needs to admit only the domain's identities and to link to other brokers."""

    trust: config.OperatorTrust
    account: str  # the public key of the domain's account
    link_credentials: pathlib.Path


@dataclass(slots=True)
class AdapterContext:
    """What an agent provides to an adapter."""

    name: str
    folder: pathlib.Path | None  # its own folder; None if nothing is stored
    report_state: Callable[[protocol.ObservedState], None]
    runtime: dict[str, Any] = field(default_factory=dict)
    report_event: Callable[..., None] = lambda *_, **__: None  # (what, **details): an event for subscribers
    sibling: Callable[[str], Adapter | None] = lambda _: (
        None
    )  # the adapter of another resource of the same agent
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stored_secret: Callable[[str], Awaitable[str]] | None = None  # reads a secret from the domain's store
    save: Callable[[], Awaitable[None]] = _nothing_to_save
    broker_access: Callable[[], Awaitable[BrokerAccess]] | None = None  # None: this agent may not run brokers
    generation: int = 0  # of the desired state that the current or last call applies
    may_move: Callable[[], bool] = lambda: False  # whether it is stopped to be started on another machine
    hooks: protocol.Hooks | None = None

    async def secret(self, reference: Mapping[str, str]) -> str:
        """The value of ``{"secret": "file:…"}`` (or env, or store): to be used, not to be stored."""
        kind, _, name = reference.get("secret", "").partition(":")
        if kind != "store":
            return await asyncio.to_thread(
                loader.read_secret, reference.get("secret", ""), self.environment, folder=self.folder
            )
        if self.stored_secret is None:
            raise errors.Unavailable("this agent has no access to the store of a domain")
        return await self.stored_secret(name)


class Adapter(abc.ABC):
    type_name: ClassVar[str]
    config_type: ClassVar[type[msgspec.Struct]]
    can_be_renamed: ClassVar[bool] = True  # whether its resource works after its folder moved
    #: Whether its resource is processes with `mark` in their environment, and nothing else: a watchdog can
    #: end them even if the agent is frozen, so that it may be started on another machine.
    can_move: ClassVar[bool] = False
    can_be_ended = True  # whether the watchdog can, for what is running now
    has_hooks: ClassVar[bool] = False  # whether it calls `run_hook` after each start and before each stop
    starts = 0  # by this object; for metrics
    _config: Any = None  # None: its resource does not exist
    _watching: asyncio.Task[None] | None = None
    mark = ""  # of the processes of the present run (`os_process.MARK`); for metrics

    def __init__(self, context: AdapterContext) -> None:
        self.context = context

    def _require(self) -> Any:
        """Its configuration."""
        if self._config is None:
            raise errors.NotFound(f"{self.context.name} does not exist")
        return self._config

    def watch(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``look`` in the background until `close`, if it does not run yet."""
        if self._watching is None or self._watching.done():
            self._watching = self.tasks.loop("watch", look)

    async def poll(self) -> None:
        """Report the state every ``every_s`` of the configuration, for `watch`."""
        while self._config is not None:
            try:
                observed = await self.observe()
            except errors.MusterError as error:  # it may be running
                observed = protocol.ObservedState(True, health.HealthState.UNKNOWN, str(error))
            self.context.report_state(observed)  # the agent publishes only changes
            await asyncio.sleep(self._config.every_s)

    @functools.cached_property
    def tasks(self) -> tasks.TaskSupervisor:
        """For background work: a failure is logged, counted and shown, and the work is restarted. `close` has
        to end it."""
        return tasks.TaskSupervisor(f"resource {self.context.name}")

    @abc.abstractmethod
    async def create(self, config: Any, *, start: bool) -> None:
        """Create the resource, and start it if ``start``. An existing one is changed to ``config``."""

    @abc.abstractmethod
    async def put(self, config: Any) -> None:
        """Change the resource to ``config``, with as little disruption as possible."""

    @abc.abstractmethod
    async def delete(self) -> None:
        """Stop and remove the resource. It is gone when this returns."""

    @abc.abstractmethod
    async def observe(self) -> protocol.ObservedState:
        """The current state. If ``digest`` is empty, the agent fills in that of the last configuration."""

    @abc.abstractmethod
    async def resume(self, config: Any) -> None:
        """The agent was restarted: find the resource by `AdapterContext.runtime`, and start nothing."""

    async def close(self) -> None:
        """The agent stops. The resource continues to run."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    async def log_page(self, query: protocol.LogQuery) -> protocol.LogPage:
        """A part of the log, for readers that follow it. It may be called during another call.

        An adapter with an operation ``logs`` that returns a text has a log that cannot be followed.
        """
        if "logs" not in self.operations():
            raise errors.NotFound(f"{self.context.name}: resources of the type {self.type_name} have no log")
        return protocol.LogPage(text=str(await self.execute("logs", {})))

    async def open_shell(self, command: protocol.ShellCommand) -> shell.Shell:
        """Run a command of a user inside the resource. It may be called during another call."""
        raise errors.Refused(
            f"{self.context.name}: no commands can be run inside resources of the type {self.type_name}"
        )

    async def run_hook(self, name: str, hook: protocol.HookCommand | None) -> str:
        """Run a command inside the resource. Returns how it failed; empty: it did not."""
        if hook is None:
            return ""
        output: collections.deque[bytes] = collections.deque(maxlen=HOOK_CHUNKS)
        try:
            async with asyncio.timeout(hook.timeout_s):
                running = await self.open_shell(protocol.ShellCommand(command=hook.command))
                readers = [self.tasks.spawn("hook", _read(each, output)) for each in running.outputs()]
                try:
                    running.end_input()
                    code = await running.wait()
                    await asyncio.wait(readers, timeout=HOOK_OUTPUT_S)
                finally:
                    await tasks.finish(running.close())
                    running.end_output()
                    for reader in readers:
                        reader.cancel()
        except TimeoutError:
            return f"its {name} hook took longer than {hook.timeout_s:g} s"
        except errors.MusterError as error:
            return f"its {name} hook failed: {error.message}"
        text = b"".join(output).decode(errors="replace").strip().rpartition("\n")[2][-HOOK_TEXT_MAX:]
        return f"its {name} hook failed with exit code {code}" + (f": {text}" if text else "") if code else ""

    async def execute(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Perform an operation of this type: the method ``do_NAME``."""
        function = getattr(self, OPERATION_PREFIX + operation.replace("-", "_"), None)
        if function is None and operation in _COMPOSED and operation in self.operations():
            for part in _COMPOSED[operation]:
                await self.execute(part, arguments)
            return None
        if function is None:
            known = ", ".join(self.operations())
            raise errors.NotFound(f"the type {self.type_name} has no operation {operation!r}: it has {known}")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise errors.InvalidInput(f"{operation}: {error}") from error
        for name, kind in _types(function).items():
            if name in arguments:
                try:
                    arguments = {**arguments, name: msgspec.convert(arguments[name], kind)}
                except msgspec.ValidationError as error:
                    raise errors.InvalidInput(f"{operation}, {name}: {error}") from error
        return await function(**arguments)

    def operations(self) -> list[str]:
        """The names of the operations: of the methods ``do_…``."""
        prefix = OPERATION_PREFIX
        own = {name.removeprefix(prefix).replace("_", "-") for name in dir(self) if name.startswith(prefix)}
        return sorted(own.union(name for name, parts in _COMPOSED.items() if own.issuperset(parts)))


async def _read(chunks: AsyncIterator[tuple[int, bytes]], output: collections.deque[bytes]) -> None:
    async for _, data in chunks:
        output.append(data)


def _types(function: Callable[..., object]) -> dict[str, Any]:
    """Of its arguments, as far as they are known: an adapter may be a plug-in with types of its own."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        return {}


def convert(kind: type[Adapter], config: Mapping[str, Any]) -> Any:
    """The configuration as the adapter's type; `errors.InvalidInput` names the invalid path."""
    try:
        return msgspec.convert(dict(config), kind.config_type)
    except msgspec.ValidationError as error:
        hint = field_hints.hint(kind.config_type, str(error))
        raise errors.InvalidInput(str(error), hint=hint) from error
