"""Parses what a broker sends, one block at a time, and passes each message to its subscription.

A broker accepts nearly any byte in a subject and a reply subject, and delivers it: white space other than
spaces, control characters, wildcards, bytes that are not UTF-8. No client of Muster sends these, so such a
message is refused here, before any handler; and a message is read by a subscription only if its subject
matches. Neither ends the connection, and no error of a reader does.

The broker sends its replies to any subject that a client names, also those of processes: a stored message as
a copy, or a status. A subscription to Muster's own subjects receives neither.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from muster.bus import api, message_format
from muster.bus.client import broker_errors, counters
from muster.core import subjects
from muster.core.telemetry import log

if TYPE_CHECKING:
    from muster.bus.client import session

events = log.EventLog("bus")

Reader: TypeAlias = Callable[[bytes, bytes, bytes, bytes | None], None]  # subject, reply, data, raw headers

LINE_BYTES_MAX: Final = 1 << 20  # of a line without an end: the INFO of a broker may list many brokers


def _message(token: str) -> re.Pattern[bytes]:
    """The line before a message: without or with headers, subject, number of the subscription, reply subject,
    bytes of the headers, bytes of both. Without a reply subject, the bytes of headers are found in its place.
    The system account of a broker replies with an empty reply subject: two spaces.
    """
    subject = rf"{token}(?:\.{token})*+"
    line = rf"(H?)MSG ({subject}) (\d++) (?:({subject})? )?(?:(\d{{1,9}}+) )?(\d{{1,9}}+)\r\n"
    return re.compile(line.encode("latin-1"))


_OWN = f"{subjects.PREFIX}."
_COPY: Final = b"\r\nNats-Stream: "  # a header that the broker adds to a stored message

_ASCII = _message(message_format.TOKEN_ASCII)
_UTF_8 = _message(message_format.TOKEN)
_MALFORMED = _message(r"[^ \n]++")


class WireSubscription:
    """``read`` is called for each message while the socket is read; ``read_all`` instead for the subjects and
    data of a block.

    ``stored``: it receives messages of a stream, under the subjects that they are stored on; the subject of
    one that is malformed is empty.
    """

    __slots__ = (
        "command", "data", "is_active", "is_internal", "is_refused", "matches",
        "number", "read", "read_all", "subject", "subjects",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        subject: str,
        group: str,
        read: Reader | None,
        read_all: api.BulkHandler | None = None,
        *,
        stored: bool = False,
    ) -> None:
        self.number = number
        self.subject = subject
        self.command = f"SUB {subject} {group} {number}\r\n".encode()
        self.read = read
        self.read_all = read_all
        pattern = subjects.compiled(subject).pattern.encode()
        self.matches = None if stored else re.compile(pattern, re.DOTALL).match
        self.is_internal = not stored and subject.startswith(_OWN)
        self.is_active = True  # the broker is to have it
        self.is_refused = False
        self.subjects: list[bytes] = []
        self.data: list[bytes] = []


class WireSubscriptions:
    """The subscriptions of a connection; it counts what none of them receives."""

    def __init__(self, counts: counters.ConnectionCounters) -> None:
        self.by_number: dict[bytes, WireSubscription] = {}
        self._counts = counts

    def active(self) -> dict[int, WireSubscription]:
        return {held.number: held for held in self.by_number.values() if held.is_active}

    def refuse(self, why: counters.ConnectionCounter, subject: bytes) -> None:
        if self._counts.add(why) == 1:  # one line for a connection: others only count
            events.warning("message-refused", reason=why.value[2], subject=str(subject))

    def reader_failed(self, subject: bytes, error: BaseException) -> None:
        events.event("unreadable", level=logging.ERROR, error=error, subject=str(subject))


class BrokerParser:
    """Parses what arrives over one socket."""

    def __init__(self, over: session.BrokerSession, subscriptions: WireSubscriptions) -> None:
        self._session = over
        self.reads_messages = False  # before the login they are not of the protocol
        self._subscriptions = subscriptions
        self._kept: list[bytes] = []  # the beginning of something whose end has not come
        self._kept_bytes = 0
        self._wanted_bytes = 0  # with fewer than that there is nothing to do
        self.blocks = 0  # received: while it grows, the broker is alive
        self.has_ended = False  # what still arrives is not read

    def __repr__(self) -> str:
        return f"<parser with {self._kept_bytes} buffered bytes>"

    def feed(self, data: bytes) -> None:
        """Read the next block; `broker_errors.BrokerError` if it is not from a broker."""
        if self.has_ended:
            return
        self.blocks += 1
        if self._kept:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes < self._wanted_bytes:
                return
            data = b"".join(self._kept)
        self._wanted_bytes = 0
        rest = data[self._read(data) :]
        self._kept, self._kept_bytes = [rest] if rest else [], len(rest)

    def _read(self, data: bytes) -> int:
        """Read ``data`` up to the end of the last complete line or message, which is returned."""
        collecting: dict[int, WireSubscription] = {}
        at = 0
        try:
            while (at := self._read_messages(data, at, collecting)) < len(data):
                if self._wanted_bytes:
                    break
                end = data.find(b"\r\n", at)
                if end < 0:
                    if len(data) - at > LINE_BYTES_MAX:
                        raise broker_errors.BrokerError("a line of it has no end")
                    break
                self._read_line(data[at:end])
                at = end + 2
                if self.has_ended:
                    return len(data)
        finally:
            for subscription in collecting.values():
                self._deliver(subscription)
        return at

    def _read_messages(self, data: bytes, at: int, collecting: dict[int, WireSubscription]) -> int:
        subscriptions, size, usual = self._subscriptions.by_number, len(data), _ASCII.match
        while at < size and self.reads_messages:
            line = usual(data, at) or _unusual(data, at)
            if line is None:
                return at
            has_headers, subject, number, reply, header_bytes, all_bytes = line.groups()
            begin = body = line.end()
            if has_headers:
                if header_bytes is None:
                    header_bytes, reply = reply, None
                if header_bytes is None or not header_bytes.isdigit() or len(header_bytes) > 9:
                    return at
                body += int(header_bytes)
            elif header_bytes is not None:
                return at
            stop = begin + int(all_bytes)
            if stop + 2 > size:
                self._wanted_bytes = stop + 2 - at
                return at
            at = stop + 2
            subscription = subscriptions.get(number)
            is_malformed = line.re is _MALFORMED
            if is_malformed:
                self._subscriptions.refuse(counters.ConnectionCounter.MALFORMED, subject)
                subject = b""
            if subscription is None:
                continue
            if subscription.matches is not None and (is_malformed or subscription.matches(subject) is None):
                if not is_malformed:
                    self._subscriptions.refuse(counters.ConnectionCounter.MISROUTED, subject)
            elif has_headers and subscription.is_internal and _is_reply(data, begin, body):
                self._subscriptions.refuse(counters.ConnectionCounter.REPUBLISHED, subject)
            elif subscription.read is not None:
                try:
                    headers = data[begin:body] if has_headers else None
                    subscription.read(subject, reply or b"", data[body:stop], headers)
                except broker_errors.READER_ERRORS as error:
                    self._subscriptions.reader_failed(subject, error)
            else:
                collecting[subscription.number] = subscription
                subscription.subjects.append(subject)
                subscription.data.append(data[body:stop])
        return at

    def _deliver(self, subscription: WireSubscription) -> None:
        subjects, subscription.subjects = subscription.subjects, []
        data, subscription.data = subscription.data, []
        try:
            if subscription.read_all is not None:
                subscription.read_all(subjects, data)
        except broker_errors.READER_ERRORS as error:
            self._subscriptions.reader_failed(subjects[0], error)

    def _read_line(self, line: bytes) -> None:
        what, _, rest = line.partition(b" ")
        match what.strip():
            case b"PING":
                self._session.on_ping()
            case b"PONG":
                self._session.on_pong()
            case b"INFO":
                try:
                    info = json.loads(rest)
                except (ValueError, RecursionError) as error:
                    raise broker_errors.BrokerError(f"its INFO is not JSON: {error}") from error
                if not isinstance(info, dict):
                    raise broker_errors.BrokerError("its INFO is not an object")
                self._session.on_info(info)
            case b"-ERR":
                self._session.on_error(rest.strip().decode("utf-8", "replace").strip("'"))
            case b"+OK":
                pass
            case _:
                raise broker_errors.BrokerError(f"{line[:60]!r} is not its protocol")


def _is_reply(data: bytes, begin: int, body: int) -> bool:
    """Whether these are the headers of a broker's reply: with a status, or of a copy."""
    return data.startswith(b"NATS/1.0 ", begin) or data.find(_COPY, begin, body) >= 0


def _unusual(data: bytes, at: int) -> re.Match[bytes] | None:
    """A message whose subjects are not ASCII, or malformed."""
    line = _UTF_8.match(data, at)
    if line is not None:
        with contextlib.suppress(UnicodeDecodeError):
            line[0].decode()
            return line
    return _MALFORMED.match(data, at)
