"""Requests to the pipeline, over a real broker; no Spark is needed for them."""

import contextlib
import sys
import time

import pytest

from muster.bus.client import client as bus_client
from muster.bus.rpc import client as rpc
from muster.bus.rpc import server
from muster.core import errors, messages
from muster.pipeline import client, protocol
from muster.pipeline.alerts import tracker
from muster.pipeline.job import request_handler
from tests.pipeline import test_outcomes


def _none() -> protocol.BatchProgress:
    raise errors.Unavailable("nothing runs")


@contextlib.asynccontextmanager
async def serving(broker, folder, operators=("*",)):
    """The book, and a client of it."""
    async with (
        await bus_client.connect([broker.url], identity="pipeline") as bus,
        await bus_client.connect([broker.url], identity="ann") as user,
    ):
        known = await test_outcomes.opened(bus, folder)
        made = request_handler.PipelineRequestHandler(
            known, operators, progress=_none, batches=list, check=lambda: None, stop=lambda: None
        )
        async with server.RpcServer(bus, protocol.PART, made.operations(), authorize=made.authorize):
            yield known.alert_tracker, user


@pytest.mark.parametrize("count", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_thousands_of_open_alerts_are_listed(broker, tmp_path, count):
    """Issue 13, finding 1: without pages the answer was larger than a message, and none came."""
    down = [
        tracker.RuleVerdict("down", f"group:g{n:05}", True, 1000 + n % 7, group="g") for n in range(count)
    ]
    async with serving(broker, tmp_path) as (book, user):
        book.apply(down, 2000)
        started = time.monotonic()
        alerts = await client.PipelineClient(user).alerts()
        sys.stderr.write(f"\n{count:,} alerts in {time.monotonic() - started:.1f} s\n")
        assert [alert.about for alert in alerts] == [alert.about for alert in book.alerts()]
        assert len(alerts) == count


async def test_each_change_is_in_the_audit_for_every_sender(broker, tmp_path):
    async with serving(broker, tmp_path, operators=("ann",)) as (_, user):
        ask = client.PipelineClient(user)
        made = await ask.silence("group = 'web'", for_s=60)
        await ask.unsilence(made.id)
        with pytest.raises(errors.NotFound):
            await ask.acknowledge("down", "group:none")
        with pytest.raises(errors.InvalidInput, match="for_s"):
            await ask.silence("TRUE", for_s=-1)
        async with await bus_client.connect([broker.url], identity="eve") as eve:
            data = b'{"covers": "TRUE", "for_s": 60}'
            answer = await eve.request("muster.pipeline.from.eve.request.silence", data)  # by hand
            with pytest.raises(errors.Forbidden, match="eve may not silence") as caught:
                rpc.result_of(answer.data)
            assert caught.value.exit_code == errors.Forbidden.exit_code
        stream = await user.open_stream(messages.DECISIONS_STREAM)
        lines = [messages.decode(message.data, messages.Decision) async for message in stream.read(1)]
        assert [(line.who, line.what, line.target, line.outcome.value) for line in lines] == [
            ("ann", "silence", "group = 'web'", "done"),
            ("ann", "unsilence", made.id, "done"),
            ("ann", "acknowledge", "down group:none", "refused"),
            ("ann", "silence", "-", "refused"),
            ("eve", "silence", "TRUE", "refused"),
        ]
