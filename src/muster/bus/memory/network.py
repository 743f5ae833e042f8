"""A simulated network.

    net = network.Network(seed=7, faults=network.Faults(loss=0.01, reordering=0.1))
    bus = await net.connect("sensor-1")
    net.cut("sensor-1")

All random events are drawn from one seed, and time is that of the event loop, so under a virtual loop
(`muster.testing.virtual_clock`) a run of hours takes seconds and repeats exactly.

Each connection is on a node (by default with the name of its identity). A message takes two hops, to the
brokers and on to its receiver; each hop has a delay, keeps the order unless reordering is configured, and may
lose or duplicate messages. Whatever arrives at a connection runs in the `contextvars` context in which the
connection was made, so a simulation can tell processes apart by a context variable.

There are three kinds of partition. Nodes that are *cut* off have a broker on their side: they reach only each
other, and stay connected. A node that is *unplugged* reaches no other node; after `NetworkFaults.silence_s`
both ends close its connection, and the brokers report it, like every closed connection. A node that is
*blocked* only sends, or only receives, with the same end. Streams and key/value buckets are on the side of
the quorum. A request to them or its reply may be lost: then its outcome is unknown, as with real brokers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from muster.bus import api
from muster.bus.memory import connection, storage
from muster.core import errors, subjects

QUORUM = "quorum"  # the node where streams live
EPOCH_NS = 1_700_000_000_000_000_000  # the wall clock when the loop's time is zero
RECONNECT_S = 0.1

#: To the brokers, or from them.
Way = Literal["up", "down"]


@dataclass(slots=True)
class NetworkFaults:
    """The effects of the network on messages. They may be changed at run time."""

    delay_s_min: float = 0.000_1
    delay_s_max: float = 0.001
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    silence_s: float = 40.0  # after so long, both ends of a cut connection give it up
    storage_s_max: float = 0.0  # the time that streams take for an operation
    retransmits: bool = False  # as TCP: what a partition stops arrives after it, over the same connection


class SubscriptionTable:
    """The subscriptions, by subject where it has no wildcards."""

    def __init__(self) -> None:
        self._exact: dict[str, list[connection.SimulatedSubscription]] = {}
        self._wild: list[connection.SimulatedSubscription] = []
        self._patterns: list[tuple[connection.SimulatedSubscription, re.Pattern[str]]] | None = None

    def _place(self, listener: connection.SimulatedSubscription) -> list[connection.SimulatedSubscription]:
        if "*" in listener.subject or ">" in listener.subject:
            self._patterns = None  # it changes
            return self._wild
        return self._exact.setdefault(listener.subject, [])

    def add(self, listener: connection.SimulatedSubscription) -> None:
        listener.listening = True
        self._place(listener).append(listener)

    def remove(self, listener: connection.SimulatedSubscription) -> None:
        if listener.listening:
            listener.listening = False
            self._place(listener).remove(listener)
            if not self._exact.get(listener.subject, True):
                del self._exact[listener.subject]

    def remove_all_of(self, bus: connection.SimulatedBus) -> None:
        everyone = [*self._wild, *(listener for listeners in self._exact.values() for listener in listeners)]
        for listener in everyone:
            if listener.bus is bus:
                self.remove(listener)

    def for_subject(self, subject: str) -> list[connection.SimulatedSubscription]:
        if self._patterns is None:
            self._patterns = [(listener, subjects.compiled(listener.subject)) for listener in self._wild]
        wild = [listener for listener, pattern in self._patterns if pattern.match(subject)]
        return [*self._exact.get(subject, ()), *wild]


class SimulatedNetwork:
    """Brokers, links and storage."""

    def __init__(self, seed: int = 0, *, faults: NetworkFaults | None = None) -> None:
        self.faults = faults or NetworkFaults()
        self.random = random.Random(seed)
        self.lost = 0
        self.duplicated = 0
        self._sides: dict[str, int] = {}
        self._cuts = 0
        self._unplugged: dict[str, int] = {}  # node: which unplugging
        self._blocked: dict[tuple[str, Way], int] = {}  # node and way: which blocking
        self._stopped: list[Callable[[], None]] = []  # what is sent again after a partition
        self._context = contextvars.copy_context()
        self._links: dict[tuple[str, str], float] = {}
        self._table = SubscriptionTable()
        self._connections = 0
        self._buses: list[connection.SimulatedBus] = []
        self.logs: dict[str, storage.SimulatedLog] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    # Time and chance.

    def now_ns(self) -> int:
        return EPOCH_NS + round(asyncio.get_running_loop().time() * 1e9)

    def hop(
        self, node: str, way: Way, action: Callable[[], None], context: contextvars.Context | None = None
    ) -> None:
        """Do it after a hop's delay, in order on that link. ``context``: that of the receiver; by default
        that of the brokers."""
        if node in self._unplugged or (node, way) in self._blocked:
            self._stop(lambda: self.hop(node, way, action, context))
            return
        loop, faults = asyncio.get_running_loop(), self.faults
        at = loop.time() + self.random.uniform(faults.delay_s_min, faults.delay_s_max)
        if self.random.random() >= faults.reordering:
            # Slightly later than the last: timers of the same time have no order.
            at = max(at, math.nextafter(self._links.get((node, way), 0.0) + 1e-9, math.inf))
            self._links[node, way] = at
        loop.call_at(at, action, context=(context or self._context).copy())

    def _stop(self, send_again: Callable[[], None]) -> None:
        if self.faults.retransmits:
            self._stopped.append(send_again)
        else:
            self.lost += 1

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    # Faults.

    def reaches(self, here: str, other: str) -> bool:
        if here in self._unplugged or other in self._unplugged:
            return False
        return self._sides.get(here, 0) == self._sides.get(other, 0)

    def is_plugged(self, node: str) -> bool:
        """Whether it reaches a broker, and a broker reaches it."""
        return self._interruptions(node) == (None, None, None)

    def sends(self, node: str) -> bool:
        """Whether what it has sent arrives at the brokers."""
        return self._passes(node, "up")

    def receives(self, node: str) -> bool:
        return self._passes(node, "down")

    def _passes(self, node: str, way: Way) -> bool:
        return self.faults.retransmits or (node not in self._unplugged and (node, way) not in self._blocked)

    def reaches_storage(self, node: str) -> bool:
        return self.reaches(node, QUORUM)

    def after_storage(self, action: Callable[[], None]) -> None:
        """Do it when the storage has completed an operation."""
        if self.faults.storage_s_max:
            delay_s = self.random.uniform(0.0, self.faults.storage_s_max)
            asyncio.get_running_loop().call_later(delay_s, action, context=self._context.copy())
        else:
            action()

    def cut(self, *nodes: str) -> None:
        """These, and a broker with them, are cut off from the rest until `heal`."""
        self._cuts += 1
        for node in nodes:
            self._sides[node] = self._cuts

    def unplug(self, *nodes: str) -> None:
        """These nodes reach no other node until `heal`."""
        self._cuts += 1
        for node in nodes:
            self._unplugged[node] = self._cuts
        self._give_up_later(nodes)

    def block(self, way: Way, *nodes: str) -> None:
        """These nodes send nothing ("up") or receive nothing ("down") until `heal`."""
        self._cuts += 1
        for node in nodes:
            self._blocked[node, way] = self._cuts
        self._give_up_later(nodes)

    def heal(self) -> None:
        self._sides.clear()
        self._unplugged.clear()
        self._blocked.clear()
        stopped, self._stopped = self._stopped, []
        for send_again in stopped:
            send_again()
        for bus in list(self._buses):
            if bus.state is api.ConnectionState.RECONNECTING:
                self._reconnect_soon(bus)

    def disconnect(self, bus: connection.SimulatedBus) -> None:
        """Its connection breaks; it makes another."""
        self.report_closed(bus)
        bus.context.copy().run(bus.lose_connection)
        self._reconnect_soon(bus)

    def sever(self, bus: connection.SimulatedBus) -> None:
        """The brokers close its connection, as that of a process which does not reply. The process learns of
        it when it runs again, and makes another."""
        if bus.connection is None or bus.severed:
            return
        self.report_closed(bus)
        bus.severed = True
        # Not over the network: without an answer to its pings, the process gives the connection up as well.
        asyncio.get_running_loop().call_later(
            RECONNECT_S, self._learn_of_loss, bus, context=bus.context.copy()
        )

    def _learn_of_loss(self, bus: connection.SimulatedBus) -> None:
        bus.lose_connection()
        self._reconnect(bus)

    def crash(self, bus: connection.SimulatedBus) -> None:
        """Kill the process of the node: it sends and does nothing any more."""
        self.report_closed(bus)
        bus.end(errors.NotConnected("the process was killed"))

    def _give_up_later(self, nodes: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.faults.silence_s, self._give_up, nodes, self._cuts, context=self._context.copy())

    def _give_up(self, nodes: Sequence[str], number: int) -> None:
        for bus in list(self._buses):
            if bus.node in nodes and number in self._interruptions(bus.node) and bus.connection:
                self.report_closed(bus)
                bus.context.copy().run(bus.lose_connection)

    def _interruptions(self, node: str) -> tuple[int | None, ...]:
        return self._unplugged.get(node), self._blocked.get((node, "up")), self._blocked.get((node, "down"))

    def _reconnect_soon(self, bus: connection.SimulatedBus) -> None:
        delay_s = RECONNECT_S * (0.5 + self.random.random() / 2)
        asyncio.get_running_loop().call_later(delay_s, self._reconnect, bus, context=bus.context.copy())

    def _reconnect(self, bus: connection.SimulatedBus) -> None:
        if bus.state is api.ConnectionState.RECONNECTING and self.is_plugged(bus.node):
            bus.gain_connection(self._next_connection())

    def _next_connection(self) -> api.ConnectionId:
        self._connections += 1
        return api.ConnectionId("memory", self._connections)

    def is_closed(self, node: str, connection: api.ConnectionId) -> bool:
        """The brokers' answer to ``node``."""
        is_open = any(bus.connection == connection and not bus.severed for bus in self._buses)
        return self.is_plugged(node) and not is_open

    def report_closed(self, bus: connection.SimulatedBus) -> None:
        if bus.connection is not None:
            report = {"server": {"id": bus.connection.broker}, "client": {"id": bus.connection.number}}
            subject = f"{subjects.CONNECTIONS}.disconnect"
            data = json.dumps(report).encode()
            self.hop(QUORUM, "up", lambda: self.announce(subject, data))

    # Messages.

    async def connect(
        self, identity: str, *, servers: Iterable[str] = (), node: str | None = None
    ) -> connection.SimulatedBus:
        del servers  # there is one network
        node = node or identity
        if not self.is_plugged(node):
            raise errors.NotConnected(f"no broker responds to {node!r}")
        bus = connection.SimulatedBus(self, subjects.identity(identity), node, self._connections)
        self._buses.append(bus)
        bus.gain_connection(self._next_connection())
        return bus

    def listen(self, listener: connection.SimulatedSubscription) -> None:
        self._table.add(listener)

    def forget(self, listener: connection.SimulatedSubscription) -> None:
        self._table.remove(listener)

    def forget_bus(self, bus: connection.SimulatedBus) -> None:
        self._table.remove_all_of(bus)
        if bus in self._buses:
            self._buses.remove(bus)

    def route(self, node: str, subject: str, data: bytes, headers: api.Headers, reply: str | None) -> int:
        """At the brokers: forward it to the subscribers. Returns their number."""
        groups: dict[tuple[str, str], list[connection.SimulatedSubscription]] = {}
        chosen: list[connection.SimulatedSubscription] = []
        for listener in self._table.for_subject(subject):
            if listener.bus.connection is None or listener.bus.severed:
                continue
            if not self.reaches(node, listener.bus.node) and not self.faults.retransmits:
                continue
            if listener.group:
                groups.setdefault((listener.subject, listener.group), []).append(listener)
            else:
                chosen.append(listener)
        chosen += [self.random.choice(members) for members in groups.values()]
        for listener in chosen:
            message = connection.SimulatedMessage(subject, data, headers, reply, listener.bus)
            if self._sides.get(node, 0) == self._sides.get(listener.bus.node, 0):
                self._pass_on(listener, message)
            else:  # the brokers send it again when they reach each other
                self._stop(functools.partial(self._pass_on, listener, message))
        return len(chosen)

    def announce(self, subject: str, data: bytes) -> None:
        """Publish a message of the brokers."""
        self.route(QUORUM, subject, data, {}, None)

    def _pass_on(
        self, listener: connection.SimulatedSubscription, message: connection.SimulatedMessage
    ) -> None:
        copies = 1
        if self.chance(self.faults.loss):
            self.lost += 1
            return
        if self.chance(self.faults.duplication):
            self.duplicated += 1
            copies = 2
        over = listener.bus.connection

        def arrive() -> None:
            if over is not None and listener.bus.connection == over and listener.listening:
                listener.accept(message)

        for _ in range(copies):
            self.hop(listener.bus.node, "down", arrive, listener.bus.context)

    # Storage.

    def changed(self, name: str) -> asyncio.Event:
        return self._changed.setdefault(name, asyncio.Event())

    def notify_consumers(self, log: storage.SimulatedLog) -> None:
        """Wake the readers of this stream, and schedule its next expiry."""
        event = self._changed.pop(log.settings.name, None)
        if event is not None:
            event.set()
        next_ns = log.next_expiry_ns()
        if next_ns is not None:
            # A little after, so that rounding does not find it still alive.
            at = (next_ns - EPOCH_NS) / 1e9 + 1e-6
            alarm = self._expiries.get(log.settings.name)
            if alarm is None or alarm.cancelled() or alarm.when() > at:
                if alarm is not None:
                    alarm.cancel()
                alarm = asyncio.get_running_loop().call_at(at, self._expire, log)
                self._expiries[log.settings.name] = alarm

    def _expire(self, log: storage.SimulatedLog) -> None:
        self._expiries.pop(log.settings.name, None)
        log.expire(self.now_ns())
        self.notify_consumers(log)

    def log(self, name: str) -> storage.SimulatedLog:
        log = self.logs.get(name)
        if log is None:
            raise errors.NotFound(f"stream not found: {name}")
        log.expire(self.now_ns())
        return log

    def store(self, name: str, batch: Sequence[api.OutgoingMessage], node: str) -> int:
        """At the brokers: subscribers receive it, and the stream stores it."""
        log = self.log(name)
        for message in batch:
            self.route(node, message.subject, message.data, message.headers, None)
        sequence = log.store(batch, self.now_ns())
        self.notify_consumers(log)
        return sequence

    def capture(self, node: str, subject: str, data: bytes, headers: api.Headers) -> int:
        """Store a plain publish on the subject of a stream, without an acknowledgement. Returns the number of
        streams."""
        if not self.reaches_storage(node):
            return 0
        keepers = [log for log in self.logs.values() if log.covers(subject)]
        for log in keepers:
            with contextlib.suppress(errors.Refused, errors.AlreadyExists):
                log.store([api.OutgoingMessage(subject, data, headers)], self.now_ns())
                self.notify_consumers(log)
        return len(keepers)
