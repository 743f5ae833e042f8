"""Alert notifications to contacts by webhook and mail, to allowed addresses only.

A webhook receives the alert as JSON in a POST request (`webhooks`); redirects are not followed.  The webhook
and the mail of each contact have a queue and a worker of their own, so an unresponsive one does not delay the
others.  A failed notification is retried for `RETRY_S` with exponential back-off, those of other alerts in
turn with it; meanwhile the contact is listed in the progress, and an alert tells of it.  A full queue rejects
new alerts.  For the end of an alert it drops its oldest notification instead, because a contact that never
learns of an end acts on outdated information. Abandoned and dropped notifications are counted.  Notifications
that are still queued when the process ends are sent by the next process, so a notification may arrive twice,
with the same ``id``.
"""

from __future__ import annotations

import asyncio
import collections
import email.message
import os
import smtplib
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib import parse

import msgspec

from muster.bus.http import client
from muster.core import errors, files, messages
from muster.core.formats import yaml
from muster.core.net import hosts
from muster.core.settings import loader, sections
from muster.core.telemetry import log
from muster.pipeline import protocol
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import rules, tracker, webhooks

doc = sections.field_doc

FIRST_WAIT_S = 1.0  # doubled with each failure in a row
WAIT_MAX_S = 60.0  # a contact that is back receives what waits after this time at the latest
RETRY_S = 6 * 3600.0
FORMER_KEY = "receivers"  # of the contacts in the files of version 0.1.0
SAVE_S = 1.0  # not after each: the state has all that waits for other contacts
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


def load_rules(
    settings: settings_.PipelineSettings,
) -> tuple[tuple[rules.AlertRule, ...], dict[str, AlertContact]]:
    """The rules of the setting ``pipeline.rules``, and the contacts that they name. Blocks."""
    if not settings.rules:
        return (), {}
    path = files.expanded(settings.rules)
    known = rules.load(path)
    contacts = load(path, settings)
    for rule in known:
        for name in rule.notify:
            if name not in contacts:
                raise errors.InvalidInput(
                    f"{path}: the rule {rule.name!r} notifies {name!r}, which is not defined"
                )
    return known, contacts


def load(path: Path, settings: settings_.PipelineSettings) -> dict[str, AlertContact]:
    """Read the contacts of a rules file; `errors.InvalidInput` for an address that is not allowed."""
    contacts = parse_contacts(path.read_text("utf-8"), str(path))
    for name, contact in contacts.items():
        refuse_forbidden(name, contact, settings)
    return contacts


def parse_contacts(text: str, source: str) -> dict[str, AlertContact]:
    """The contacts of a rules file, whether or not they are allowed."""
    document = yaml.read(text, source)
    listed = document.get("contacts", document.get(FORMER_KEY, {})) if isinstance(document, dict) else {}
    try:
        return msgspec.convert(listed, dict[str, AlertContact])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"{source}: contacts: {error}") from error


def refuse_forbidden(name: str, contact: AlertContact, settings: settings_.PipelineSettings) -> None:
    if contact.webhook:
        try:
            url = webhooks.text_of(contact.webhook, _secret)
            webhooks.headers(contact.headers, _secret)
            webhooks.check(contact.body, _secret)
        except errors.MusterError as error:
            raise errors.InvalidInput(f"the contact {name!r}: {error.message}", hint=error.hint) from error
        if not _url_allowed(url, settings.webhooks_allowed):
            shown = "the address in its secret" if isinstance(contact.webhook, dict) else url
            raise errors.InvalidInput(
                f"the contact {name!r}: {shown} is not allowed",
                hint="the setting pipeline.webhooks_allowed lists the allowed addresses",
            )
    for address in contact.mail:
        if not _mail_allowed(address, settings.mail_allowed):
            raise errors.InvalidInput(
                f"the contact {name!r}: mail to {address!r} is not allowed",
                hint="the setting pipeline.mail_allowed lists the allowed addresses",
            )
    if contact.mail:
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


class _Queue:
    """What one transport of a contact has to send, and its failures since its last success."""

    def __init__(self, contact: str, transport: str) -> None:
        self.contact, self.transport = contact, transport
        self.waiting: collections.OrderedDict[str, tracker.AlertNotification] = collections.OrderedDict()
        self.added_s: dict[str, float] = {}
        self.more = asyncio.Event()
        self.failures = 0
        self.failing_since_ms = 0
        self.reason = ""


