"""A simulated domain: hosts on one network, and what parts need of each other."""

from __future__ import annotations

import asyncio
import pathlib
import random

from muster.bus.memory import network as memory_network
from tests.sim import history, host, network


class Domain:
    """``roles`` has the hosts whose processes and machines may fail, by service; clients are not among
    them."""

    def __init__(self, seed: int, folder: pathlib.Path, story: history.History) -> None:
        self.seed = seed
        self.history = story
        self.net = network.TracedNetwork(seed, story, memory_network.NetworkFaults())
        self.hosts: dict[str, host.Host] = {}
        self.roles: dict[str, list[host.Host]] = {}
        self.tolerates_loss = True  # of messages between connected processes, which TCP does not lose
        self.calm = asyncio.Event()  # no more faults, and no more load
        self._folder = folder

    def chance(self, name: str) -> random.Random:
        """Random numbers that do not depend on those of other parts."""
        return random.Random(f"{self.seed}/{name}")

    def add_host(
        self, name: str, program: host.Program, *, role: str | None = None, may_lose_disk: bool = True
    ) -> host.Host:
        added = host.Host(
            name,
            program,
            self.net,
            self.history,
            self._folder / name,
            self.chance(name),
            may_lose_disk=may_lose_disk,
        )
        self.hosts[name] = added
        if role is not None:
            self.roles.setdefault(role, []).append(added)
        return added

    def start(self) -> None:
        for each in self.hosts.values():
            each.start()

    async def pause(self, chance: random.Random, least_s: float, most_s: float) -> bool:
        """Wait between two operations. False: it is time to stop."""
        await asyncio.sleep(chance.uniform(least_s, most_s))
        return not self.calm.is_set()
