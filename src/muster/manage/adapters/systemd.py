"""A systemd unit: an existing unit that is started, stopped and monitored.

With ``definition`` the unit file is written too (a user unit, or a system unit if the agent has the
permission).
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from typing import Annotated

import msgspec

from muster.core import errors, files, health
from muster.core.settings import sections
from muster.manage import protocol
from muster.manage.adapters import base
from muster.supervision import commands

doc = sections.field_doc

PROGRAM = "systemctl"
TIMEOUT_S = 30.0
NOT_RUNNING = "not been booted with systemd"

_GONE = {"LoadState=not-found", "ActiveState=inactive"}
_STATES = {
    "active": health.HealthState.UP,
    "reloading": health.HealthState.UP,
    "activating": health.HealthState.STARTING,
    "deactivating": health.HealthState.DRAINING,
}


class SystemdUnitConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A unit of systemd on the agent's machine."""

    unit: Annotated[
        str,
        doc("Name of the unit.", pattern=r"^[A-Za-z0-9:_.@-]{1,200}\.(service|timer|socket|target)$(?!\n)"),
    ]
    user: Annotated[bool, doc("A unit of the agent's user instead of the system.")] = False
    definition: Annotated[str, doc("Text of the unit file; empty: the unit exists already.")] = ""
    every_s: Annotated[float, doc("Interval between checks.", gt=0, le=3600)] = 2.0


class SystemdAdapter(base.Adapter):
    """``context.runtime`` contains the ``unit`` that it operates: its name, whether it is a user's, and
    whether its file was written here."""

    type_name = "systemd"
    config_type = SystemdUnitConfig
    _config: SystemdUnitConfig | None

    async def create(self, config: SystemdUnitConfig, *, start: bool) -> None:
        await self.put(config)
        if start:
            await self.do_start()

    async def put(self, config: SystemdUnitConfig) -> None:
        if (former := self._former()) and (former.unit, former.user) != (config.unit, config.user):
            self._config = former
            await self.delete()
        self._config = config
        self.context.runtime["unit"] = [config.unit, config.user, bool(config.definition)]
        try:
            is_changed = await asyncio.to_thread(_write, config)
        except OSError as error:
            raise errors.Refused(
                f"cannot write {_path(config)}: {error.strerror}; the agent has to run as root, and its unit "
                f"needs ReadWritePaths={_path(config).parent}"
            ) from error
        if is_changed:
            await self._systemctl("daemon-reload")
            await self._systemctl("try-restart", unit=True)  # the running unit has the old definition
        await self.close()
        self.watch(self.poll)

    async def delete(self) -> None:
        if self._config is None:
            return
        with contextlib.suppress(errors.MissingDependency):  # without systemd, no unit runs
            shown = await self._systemctl("show", "--property=LoadState,ActiveState", unit=True)
            if not _GONE.issubset(shown.split()):  # a program that was removed took its unit with it
                await self.do_stop()
        await self.close()
        former = self._former()
        if self._config.definition or (former and former.definition):
            await asyncio.to_thread(_path(self._config).unlink, missing_ok=True)
            with contextlib.suppress(errors.MissingDependency):
                await self._systemctl("daemon-reload")
        self.context.runtime.pop("unit", None)
        self._config = None

    def _former(self) -> SystemdUnitConfig | None:
        """The unit of the last configuration."""
        unit, user, is_written = self.context.runtime.get("unit") or ("", False, False)
        return SystemdUnitConfig(unit=unit, user=user, definition="written" * is_written) if unit else None

    async def observe(self) -> protocol.ObservedState:
        if self._config is None:
            return protocol.ObservedState(False)
        output = await self._systemctl("show", "--property=ActiveState,SubState,Result,MainPID", unit=True)
        properties = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
        state = _STATES.get(properties.get("ActiveState", ""), health.HealthState.DOWN)
        reason = (
            ""
            if state is health.HealthState.UP
            else f"{properties.get('SubState')}, {properties.get('Result')}"
        )
        return protocol.ObservedState(
            True, state, reason, properties={"pid": int(properties.get("MainPID") or 0)}
        )

    async def resume(self, config: SystemdUnitConfig) -> None:
        self._config = config
        self.watch(self.poll)

    async def do_start(self) -> None:
        await self._systemctl("start", unit=True)

    async def do_stop(self) -> None:
        await self._systemctl("stop", unit=True)

    async def do_restart(self) -> None:
        await self._systemctl("restart", unit=True)

    async def _systemctl(self, *arguments: str, unit: bool = False) -> str:
        config = self._config
        if config is None:
            raise errors.NotFound(f"{self.context.name} does not exist")
        scope = ("--user",) if config.user else ()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                done = await commands.run(
                    PROGRAM, *scope, *arguments, *((config.unit,) if unit else ()), capture=True
                )
        except TimeoutError:
            raise errors.TimedOut(f"systemctl {arguments[0]} did not finish within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise errors.MissingDependency(f"systemd is not available on this machine: {error}") from error
        if done.exit_code:
            reason = done.errors.decode("utf-8", "replace").strip()[:500]
            if NOT_RUNNING in reason:
                raise errors.MissingDependency(f"systemd does not run on this machine: {reason}")
            raise errors.Refused(f"systemctl {arguments[0]}: {reason}")
        return done.output.decode("utf-8", "replace")


def _path(config: SystemdUnitConfig) -> pathlib.Path:
    folder = files.expanded("~/.config/systemd/user") if config.user else None
    return (folder or pathlib.Path("/etc/systemd/system")) / config.unit


def _write(config: SystemdUnitConfig) -> bool:
    """Write the definition, if there is one. Returns whether it changed."""
    path = _path(config)
    if not config.definition:
        return False
    if path.exists() and path.read_text() == config.definition:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, config.definition.encode(), mode=files.PUBLIC)
    return True
