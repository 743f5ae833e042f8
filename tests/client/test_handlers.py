"""Handlers: what they return, raise and say becomes of their messages. In virtual time, without a broker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import muster
from muster.bus import spans
from muster.bus.memory import network
from muster.client import front, services
from muster.core import errors
from muster.core.telemetry import otlp, trace
from muster.message import destinations, messages, settings
from muster.testing import virtual_clock
from muster.testing.eventually import eventually
from tests.message import conftest

pytestmark = [pytest.mark.virtual_time]
ORDERS = "queue:orders"
FAST = muster.Retry(attempts=3, delay_s=1.0)
QUEUES = (settings.QueueSettings(name="slow", redelivery_delay_s=100.0, max_deliveries=2),)


@pytest_asyncio.fixture
async def m(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[front.AsyncMuster]:
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)
    connect: Any = simulated_network.connect
    async with conftest.serving(connect, message_settings=settings.MessageSettings(queues=QUEUES)) as started:
        await started.acting.wait()
        opened = front.AsyncMuster(await connect("client"))
        yield opened
        await opened.close()


async def dead_letter(m: front.AsyncMuster) -> tuple[Any, str]:
    message = await m.queue(destinations.DEAD_LETTERS).receive(timeout_s=600)
    return message.body(), str(message.properties[messages.DEAD_REASON])


def failures(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[Any, str]]:
    for record in caplog.records:
        if record.getMessage() == "handler-failed":
            assert record.exc_info
            shown = "".join(traceback.format_exception(record.exc_info[1]))
            yield record.facts, shown  # type: ignore[attr-defined]


# Requests


class Order(msgspec.Struct):
    boxes: int


async def test_a_request_whose_handler_fails_is_answered_at_once_with_the_error(
    m: front.AsyncMuster, caplog: pytest.LogCaptureFixture
):
    @m.on("prices/*")
    async def price(order: Order) -> str:
        if order.boxes == 1:
            raise errors.NotFound("no such price", hint="ask for two")
        return str(1 / order.boxes)

    assert (await m.request("prices/chair", {"boxes": 4})).text == "0.25"
    with pytest.raises(muster.MusterError, match="price failed: ZeroDivisionError") as failed:
        await m.request("prices/chair", {"boxes": 0}, timeout_s=5)
    assert failed.value.code == "handler-failed"
    with pytest.raises(errors.NotFound, match="no such price") as missing:
        await m.request("prices/chair", {"boxes": 1}, timeout_s=5)
    assert missing.value.hint == "ask for two"
    with pytest.raises(errors.InvalidInput, match="prices/chair"):
        await m.request("prices/chair", "seven", timeout_s=5)
    logged = list(failures(caplog))
    assert [facts["topic"] for facts, _ in logged] == ["prices/chair"] * 3
    assert {facts["handler"] for facts, _ in logged} == {"price"}
    assert "in the handler price, for a message of prices/chair" in logged[0][1]
    assert "1 / order.boxes" in logged[0][1], "the traceback"


@pytest.mark.parametrize("kind", [ValueError, errors.NotFound])
@pytest.mark.parametrize("text", ["file \udcff", "a\x00b\n\x1b[31m", "x" * 2_000_000])
async def test_any_text_of_an_error_is_an_answer(m: front.AsyncMuster, kind: type[Exception], text: str):
    @m.on("failing")
    async def failing(_: str) -> str:
        raise kind(text)

    for _ in range(2):  # the handler goes on
        with pytest.raises(muster.MusterError, match=r"x{900}|file|a.b") as failed:
            await m.request("failing", "", timeout_s=1)
        assert not isinstance(failed.value, errors.Unavailable)


async def test_a_result_that_cannot_be_sent_is_an_error(m: front.AsyncMuster):
    @m.on("report")
    async def report(size: int) -> Any:
        return "x" * size if size else object()

    assert len((await m.request("report", "1000")).text) == 1000
    with pytest.raises(errors.LimitExceeded, match="maximum"):
        await m.request("report", "5000000", timeout_s=1)
    with pytest.raises(errors.InvalidInput, match="not object"):
        await m.request("report", "0", timeout_s=1)


class Discount:
    def __init__(self, percent: int) -> None:
        self.percent = percent

    async def __call__(self, order: Order) -> str:
        return str(order.boxes * self.percent)


def scaled(factor: int, order: Order) -> str:
    return str(order.boxes * factor)


async def test_any_callable_is_a_handler_and_its_type_is_known(m: front.AsyncMuster):
    class Local(msgspec.Struct):
        boxes: int

    @m.on("closure")
    async def closure(order: Local) -> str:
        assert isinstance(order, Local)
        return str(order.boxes)

    m.on("object")(Discount(3))
    m.on("partial")(functools.partial(scaled, 2))
    for topic, answer in (("object", "15"), ("partial", "10"), ("closure", "5")):
        assert (await m.request(topic, {"boxes": 5})).text == answer


def test_a_type_that_is_not_known_is_reported():
    def handler(order: Hidden) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.warns(UserWarning, match="handler receives messages as they are: its type Hidden"):
        assert services.reader(handler)("the message") == ("the message",)


async def test_an_error_of_another_service_of_nats_is_an_error_too(m: front.AsyncMuster):
    subscription = await m.subscribe("foreign")

    async def answer() -> None:
        message = await subscription.next()
        assert message.received is not None
        await message.received.respond(b"", headers={"Nats-Service-Error": "too late"})

    async with subscription, asyncio.TaskGroup() as group:
        group.create_task(answer())
        with pytest.raises(muster.MusterError, match="too late"):
            await m.request("foreign")


async def test_a_handler_without_a_result_answers_nothing_and_hides_no_other_answer(m: front.AsyncMuster):
    @m.on("asked")
    async def observer(text: str) -> None:
        raise RuntimeError(text)

    @m.on("asked")
    async def answer(text: str) -> str:
        return text.upper()

    assert (await m.request("asked", "x")).text == "X"


async def test_as_many_messages_as_configured_are_handled_at_a_time(m: front.AsyncMuster):
    running, most, done = 0, dict[str, int](), 0

    async def work(message: Any) -> None:
        nonlocal running, done
        running += 1
        source = "queue" if isinstance(message, muster.QueueMessage) else "topic"
        most[source] = max(most.get(source, 0), running)
        await asyncio.sleep(1)
        running -= 1
        done += 1

    m.on("work", concurrency=3)(work)
    for _ in range(9):
        await m.publish("work", "")
    await eventually(lambda: done == 9)
    m.on("queue:work", concurrency=4)(work)
    for _ in range(9):
        await m.queue("work").send("x")
    await eventually(lambda: done == 18)
    assert most == {"topic": 3, "queue": 4}
    with pytest.raises(errors.InvalidInput, match="concurrency"):
        await m.serve(work, "work", concurrency=0)
    with pytest.raises(errors.InvalidInput, match="no retry"):
        await m.serve(work, "work", retry=FAST)
    with pytest.raises(errors.InvalidInput, match="no groups"):
        await m.serve(work, "queue:work", group="g")


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_handler_that_exits_ends_the_program(m: front.AsyncMuster, concurrency: int):
    @m.on("end", concurrency=concurrency)
    async def end(text: str) -> None:
        raise SystemExit(7)

    await m.publish("end", "")
    with pytest.raises(services.HandlerExit):
        await m.wait_stopped()


async def test_a_request_whose_handler_exits_is_answered(m: front.AsyncMuster):
    @m.on("end")
    async def end(text: str) -> str:
        raise SystemExit(7)

    with pytest.raises(muster.MusterError, match="end failed: SystemExit: 7"):
        await m.request("end", "", timeout_s=1)
    with pytest.raises(services.HandlerExit):
        await m.wait_stopped()


async def test_a_request_without_an_answer_names_its_topic(m: front.AsyncMuster):
    with pytest.raises(errors.Unavailable, match="there is no subscriber on nobody/here"):
        await m.request("nobody/here")
    async with await m.subscribe("silent"):
        with pytest.raises(errors.TimedOut, match="no reply on silent in 2 s"):
            await m.request("silent", timeout_s=2)


# Queues


async def test_a_failing_message_is_repeated_later_and_becomes_a_dead_letter_with_the_last_error(
    m: front.AsyncMuster, caplog: pytest.LogCaptureFixture
):
    loop = asyncio.get_running_loop()
    tried: list[tuple[str, int, float]] = []

    @m.on(ORDERS, retry=FAST)
    async def order(message: muster.QueueMessage) -> None:
        tried.append((message.body(), message.delivery_count, loop.time()))
        if message.body() == "bad":
            raise ValueError(f"attempt {message.delivery_count}")

    await m.queue("orders").send("bad")
    await m.queue("orders").send("good")
    assert await dead_letter(m) == ("bad", "3 attempts; last error: ValueError: attempt 3")
    bad = [at for body, _, at in tried if body == "bad"]
    assert [round(later - before) for before, later in itertools.pairwise(bad)] == [1, 2]
    assert [body for body, _, _ in tried] == ["bad", "good", "bad", "bad"], "others overtake it"
    facts = [facts for facts, _ in failures(caplog)]
    assert [(entry["attempt"], str(entry["topic"])) for entry in facts] == [(n, ORDERS) for n in (1, 2, 3)]
    assert facts[0]["handler"].endswith("order")


async def test_an_error_with_text_that_cannot_be_sent_is_the_reason_of_a_dead_letter(m: front.AsyncMuster):
    @m.on(ORDERS, retry=FAST)
    async def order(text: str) -> None:
        raise ValueError("file \udcff")

    await m.queue("orders").send("table")
    assert await dead_letter(m) == ("table", "3 attempts; last error: ValueError: file ?")


async def test_the_settings_of_the_queue_are_a_limit_too_and_keep_the_last_error(m: front.AsyncMuster):
    loop = asyncio.get_running_loop()
    tried: list[float] = []

    @m.on("queue:slow", retry=muster.Retry(attempts=9, delay_s=0.0))
    async def slow(text: str) -> None:
        tried.append(loop.time())
        raise ValueError("never")

    await m.queue("slow").send("x")
    body, reason = await dead_letter(m)
    assert (body, reason.partition("; ")[2]) == ("x", "last error: ValueError: never")
    assert [round(later - before) for before, later in itertools.pairwise(tried)] == [100]


async def test_a_handler_settles_its_message_itself(m: front.AsyncMuster):
    loop = asyncio.get_running_loop()
    seen: list[tuple[str, int]] = []

    @m.on(ORDERS, retry=FAST)
    def order(message: muster.QueueMessage) -> None:  # in a thread
        seen.append((message.body(), message.delivery_count))
        match message.body():
            case "done":
                message.ack()
                message.retry(after_s=1)  # has no effect any more
                raise RuntimeError("after it was done")
            case "never":
                message.nack("nobody wants it")
            case "later" if message.delivery_count == 1:
                message.retry(after_s=3600)

    for body in ("done", "never", "later"):
        await m.queue("orders").send(body)
    assert await dead_letter(m) == ("never", "rejected: nobody wants it")
    began = loop.time()
    await eventually(lambda: ("later", 2) in seen, timeout_s=7200)
    assert 3599 < loop.time() - began < 3700
    assert sorted(seen) == [("done", 1), ("later", 1), ("later", 2), ("never", 1)]
    assert await m.queue("orders").depth() == 0
    message = messages.TextMessage("x")
    for settle in (message.ack, message.nack, message.retry):
        with pytest.raises(errors.Refused, match="of a listener"):
            settle()


async def test_the_end_of_a_handler_that_gave_its_message_back_does_not_settle_the_next_delivery(
    m: front.AsyncMuster,
):
    seen: list[int] = []

    @m.on(ORDERS, concurrency=2, retry=FAST)
    async def order(message: muster.QueueMessage) -> None:
        seen.append(message.delivery_count)
        if message.delivery_count == 1:
            message.retry(after_s=1)
            await asyncio.sleep(5)  # it ends while the second delivery is handled
        else:
            await asyncio.sleep(10)
            raise ValueError("too early")

    await m.queue("orders").send("x")
    assert await dead_letter(m) == ("x", "3 attempts; last error: ValueError: too early")
    assert seen == [1, 2, 3]


async def test_a_plain_function_that_raises_stop_iteration_has_failed(m: front.AsyncMuster):
    @m.on(ORDERS, retry=muster.Retry(attempts=1))
    def order(text: str) -> None:
        next(iter(text[1:]))

    await m.queue("orders").send("x")
    body, reason = await dead_letter(m)
    assert (body, "StopIteration" in reason) == ("x", True)


async def test_a_message_that_waits_for_its_retry_can_be_deleted_and_survives_the_client(
    m: front.AsyncMuster, simulated_network: network.SimulatedNetwork
):
    other = front.AsyncMuster(await simulated_network.connect("other"))
    failed = asyncio.Event()

    @other.on(ORDERS, retry=muster.Retry(delay_s=1000, delay_s_max=1000))
    async def order(text: str) -> None:
        failed.set()
        raise ValueError(text)

    await m.queue("orders").send("x")
    await failed.wait()
    await asyncio.sleep(1)
    await other.close()
    assert await m.queue("orders").depth() == 1
    with pytest.raises(errors.TimedOut):
        await m.queue("orders").receive(timeout_s=900)
    assert (await m.queue("orders").receive(timeout_s=200)).delivery_count == 2


def test_a_retry_has_limits():
    for wrong in ({"attempts": -1}, {"delay_s": -1}, {"delay_s": float("nan")}, {"backoff": 0}):
        with pytest.raises(errors.InvalidInput):
            muster.Retry(**wrong)
    with pytest.raises(errors.InvalidInput, match=r"message\.queues 'x'"):
        settings.QueueSettings(name="x", redelivery_delay_s=-1)
    assert muster.Retry(delay_s=1, backoff=10, delay_s_max=50).delay_after(10**6) == 50


# Middleware


async def test_middlewares_surround_each_call_in_order_and_see_the_failure(m: front.AsyncMuster):
    events: list[str] = []

    @m.middleware
    async def outer(call: muster.HandlerCall) -> AsyncIterator[None]:
        events.append(f"+{call.handler} {call.topic} {call.attempt}")
        try:
            yield
        except ValueError as error:
            events.append(f"!{error}")
            raise
        events.append("-")

    @m.middleware
    def inner(call: muster.HandlerCall) -> contextlib.AbstractContextManager[None]:
        return contextlib.suppress(KeyError) if call.message.text == "key" else contextlib.nullcontext()

    @m.on("a")
    async def handle(text: str) -> str:
        if text == "value":
            raise ValueError(text)
        if text == "key":
            raise KeyError(text)
        return text

    assert (await m.request("a", "x")).text == "x"
    with pytest.raises(muster.MusterError, match="ValueError: value"):
        await m.request("a", "value")
    await m.publish("a", "key")
    await eventually(lambda: events == ["+handle a 1", "-", "+handle a 1", "!value", "+handle a 1", "-"])


async def test_the_trace_of_a_message_is_that_of_its_handler(m: front.AsyncMuster):
    seen: list[trace.TraceContext | None] = []
    spans_ended: list[otlp.FinishedSpan] = []

    async def handle() -> None:
        seen.append(trace.current.get())

    m.on("a")(handle)
    m.on(ORDERS)(handle)
    with spans.recorded_to(spans_ended.append):
        began = trace.start(bytes(range(24)))
        trace.current.set(began)
        await m.publish("a", "")
        await m.queue("orders").send("x")
        trace.current.set(None)
        await eventually(lambda: len(spans_ended) == 2)
    assert [context.trace_id for context in seen if context] == [began.trace_id] * 2
    assert [ended.name for ended in spans_ended] == ["handle handle"] * 2
