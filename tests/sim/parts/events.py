"""Notifiers, receivers whose states and policies change, and a sender of durable events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Any

from muster.core import errors, messages
from muster.notify import client, models, protocol, settings
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier
from muster.predicates import types
from tests.sim import domain as domain_
from tests.sim import host

NOTIFIERS = 2
FARMS = ("farm-1", "farm-2")
RECEIVERS = ("a", "b", "c")
SENDER = "alarm"
REGIONS = ("north", "south")
EVENTS_MAX = 60
SERVER = models.Model("Server", {"region": types.STRING, "load": types.INT})
ALERT = models.Model("alert", {"level": types.INT}, models.ModelKind.EVENT)
ADDRESSES = ("TRUE", "region = 'north'", "load >= 5", "region = 'south' AND load < 7")
POLICIES = (
    "alert",
    "alert AND level >= 5",
    "alert AND sender.load < 5",
    "level < 3 OR sender.region = 'north'",
)
SETTINGS = settings.NotifySettings(lease_s=4.0, ack_wait_s=2.0, beat_s=1.0, snapshot_changes=20)


class EventPart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        self._notifiers: dict[str, notifier.Notifier] = {}
        for number in range(1, NOTIFIERS + 1):
            domain.add_host(f"notifier-{number}", self._notifier, role="notifier")
        for name in FARMS:
            domain.add_host(name, self._farm)
        domain.add_host(SENDER, self._sender)

    # Programs.

    async def _notifier(self, machine: host.Host) -> None:
        self._notifiers.pop(machine.name, None)
        made = notifier.Notifier(await machine.connect(), SETTINGS, kernels=kernels_numpy)
        await made.start()
        self._notifiers[machine.name] = made
        self._history.note(machine.name, "serves")
        await _forever()

    async def _farm(self, machine: host.Host) -> None:
        """Receivers that change."""
        chance = machine.chance

        def on_event(names: Sequence[str], event: client.ReceivedEvent) -> None:
            for name in names:
                receiver = protocol.participant_id(machine.name, name)
                self._history.event(machine.name, "notified", key=receiver, id=event.id)

        async with client.NotifyClient(await machine.connect(), on_event=on_event) as receivers:
            await self._define(receivers)
            states = {name: _state(chance) for name in RECEIVERS}
            policies = {name: chance.choice(POLICIES) for name in RECEIVERS}
            for name in RECEIVERS:
                join = receivers.advertise(name, "Server", states[name], policy=policies[name], durable=True)
                await self._change(machine.name, name, states[name], policies[name], join)
            settled = dict.fromkeys(RECEIVERS, True)
            while await self._domain.pause(chance, 0.3, 4.0):
                name = chance.choice(RECEIVERS)
                change: Awaitable[object]
                if not settled[name]:  # the outcome of the last change is unknown: replace everything
                    change = receivers.advertise(
                        name, "Server", states[name], policy=policies[name], durable=True
                    )
                elif chance.random() < 0.3:
                    policies[name] = chance.choice(POLICIES)
                    change = receivers.change(
                        [protocol.SetReceiverPolicy(receiver=name, policy=policies[name])]
                    )
                else:
                    states[name] = _state(chance)
                    change = receivers.update([name], **{key: [value] for key, value in states[name].items()})
                settled[name] = await self._change(machine.name, name, states[name], policies[name], change)
            await _forever()

    async def _define(self, receivers: client.NotifyClient) -> None:
        while True:
            try:
                for model in (SERVER, ALERT):
                    await receivers.define(model)
            except errors.Unavailable:
                await asyncio.sleep(0.5)
            else:
                return

    async def _change(
        self, process: str, name: str, state: dict[str, Any], policy: str, change: Awaitable[object]
    ) -> bool:
        """``state`` and ``policy``: after the change. Returns whether its outcome is known."""
        operation = self._history.begin(
            process, "change", key=protocol.participant_id(process, name), state=dict(state), policy=policy
        )
        try:
            await change
        except errors.Unavailable as error:
            self._history.end(operation, "unknown", error)
            return False
        self._history.end(operation, "ok")
        return True

    async def _sender(self, machine: host.Host) -> None:
        """A sender is a receiver too: its state counts in policies."""
        chance = machine.chance
        async with client.NotifyClient(await machine.connect(), on_event=lambda *_: None) as receivers:
            await self._define(receivers)
            for number in range(EVENTS_MAX):
                if not await self._domain.pause(chance, 0.1, 2.0):
                    break
                if number == 0 or chance.random() < 0.2:
                    state = _state(chance)
                    change = receivers.advertise(SENDER, "Server", state)
                    await self._change(machine.name, SENDER, state, "FALSE", change)
                await self._send(receivers, machine.name, f"e{number}", chance)
            await _forever()

    async def _send(
        self, receivers: client.NotifyClient, process: str, id: str, chance: random.Random
    ) -> None:
        level, address = chance.randrange(10), chance.choice(ADDRESSES)
        operation = self._history.begin(
            process,
            "event",
            key=protocol.participant_id(process, SENDER),
            id=id,
            content={"level": level},
            address=address,
        )
        try:
            await receivers.send(
                SENDER, "alert", {"level": level}, to=address, durable=True, id=id, timeout_s=10.0
            )
        except errors.Unavailable as error:
            self._history.end(operation, "unknown", error)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
        else:
            self._history.end(operation, "ok")

    # The end.

    def missing(self) -> str | None:
        up = {name: made for name, made in self._notifiers.items() if self._domain.hosts[name].is_up}
        if len(up) < NOTIFIERS:
            return f"only {sorted(up)} serve"
        held = [shard for made in up.values() for shard in made.held]
        if sorted(held) != list(range(protocol.SHARDS)):
            return f"shards {sorted(held)} are held"
        last = self._domain.net.logs[protocol.STREAM_EVENTS].last
        for name, made in up.items():
            for shard in made.held.values():
                if shard.pending.position < last:
                    return f"shard {shard.shard} of {name} is at {shard.pending.position}, not {last}"
                if shard.pending.owed:
                    return f"shard {shard.shard} of {name} owes {shard.pending.owed}"
        return None

    async def finish(self) -> None:
        stored = self._domain.net.stored
        for event in stored.get(protocol.STREAM_EVENTS, ()):
            admitted = messages.decode(event.message.data, protocol.AdmittedEvent)
            self._history.fact("admitted", id=admitted.id, sequence=event.sequence)
        for record in stored.get(protocol.STREAM_MATCHES, ()):
            matched = messages.decode(record.message.data, protocol.MatchRecord)
            shard = int(record.message.subject.rpartition(".")[2])
            self._history.fact(
                "matched", shard=shard, position=matched.position, epoch=matched.epoch, at_s=record.at_s
            )
        for name in (protocol.participant_id(farm, name) for farm in FARMS for name in RECEIVERS):
            self._history.fact("shard", key=name, shard=protocol.shard_of(name))


def _state(chance: random.Random) -> dict[str, Any]:
    return {"region": chance.choice(REGIONS), "load": chance.randrange(10)}


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
