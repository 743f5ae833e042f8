"""How many connections the AMQP gateway gives to one address and one login, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.core import errors  # noqa: E402
from muster.core.telemetry import metrics  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.gateways.amqp.links import topics  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.message.client import flow_control  # noqa: E402
from muster.testing import eventually  # noqa: E402
from muster.trust.login import password_checker, passwords  # noqa: E402
from muster.trust.permissions import roles  # noqa: E402
from tests.gateways.amqp import raw_client  # noqa: E402
from tests.message import conftest  # noqa: E402

ACTIVE, CLOSED = proton.Endpoint.REMOTE_ACTIVE, proton.Endpoint.REMOTE_CLOSED


def _opened(port: int, name: str, login: bytes = raw_client.LOGIN) -> tuple[raw_client.Raw, str]:
    """A connection, and the condition with which it was refused."""
    raw = raw_client.Raw(port, name, login=login)
    raw.until(lambda: raw.connection.state & (ACTIVE | CLOSED))
    if raw.connection.remote_properties:  # they announce that an error follows
        raw.until(lambda: raw.connection.state & CLOSED)
    condition = raw.connection.remote_condition
    return raw, str(condition.name) if condition else ""


async def test_the_connections_of_a_login_are_bounded(gateway: amqp_gateway.AmqpGateway):
    measured = metrics.Metrics()

    def work(port: int) -> list[str]:
        matches = []
        with contextlib.ExitStack() as stack:
            for number in range(3):
                raw, condition = _opened(port, f"client-{number}")
                stack.callback(raw.socket.close)
                matches.append(condition)
        return matches

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", per_login_max=2, measure=measured
    ) as bounded:
        for _ in range(2):
            actual = await asyncio.to_thread(work, bounded.port)
            assert actual == ["", "", "amqp:resource-limit-exceeded"]
            await eventually.eventually(lambda: not bounded.connections and not bounded._budgets)
    assert measured.value("muster_amqp_refused_connections_total", reason="login") == 2


async def test_the_connections_of_an_address_are_bounded(gateway: amqp_gateway.AmqpGateway):
    measured = metrics.Metrics()

    def is_served(port: int) -> bool:
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw_client.LOGIN)
                return bool(connection.recv(100))
            return False

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", per_address_max=2, measure=measured
    ) as bounded:
        held = [await asyncio.to_thread(_opened, bounded.port, f"client-{number}") for number in range(2)]
        assert not await asyncio.to_thread(is_served, bounded.port)
        for raw, _ in held:
            raw.socket.close()
        await eventually.eventually(lambda: not bounded.connections)
        assert await asyncio.to_thread(is_served, bounded.port)
    assert measured.value("muster_amqp_refused_connections_total", reason="address") == 1


@pytest.mark.parametrize("how", ["changed", "removed", "expired"])
async def test_connections_end_with_the_password_of_their_login(
    gateway: amqp_gateway.AmqpGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    now = [1e9]
    known = passwords.PasswordStore(tmp_path, clock=lambda: now[0])
    for name in ("ann", "bob"):
        lifetime_s = 60.0 if name == "ann" and how == "expired" else None
        known.set(name, roles.Role.USER, "correct horse", lifetime_s=lifetime_s)
    checked = password_checker.PasswordChecker(known, clock=lambda: now[0])
    async with amqp_gateway.AmqpGateway(
        gateway.connect, checked, anonymous="nobody", recheck_s=0.05
    ) as checking:
        opened = {
            name: await asyncio.to_thread(_opened, checking.port, name, login)
            for name, login in (
                ("ann", raw_client.plain("ann", "correct horse")),
                ("bob", raw_client.plain("bob", "correct horse")),
                ("nobody", raw_client.LOGIN),
            )
        }
        assert [condition for _, condition in opened.values()] == ["", "", ""]
        if how == "changed":
            known.set("ann", roles.Role.USER, "another horse")
        elif how == "removed":
            known.remove("ann")
        else:
            now[0] += 61.0
        ann = opened["ann"][0]
        await asyncio.to_thread(ann.until, lambda: ann.connection.state & CLOSED)
        assert ann.connection.remote_condition.name == "amqp:unauthorized-access"
        await eventually.eventually(lambda: len(checking.connections) == 2)
        assert {connection.login.name for connection in checking.connections if connection.login} == {
            "bob",
            "nobody",
        }
        for raw, _ in opened.values():
            raw.socket.close()


async def test_a_login_that_cannot_be_checked_now_goes_on(
    gateway: amqp_gateway.AmqpGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    known = passwords.PasswordStore(tmp_path)
    known.set("ann", roles.Role.USER, "correct horse")
    async with amqp_gateway.AmqpGateway(
        gateway.connect, password_checker.PasswordChecker(known), recheck_s=0.05
    ) as checking:
        login = raw_client.plain("ann", "correct horse")
        raw, _ = await asyncio.to_thread(_opened, checking.port, "ann", login)
        tries = 0

        def unreadable(self: passwords.PasswordStore, name: str) -> passwords.PasswordRecord:
            nonlocal tries
            tries += 1
            raise errors.Refused("ann.json: Too many open files")

        monkeypatch.setattr(passwords.PasswordStore, "get", unreadable)
        await eventually.eventually(lambda: tries >= 3)
        assert len(checking.connections) == 1
        raw.socket.close()


async def test_large_messages_on_a_topic_displace_as_many_small_ones_as_they_need(
    gateway: amqp_gateway.AmqpGateway,
    dial: conftest.Dial,
    measured: metrics.Metrics,
    monkeypatch: pytest.MonkeyPatch,
):
    def subscribe() -> raw_client.Raw:
        """Without credit."""
        raw, _ = _opened(gateway.port, "idle")
        receiver = raw.session.receiver("in")
        receiver.source.address = "topic:news"
        receiver.open()
        raw.until(lambda: receiver.state & ACTIVE)
        return raw

    monkeypatch.setattr(flow_control, "WAITING_SLOW", 1)
    monkeypatch.setattr(flow_control, "WAITING_BYTES_MAX", 10_000)
    raw = await asyncio.to_thread(subscribe)
    (client,) = gateway.connections
    (link,) = client.outgoing_links.values()
    assert isinstance(link, topics.TopicLink)
    monkeypatch.setattr(client.jms, "report_slow", lambda consumer: None)
    producer = (await dial()).session().producer(destinations.topic("news"), persistent=False)
    for size in (*[1] * 50, *[1_000] * 20):
        await producer.send(bytes(size))

    def dropped() -> float:
        return measured.value("muster_amqp_dropped_messages_total", reason="slow")

    await eventually.eventually(lambda: dropped() + len(link._waiting) == 70)
    assert link._bytes == sum(len(data) for data, _ in link._waiting) <= 10_000
    raw.socket.close()