class AlertNotificationSender:
    def __init__(
        self,
        contacts: Mapping[str, AlertContact],
        settings: settings_.PipelineSettings,
        *,
        unsent: Sequence[tracker.AlertNotification] = (),
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.contacts = contacts
        self.settings = settings
        self._queues = [
            _Queue(name, transport)
            for name, contact in contacts.items()
            for transport, address in (("webhook", contact.webhook), ("mail", contact.mail))
            if address
        ]
        self._log = log.EventLog("pipeline")
        self.sent = self.failed = 0
        self._count = count
        for notification in unsent:
            self.add(notification)

    def add(self, notification: tracker.AlertNotification) -> None:
        for name in notification.contacts:
            if name not in self.contacts:  # the one that the alert fired for is no longer in the file
                self._drop(name, notification.id, "there is no such contact")
        for queue in self._queues:
            is_meant = notification.transport in ("", queue.transport)
            if queue.contact in notification.contacts and is_meant:
                self._enqueue(queue, notification)

    def _enqueue(self, queue: _Queue, notification: tracker.AlertNotification) -> None:
        waiting = queue.waiting
        if notification.id in waiting:
            return
        if len(waiting) >= QUEUE_MAX:
            self._drop(queue.contact, notification.id, f"{len(waiting)} are queued")
            if not _is_end(notification):
                return
            beginnings = (id for id, queued in waiting.items() if not _is_end(queued))
            del waiting[next(beginnings, next(iter(waiting)))]
        waiting[notification.id] = notification
        queue.added_s[notification.id] = time.monotonic()
        queue.more.set()

    def _drop(self, name: str, id: str, reason: object) -> None:
        self.failed += 1
        self._count("notifications-not-sent")
        self._log.error("notification-dropped", contact=name, notification=id, reason=reason)

    def unsent(self) -> list[tracker.AlertNotification]:
        """By contact, in the order of its queue."""
        return [
            tracker.AlertNotification(notification.alert, (queue.contact,), queue.transport)
            for queue in self._queues
            for notification in queue.waiting.values()
        ]

    def failing(self) -> tuple[protocol.FailingContact, ...]:
        """The contacts that do not accept notifications at present."""
        return tuple(
            protocol.FailingContact(
                name=queue.contact,
                transport=queue.transport,
                since_ms=queue.failing_since_ms,
                waiting=len(queue.waiting),
                reason=queue.reason,
            )
            for queue in self._queues
            if queue.failures
        )

    async def run(self, save: Callable[[], Awaitable[None]]) -> None:
        """Send queued notifications until cancelled, in order for each alert and contact."""
        async with asyncio.TaskGroup() as workers:
            for queue in self._queues:
                workers.create_task(self._work(queue, save), name=f"notifications for {queue.contact}")

    async def _work(self, queue: _Queue, save: Callable[[], Awaitable[None]]) -> None:
        saved_s = 0.0
        while True:
            await queue.more.wait()
            queue.more.clear()
            while queue.waiting:
                id, notification = next(iter(queue.waiting.items()))
                try:
                    await self._send(queue, notification)
                except Exception as error:  # noqa: BLE001  (an error of one contact must not end the pipeline)
                    self._failed(queue, id, notification, error)
                    await asyncio.sleep(min(FIRST_WAIT_S * 2.0 ** min(queue.failures - 1, 30), WAIT_MAX_S))
                    continue
                self.sent += 1
                queue.failures = 0
                self._remove(queue, id)
                if not queue.waiting or time.monotonic() - saved_s > SAVE_S:
                    await save()
                    saved_s = time.monotonic()

    def _remove(self, queue: _Queue, id: str) -> None:
        queue.waiting.pop(id, None)
        queue.added_s.pop(id, None)

    def _failed(
        self, queue: _Queue, id: str, notification: tracker.AlertNotification, error: Exception
    ) -> None:
        if not queue.failures:
            queue.failing_since_ms = time.time_ns() // 1_000_000
        queue.failures += 1
        queue.reason = (str(error) or type(error).__name__)[:500]
        self._log.warning(
            "notification-not-sent",
            contact=queue.contact,
            notification=id,
            attempt=queue.failures,
            error=error,
        )
        if time.monotonic() - queue.added_s[id] > RETRY_S:
            self._remove(queue, id)
            self._drop(queue.contact, id, error)
            return
        # A notification that the contact never accepts must not delay those of other alerts.
        alert = notification.alert
        same = [
            later
            for later, other in queue.waiting.items()
            if (other.alert.rule, other.alert.about) == (alert.rule, alert.about)
        ]
        for later in same:
            queue.waiting.move_to_end(later)

    async def _send(self, queue: _Queue, notification: tracker.AlertNotification) -> None:
        contact = self.contacts[queue.contact]
        if queue.transport == "mail":
            await asyncio.to_thread(mail, contact.mail, notification, self.settings)
        else:
            await post(queue.contact, contact, notification)


def _is_end(notification: tracker.AlertNotification) -> bool:
    return notification.alert.state is messages.AlertState.RESOLVED


class WebhookRefused(errors.Unavailable):
    def __init__(self, status: int) -> None:
        super().__init__(f"the webhook returned HTTP status {status}")
        self.status = status


async def post(name: str, contact: AlertContact, notification: tracker.AlertNotification) -> int:
    """Returns the HTTP status, which is one of success."""
    url, headers, body = await asyncio.to_thread(_request, name, contact, notification)
    try:
        response = await client.post(url, body, headers=headers, timeout_s=TIMEOUT_S)
    except errors.MusterError as error:
        if not isinstance(contact.webhook, dict):
            raise
        raise errors.Unavailable("the webhook does not respond") from error  # its address is a secret
    if not 200 <= response.status < 300:
        raise WebhookRefused(response.status)
    return response.status


def _request(
    name: str, contact: AlertContact, notification: tracker.AlertNotification
) -> tuple[str, dict[str, str], bytes]:
    """URL, headers and body. Reads the secrets each time, since they may be rotated."""
    return (
        webhooks.text_of(contact.webhook, _secret),
        webhooks.headers(contact.headers, _secret),
        webhooks.body(contact.format, contact.body, name, notification, _secret),
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
