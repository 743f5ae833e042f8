"""Durable events: three senders, and three receivers of which each is addressed by some of the events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.core import errors
from muster.notify import client as notify_client
from muster.notify import models, protocol
from muster.predicates import types
from tests.faults import deployment
from tests.faults.workloads import workload

SERVER = models.Model("Server", {"region": types.STRING, "load": types.INT})
ALERT = models.Model("alert", {"level": types.INT}, models.ModelKind.EVENT)
POLICY = "alert"
DRAIN_S = 60.0


class EventWorkload(workload.Workload):
    name = "events"
    guarantee = "a durable event reaches exactly the receivers that it addresses, once"
    measured = ("event", "notified")

    async def start(self) -> None:
        self._clients: dict[str, notify_client.NotifyClient] = {}
        self._receivers: dict[str, str] = {}
        self._notified: set[tuple[str, str]] = set()
        for number in range(1, deployment.CLIENTS + 1):
            bus = await self.connect("user", number)
            self._clients[bus.identity] = await self.stack.enter_async_context(
                notify_client.NotifyClient(bus, on_event=self._recorder(bus.identity))
            )
        first = next(iter(self._clients.values()))
        for model in (SERVER, ALERT):
            await workload.patiently(first.define, model)
        for number, (actor, receivers) in enumerate(self._clients.items()):
            name, state = f"r-{self.tag}", {"region": self.tag, "load": number}
            key = protocol.participant_id(actor, name)
            self._receivers[key] = f"region = '{self.tag}' AND load <= {number}"
            operation = self.history.begin(actor, "change", key=key, state=state, policy=POLICY)
            await workload.patiently(
                receivers.advertise, name, SERVER.name, state, policy=POLICY, durable=True
            )
            self.history.end(operation, "ok")
        for actor, receivers in self._clients.items():
            self.run(self._send(actor, receivers))

    def _recorder(self, actor: str) -> notify_client.OnEvent:
        def record(names: Sequence[str], event: notify_client.ReceivedEvent) -> None:
            for name in names:
                key = protocol.participant_id(actor, name)
                self._notified.add((key, event.id))
                self.history.event(actor, "notified", key=key, id=event.id)

        return record

    async def _send(self, actor: str, sender: notify_client.NotifyClient) -> None:
        number = 0
        key = protocol.participant_id(actor, f"s-{self.tag}")
        self.history.event(actor, "change", key=key, state={}, policy="FALSE")

        async def send() -> None:
            nonlocal number
            number += 1
            id = f"{self.tag}-{actor}-{number}"
            address = self.chance.choice(list(self._receivers.values()))
            operation = self.history.begin(
                actor, "event", key=key, id=id, content={"level": number}, address=address
            )
            work = sender.send(
                f"s-{self.tag}",
                ALERT.name,
                {"level": number},
                to=address,
                durable=True,
                id=id,
                timeout_s=workload.TIMEOUT_S,
            )
            await self.operate(operation, work, unknown=errors.Unavailable)

        await self.repeat(send)

    async def finish(self) -> None:
        accepted = [event for event in self.history.of("event") if event.outcome == "ok"]
        addresses = list(self._receivers.values())
        # The address of number N matches the receivers 0 to N.
        missing = {
            (key, event.facts["id"])
            for event in accepted
            for key in list(self._receivers)[: addresses.index(event.facts["address"]) + 1]
        }
        await workload.wait_for(lambda: missing <= self._notified, DRAIN_S)
        await asyncio.sleep(2.0)  # pace: for what should not come
        for event in accepted:  # the states do not change: when an event was matched does not matter
            self.history.fact("admitted", id=event.facts["id"], sequence=1)
        for key in self._receivers:
            self.history.fact("shard", key=key, shard=protocol.shard_of(key))
