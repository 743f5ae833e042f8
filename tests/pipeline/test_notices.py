"""Notifications by webhook and mail, over real sockets on loopback."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline import settings
from muster.pipeline.alerts import notifications, tracker
from muster.testing.eventually import eventually

ALERT = messages.Alert(
    rule="hot",
    about="node:a\r\nBcc: eve@evil.example",
    severity=messages.Severity.CRITICAL,
    state=AlertState.FIRING,
    since_ms=1,
    at_ms=2,
    value=97.0,
    reason="node:a is hot",
)
NOTICE = tracker.AlertNotification(ALERT, ("team",))


async def not_saved() -> None:
    pass


@contextlib.asynccontextmanager
async def serving(handle):
    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader, writer):
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def sending(contact: notifications.AlertContact, pipeline_settings: settings.PipelineSettings, **more):
    sender = notifications.AlertNotificationSender({"team": contact}, pipeline_settings, **more)
    task = asyncio.create_task(sender.run(not_saved))
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_webhook_gets_the_alert_and_is_asked_again_when_it_fails(monkeypatch):
    monkeypatch.setattr(notifications, "FIRST_WAIT_S", 0.01)
    bodies: list[bytes] = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        status = b"500 no" if len(bodies) == 1 else b"204 ok"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with serving(handle) as port:
        contact = notifications.AlertContact(webhook=f"http://127.0.0.1:{port}/web")
        async with sending(contact, settings.PipelineSettings()) as sender:
            sender.add(NOTICE)
            sender.add(NOTICE)  # once is enough
            await eventually(lambda: not sender.unsent() and sender.sent)
    assert len(bodies) == 2
    assert msgspec.json.decode(bodies[1])["alert"]["rule"] == "hot"
    assert (sender.sent, sender.failed) == (1, 0)


async def test_mail_contains_the_reason_and_its_headers_cannot_be_forged():
    lines: list[str] = []

    async def handle(reader, writer):
        writer.write(b"220 here\r\n")
        in_data = False
        while line := await reader.readline():
            text = line.decode().rstrip("\r\n")
            lines.append(text)
            if in_data:
                if text == ".":
                    in_data = False
                    writer.write(b"250 taken\r\n")
                continue
            if text.upper() == "DATA":
                in_data = True
                writer.write(b"354 go on\r\n")
            elif text.upper() == "QUIT":
                writer.write(b"221 bye\r\n")
                await writer.drain()
                return
            else:
                writer.write(b"250 fine\r\n")
            await writer.drain()

    async with serving(handle) as port:
        pipeline_settings = settings.PipelineSettings(mail_server=f"127.0.0.1:{port}", mail_security="off")
        async with sending(
            notifications.AlertContact(mail=("ann@example.org",)), pipeline_settings, unsent=[NOTICE]
        ) as sender:
            await eventually(lambda: sender.sent)
    assert any(line.startswith("Subject: [critical] firing: hot node:a") for line in lines)
    assert not any(line.startswith("Bcc") for line in lines)
    assert "node:a is hot" in lines
    recipients = [line.lower() for line in lines if line.lower().startswith("rcpt")]
    assert recipients == ["rcpt to:<ann@example.org>"]


def notice(number: int, state: AlertState = AlertState.FIRING, *contacts: str) -> tracker.AlertNotification:
    alert = msgspec.structs.replace(ALERT, about=f"node:{number}", state=state)
    return tracker.AlertNotification(alert, contacts or ("team",))


async def test_a_full_queue_drops_and_counts_new_alerts_but_takes_their_ends(monkeypatch):
    monkeypatch.setattr(notifications, "QUEUE_MAX", 3)
    counted: list[str] = []
    sender = notifications.AlertNotificationSender(
        {"team": notifications.AlertContact(webhook="https://hooks.example")},
        settings.PipelineSettings(),
        count=counted.append,
    )
    for number in range(4):
        sender.add(notice(number))
    assert [notification.alert.about for notification in sender.unsent()] == ["node:0", "node:1", "node:2"]
    sender.add(notice(0, AlertState.RESOLVED))
    assert [notification.alert.about for notification in sender.unsent()] == ["node:1", "node:2", "node:0"]
    assert counted == ["notifications-not-sent"] * 2
    assert sender.failed == 2


async def test_of_a_full_queue_beginnings_are_dropped_before_ends(monkeypatch):
    monkeypatch.setattr(notifications, "QUEUE_MAX", 3)
    sender = notifications.AlertNotificationSender(
        {"team": notifications.AlertContact(webhook="https://hooks.example")}, settings.PipelineSettings()
    )
    for added in (notice(0, AlertState.RESOLVED), notice(1), notice(2)):
        sender.add(added)
    for number, left in ((1, [0, 2, 1]), (2, [0, 1, 2]), (3, [1, 2, 3])):
        sender.add(notice(number, AlertState.RESOLVED))
        assert [sent.alert.about for sent in sender.unsent()] == [f"node:{each}" for each in left]


class Transport:
    """Replaces what sends: a contact accepts notifications unless it refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: Callable[[str, str], bool] = lambda to, about: False  # to: an address, about: an alert
        self.attempts = 0
        self.sent: list[tuple[str, str, str]] = []
        monkeypatch.setattr(notifications, "FIRST_WAIT_S", 0.0)
        monkeypatch.setattr(notifications, "post", self.post)
        monkeypatch.setattr(notifications, "mail", self.mail)

    def send(self, to: str, notification: tracker.AlertNotification) -> None:
        self.attempts += 1
        alert = notification.alert
        if self.refuses(to, alert.about):
            raise RuntimeError("refused")
        self.sent.append((to, alert.about, alert.state.value))

    async def post(
        self, name: str, contact: notifications.AlertContact, sent: tracker.AlertNotification
    ) -> None:
        self.send(str(contact.webhook), sent)

    def mail(self, addresses: tuple[str, ...], sent: tracker.AlertNotification, _: object) -> None:
        self.send(addresses[0], sent)


