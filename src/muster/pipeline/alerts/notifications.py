"""Alert notifications to contacts by webhook and mail, to allowed addresses only.

    receivers:
      team-web: {webhook: "https://hooks.example/web"}
      on-call:  {mail: [ann@example.org]}

A webhook receives the alert as JSON in a POST request (`webhooks`); redirects are not followed.  Each contact
has its own queue and worker, so an unresponsive contact does not delay the others.  A failed notification is
retried with exponential back-off, `TRIES` times.  A full queue rejects new alerts.  For the end of an alert
it drops its oldest notification instead, because a contact that never learns of an end acts on outdated
information. Abandoned and dropped notifications are counted.  Notifications that are still queued when the
process ends are sent by the next process, so a notification may arrive twice, with the same ``id``.
"""

from __future__ import annotations

import asyncio
import collections
import email.message
import os
import smtplib
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib import parse

import msgspec

from muster.bus.http import client
from muster.core import errors, messages
from muster.core.formats import yaml
from muster.core.net import hosts
from muster.core.settings import loader, sections
from muster.core.telemetry import log
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import tracker, webhooks

doc = sections.field_doc

TRIES = 5
FIRST_WAIT_S = 1.0
TIMEOUT_S = 10.0
QUEUE_MAX = 10_000


class AlertContact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where notifications about alerts go."""

    webhook: Annotated[
        webhooks.Text,
        doc(
            'URL that receives alerts, or {secret: "file:PATH"}; the setting `pipeline.webhooks_allowed` '
            "lists the allowed addresses."
        ),
    ] = ""
    format: Annotated[
        webhooks.Format,
        doc(
            "What the webhook receives. alertmanager: as from Alertmanager to a webhook; "
            "alertmanager-api: as from Prometheus to Alertmanager."
        ),
    ] = "muster"
    headers: Annotated[
        dict[str, webhooks.Text],
        doc('Headers of the request: text, or {secret: "env:TOKEN", prefix: "Bearer "}.'),
    ] = {}
    body: Annotated[
        Any,
        doc(
            "Template of the request's JSON, in place of `format`. Placeholders: "
            + ", ".join(f"{{{name}}}" for name in webhooks.PLACEHOLDERS)
            + ", {labels.NAME}."
        ),
    ] = None
    mail: Annotated[
        tuple[str, ...], doc("Mail addresses; the setting `pipeline.mail_allowed` lists them.")
    ] = ()


def load(path: Path, settings: settings_.PipelineSettings) -> dict[str, AlertContact]:
    """Read the contacts of a rules file; `errors.InvalidInput` for an address that is not allowed."""
    receivers = parse_contacts(path.read_text("utf-8"), str(path))
    for name, receiver in receivers.items():
        refuse_forbidden(name, receiver, settings)
    return receivers


def parse_contacts(text: str, source: str) -> dict[str, AlertContact]:
    """The contacts of a rules file, whether or not they are allowed."""
    document = yaml.read(text, source)
    listed = document.get("receivers", {}) if isinstance(document, dict) else {}
    try:
        return msgspec.convert(listed, dict[str, AlertContact])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"{source}: receivers: {error}") from error


def refuse_forbidden(name: str, receiver: AlertContact, settings: settings_.PipelineSettings) -> None:
    if receiver.webhook:
        try:
            url = webhooks.text_of(receiver.webhook, _secret)
            webhooks.headers(receiver.headers, _secret)
            webhooks.check(receiver.body, _secret)
        except errors.MusterError as error:
            raise errors.InvalidInput(f"the receiver {name!r}: {error.message}", hint=error.hint) from error
        if not _url_allowed(url, settings.webhooks_allowed):
            shown = "the address in its secret" if isinstance(receiver.webhook, dict) else url
            raise errors.InvalidInput(
                f"the receiver {name!r}: {shown} is not allowed",
                hint="the setting pipeline.webhooks_allowed lists the allowed addresses",
            )
    for address in receiver.mail:
        if not _mail_allowed(address, settings.mail_allowed):
            raise errors.InvalidInput(
                f"the receiver {name!r}: mail to {address!r} is not allowed",
                hint="the setting pipeline.mail_allowed lists the allowed addresses",
            )
    if receiver.mail:
        mail_server(settings)


def _url_allowed(url: str, allowed: Sequence[str]) -> bool:
    """Same scheme, host and port, and a path below it. Comparing text prefixes would allow other hosts."""
    try:
        target = parse.urlsplit(url)
        # The receiver may decode the path before it resolves dot segments.
        steps = parse.unquote(target.path).replace("\\", "/").split("/")
        if target.scheme not in ("http", "https") or target.username or not {".", ".."}.isdisjoint(steps):
            return False
        for prefix in map(parse.urlsplit, allowed):
            same = (prefix.scheme, prefix.hostname, prefix.port) == (
                target.scheme,
                target.hostname,
                target.port,
            )
            if same and (target.path + "/").startswith(prefix.path.rstrip("/") + "/"):
                return True
    except ValueError:
        return False
    return False


def _mail_allowed(address: str, allowed: Sequence[str]) -> bool:
    if not address.isprintable() or address.count("@") != 1 or any(mark in address for mark in " ,;<>\"'"):
        return False
    return address in allowed or f"@{address.partition('@')[2]}" in allowed


class AlertNotificationSender:
    def __init__(
        self,
        receivers: Mapping[str, AlertContact],
        settings: settings_.PipelineSettings,
        *,
        unsent: Sequence[tracker.AlertNotification] = (),
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.receivers = receivers
        self.settings = settings
        self._queues: dict[
            str, collections.OrderedDict[str, tracker.AlertNotification]
        ] = {  # by receiver, by id
            name: collections.OrderedDict() for name in receivers
        }
        self._lock = threading.Lock()  # of the queues: the event loop changes them, threads save them
        self._more = {name: asyncio.Event() for name in receivers}
        self._log = log.EventLog("pipeline")
        self.sent = self.failed = 0
        self._count = count
        for notification in unsent:
            self.add(notification)

    def add(self, notification: tracker.AlertNotification) -> None:
        for name in notification.receivers:
            queue = self._queues.get(name)
            if queue is None or notification.id in queue:
                continue
            if len(queue) >= QUEUE_MAX:
                self._fail()
                self._log.warning(
                    "notification-dropped", receiver=name, notification=notification.id, queued=len(queue)
                )
                if not _is_end(notification):
                    continue
                beginnings = (id for id, queued in queue.items() if not _is_end(queued))
                with self._lock:
                    del queue[next(beginnings, next(iter(queue)))]
            with self._lock:
                queue[notification.id] = notification
            self._more[name].set()

    def _fail(self) -> None:
        self.failed += 1
        self._count("notifications-not-sent")

    def unsent(self) -> list[tracker.AlertNotification]:
        """Each with the contacts that have not received it yet. Also called in threads, to save the state."""
        pending: dict[str, tuple[tracker.AlertNotification, list[str]]] = {}
        for name, queue in self._queues.items():
            with self._lock:
                queued = list(queue.items())
            for id, notification in queued:
                pending.setdefault(id, (notification, []))[1].append(name)
        return [
            tracker.AlertNotification(notification.alert, tuple(names))
            for notification, names in pending.values()
        ]

    async def run(self, save: Callable[[], None]) -> None:
        """Send queued notifications until cancelled, in order for each contact."""
        async with asyncio.TaskGroup() as workers:
            for name in self.receivers:
                workers.create_task(self._work(name, save), name=f"notifications for {name}")

    async def _work(self, name: str, save: Callable[[], None]) -> None:
        receiver, queue, more = self.receivers[name], self._queues[name], self._more[name]
        while True:
            await more.wait()
            more.clear()
            while queue:
                id, notification = next(iter(queue.items()))
                try:
                    await self._send(name, receiver, notification)
                except Exception as error:  # noqa: BLE001  (an error of one contact must not end the pipeline)
                    self._fail()
                    self._log.error("notification-failed", receiver=name, notification=id, error=error)
                with self._lock:
                    queue.pop(id, None)
                await asyncio.to_thread(save)

    async def _send(self, name: str, receiver: AlertContact, notification: tracker.AlertNotification) -> None:
        transports: list[Callable[[], Awaitable[object]]] = []
        if receiver.webhook:
            transports.append(lambda: post(name, receiver, notification))
        if receiver.mail:
            transports.append(lambda: asyncio.to_thread(mail, receiver.mail, notification, self.settings))
        for transport in transports:
            wait_s = FIRST_WAIT_S
            for attempt in range(1, TRIES + 1):
                try:
                    await transport()
                    self.sent += 1
                    break
                except (OSError, smtplib.SMTPException, errors.MusterError) as error:
                    self._log.warning(
                        "notification-not-sent", notification=notification.id, attempt=attempt, error=error
                    )
                    if attempt == TRIES:
                        self._fail()
                    else:
                        await asyncio.sleep(wait_s)
                        wait_s *= 2


def _is_end(notification: tracker.AlertNotification) -> bool:
    return notification.alert.state is messages.AlertState.RESOLVED


class WebhookRefused(errors.Unavailable):
    def __init__(self, status: int) -> None:
        super().__init__(f"the webhook returned HTTP status {status}")
        self.status = status


async def post(name: str, receiver: AlertContact, notification: tracker.AlertNotification) -> int:
    """Returns the HTTP status, which is one of success."""
    url, headers, body = await asyncio.to_thread(_request, name, receiver, notification)
    try:
        response = await client.post(url, body, headers=headers, timeout_s=TIMEOUT_S)
    except errors.MusterError as error:
        if not isinstance(receiver.webhook, dict):
            raise
        raise errors.Unavailable("the webhook does not respond") from error  # its address is a secret
    if not 200 <= response.status < 300:
        raise WebhookRefused(response.status)
    return response.status


def _request(
    name: str, receiver: AlertContact, notification: tracker.AlertNotification
) -> tuple[str, dict[str, str], bytes]:
    """URL, headers and body. Reads the secrets each time, since they may be rotated."""
    return (
        webhooks.text_of(receiver.webhook, _secret),
        webhooks.headers(receiver.headers, _secret),
        webhooks.body(receiver.format, receiver.body, name, notification, _secret),
    )


def _secret(reference: str) -> str:
    return loader.read_secret(reference, os.environ)


def mail(
    addresses: Sequence[str], notification: tracker.AlertNotification, settings: settings_.PipelineSettings
) -> None:
    alert = notification.alert
    message = email.message.EmailMessage()
    message["From"] = settings.mail_from
    message["To"] = ", ".join(addresses)
    message["Subject"] = _one_line(
        f"[{alert.severity.value}] {alert.state.value}: {alert.rule} {alert.about}"
    )
    facts: dict[str, Any] = {"value": alert.value, "id": notification.id, **alert.labels}
    lines = [
        _one_line(alert.reason),
        "",
        *(_one_line(f"{key}: {value}") for key, value in facts.items() if value is not None),
    ]
    message.set_content("\n".join(lines))
    host, port = mail_server(settings)
    security = settings.mail_security
    if security == "off" and not hosts.is_loopback(host):
        raise errors.InvalidInput("mail without TLS is allowed only to a server on loopback")
    tls = ssl.create_default_context()
    opened = (
        smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=tls)
        if security == "tls"
        else smtplib.SMTP(host, port, timeout=TIMEOUT_S)
    )
    with opened as server:
        if security == "starttls":
            server.starttls(context=tls)
        if settings.mail_user:
            server.login(settings.mail_user, loader.read_secret(settings.mail_password, os.environ))
        server.send_message(message)


def mail_server(settings: settings_.PipelineSettings) -> tuple[str, int]:
    """Host and port of the mail server."""
    host, _, port = settings.mail_server.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise errors.InvalidInput(
            f"pipeline.mail_server is {settings.mail_server!r}: expected host:port (mail.example.org:465)"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:200]
