"""Simulated machines: each has a disk and a wall clock, and runs one process at a time."""

from __future__ import annotations

import asyncio
import contextvars
import pathlib
import random
import shutil
from collections.abc import Awaitable, Callable

from muster.bus.memory import connection
from muster.core import errors
from tests.sim import entropy, history, loop, network
from tests.sim import process as process_

DISK_S = 0.000_2
RETRY_S = 0.5
RESTART_S = 1.0
BROKER_PATIENCE_S = 8.0  # a broker closes the connection of a process that stands still for so long

Program = Callable[["Host"], Awaitable[None]]


class Host:
    """``program`` is started again after its process ended, as by a supervisor."""

    def __init__(
        self,
        name: str,
        program: Program,
        net: network.TracedNetwork,
        story: history.History,
        folder: pathlib.Path,
        chance: random.Random,
        *,
        may_lose_disk: bool = True,
    ) -> None:
        self.name = name
        self.net = net
        self.history = story
        self.chance = chance
        self.folder = folder
        self.may_lose_disk = may_lose_disk
        self.disk_s_max = DISK_S
        self.clock_ahead_ns = 0
        self._freezes = 0
        self.process: process_.Process | None = None
        self.buses: list[connection.SimulatedBus] = []
        self._program = program
        self._lives: list[process_.Process] = []  # none may be collected: that would run its coroutines
        self.folder.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return self.name

    # For programs.

    async def connect(self, identity: str | None = None) -> connection.SimulatedBus:
        """Connect to the brokers, as soon as they can be reached."""
        while True:
            try:
                bus = await self.net.connect(identity or self.name, node=self.name)
            except errors.Unavailable:
                await asyncio.sleep(RETRY_S)
                continue
            self.buses.append(bus)
            return bus

    def wall_s(self) -> float:
        return self.wall_ns() / 1e9

    def wall_ns(self) -> int:
        return entropy.EPOCH_NS + entropy.monotonic_ns() + self.clock_ahead_ns

    def disk_s(self) -> float:
        return self.chance.uniform(0.0, self.disk_s_max)

    # For the supervisor and the nemesis.

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.killed

    @property
    def is_frozen(self) -> bool:
        return self.process is not None and self.process.frozen

    def start(self) -> None:
        if self.is_up:
            return
        process = process_.Process(f"{self.name}/{len(self._lives) + 1}")
        self._lives.append(process)
        process.disk_delay_s = self.disk_s
        process.clock_ahead_ns = lambda: self.clock_ahead_ns
        self.process, self.buses = process, []
        context = contextvars.Context()
        context.run(process_.CURRENT.set, process)
        asyncio.get_running_loop().create_task(self._run(process), context=context, name=process.name)
        self.history.note(self.name, "starts")

    async def _run(self, process: process_.Process) -> None:
        """The program ends only with an error: then its process ends, and is started again."""
        try:
            await self._program(self)
            reason = "ended"
        except errors.Unavailable as error:
            reason = f"ended: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  (a violation)
            self.history.event(self.name, "failure", error=f"{type(error).__name__}: {error}")
            reason = f"failed: {type(error).__name__}: {error}"
        self.history.note(self.name, reason)
        running = asyncio.get_running_loop()
        running.call_later(RESTART_S, self._restart, process, context=contextvars.Context())
        self.kill()

    def _restart(self, process: process_.Process) -> None:
        if self.process is process:
            self.start()

    def kill(self, *, wipe: bool = False) -> None:
        """SIGKILL. ``wipe``: the disk is lost as well."""
        if self.process is None or self.process.killed:
            return
        running = asyncio.get_running_loop()
        assert isinstance(running, loop.SimulatedLoop)
        running.kill(self.process)
        for bus in self.buses:
            self.net.crash(bus)
        self.history.event(self.name, "killed")
        if wipe:
            shutil.rmtree(self.folder)
            self.folder.mkdir()

    def freeze(self) -> None:
        """SIGSTOP."""
        running = asyncio.get_running_loop()
        assert isinstance(running, loop.SimulatedLoop)
        if self.process is not None and self.process.runs:
            running.freeze(self.process)
            self._freezes += 1
            running.call_later(
                BROKER_PATIENCE_S, self._lose_patience, self._freezes, context=contextvars.Context()
            )

    def _lose_patience(self, freeze: int) -> None:
        if freeze == self._freezes and self.is_frozen:
            for bus in self.buses:
                self.net.sever(bus)

    def thaw(self) -> None:
        """SIGCONT."""
        running = asyncio.get_running_loop()
        assert isinstance(running, loop.SimulatedLoop)
        if self.process is not None and self.process.frozen:
            running.thaw(self.process)
