"""Hostile messages through a real broker, with the credentials of each role: ``make fuzz TARGET=wire``.

An attacker of each role writes to the broker's socket: messages on the subjects that its role may publish on,
with any bytes in subject, reply subject and headers that the broker passes on. Services serve regular
requests meanwhile. What has to hold: their connections stay, a handler sees the subject that was
published or nothing, it matches the subscription, and regular messages arrive in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NoReturn

from muster.bus import api, message_format
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.core import subjects
from muster.testing.eventually import eventually
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.bus import plain_client
from tests.fuzz import mutations
from tests.trust import matrix

AT_ONCE = 20  # messages of an attacker in one write
#: The victims, and what they listen to: requests, their own subjects, those of all, topics.
VICTIMS = {
    roles.Role.REGISTRY: (
        "muster.manage.from.*.request.*",
        "muster.manage.from.*.>",
        "muster.manage.to.{identity}.>",
        "muster.manage.all.>",
        "muster.manage.log.>",
    ),
    roles.Role.INFORMATION_NODE: ("muster.inform.from.*.read.>", "muster.inform.to.{identity}.>"),
    roles.Role.USER: ("topic.>", "topic.*", "topic.orders.>"),
}
HOSTILE = (
    *(bytes([byte]) for byte in range(0x20) if byte not in b"\n\t"),
    *(
        b"\x7f",
        b"\x80",
        b"\xff",
        b"\xc0\xae",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
    ),
    *(b".*", b".>", b"*", b">", b"..", b".", b" ", b"\x00" * 100),
    *(b"\x0b%d" % number for number in range(12)),
    *(b"\x0c%d 2" % number for number in range(12)),
    *(b"\r%d" % number for number in range(4)),
    "ä漢".encode(),
    b"x" * 2000,
)
HEADERS = (
    *(b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", b"NATS/1.0\r\n"),
    *(b"NATS/1.0\r\ntraceparent: 00-x\r\n\r\n", b"NATS/1.0\r\nA: b\r\nA: c\r\n\xff: \xff\r\n:\r\n\r\n"),
    b"NATS/1.0\r\nNats-Subject: muster.manage.to.victim-registry.x\r\nNats-Sequence: -1\r\n\r\n",
)


def attackers() -> list[roles.Role]:
    """Every role that may publish something."""
    return [role for role in roles.Role if role not in matrix.APART and own_subjects(role, f"evil-{role}")]


def own_subjects(role: roles.Role, identity: str) -> list[bytes]:
    """What the role may publish on, each with a free end."""
    allowed = roles.limits(role, identity).pub.allow
    chosen = [attempt.subject.replace(".me.", f".{identity}.") for attempt in matrix.ATTEMPTS]
    chosen += [
        f"muster.{part}.from.{identity}.{kind}.x"
        for part in ("manage", "inform")
        for kind in ("request", "read")
    ]
    return [
        subject.encode()
        for subject in chosen
        if any(subjects.matches(pattern, subject) for pattern in allowed) and not subject.startswith("$")
    ]


def hostile_message(chance: random.Random, allowed: list[bytes]) -> bytes:
    """A publish command. Its data names the subject, so that a receiver can compare it."""

    def spoil(subject: bytes) -> bytes:
        if chance.random() < 0.02:
            end = subject.rfind(b".") + 1
            return subject[:end] + mutations.mutate(chance, [subject[end:]], bytes_max=200)
        at = (
            len(subject)
            if chance.random() < 0.5
            else chance.randrange(subject.rfind(b".") + 1, len(subject) + 1)
        )
        return subject[:at] + chance.choice(HOSTILE) + subject[at:]

    subject, reply, headers = chance.choice(allowed), b"", None
    if chance.random() < 0.8:
        subject = spoil(subject)
    if chance.random() < 0.5:
        reply = chance.choice(
            [
                b"_R.@manage.x.s.1",
                b"_INBOX.victim-registry.1",
                b"muster.manage.to.victim-registry.x",
                b"$JS.ACK.a.b.1",
            ]
        )
        reply = spoil(reply) if chance.random() < 0.7 else reply
    if chance.random() < 0.3:
        headers = chance.choice(HEADERS)
        if chance.random() < 0.5:
            headers = b"NATS/1.0" + mutations.mutate(chance, [headers[8:]], bytes_max=300)
    return plain_client.publish(subject, subject, reply, headers)


class Victims:
    """Connections that read what the attackers send, and serve each other."""

    def __init__(self, buses: dict[roles.Role, client.NatsBus]) -> None:
        self.buses = buses
        self._service, self._user = buses[roles.Role.REGISTRY], buses[roles.Role.USER]
        self.problems: list[str] = []
        self.served = self.received = 0

    async def listen(self) -> None:
        for role, patterns in VICTIMS.items():
            bus = self.buses[role]
            for pattern in (pattern.format(identity=bus.identity) for pattern in patterns):
                await bus.subscribe(pattern, handler=functools.partial(self._read, pattern))
                await bus.subscribe(pattern, bulk=functools.partial(self._read_all, pattern))
        echo = f"muster.manage.from.{self._user.identity}.request.echo"
        await self._service.subscribe(echo, handler=lambda message: message.respond(message.data))
        self._orders = await self._user.subscribe("topic.regular", group="g")

    def _read(self, pattern: str, message: api.Message) -> None:
        self._judge(pattern, message.subject.encode(), message.data)
        _ = message.headers, message.trace, message.header("Nats-Subject")
        if message.reply is not None and not message_format.is_subject(message.reply):
            self.problems.append(f"{pattern} has read the reply subject {message.reply!r}")

    def _read_all(self, pattern: str, read: Sequence[bytes], data: Sequence[bytes]) -> None:
        for subject, content in zip(read, data, strict=True):
            self._judge(pattern, subject, content)

    def _judge(self, pattern: str, subject: bytes, data: bytes) -> None:
        self.received += 1
        if not subjects.matches(pattern, subject.decode()) or not message_format.is_subject(subject.decode()):
            self.problems.append(f"{pattern} has read {subject!r}")
        # The broker itself leaves out a carriage return where its buffer ends, and ends a subject at a space.
        published = data.replace(b"\r", b"")
        if not data.startswith(b"regular") and re.split(rb"[ \t]", published)[0] != subject.replace(
            b"\r", b""
        ):
            self.problems.append(f"{data[:100]!r} was read as {subject[:100]!r}")

    async def serve(self) -> NoReturn:
        """Regular requests and messages, one after the other."""
        echo = f"muster.manage.from.{self._user.identity}.request.echo"
        while True:
            number = b"regular %d" % self.served
            await self._user.publish("topic.regular", number)
            answer = await self._user.request(echo, number, timeout_s=20)
            order = await self._orders.next(timeout_s=20)
            if not answer.data == order.data == number:
                self.problems.append(f"{number!r} was answered {answer.data!r}, after {order.data!r}")
            self.served += 1


async def attack(url: str, trust: keyring.Keyring, role: roles.Role, inputs: int, seed: int) -> None:
    identity = f"evil-{role}"
    chance, allowed = random.Random(f"{seed} {role}"), own_subjects(role, identity)
    while inputs > 0:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the broker closes some connections
            async with plain_client.connect(url, trust.credentials(identity)) as line:
                while inputs > 0:
                    count = min(AT_ONCE, inputs)
                    inputs -= count
                    await line.send(*(hostile_message(chance, allowed) for _ in range(count)))


@contextlib.asynccontextmanager
async def domain(folder: Path) -> AsyncIterator[tuple[str, keyring.Keyring]]:
    trust = keyring.Keyring.create(folder / "trust", "fleet")
    for role in VICTIMS:
        trust.issue(f"victim-{role}", role)
    for role in attackers():
        trust.issue(f"evil-{role}", role)
    known = trust.broker()
    anchors = config.OperatorTrust(
        operator_jwt=known.operator_jwt, system_account=known.system_account, accounts=known.accounts
    )
    settings = config.BrokerConfig(name="b", directory=folder / "b", trust=anchors, storage=None)
    async with broker.Broker(settings) as running:
        yield running.url, trust


async def fuzz(folder: Path, inputs: int, seed: int = 1) -> Victims:
    """``inputs`` messages of all attackers together."""
    async with domain(folder) as (url, trust), contextlib.AsyncExitStack() as stack:
        buses = {
            role: await stack.enter_async_context(
                await client.connect([url], creds=trust.credentials(f"victim-{role}"), audit_s=0)
            )
            for role in VICTIMS
        }
        victims = Victims(buses)
        await victims.listen()
        serving = asyncio.create_task(victims.serve())
        chosen = attackers()
        await asyncio.gather(*(attack(url, trust, role, inputs // len(chosen), seed) for role in chosen))
        done = victims.served
        await eventually(lambda: victims.served > done + 3 or serving.done(), timeout_s=60)
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            victims.problems.append(f"regular requests failed: {serving.exception()!r}")
        for bus in buses.values():
            if bus.statistics().reconnects:
                victims.problems.append(f"the connection of {bus.identity} was lost")
    return victims
