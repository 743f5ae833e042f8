"""Faults of real processes, networks, disks and clocks: each begins, holds for a while, and ends."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests import disks, next_version
from tests.cli import driver
from tests.faults import deployment as deployment_
from tests.faults import network, units

HOUR_S = 3600.0
LOSS_PERCENT = 10
DELAY_S_MAX = 0.3
RATE = "2mbit"
FLIPPED_BYTES = 64
STREAMS = ("messages", "contexts")


class Fault(abc.ABC):
    """``words``: for the table. ``kind``: the deployment that it needs."""

    words: str
    kind: str = "machines"
    least_s: float = 0.0  # how long it has to last
    lasting = False  # it affects something that cannot work before its end
    agent = ""  # of the machine whose processes cannot be restored before its end

    def __init__(self, deployment: Any, chance: random.Random) -> None:
        self.deployment = deployment
        self.chance = chance

    @abc.abstractmethod
    async def begin(self) -> str:
        """Returns what is affected."""

    async def observe(self) -> list[str]:
        """While the fault lasts: what the domain should show and does not."""
        return []

    async def end(self) -> None:  # noqa: B027  (optional)
        """Repair what does not repair itself."""


class NoFault(Fault):
    words = "none"

    async def begin(self) -> str:
        return "nothing"


class ProcessFault(Fault):
    """A signal to the processes of a target. A host that is killed stays down until the end of the fault."""

    target: str
    number: signal.Signals
    unit: units.Unit | None = None  # that stays down

    async def begin(self) -> str:
        self.victim: deployment_.Victim = await self.deployment.victim(self.target)
        if self.lasting:
            self.agent = self.deployment.agent(self.victim.name)
        if self.target.startswith("host-") and self.number is signal.SIGKILL:
            self.unit = self.deployment.units[f"domain-{self.victim.name}"]
            self.unit.masked = True
        self._send(self.number)
        return f"{self.target} {self.victim.name}"

    async def observe(self) -> list[str]:
        rows = {"broker": "brokers", "registry": "management", "manager": "management"}.get(self.target)
        if self.kind != "local" or rows is None:
            return []
        pid = (await self.deployment.pids(rows)).get(self.victim.name)
        return [] if pid not in (None, *self.victim.pids) else [f"{self.victim.name} was not replaced"]

    async def end(self) -> None:
        if self.number is signal.SIGSTOP:
            self._send(signal.SIGCONT)
        if self.unit is not None:
            self.unit.masked = False

    def _send(self, number: signal.Signals) -> None:
        for pid in self.victim.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class MassRestart(Fault):
    words = "all processes killed at once"

    async def begin(self) -> str:
        for unit in self.deployment.units.values():
            unit.kill()
        return ", ".join(self.deployment.units)


class LocalMassRestart(MassRestart):
    kind = "local"


# The network of a machine.


class NetworkFault(Fault):
    host = ""  # empty: the one whose broker leads the stream of messages

    async def begin(self) -> str:
        leader = await self.deployment.stream_leader("messages")
        self.name = self.host or self.deployment.machine_of(leader)
        if self.lasting:
            self.agent = self.deployment.agent(self.name)
        self.apply()
        return f"machine {self.name}"

    @abc.abstractmethod
    def apply(self) -> None: ...

    async def end(self) -> None:
        network.heal(self.name)


class Partition(NetworkFault):
    words = "a machine cut off from the network"
    lasting = True

    def apply(self) -> None:
        network.drop(self.name, "in", "out")


def _cuts() -> dict[str, type[Fault]]:
    hosts = [target for target in deployment_.Machines.targets if target.startswith("host-")]
    return {
        f"cut-{target}": type(
            "Cut_",
            (Partition,),
            {"host": target.removeprefix("host-"), "words": "host " + target[-1] + " cut off"},
        )
        for target in hosts
    }


class Mute(NetworkFault):
    words = "a machine that receives and cannot send"
    lasting = True

    def apply(self) -> None:
        network.drop(self.name, "out")


class Deaf(NetworkFault):
    words = "a machine that sends and cannot receive"
    lasting = True

    def apply(self) -> None:
        network.drop(self.name, "in")


class PacketLoss(NetworkFault):
    words = f"{LOSS_PERCENT} % of packets of a machine lost in both directions"

    def apply(self) -> None:
        network.drop(self.name, f"in {LOSS_PERCENT}", f"out {LOSS_PERCENT}")


class NarrowLink(NetworkFault):
    words = f"the link of a machine limited to {RATE}"

    def apply(self) -> None:
        network.limit(self.name, RATE)


class Delay(Fault):
    words = f"up to {DELAY_S_MAX * 1000:.0f} ms of random delay between all machines"

    async def begin(self) -> str:
        for name in self.deployment.names:
            network.delay(name, DELAY_S_MAX)
        return "all connections"

    async def end(self) -> None:
        for name in self.deployment.names:
            network.heal(name)


# Clocks.


class Clock(Fault):
    """The processes of a machine are killed, and start with another clock."""

    by_s: float

    async def begin(self) -> str:
        self.name = self.chance.choice(self.deployment.names)
        return self._restart(self.by_s)

    async def end(self) -> None:
        self._restart(0.0)

    def _restart(self, by_s: float) -> str:
        self.deployment.skew(self.name, by_s)
        self.deployment.units[f"domain-{self.name}"].kill()
        return f"machine {self.name}"


class ClockAhead(Clock):
    words = "a machine restarted with a clock that is an hour ahead, and back"
    by_s = HOUR_S


class ClockBehind(Clock):
    words = "a machine restarted with a clock that is an hour behind, and back"
    by_s = -HOUR_S


# Disks.


class DiskFull(Fault):
    words = "disk full"
    kind = "local"
    lasting = True

    async def begin(self) -> str:
        self._ballast = disks.fill(self.deployment.folder)
        return "the disk of the domain"

    async def observe(self) -> list[str]:
        ready = (await self.deployment.status())["ready"]
        return ["the domain says that it is ready, with a full disk"] if ready else []

    async def end(self) -> None:
        self._ballast.unlink()


class HostDiskFull(Fault):
    """Of the machine whose broker leads the stream of messages."""

    words = "the disk of a machine full"
    lasting = True

    async def begin(self) -> str:
        self.name = self.deployment.machine_of(await self.deployment.stream_leader("messages"))
        self.agent = self.deployment.agent(self.name)
        self._ballast = disks.fill(self.deployment.folder / self.name)
        return f"the disk of machine {self.name}"

    async def end(self) -> None:
        self._ballast.unlink()


class Damage(Fault):
    """The leader of a stream finds a damaged block when it starts again."""

    kind = "local"

    async def begin(self) -> str:
        pids = await self.deployment.pids("brokers")
        damaged = []
        for stream in STREAMS:
            name = await self.deployment.stream_leader(stream)
            blocks = sorted(
                self.deployment.broker_folder(name).glob(f"**/streams/{stream}/msgs/*.blk"),
                key=lambda path: path.stat().st_size,
            )
            self.damage(blocks[-1])
            damaged.append(name)
        for name in set(damaged):
            os.kill(pids[name], signal.SIGKILL)
        return f"streams {', '.join(STREAMS)} on {', '.join(damaged)}"

    @abc.abstractmethod
    def damage(self, block: Path) -> None: ...


class BitFlips(Damage):
    words = f"{FLIPPED_BYTES} bytes of a stream's block flipped on its leader, which is killed"

    def damage(self, block: Path) -> None:
        data = bytearray(block.read_bytes())
        first = self.chance.randrange(max(1, len(data) // 2 - FLIPPED_BYTES))
        for place in range(first, min(len(data), first + FLIPPED_BYTES)):
            data[place] ^= 0xFF
        with block.open("r+b") as file:
            file.write(data)


class Truncation(Damage):
    words = "a stream's block cut to a half on its leader, which is killed"

    def damage(self, block: Path) -> None:
        os.truncate(block, block.stat().st_size // 2)


# Versions.


class Upgrade(Fault):
    """`muster machine upgrade`, of all machines. Programs are scripts, because a test installs nothing."""

    async def upgrade(self, name: str, words: str) -> driver.Answer:
        script = self.deployment.scratch / name
        script.write_text(f"#!/bin/sh\n{words}\n")
        script.chmod(0o755)
        command = "machine", "upgrade", script, "--timeout", "240s"
        return await asyncio.to_thread(driver.run, *command, home=self.deployment.home, timeout_s=1200)

    def versions(self) -> list[str]:
        return [self.deployment.version(name) for name in self.deployment.all_names]


class FailedUpgrade(Upgrade):
    words = "an upgrade to a program that does not start, and back"

    async def begin(self) -> str:
        before = self.versions()
        run = 'test "$1" = version && echo \'{"muster": "9"}\''
        answer = await self.upgrade("broken", f"{run} || exit 1")
        self.untrue = [] if answer.code else ["the upgrade to a broken program succeeded"]
        if "all machines run their former programs" not in answer.err:
            self.untrue.append(f"the upgrade ended with {answer.err[-500:]}")
        if self.versions() != before:
            self.untrue.append(f"the versions are {', '.join(self.versions())}")
        return "one machine after the other"

    async def observe(self) -> list[str]:
        return self.untrue


class RollingUpgrade(Upgrade):
    """It comes last: the machines keep the next version."""

    words = "the machines upgraded to the next version one after the other"

    async def begin(self) -> str:
        source = self.deployment.scratch / "next"
        await asyncio.to_thread(next_version.copy, source)
        path = f"{source}:{driver.SOURCE.parent}"
        python = f"PYTHONPATH={path} exec {sys.executable} -m muster"
        answer = await self.upgrade("next-muster", f'{python} "$@"')
        if answer.code:
            raise RuntimeError(f"muster machine upgrade: {answer.out}{answer.err}")
        return ", ".join(self.deployment.all_names)

    async def observe(self) -> list[str]:
        versions = self.versions()
        expected = [next_version.NUMBER] * len(versions)
        return [] if versions == expected else [f"the versions are {', '.join(versions)}"]


def _process_faults() -> dict[str, type[Fault]]:
    made: dict[str, type[Fault]] = {}
    for kind in deployment_.KINDS.values():
        for target in kind.targets:
            for verb, number in (("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
                frozen = number is signal.SIGSTOP
                names = {
                    "least_s": units.WATCHDOG_S + 2.0 if frozen else 0.0,  # until it is noticed
                    "words": target.replace("-", " ") if "-" in target else f"one {target}",
                    "lasting": target.startswith("host-") or (frozen and target == "machine"),
                    "kind": kind.kind,
                    "target": target,
                    "number": number,
                }
                made[f"{verb}-{target}{_suffix(kind.kind)}"] = type("ProcessFault_", (ProcessFault,), names)
    return made


def _suffix(kind: str) -> str:
    return "-of-three" if kind == "machines" else ""


FAULTS: dict[str, type[Fault]] = {
    "none": NoFault,
    **_process_faults(),
    "mass-restart": LocalMassRestart,
    "disk-full": DiskFull,
    "bit-flips": BitFlips,
    "truncation": Truncation,
    "partition": Partition,
    **_cuts(),
    "host-disk-full": HostDiskFull,
    "mute": Mute,
    "deaf": Deaf,
    "packet-loss": PacketLoss,
    "narrow-link": NarrowLink,
    "delay": Delay,
    "clock-ahead": ClockAhead,
    "clock-behind": ClockBehind,
    "mass-restart-of-three": MassRestart,
    "failed-upgrade": FailedUpgrade,
    "rolling-upgrade": RollingUpgrade,
}
