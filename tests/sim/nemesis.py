"""Faults at random: of the network, of processes, of disks and of clocks.

Which kinds of fault a run has is drawn first: many faults of few kinds find more than a few of every kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.bus.memory import network as memory_network
from tests.sim import domain as domain_
from tests.sim import host

HOUR_NS = 3600 * 10**9
SHORT_S, LONG_S = 0.04, 40.0


class Nemesis:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._chance = domain.chance("nemesis")
        kinds: list[Callable[[], None]] = [
            self._partition,
            self._partition,
            self._disconnect,
            self._crash,
            self._freeze,
            self._jump_clock,
            self._slow_disk,
        ]
        self._kinds = [kind for kind in kinds if self._chance.random() < 0.6] or kinds
        self._period_s = self._chance.choice([2.0, 5.0, 10.0])
        self._timers: list[asyncio.TimerHandle] = []

    def _note(self, text: str) -> None:
        self._domain.history.note("nemesis", text)

    def begin(self) -> None:
        """The weather of the whole run."""
        chance = self._chance
        self._domain.net.faults = faults = memory_network.NetworkFaults(
            delay_s_max=chance.choice([0.001, 0.005, 0.05]),
            loss=chance.choice([0.0, 0.0, 0.01, 0.05]),
            duplication=chance.choice([0.0, 0.0, 0.05]),
            reordering=chance.choice([0.0, 0.0, 0.1]),
            silence_s=chance.uniform(2.0, 10.0),
            storage_s_max=chance.choice([0.0, 0.0, 0.02, 0.5]),
        )
        if not self._domain.tolerates_loss or chance.random() < 0.3:
            faults.loss = faults.duplication = faults.reordering = 0.0
            faults.retransmits = True
        self._note(f"weather {faults}; faults {[kind.__name__.strip('_') for kind in self._kinds]}")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / self._period_s))
            self._chance.choice(self._kinds)()

    def end(self) -> None:
        """Repair everything."""
        domain = self._domain
        for timer in self._timers:
            timer.cancel()
        domain.net.heal()
        domain.net.faults = memory_network.NetworkFaults()
        for each in domain.hosts.values():
            each.thaw()
            each.disk_s_max = host.DISK_S
            each.clock_ahead_ns = 0
            each.start()
        self._note("ends")

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, action))

    def _duration_s(self) -> float:
        return self._chance.choice([SHORT_S, LONG_S, self._chance.uniform(0.5, 15.0)])

    def _servers(self) -> list[host.Host]:
        return [each for hosts in self._domain.roles.values() for each in hosts]

    def _victim(self) -> host.Host:
        role = self._chance.choice(list(self._domain.roles.values()))
        return self._chance.choice(role)

    # The network.

    def _partition(self) -> None:
        net, chance = self._domain.net, self._chance
        victims = [each.name for each in self._domain.hosts.values() if chance.random() < 0.3]
        duration_s = self._duration_s()
        way = chance.choice(["cut", "unplug", "up", "down"])
        self._note(f"partition {way} {victims} for {duration_s:.2f} s")
        if way == "cut":
            net.cut(*victims)
        elif way == "unplug":
            net.unplug(*victims)
        elif way == "up":
            net.block("up", *victims)
        else:
            net.block("down", *victims)
        self._later(duration_s, self._heal)

    def _heal(self) -> None:
        self._note("heal")
        self._domain.net.heal()

    def _disconnect(self) -> None:
        for each in self._domain.hosts.values():
            if self._chance.random() < 0.3 and not each.is_frozen:
                self._note(f"disconnect {each}")
                for bus in each.buses:
                    if bus.connection is not None:
                        self._domain.net.disconnect(bus)

    # Processes.

    def _crash(self) -> None:
        victim = self._victim()
        # A disk is lost only while the others have theirs: what is stored on a quorum survives that.
        wipe = self._chance.random() < 0.3 and victim.may_lose_disk
        self._note(f"crash {victim}{' and wipe its disk' if wipe else ''}")
        victim.kill(wipe=wipe)
        self._later(self._chance.uniform(0.1, 12.0), victim.start)

    def _freeze(self) -> None:
        victim, duration_s = self._victim(), self._chance.choice([0.5, 5.0, self._chance.uniform(8.0, 30.0)])
        self._note(f"freeze {victim} for {duration_s:.2f} s")
        victim.freeze()
        self._later(duration_s, lambda: self._thaw(victim))

    def _thaw(self, victim: host.Host) -> None:
        self._note(f"thaw {victim}")
        victim.thaw()

    # Machines.

    def _jump_clock(self) -> None:
        victim = self._victim()
        victim.clock_ahead_ns = self._chance.choice([-HOUR_NS, 0, HOUR_NS])
        self._note(f"clock of {victim} {victim.clock_ahead_ns / 1e9:+.0f} s")

    def _slow_disk(self) -> None:
        victim = self._victim()
        victim.disk_s_max = self._chance.choice([host.DISK_S, 0.1, 2.0])
        self._note(f"disk of {victim} takes up to {victim.disk_s_max} s")
