"""What programs may pass, what is refused, and how results look. In memory, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from typing import Any, Optional

import pytest

import muster
from muster.client import (
    contexts,
    fleet,
    front,
    history,
    messages,
    monitor,
    notifications,
    queues,
    synchronous,
)
from muster.core import errors
from muster.inform import protocol
from muster.message import messages as jms_messages
from muster.message.client import api, consumers, producers
from muster.testing import memory_domain
from muster.testing.eventually import eventually

WAIT_S = 30.0
PUBLIC = [
    *(getattr(muster, name) for name in muster.__all__ if name not in ("__version__", "blocking", "errors")),
    *(contexts.AsyncContexts, fleet.AsyncFleet, history.AsyncHistory, messages.AsyncSubscription),
    *(monitor.AsyncAlerts, monitor.AsyncReports, notifications.AsyncNotify, notifications.AsyncReceiver),
    *(queues.AsyncQueue, synchronous.Contexts, synchronous.Queue, synchronous.Notify, synchronous.Receiver),
    *(synchronous.Fleet, synchronous.Alerts, synchronous.Reports, synchronous.History),
    *(synchronous.JmsConnection, synchronous.JmsSession, synchronous.JmsProducer, synchronous.JmsConsumer),
    *(synchronous.TopicSubscription, api.Connection, api.Session, producers.Producer, consumers.Consumer),
    memory_domain.TestedDomain,
]


def test_every_public_name_is_documented():
    missing = []
    for item in PUBLIC:
        if not inspect.getdoc(item):
            missing.append(item.__name__)
        if not inspect.isclass(item):
            continue
        for name, member in vars(item).items():
            is_code = inspect.isfunction(member) or isinstance(member, property | classmethod)
            if is_code and not name.startswith("_") and not (member.__doc__ or "").strip():
                missing.append(f"{item.__name__}.{name}")
    assert missing == []


# Contexts


async def test_a_context_that_does_not_exist_has_a_default(domain: memory_domain.TestedDomain):
    assert await domain.contexts.get("printers/9", None) is None
    assert await domain.contexts.get("printers/9", "none", max_staleness_s=0) == "none"
    with pytest.raises(errors.NotFound):
        await domain.contexts.get("printers/9")


@pytest.mark.parametrize("value", [7, {"a": 1}, None])
async def test_a_value_that_is_neither_text_nor_bytes_is_refused_with_its_type(
    domain: memory_domain.TestedDomain, value: Any
):
    with pytest.raises(errors.InvalidInput, match=f"text or bytes, not {type(value).__name__}"):
        await domain.contexts.put("printers/3", value)
    if value is not None:
        with pytest.raises(errors.InvalidInput, match=f"context is text, not {type(value).__name__}"):
            await domain.contexts.put(value, "idle")


async def test_an_attribute_that_cannot_be_stored_is_refused_by_name(domain: memory_domain.TestedDomain):
    wrong: Any = {"floor": 2, "place": {"x": 1}}
    with pytest.raises(errors.InvalidInput, match=r"attribute 'place' is .*, not dict"):
        await domain.contexts.put("printers/3", "idle", attributes=wrong)


async def test_content_that_is_no_json_is_refused(domain: memory_domain.TestedDomain):
    unknown: Any = object()
    with pytest.raises(errors.InvalidInput, match="text, bytes or JSON"):
        await domain.publish("a", unknown)


async def test_text_that_utf8_cannot_encode_is_refused(domain: memory_domain.TestedDomain):
    for work in (
        domain.publish("a", "\ud800"),
        domain.request("a", {"name": "\ud800"}),
        domain.contexts.put("a", "\ud800"),
        domain.queue("a").send("\ud800"),
        domain.queue("a").send({"name": "\ud800"}),
    ):
        with pytest.raises(errors.InvalidInput, match="surrogate"):
            await work


@pytest.mark.parametrize("option", ["ttl_s", "delay_s"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_time_that_no_message_has_is_refused(
    domain: memory_domain.TestedDomain, option: str, seconds: float
):
    options: dict[str, Any] = {option: seconds}
    with pytest.raises(errors.InvalidInput, match=f"{option} is 0 to 100 years"):
        await domain.queue("a").send("", **options)


@pytest.mark.parametrize("prefix", [True, False])
async def test_a_watcher_ends_with_the_connection(domain: memory_domain.TestedDomain, prefix: bool):
    async def watch() -> None:
        async for _ in domain.contexts.watch("a", prefix=prefix):
            pass

    await domain.contexts.put("a", "b")
    watching = asyncio.create_task(watch())
    await domain.advance(1)
    await domain.bus.close()
    with pytest.raises(errors.NotConnected):
        await asyncio.wait_for(watching, 60)


async def test_changes_of_a_prefix_arrive_in_the_order_of_the_log(domain: memory_domain.TestedDomain):
    put = domain.contexts.put
    await put("printers/1", "before")
    start = await domain.contexts.position()
    seen: list[tuple[str, str | None]] = []

    @domain.on_change("printers/", prefix=True)
    async def changed(change: protocol.ContextChange) -> None:
        seen.append((change.key, None if change.value is None else change.value.decode()))

    texts: list[str | None] = []

    @domain.on_change("printers/1")
    async def first(value: Optional[str]) -> None:  # noqa: UP045 - as many programs write it
        texts.append(value)

    @domain.on_change("printers/2")
    async def second(value: str | None) -> None:
        raise ValueError("is logged, and the next change is handled")

    await domain.publish("any", "")  # the decorated functions have started
    await put("printers/1", "a")
    await put("scanners/1", "b")
    await put("printers/2", "c")
    await domain.contexts.delete("printers/1")
    expected = [("printers/1", "a"), ("printers/2", "c"), ("printers/1", None)]
    await eventually(lambda: seen == expected)
    assert texts == ["a", None]
    watched = [
        (change.key, change.version)
        async for change in domain.contexts.watch("printers/", prefix=True, after_version=start, timeout_s=60)
    ]
    assert [key for key, _ in watched] == [key for key, _ in expected]
    assert [version for _, version in watched] == sorted(version for _, version in watched)
    again = [change async for change in domain.contexts.watch("printers/2", timeout_s=1)]
    assert [change.value for change in again] == [b"c"]


async def test_a_watcher_of_a_prefix_reads_the_log_in_steps(
    domain: memory_domain.TestedDomain, monkeypatch: pytest.MonkeyPatch
):
    from muster.inform.node import reads

    monkeypatch.setattr(reads, "SCANNED_MAX", 2)
    start = await domain.contexts.position()
    for number in range(5):
        await domain.contexts.put(f"k/{number}", "x")
        await domain.contexts.put(f"other/{number}", "x")
    changes = domain.contexts.watch("k/", prefix=True, after_version=start, timeout_s=60)
    assert [change.key async for change in changes] == [f"k/{number}" for number in range(5)]


async def test_a_watcher_of_a_prefix_that_the_log_has_not_reached_gets_an_error(
    domain: memory_domain.TestedDomain,
):
    with pytest.raises(errors.NotFound, match="was restored"):
        async for _ in domain.contexts.watch("k", prefix=True, after_version=10**12):
            pass


# Resources


async def test_a_machine_is_described_under_one_name(domain: memory_domain.TestedDomain):
    web = {"name": "web", "type": "process", "agent": "local", "config": {"command": ["serve"]}}
    await domain.fleet.apply({"resources": [web]}, wait_s=30)
    machine = await domain.fleet.machine("local")
    assert machine.agent is not None
    assert (machine.agent.name, [row.name for row in machine.resources]) == ("local", ["web"])
    assert (machine.report, machine.alerts, machine.receivers) == (None, [], [])
    with pytest.raises(errors.NotFound, match="no agent and no sensor is named 'lokal'") as missing:
        await domain.fleet.machine("lokal")
    assert missing.value.hint == "agents: local"
    with pytest.raises(errors.InvalidInput, match="the name of a file") as named:
        await domain.fleet.apply("web.yaml")
    assert named.value.hint == "pass Path('web.yaml')"


class Lamp(memory_domain.MemoryResource):
    """A resource of a program."""


class Door(memory_domain.MemoryResource):
    """Another one."""


async def test_adapters_of_a_program_belong_to_one_agent(domain: memory_domain.TestedDomain):
    domain.adapter("lamp", agent="house")(Lamp)
    domain.adapter("door", agent="house")(Door)  # while the first one starts
    await domain.publish("any", "")  # the decorated classes have started
    things: dict[str, Any] = {"agent": "house", "config": {}}
    manifest = {"resources": [{"name": name, "type": name, **things} for name in ("lamp", "door")]}
    await domain.fleet.apply(manifest, wait_s=30)
    assert [row.types for row in await domain.fleet.agents() if row.name == "house"] == [["lamp", "door"]]
    with pytest.raises(errors.InvalidInput, match="'house', and cannot be 'garden'"):
        await domain.serve_adapter(Lamp, "garden-lamp", agent="garden")


# Events


async def test_an_event_of_a_type_that_nobody_defined_is_refused(domain: memory_domain.TestedDomain):
    await domain.notify.define_event("alert", level=int)
    with pytest.raises(errors.InvalidInput, match="of the type 'alrt'") as misspelt:
        await domain.notify.send("alrt", {"level": 1})
    assert misspelt.value.hint == "did you mean alert?"
    assert await domain.notify.send("alert", {"level": 1})
    await domain.notify.define_event("later", level=int)
    assert await domain.notify.send("later", {"level": 1}), "models are read again"


# Messages


async def test_a_sent_message_has_an_id(domain: memory_domain.TestedDomain):
    sent = await domain.queue("orders").send("chair")
    assert (await domain.queue("orders").receive(timeout_s=WAIT_S)).message_id == sent


async def test_a_topic_with_dots_is_a_warning(domain: memory_domain.TestedDomain):
    expected = "'orders.eu' has one level: write 'orders/eu'"
    with pytest.warns(UserWarning, match=expected):
        await domain.publish("orders.eu", "")
    with pytest.warns(UserWarning, match=expected):
        await (await domain.subscribe("orders.eu")).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await domain.publish("files/a.csv", "")
        await domain.publish("subject:topic.a.b", "")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        await domain.publish("orders.eu", "")
        await (await domain.subscribe("orders.eu")).close()
    assert [warning.filename for warning in warned] == [__file__] * 2


async def test_jms_is_reached_from_the_domain(domain: memory_domain.TestedDomain):
    async with domain.jms("shop") as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        consumer = await session.durable_consumer(session.topic("news/*"), "all")
        await session.producer(session.topic("news/sport")).send("goal")
        await session.commit()
        message = await consumer.receive(WAIT_S)
        assert isinstance(message, jms_messages.TextMessage)
        assert message.body() == "goal"
        await session.commit()


def test_jms_without_an_event_loop(blocking_domain: memory_domain.BlockingTestedDomain):
    with blocking_domain.jms("shop") as connection:
        with connection.session(muster.AcknowledgeMode.CLIENT) as session:
            queue = session.queue("orders")
            session.producer(queue).send("chair", priority=7)
            assert [message.body() for message in session.browse(queue)] == ["chair"]
            with session.consumer(queue, "JMSPriority > 6") as consumer:
                assert consumer.receive_body(str, WAIT_S) == "chair"
                session.recover()
                again = next(iter(consumer))
                assert (again.body(), again.redelivered) == ("chair", True)
                session.acknowledge()
        assert blocking_domain.queue("orders").depth() == 0
    with pytest.raises(errors.MusterError, match="closed"):
        connection.session().producer()
    with pytest.raises(ValueError, match="AcknowledgeMode"):
        connection.session("cleint")  # type: ignore[arg-type]


# How they look


def test_rows_are_shown_as_a_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    listed = muster.Rows(
        [
            {"name": f"web-{number}", "state": "up", "labels": {}, "reason": "a\nb", "long": "x" * 99}
            for number in range(25)
        ],
        complete=False,
    )
    lines = repr(listed).splitlines()
    assert lines[:3] == ["<25 rows, and there are more>", "  name    state  reason", "  web-0   up     a b"]
    assert lines[-2:] == ["  … 5 more", "  not shown: long"]
    assert repr(muster.Rows()) == "<0 rows>"
    assert len(repr(muster.Rows([{"a": 1}])).splitlines()) == 3


async def test_the_rows_of_a_domain_are_readable(domain: memory_domain.TestedDomain):
    await domain.queue("orders").send("chair")
    shown = repr(await domain.queues())
    assert "QueueRow" not in shown
    assert "orders" in shown
    assert isinstance(domain, front.AsyncMuster)
    await asyncio.sleep(0)
