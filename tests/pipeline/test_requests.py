"""Requests to the pipeline, over a real broker; no Spark is needed for them."""

import contextlib
import sys
import time

import msgspec
import pytest

from muster.bus.client import client as bus_client
from muster.bus.rpc import client as rpc
from muster.bus.rpc import server
from muster.core import errors, messages
from muster.pipeline import client, protocol, settings
from muster.pipeline.alerts import notifications, tracker
from muster.pipeline.job import request_handler
from tests.pipeline import test_notices, test_outcomes


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
            yield known.alert_tracker, user, known.sender


@pytest.mark.parametrize("count", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_thousands_of_open_alerts_are_listed(broker, tmp_path, count):
    """Issue 13, finding 1: without pages the answer was larger than a message, and none came."""
    down = [
        tracker.RuleVerdict("down", f"group:g{n:05}", True, 1000 + n % 7, group="g") for n in range(count)
    ]
    async with serving(broker, tmp_path) as (book, user, _):
        book.apply(down, 2000)
        started = time.monotonic()
        alerts = await client.PipelineClient(user).alerts()
        sys.stderr.write(f"\n{count:,} alerts in {time.monotonic() - started:.1f} s\n")
        assert [alert.about for alert in alerts] == [alert.about for alert in book.alerts()]
        assert len(alerts) == count


async def test_each_change_is_in_the_audit_for_every_sender(broker, tmp_path):
    async with serving(broker, tmp_path, operators=("ann",)) as (_, user, _):
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


async def test_a_test_notification_is_marked_ends_and_reports_the_status(broker, tmp_path):
    bodies: list[bytes] = []
    statuses = iter([b"202 ok", b"200 ok", b"403 no", b"202 ok", b"500 no"])

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 " + next(statuses) + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with (
        test_notices.serving(handle) as port,
        serving(broker, tmp_path, operators=("ann",)) as (_, user, sender),
    ):
        ask = client.PipelineClient(user)
        sender.settings = settings.PipelineSettings(mail_server="127.0.0.1:1", mail_security="off")
        url = f"http://127.0.0.1:{port}/"
        sender.contacts = {
            "team": notifications.AlertContact(webhook=url, body={"text": "{state} {summary} {labels.test}"}),
            "mail": notifications.AlertContact(mail=("ann@example.org",)),
        }
        assert await ask.test_contact("team") == [tracker.DeliveryResult("webhook", "sent", status=202)]
        text = "TEST: ann tests the contact team; nothing is wrong true"
        assert [msgspec.json.decode(body)["text"] for body in bodies] == [
            f"firing {text}",
            f"resolved {text}",
        ]
        (refused,) = await ask.test_contact("team")
        assert refused == tracker.DeliveryResult(
            "webhook", "failed", status=403, reason="the webhook returned HTTP status 403"
        )
        assert len(bodies) == 3, "the end of what did not begin is not sent"
        (unended,) = await ask.test_contact("team")
        assert (unended.outcome, unended.status) == ("failed", 500)
        (unsent,) = await ask.test_contact("mail")
        assert (unsent.transport, unsent.outcome, unsent.status) == ("mail", "failed", None)
        assert "refused" in unsent.reason
        with pytest.raises(errors.NotFound, match="no contact 'taem'") as caught:
            await ask.test_contact("taem")
        assert str(caught.value.hint).endswith(": mail, team")
        async with await bus_client.connect([broker.url], identity="eve") as eve:
            with pytest.raises(errors.Forbidden, match="eve may not test"):
                await client.PipelineClient(eve).test_contact("team")
        stream = await user.open_stream(messages.DECISIONS_STREAM)
        lines = [messages.decode(message.data, messages.Decision) async for message in stream.read(1)]
        assert [(line.who, line.what, line.target, line.outcome.value) for line in lines] == [
            ("ann", "alert-test", "team", "done"),
            ("ann", "alert-test", "team", "failed"),
            ("ann", "alert-test", "team", "failed"),
            ("ann", "alert-test", "mail", "failed"),
            ("ann", "alert-test", "taem", "refused"),
            ("eve", "alert-test", "team", "refused"),
        ]
        assert lines[0].details["webhook"] == "sent (HTTP status 202)"
        assert not sender.unsent()
