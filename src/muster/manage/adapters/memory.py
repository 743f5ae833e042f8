"""A resource that exists only in memory: for simulations, benchmarks and tests."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec

from muster.core import errors, health
from muster.core.settings import sections
from muster.manage import protocol
from muster.manage.adapters import base

doc = sections.field_doc


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A resource that exists only in memory, for simulations and tests."""

    value: Annotated[Any, doc("Any value.")] = None
    fails: Annotated[tuple[str, ...], doc("Operations that fail.")] = ()
    hangs: Annotated[tuple[str, ...], doc("Operations that never end.")] = ()


class MemoryAdapter(base.Adapter):
    type_name = "memory"
    can_move = True
    config_type = MemoryConfig

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self.config: MemoryConfig | None = None
        self.state = health.HealthState.DOWN
        self.reason = ""
        self.done: list[str] = []

    async def create(self, config: MemoryConfig, *, start: bool) -> None:
        self.config = config
        await self._do("create")
        if start:
            await self.do_start()

    async def put(self, config: MemoryConfig) -> None:
        self.config = config
        await self._do("put")

    async def delete(self) -> None:
        await self._do("delete")
        self.config, self.state = None, health.HealthState.DOWN

    async def observe(self) -> protocol.ObservedState:
        return protocol.ObservedState(self.config is not None, self.state, self.reason)

    async def resume(self, config: MemoryConfig) -> None:
        self.config = config
        self.state = health.HealthState(self.context.runtime.get("state", "down"))

    async def do_start(self) -> None:
        await self._do("start")
        self.reason = ""
        self._set_state(health.HealthState.UP)

    async def do_stop(self) -> None:
        await self._do("stop")
        self._set_state(health.HealthState.DOWN)

    async def do_echo(self, text: Any = "") -> Any:
        await self._do("echo")
        return text

    def die(self, reason: str = "died") -> None:
        """For tests: the resource fails."""
        self.reason = reason
        self._set_state(health.HealthState.DOWN)

    def _set_state(self, state: health.HealthState) -> None:
        self.state = state
        self.context.runtime["state"] = state.value
        self.context.report_state(protocol.ObservedState(True, state, self.reason))

    async def _do(self, what: str) -> None:
        self.done.append(what)
        if self.config is not None and what in self.config.hangs:
            await asyncio.get_running_loop().create_future()
        if self.config is not None and what in self.config.fails:
            raise errors.Refused(f"{what} fails, as configured")