BOTH = notifications.AlertContact(webhook="hook", mail=("ann@example.org",))


async def test_an_alert_arrives_at_a_webhook_that_was_down_however_often_it_failed(monkeypatch):
    transport = Transport(monkeypatch)
    transport.refuses = lambda to, about: to == "hook"
    counted: list[str] = []
    async with sending(BOTH, settings.PipelineSettings(), count=counted.append) as sender:
        sender.add(notice(1))
        sender.add(notice(1, AlertState.RESOLVED))
        await eventually(lambda: [to for to, *_ in transport.sent] == ["ann@example.org"] * 2)
        await eventually(lambda: transport.attempts > 50)
        (failing,) = sender.failing()
        assert (failing.name, failing.transport, failing.waiting) == ("team", "webhook", 2)
        assert (failing.reason, failing.since_ms > 0) == ("refused", True)
        stored = sender.unsent()
        assert {sent.transport for sent in stored} == {"webhook"}
        transport.refuses = lambda to, about: False
        await eventually(lambda: not sender.unsent())
        assert not sender.failing()
    assert not counted
    at_webhook = [state for to, _, state in transport.sent if to == "hook"]
    assert at_webhook == ["firing", "resolved"]
    transport.sent.clear()
    async with sending(BOTH, settings.PipelineSettings(), unsent=stored) as sender:  # after a restart
        await eventually(lambda: not sender.unsent())
    assert {to for to, *_ in transport.sent} == {"hook"}


async def test_a_notification_that_a_contact_never_accepts_delays_no_others_and_is_given_up(monkeypatch):
    transport = Transport(monkeypatch)
    transport.refuses = lambda to, about: about == "node:1"
    counted: list[str] = []
    async with sending(BOTH, settings.PipelineSettings(), count=counted.append) as sender:
        for number in (1, 2, 3):
            sender.add(notice(number))
        await eventually(lambda: len(transport.sent) == 4)
        assert {about for _, about, _ in transport.sent} == {"node:2", "node:3"}
        monkeypatch.setattr(notifications, "RETRY_S", 0.0)
        await eventually(lambda: not sender.unsent())
    assert counted == ["notifications-not-sent"] * 2


async def test_after_a_restart_no_contact_gets_an_end_before_its_beginning(monkeypatch):
    transport = Transport(monkeypatch)
    transport.refuses = lambda to, about: to == "late"
    contacts = {name: notifications.AlertContact(webhook=name) for name in ("ahead", "late")}
    sender = notifications.AlertNotificationSender(contacts, settings.PipelineSettings())
    task = asyncio.create_task(sender.run(not_saved))
    sender.add(notice(1, AlertState.FIRING, *contacts))
    await eventually(lambda: [sent.contacts for sent in sender.unsent()] == [("late",)])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sender.add(notice(1, AlertState.RESOLVED, *contacts))  # the process ends before it is sent
    later = notifications.AlertNotificationSender(
        contacts, settings.PipelineSettings(), unsent=sender.unsent()
    )
    states = [sent.alert.state.value for sent in later.unsent() if sent.contacts == ("late",)]
    assert states == ["firing", "resolved"]


def test_a_notification_for_a_contact_that_was_removed_is_counted():
    counted: list[str] = []
    notifications.AlertNotificationSender(
        {}, settings.PipelineSettings(), unsent=[NOTICE], count=counted.append
    )
    assert counted == ["notifications-not-sent"]


async def test_a_receiver_that_does_not_answer_delays_no_other(monkeypatch):
    silent = asyncio.Event()
    transport = Transport(monkeypatch)
    send = transport.post

    async def post(name: str, *more: Any) -> None:
        if name == "silent":
            await silent.wait()
        await send(name, *more)

    monkeypatch.setattr(notifications, "post", post)
    contacts = {name: notifications.AlertContact(webhook=name) for name in ("silent", "team")}
    sender = notifications.AlertNotificationSender(contacts, settings.PipelineSettings())
    task = asyncio.create_task(sender.run(not_saved))
    sender.add(notice(1, AlertState.FIRING, "silent", "team"))
    await eventually(lambda: [notification.contacts for notification in sender.unsent()] == [("silent",)])
    silent.set()
    await eventually(lambda: not sender.unsent())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("server", ["mailhost", "mailhost:", ":25", "mailhost:x", "mailhost:70000"])
def test_a_mail_server_without_a_port_is_refused_when_receivers_are_read(server):
    pipeline_settings = settings.PipelineSettings(mail_server=server, mail_allowed=("@example.org",))
    with pytest.raises(errors.InvalidInput, match="host:port"):
        notifications.refuse_forbidden(
            "team", notifications.AlertContact(mail=("ann@example.org",)), pipeline_settings
        )


def test_mail_without_tls_stays_on_this_machine():
    with pytest.raises(errors.InvalidInput, match="loopback"):
        notifications.mail(
            ("a@b.example",),
            NOTICE,
            settings.PipelineSettings(mail_server="mx.example:25", mail_security="off"),
        )


@pytest.mark.parametrize("path", ["..", "%2e%2e", ".%2E", "%2E.", "a/%2e%2e/..", "a%2f..%2f..", "%5c..", "."])
def test_a_webhook_does_not_leave_its_folder(path: str):
    contact = notifications.AlertContact(webhook=f"https://hooks.example/web/{path}/admin")
    allowed = settings.PipelineSettings(webhooks_allowed=("https://hooks.example/web",))
    with pytest.raises(errors.InvalidInput, match="not allowed"):
        notifications.refuse_forbidden("team", contact, allowed)
