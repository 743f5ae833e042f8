"""Calls of a program that are cancelled at each of their awaits: nothing is lost, and the next call works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import muster
from muster.client import front
from muster.core import errors
from muster.testing.eventually import eventually
from tests import cancellation
from tests.cli import driver

pytestmark = [pytest.mark.timeout(180)]
WAIT_S = 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = driver.init(tmp_path_factory.mktemp("client") / "home")
    answer = driver.run("up", "--detach", home=home)
    assert answer.code == 0, answer.err
    yield home
    assert driver.run("down", home=home).code == 0


@pytest.fixture
async def m(home: Path) -> AsyncIterator[front.AsyncMuster]:
    async with muster.open_async(home=home) as opened:
        yield opened


def subscriptions(m: front.AsyncMuster) -> set[int]:
    return set(m.bus._wire.numbers())  # type: ignore[attr-defined]


async def test_messages_of_topics(m: front.AsyncMuster):
    @m.on("cancelled/echo")
    async def echo(text: str) -> str:
        return text

    assert (await m.request("cancelled/echo", "a", timeout_s=WAIT_S)).text == "a"
    before = subscriptions(m)

    async def check() -> None:
        assert subscriptions(m) == before
        assert (await m.request("cancelled/echo", "b", timeout_s=WAIT_S)).text == "b"

    async def receive() -> None:
        async with await m.subscribe("cancelled/news", where="a = 1") as news:
            await m.publish("cancelled/news", {"a": 1})
            await news.next(timeout_s=WAIT_S)

    assert await cancellation.at_each_await(receive, check)
    assert await cancellation.at_each_await(lambda: m.request("cancelled/echo", "c", timeout_s=WAIT_S), check)


async def test_a_queue_loses_no_message(m: front.AsyncMuster):
    sent, queue = m.queue("cancelled/sent"), m.queue("cancelled/received")

    async def check() -> None:
        await sent.send("b")
        while (await sent.receive(timeout_s=WAIT_S)).body() != "b":
            pass

    assert await cancellation.at_each_await(lambda: sent.send("a"), check)

    async def still_there() -> None:
        async def waits() -> bool:
            return await queue.depth() == 1

        await eventually(waits)

    await queue.send("kept")
    assert await cancellation.at_each_await(
        lambda: queue.receive(timeout_s=WAIT_S), still_there, undo=lambda message: queue.send(message.body())
    )


async def test_a_queue_is_received_without_waiting(m: front.AsyncMuster):
    queue = m.queue("waiting")
    with pytest.raises(errors.TimedOut):
        await queue.receive(timeout_s=0)
    for text in "abc":
        await queue.send(text)
    assert [(await queue.receive(timeout_s=0)).body() for _ in "abc"] == ["a", "b", "c"]
    assert await queue.depth() == 0


async def test_connections_contexts_and_events(home: Path, m: front.AsyncMuster):
    async def opened() -> None:
        async with muster.open_async(home=home) as other:
            await other.publish("a", "b")

    async def works() -> None:
        await m.publish("a", "b")

    assert await cancellation.at_each_await(opened, works)
    assert await cancellation.at_each_await(lambda: m.contexts.put("cancelled", "a"), works)
    assert await cancellation.at_each_await(lambda: m.contexts.get("cancelled", max_staleness_s=0), works)
    await m.notify.define("CancelledModel", level=int)

    async def joined() -> None:
        async with await m.notify.join("web", "CancelledModel", {"level": 1}, policy="TRUE") as web:
            await m.notify.send("alert", {}, to="level = 1")
            await web.next(timeout_s=WAIT_S)

    assert await cancellation.at_each_await(joined, works)
