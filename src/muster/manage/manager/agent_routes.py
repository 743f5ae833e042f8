"""Agents that are connected to managers directly: which messages are for which peer, and what a manager
forwards.

After section 3.4 of the paper: a resource that no firewall hides does not need a broker, at the cost of a
connection to each manager. An agent without a broker connects to every configured manager, because any of
them may own its resources; a manager forwards its requests to the registry (its hello, a secret). An agent
with a broker connects to the managers that claim its resources, at the address in the claim. Epochs fence as
usual.
"""

from __future__ import annotations

import asyncio
import contextlib

from muster.bus import api
from muster.bus.direct import bus as direct_bus
from muster.bus.rpc import admission, client
from muster.core import errors, lifecycle, subjects
from muster.manage import protocol
from muster.supervision import tasks

PENDING_MAX = 1_000  # requests; half of them of one agent
FORWARDED = 2.0  # ms, charged to the agent: the registry cannot charge it for what its manager forwards

#: Requests of an agent to the registry, and the suffix of the forwarded subject.
_FORWARDED: dict[str, tuple[str, ...]] = {
    protocol.HELLO: (),
    f"request.{protocol.SECRET}": (protocol.SECRET,),
}


def agent_of(subject: str) -> str:
    """The agent that a message of a manager is for; empty: none."""
    levels = subject.split(".", 4)
    return levels[3] if levels[:3] == [subjects.PREFIX, protocol.PART, "to"] else ""


def manager_of(subject: str) -> str:
    """The manager that a message of an agent is for; empty: none in particular."""
    levels = subject.split(".")
    return levels[5] if levels[4:5] in (["beat"], ["event"]) and len(levels) == 6 else ""


class AgentForwarding(lifecycle.ClosingContext):
    """Forwards requests of agents that are connected to this manager without a broker."""

    def __init__(self, bus: direct_bus.DirectBus) -> None:
        self._bus = bus
        self._tasks = tasks.TaskSupervisor(f"requests forwarded by {bus.identity}")
        self._pending = admission.PendingRequests(PENDING_MAX)
        self._subscriptions = [
            bus.serve(subjects.from_identity(protocol.PART, "*", kind), self._receive) for kind in _FORWARDED
        ]

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        await self._tasks.close()

    def _receive(self, message: api.Message) -> None:
        _, _, _, agent, kind = message.subject.split(".", 4)
        budgets, now_s = self._bus.admission, asyncio.get_running_loop().time()
        if not self._pending.has_room(agent):
            self._bus.refused[admission.OverloadReason.PENDING] += 1  # the agent repeats it
        elif budgets.wait_s(agent, now_s):
            self._bus.refused[admission.OverloadReason.RATE] += 1
        else:
            budgets.charge(agent, FORWARDED, now_s)
            self._pending.begin(agent)
            forwarded = self._tasks.spawn("request", self._forward(message, agent, kind))
            forwarded.add_done_callback(lambda _: self._pending.end(agent))

    async def _forward(self, message: api.Message, agent: str, kind: str) -> None:
        subject = protocol.vouch_subject(self._bus.identity, agent, *_FORWARDED[kind])
        with contextlib.suppress(errors.Unavailable, errors.InvalidInput):
            answer = await client.exchange_once(
                self._bus.as_bus(), subject, message.data, timeout_s=api.DEFAULT_TIMEOUT_S
            )
            await message.respond(answer.data)
