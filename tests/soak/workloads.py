"""Clients that use every service at a steady rate, and enter what was acknowledged in ledgers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from muster.bus.client import client as bus_client
from muster.core import errors
from muster.demo import worm
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.message import destinations
from muster.message.client import api as message_api
from muster.notify import client as notify_client
from muster.notify import models
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.soak import domain as domain_
from tests.soak import ledgers

MESSAGE_S, EVENT_S, CONTEXT_S, RESOURCE_S, COMMAND_S = 0.25, 0.5, 0.25, 2.0, 60.0
KEYS = 20
ARRIVAL_S_MAX = 120.0  # at the end, for what was acknowledged
LATE_S = 90.0  # during the run: nothing acknowledged takes longer


class Workloads:
    def __init__(self, domain: domain_.SoakDomain) -> None:
        self._domain = domain
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = threading.Event()
        self.deliveries: list[ledgers.DeliveryLedger] = []
        self.writes: list[ledgers.WriteLedger] = []
        self.commands: dict[str, int] = {}  # accepted commands to the farm: event and number of servers
        self.failures: dict[str, int] = {}  # failed attempts by workload
        self.late_max = 0

    async def start(self) -> None:
        await self._messages()
        await self._gateway()
        await self._events()
        await self._contexts()
        await self._resources()
        await self._commands()
        self._spawn("lateness", self._watch_lateness())

    async def stop(self) -> None:
        """End the senders, wait until everything acknowledged arrived, then end the receivers."""
        self._stopping.set()
        with contextlib.suppress(AssertionError):  # the ledgers name what is missing
            await eventually(self._everything_arrived, timeout_s=ARRIVAL_S_MAX)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._read_back()
        await self._stack.aclose()

    def _everything_arrived(self) -> bool:
        return not any(ledger.overdue(time.monotonic() + 1) for ledger in self.deliveries)

    def problems(self) -> list[str]:
        """Tasks that ended although they should run."""
        return [
            f"{task.get_name()} ended: {task.exception()!r}"
            for task in self._tasks
            if task.done() and not task.cancelled() and task.exception() is not None
        ]

    def violations(self) -> list[str]:
        problems = [problem for deliveries in self.deliveries for problem in deliveries.violations()]
        problems += [problem for writes in self.writes for problem in writes.violations()]
        statistics = self._domain.statistics
        assert statistics is not None
        for event, count in self.commands.items():
            if statistics.accepted.get(event, 0) != count:
                problems.append(
                    f"command {event} reached {statistics.accepted.get(event, 0)} of {count} servers"
                )
        if statistics.repeated or statistics.not_done:
            problems.append(f"commands: {statistics.repeated} repeated, {statistics.not_done} not done")
        return problems + self.problems()

    # Loops

    def _spawn(self, name: str, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def _repeat(self, name: str, period_s: float, attempt: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            while not self._stopping.is_set():
                try:
                    await attempt()
                except errors.MusterError:
                    self.failures[name] = self.failures.get(name, 0) + 1
                await asyncio.sleep(period_s)  # pace of the load

        self._spawn(name, run())

    async def _watch_lateness(self) -> None:
        while True:
            await asyncio.sleep(10.0)  # pace of looking
            late = sum(len(ledger.overdue(time.monotonic() - LATE_S)) for ledger in self.deliveries)
            self.late_max = max(self.late_max, late)

    # Messages

    async def _messages(self) -> None:
        for kind, destination in (
            ("queue a", destinations.queue("soak-a")),
            ("queue b", destinations.queue("soak-b")),
            ("durable topic", destinations.topic("soak/news")),
        ):
            ledger = ledgers.DeliveryLedger(kind)
            self.deliveries.append(ledger)
            name = kind.replace(" ", "-")
            reader = message_api.Connection(
                await self._domain.connect(f"reader-{name}"), client_id=f"reader-{name}"
            )
            await self._stack.enter_async_context(reader)
            session = await self._stack.enter_async_context(reader.session())
            if kind == "durable topic":
                consumer = await session.durable_consumer(destination, "soak")
            else:
                consumer = await session.consumer(destination)
            self._spawn(f"read {kind}", self._read(ledger, consumer))
            writer = message_api.Connection(await self._domain.connect(f"writer-{name}"))
            await self._stack.enter_async_context(writer)
            producer = (await self._stack.enter_async_context(writer.session())).producer(destination)
            self._repeat(f"send {kind}", MESSAGE_S, functools.partial(self._send, ledger, producer))

    async def _send(self, ledger: ledgers.DeliveryLedger, producer: Any) -> None:
        number = 1 + max(len(ledger.accepted_at_s) + len(ledger.in_doubt), 0)
        ledger.failed(number)  # in doubt until it is acknowledged
        await producer.send(str(number))
        ledger.accepted(number, time.monotonic())

    async def _read(self, ledger: ledgers.DeliveryLedger, consumer: Any) -> None:
        while True:
            try:
                message = await consumer.receive(5.0)
            except errors.MusterError:
                self.failures[f"read {ledger.name}"] = self.failures.get(f"read {ledger.name}", 0) + 1
                await asyncio.sleep(1.0)  # pace
                continue
            if message is not None:
                ledger.received(int(message.body()), time.monotonic(), repeated=message.redelivered)

    async def _gateway(self) -> None:
        """An AMQP client sends; a client of the bus receives."""
        ledger = ledgers.DeliveryLedger("AMQP queue")
        self.deliveries.append(ledger)
        connection = message_api.Connection(await self._domain.connect("reader-amqp"))
        await self._stack.enter_async_context(connection)
        session = await self._stack.enter_async_context(connection.session())
        self._spawn("read AMQP", self._read(ledger, await session.consumer(destinations.queue("soak-amqp"))))
        self._spawn("send AMQP", asyncio.to_thread(self._send_amqp, ledger))

    def _send_amqp(self, ledger: ledgers.DeliveryLedger) -> None:
        from proton import Message, ProtonException
        from proton.utils import BlockingConnection

        number = 0
        while not self._stopping.is_set():
            connection = None
            try:
                connection = BlockingConnection(
                    f"amqp://127.0.0.1:{self._domain.gateway_port}",
                    timeout=10,
                    user=domain_.GATEWAY_USER,
                    password=domain_.GATEWAY_PASSWORD,
                    allow_insecure_mechs=True,
                )
                sender = connection.create_sender("queue:soak-amqp")
                while not self._stopping.wait(MESSAGE_S):
                    number += 1
                    ledger.failed(number)
                    sender.send(Message(id=f"amqp-{number}", durable=True, body=str(number)), timeout=10)
                    ledger.accepted(number, time.monotonic())
            except (ProtonException, OSError):
                self.failures["send AMQP"] = self.failures.get("send AMQP", 0) + 1
                self._stopping.wait(1.0)
            finally:
                with contextlib.suppress(ProtonException, OSError, AttributeError):
                    if connection is not None:
                        connection.close()

    # Events

    async def _events(self) -> None:
        operator = await self._domain.connect("models", roles.Role.OPERATOR)
        async with notify_client.NotifyClient(operator) as notify:
            number = types.AttributeType(types.ValueKind.INT)
            await notify.define(models.Model("Reader", {"place": number}))
            await notify.define(models.Model("tick", {"number": number}, kind=models.ModelKind.EVENT))
        of_receiver = {f"r{place}": ledgers.DeliveryLedger(f"durable event {place}") for place in range(3)}
        self.deliveries += of_receiver.values()

        def on_event(names: Any, event: notify_client.ReceivedEvent) -> None:
            for name in names:
                of_receiver[name].received(int(str(event["number"])), time.monotonic())

        receiving = notify_client.NotifyClient(await self._domain.connect("event-reader"), on_event=on_event)
        await self._stack.enter_async_context(receiving)
        for place, name in enumerate(of_receiver):
            await receiving.advertise(name, "Reader", {"place": place}, policy="TRUE", durable=True)
        sending = notify_client.NotifyClient(await self._domain.connect("event-sender"))
        sender = (await self._stack.enter_async_context(sending)).sender("ticker")
        count = 0

        async def send() -> None:
            nonlocal count
            count += 1
            for ledger in of_receiver.values():
                ledger.failed(count)
            await sender.send("tick", {"number": count}, to="place >= 0", durable=True)
            for ledger in of_receiver.values():
                ledger.accepted(count, time.monotonic())

        self._repeat("durable event", EVENT_S, send)

    async def _commands(self) -> None:
        """Durable commands to the servers of a region, which managers carry out."""
        plan = self._domain.plan
        sending = notify_client.NotifyClient(await self._domain.connect("controller"))
        sender = (await self._stack.enter_async_context(sending)).sender("controller")
        farm = worm.WormFarm(plan, 0, plan.servers)
        counts = {region: int((farm.region == place).sum()) for place, region in enumerate(plan.regions)}
        turn = 0

        async def command() -> None:
            nonlocal turn
            region = plan.regions[turn % len(plan.regions)]
            turn += 1
            event = await sender.send(
                "command", {"operation": "patch"}, to=f"region = '{region}'", durable=True
            )
            self.commands[event] = counts[region]

        self._repeat("command", COMMAND_S, command)

    # Contexts and resources

    async def _contexts(self) -> None:
        ledger = self._context_ledger = ledgers.WriteLedger("context")
        self.writes.append(ledger)
        writer = inform_client.InformClient(await self._domain.connect("context-writer"))
        reader = self._reader = inform_client.InformClient(await self._domain.connect("context-reader"))
        turns = {"write": 0, "read": 0}

        async def put() -> None:
            turns["write"] += 1
            key = f"soak/{turns['write'] % KEYS}"
            number = ledger.begin(key)
            await writer.put(key, str(number).encode())
            ledger.wrote(key, number)

        async def get() -> None:
            turns["read"] += 7
            key = f"soak/{turns['read'] % KEYS}"
            if key in ledger.accepted:
                floor = ledger.floor(key)
                context = await reader.get(key, max_staleness_s=0)
                ledger.read(key, int(context.value), floor)

        self._repeat("context put", CONTEXT_S, put)
        self._repeat("context get", CONTEXT_S, get)

    async def _resources(self) -> None:
        ledger = self._resource_ledger = ledgers.WriteLedger("resource")
        self.writes.append(ledger)
        bus: bus_client.NatsBus = await self._domain.connect("operator-of-resources", roles.Role.OPERATOR)
        manage = self._manage = manage_client.ManageClient(bus)
        turn = 0

        async def change() -> None:
            nonlocal turn
            turn += 1
            name = f"soak-{turn % KEYS}"
            number = ledger.begin(name)
            entry = f"name: {name}, type: memory, agent: {domain_.FARM}, config: {{value: {number}}}"
            await manage.apply(f"resources: [{{{entry}}}]")
            ledger.wrote(name, number)

        self._repeat("resource", RESOURCE_S, change)

    async def _read_back(self) -> None:
        """At the end: every key has the last acknowledged number, or one in doubt after it."""
        for key in self._context_ledger.accepted:
            context = await self._reader.get(key, max_staleness_s=0)
            self._context_ledger.read(key, int(context.value), self._context_ledger.floor(key))
        for name in self._resource_ledger.accepted:
            described = await self._manage.describe(name)
            value = int(described.spec.config["value"])
            self._resource_ledger.read(name, value, self._resource_ledger.floor(name))
            if described.state != "up":
                self._resource_ledger.problems.append(f"{name} is {described.state}")
