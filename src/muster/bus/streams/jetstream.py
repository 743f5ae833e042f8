"""The JetStream interface: requests in JSON, error codes mapped to Muster errors, headers and times."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from typing import Any

import msgspec

from muster.bus import api, message_format
from muster.bus.client import connection, requests
from muster.bus.streams import key_value
from muster.core import errors

PREFIX = "$JS.API"
TRY_S = 3.0  # one attempt of a request; during an election a request can be lost
FIRST_TRY_S = 0.75  # of the first attempt; each later one takes twice as long, up to TRY_S

HEARD_S = 3.5  # a leader hears from its replicas every second; an election begins after at least 4 s
STALE_RETRY_S = 0.1

_NOT_FOUND = {10014, 10037, 10043, 10059}
_NOT_DELETED = 10057  # for any reason; that of a sequence beyond the end is the error of its storage
_CONFLICT = {10070, 10071, 10164}
_FULL = {10077}
_LIMIT = {10002, 10023, 10026, 10027, 10028, 10047, 10054, 10097, 10111, 10199}
_NOT_STORED = {10158, 10176, 10210, 10211}  # an id in process, an incomplete batch, too many open ones
DUPLICATE_IN_BATCH = 10201
NAME_IN_USE = 10058
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_decode_report = msgspec.json.Decoder(dict[str, Any]).decode
_MARKER = key_value.MARKER_REASON.encode()
_ADDED = b"\r\nNats-Stream: "  # begins the headers that the broker adds


class JetStreamRefused(errors.Refused):
    """An error of the broker for which there is no closer Muster error."""

    def __init__(self, message: str, *, err_code: int) -> None:
        super().__init__(message)
        self.err_code = err_code


class StreamFull(errors.LimitExceeded):
    """A stream's budget is used up, and it refuses rather than forgets."""


def error_of(report: dict[str, Any], about: str) -> errors.MusterError:
    err_code, code = report.get("err_code", 0), report.get("code", 0)
    text = f"{about}: {report.get('description', 'refused')}"
    if err_code in _NOT_FOUND or (err_code == _NOT_DELETED and text.endswith("EOF")):
        return errors.NotFound(text)
    if err_code in _CONFLICT:
        actual = re.search(r": (\d+)$", text)
        return errors.Conflict(text, actual=int(actual[1]) if actual else None)
    if err_code == DUPLICATE_IN_BATCH:
        return errors.AlreadyExists(text)
    if err_code in _FULL:
        return StreamFull(
            text,
            hint=("raise max_bytes, shorten max_age_s, or let the stream drop its oldest messages (on_full)"),
        )
    if err_code in _LIMIT:
        return errors.LimitExceeded(text)
    if err_code in _NOT_STORED or code == 503:
        return errors.Unavailable(text)
    if code == 404:
        return errors.NotFound(text)
    if code == 403:
        return errors.Forbidden(text)
    if code >= 500:
        return errors.Unavailable(text)
    return JetStreamRefused(text, err_code=err_code)


class JetStreamApi:
    """Requests to the storage of the domain."""

    def __init__(self, over: connection.NatsConnection) -> None:
        self.wire = over

    async def call(
        self,
        name: str,
        question: dict[str, Any] | None = None,
        *,
        timeout_s: float = api.DURABLE_TIMEOUT_S,
        try_s: float | None = None,
        removes: bool = False,
    ) -> dict[str, Any]:
        """The reply to ``$JS.API.<name>``. Waits for the end of an election.

        A request without a reply is repeated; every ``try_s`` if that is given: for one that must not run
        twice, pass a ``try_s`` as long as its timeout. One that ``removes`` something has succeeded when a
        repetition does not find it any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        body = json.dumps(question).encode() if question is not None else b""
        pause_s = 0.1
        wait_s, wait_s_max = (min(FIRST_TRY_S, TRY_S), TRY_S) if try_s is None else (try_s, try_s)
        in_doubt = False
        while True:
            left_s = deadline - loop.time()
            try:
                answer = await self.wire.requests.exchange(
                    f"{PREFIX}.{name}", body, timeout_s=max(0.01, min(wait_s, left_s))
                )
                report = _decode_report(answer.data)
                if "error" in report:
                    raise error_of(report["error"], name.lower().replace(".", " "))
                return report
            except errors.NotFound:
                if removes and in_doubt:
                    return {}
                raise
            except errors.TimedOut:
                in_doubt = True
                if left_s <= wait_s:
                    raise errors.TimedOut(
                        f"the brokers' storage did not respond within {timeout_s:g} s"
                    ) from None
                wait_s = min(2 * wait_s, wait_s_max)
            except requests.NoResponders as error:
                raise errors.Unavailable(
                    "this domain's brokers have no durable storage, or this identity may not use it",
                    hint="enable durable storage (JetStream) on at least one broker",
                ) from error
            except errors.Unavailable:
                if left_s <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(1.0, pause_s * 2)

    async def stream_info(self, name: str, *, timeout_s: float = api.DURABLE_TIMEOUT_S) -> dict[str, Any]:
        """The report of a stream by its leader.

        A leader that was frozen or cut off reports an old end until it hears of its successor, which takes
        a second after its return and as long as a partition lasts. It has not heard from most replicas for
        longer than an election needs, so such a report is not used.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            report = await self.call(f"STREAM.INFO.{name}", timeout_s=timeout_s)
            if has_majority(report.get("cluster") or {}):
                return report
            if asyncio.get_running_loop().time() > deadline:
                raise errors.Unavailable(f"the leader of {name!r} has not heard from most of its replicas")
            await asyncio.sleep(STALE_RETRY_S)


