"""Telling people: notices by webhook and by mail, to allowed addresses only.

    receivers:
      team-web: {webhook: "https://hooks.example/web"}
      on-call:  {mail: [ann@example.org]}

A webhook gets the alert as JSON in a POST; redirects are not followed.  A notice is queued, tried again with
growing waits, and given up, counted, after `TRIES`; what is still queued when the process ends is sent by the
next one.  So a notice may arrive twice, and its ``id`` says so.
"""

from __future__ import annotations

import asyncio
import collections
import email.message
import http.client
import os
import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib import parse

import msgspec

from muster.core import errors, hosts, log, yaml
from muster.core import settings as core_settings
from muster.pipeline import alerts
from muster.pipeline import settings as settings_

TRIES = 5
FIRST_WAIT_S = 1.0
TIMEOUT_S = 10.0
QUEUE_MAX = 10_000


class Receiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    webhook: str = ""
    mail: tuple[str, ...] = ()


def load(path: Path, settings: settings_.Pipeline) -> dict[str, Receiver]:
    """The receivers of a file of rules; `errors.InvalidInput` for an address that is not allowed."""
    told = yaml.read(path.read_text("utf-8"), str(path))
    listed = told.get("receivers", {}) if isinstance(told, dict) else {}
    try:
        found = msgspec.convert(listed, dict[str, Receiver])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"{path}: receivers: {error}") from error
    for name, receiver in found.items():
        refuse_forbidden(name, receiver, settings)
    return found


def refuse_forbidden(name: str, receiver: Receiver, settings: settings_.Pipeline) -> None:
    if receiver.webhook and not _url_allowed(receiver.webhook, settings.webhooks_allowed):
        raise errors.InvalidInput(
            f"the receiver {name!r}: {receiver.webhook} is not allowed",
            hint="pipeline.webhooks_allowed in the settings lists what is",
        )
    for address in receiver.mail:
        if not _mail_allowed(address, settings.mail_allowed):
            raise errors.InvalidInput(
                f"the receiver {name!r}: mail to {address!r} is not allowed",
                hint="pipeline.mail_allowed in the settings lists what is",
            )
    if receiver.mail and not settings.mail_server:
        raise errors.InvalidInput(f"the receiver {name!r}: there is no pipeline.mail_server in the settings")


def _url_allowed(url: str, allowed: Sequence[str]) -> bool:
    """Same scheme, host and port, and a path below: prefixes of text would let other hosts in."""
    try:
        wanted = parse.urlsplit(url)
        if wanted.scheme not in ("http", "https") or wanted.username or ".." in wanted.path.split("/"):
            return False
        for one in map(parse.urlsplit, allowed):
            same = (one.scheme, one.hostname, one.port) == (wanted.scheme, wanted.hostname, wanted.port)
            if same and (wanted.path + "/").startswith(one.path.rstrip("/") + "/"):
                return True
    except ValueError:
        return False
    return False


def _mail_allowed(address: str, allowed: Sequence[str]) -> bool:
    if not address.isprintable() or address.count("@") != 1 or any(mark in address for mark in " ,;<>\"'"):
        return False
    return address in allowed or f"@{address.partition('@')[2]}" in allowed


class Sender:
    def __init__(
        self,
        receivers: Mapping[str, Receiver],
        settings: settings_.Pipeline,
        *,
        unsent: Sequence[alerts.Notice] = (),
    ) -> None:
        self._receivers = receivers
        self._settings = settings
        self._queue = collections.deque(unsent, maxlen=QUEUE_MAX)
        self._more = asyncio.Event()
        self._log = log.Events("pipeline")
        self.sent = self.failed = 0
        if unsent:
            self._more.set()

    def add(self, notice: alerts.Notice) -> None:
        if notice.id not in {one.id for one in self._queue}:
            self._queue.append(notice)
            self._more.set()

    def unsent(self) -> list[alerts.Notice]:
        return list(self._queue)

    async def run(self, save: Callable[[], None]) -> None:
        """Send what is queued, one after the other, until cancelled."""
        while True:
            await self._more.wait()
            while self._queue:
                notice = self._queue[0]
                for name in notice.receivers:
                    if receiver := self._receivers.get(name):
                        await self._send(receiver, notice)
                self._queue.popleft()
                await asyncio.to_thread(save)
            self._more.clear()

    async def _send(self, receiver: Receiver, notice: alerts.Notice) -> None:
        ways: list[Callable[[], None]] = []
        if receiver.webhook:
            ways.append(lambda: post(receiver.webhook, notice))
        if receiver.mail:
            ways.append(lambda: mail(receiver.mail, notice, self._settings))
        for way in ways:
            wait_s = FIRST_WAIT_S
            for attempt in range(1, TRIES + 1):
                try:
                    await asyncio.to_thread(way)
                    self.sent += 1
                    break
                except (
                    OSError,
                    http.client.HTTPException,
                    smtplib.SMTPException,
                    errors.MusterError,
                ) as error:
                    self._log.warning("notice-not-sent", notice=notice.id, attempt=attempt, error=error)
                    if attempt == TRIES:
                        self.failed += 1
                    else:
                        await asyncio.sleep(wait_s)
                        wait_s *= 2


def post(url: str, notice: alerts.Notice) -> None:
    parts = parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    path = parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    try:
        connection.request(
            "POST",
            path,
            body=msgspec.json.encode({"id": notice.id, "alert": notice.alert}),
            headers={"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        answer.read(64 << 10)
        if not 200 <= answer.status < 300:
            raise errors.Unavailable(f"the webhook answered {answer.status}")
    finally:
        connection.close()


def mail(addresses: Sequence[str], notice: alerts.Notice, settings: settings_.Pipeline) -> None:
    one = notice.alert
    message = email.message.EmailMessage()
    message["From"] = settings.mail_from
    message["To"] = ", ".join(addresses)
    message["Subject"] = _one_line(f"[{one.level.value}] {one.state.value}: {one.rule} {one.about}")
    facts: dict[str, Any] = {"value": one.value, "id": notice.id, **one.labels}
    lines = [
        _one_line(one.reason),
        "",
        *(_one_line(f"{key}: {value}") for key, value in facts.items() if value is not None),
    ]
    message.set_content("\n".join(lines))
    host, _, port = settings.mail_server.rpartition(":")
    security = settings.mail_security
    if security == "off" and not hosts.is_loopback(host):
        raise errors.InvalidInput("mail without TLS goes only to a server on loopback")
    tls = ssl.create_default_context()
    opened = (
        smtplib.SMTP_SSL(host, int(port), timeout=TIMEOUT_S, context=tls)
        if security == "tls"
        else smtplib.SMTP(host, int(port), timeout=TIMEOUT_S)
    )
    with opened as server:
        if security == "starttls":
            server.starttls(context=tls)
        if settings.mail_user:
            server.login(settings.mail_user, core_settings.read_secret(settings.mail_password, os.environ))
        server.send_message(message)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:200]
