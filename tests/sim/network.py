"""The simulated network, with a record of what its streams stored."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import NamedTuple

from muster.bus import api
from muster.bus.memory import network
from tests.sim import history


class Stored(NamedTuple):
    at_s: float
    sequence: int
    message: api.OutgoingMessage


class TracedNetwork(network.SimulatedNetwork):
    """Retention and deletions do not concern ``stored``: it has everything that a stream ever stored."""

    def __init__(self, seed: int, story: history.History, faults: network.NetworkFaults) -> None:
        super().__init__(seed, faults=faults)
        self._history = story
        self.stored: dict[str, list[Stored]] = {}
        self.hops = 0

    def hop(
        self,
        node: str,
        way: network.Way,
        action: Callable[[], None],
        context: contextvars.Context | None = None,
    ) -> None:
        self.hops += 1
        self._history.mark(f"{asyncio.get_running_loop().time()!r} {node} {way}")
        super().hop(node, way, action, context)

    def store(self, name: str, batch: Sequence[api.OutgoingMessage], node: str) -> int:
        last = super().store(name, batch, node)
        if not isinstance(last, api.Duplicate):
            at_s = asyncio.get_running_loop().time()
            first = last - len(batch) + 1
            self.stored.setdefault(name, []).extend(
                Stored(at_s, first + place, message) for place, message in enumerate(batch)
            )
        return last