def has_majority(cluster: dict[str, Any]) -> bool:
    """Whether the leader has heard from most replicas. For one it never heard from, ``active`` is 0."""
    others = cluster.get("replicas") or []
    heard = sum(
        other.get("active", 0) < HEARD_S * 1e9 and bool(other.get("current") or other.get("active"))
        for other in others
    )
    return bool(2 * (heard + 1) > len(others) + 1)


def nanoseconds(stamp: str) -> int:
    """RFC 3339 in UTC, with up to nine digits of a second, as nanoseconds since 1970."""
    date_time, _, fraction = stamp.rstrip("Z").partition(".")
    day = datetime.date(int(date_time[:4]), int(date_time[5:7]), int(date_time[8:10])).toordinal()
    minutes = int(date_time[11:13]) * 60 + int(date_time[14:16])
    seconds = (day - _EPOCH_DAY) * 86_400 + minutes * 60 + int(date_time[17:19])
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)


def stored(data: bytes, raw_headers: bytes | None) -> api.StoredMessage:
    """The message of a direct read.

    The broker adds its headers after those of the message.  A message may have headers of the same names: a
    sender can choose them, and the broker's reply to such a read, sent to a subject of a stream, is stored
    with them.
    """
    raw = raw_headers or b""
    start = raw.rfind(_ADDED)
    own = message_format.decode_headers(raw[:start])
    added = message_format.decode_headers(b"NATS/1.0" + raw[start:])
    return api.StoredMessage(
        subject=added["Nats-Subject"],
        data=data,
        headers=public_headers(own),
        sequence=int(added["Nats-Sequence"]),
        stored_at_ns=nanoseconds(added["Nats-Time-Stamp"]),
        is_copy="Nats-Stream" in own,
    )


def public_headers(headers: dict[str, str]) -> dict[str, str]:
    """The headers without those of JetStream, except for the one with the reason of a marker."""
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith("Nats-") or name == key_value.MARKER_REASON
    }


def public_headers_of(raw: bytes | None) -> dict[str, str]:
    """Like `public_headers`, faster if all headers are those of JetStream."""
    if raw is None or (raw.count(b"\r\nNats-") == raw.count(b"\r\n") - 2 and _MARKER not in raw):
        return {}
    return public_headers(message_format.decode_headers(raw))


class DeliveryMetadata:
    """The metadata in the reply subject of a message delivered by a consumer."""

    __slots__ = ("consumer_sequence", "count", "pending", "sequence", "stored_at_ns")

    def __init__(self, reply: bytes) -> None:
        parts = reply.split(b".")
        # $JS.ACK.<stream>.<consumer>.<count>.<sequence>.<consumer sequence>.<time>.<pending>, or the same
        # with two tokens (domain, account) before the stream and possibly one more at the end.
        first = 4 if len(parts) == 9 else 6
        numbers = [int(part) for part in parts[first : first + 5]]
        self.count, self.sequence, self.consumer_sequence, self.stored_at_ns, self.pending = numbers
