"""A message received from the broker."""

from __future__ import annotations

import functools
from typing import Protocol

from muster.bus import api, message_format
from muster.core.telemetry import trace


@functools.lru_cache(maxsize=64)
def _beginning(name: str) -> bytes:
    return f"NATS/1.0\r\n{name}:".encode()


class ReplyConnection(Protocol):
    """The connection over which a message arrived."""

    @property
    def has_room(self) -> bool: ...
    def send(self, subject: str, data: bytes, reply: str = "", raw_headers: bytes | None = None) -> bool: ...
    async def ease(self) -> None: ...
    def count_bad_trace(self, _: str) -> None: ...


class ReceivedMessage:
    """See `api.Message`. Headers are decoded at the first access."""

    __slots__ = ("_headers", "_raw_headers", "_wire", "data", "reply", "subject")

    def __init__(
        self,
        subject: str,
        reply: str | None,
        data: bytes,
        raw_headers: bytes | None,
        over: ReplyConnection,
    ) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self._raw_headers = raw_headers
        self._headers: dict[str, str] | None = None
        self._wire = over

    @property
    def size(self) -> int:
        return len(self.data) if self._raw_headers is None else len(self.data) + len(self._raw_headers)

    @property
    def headers(self) -> api.Headers:
        if self._headers is None:
            self._headers = message_format.decode_headers(self._raw_headers)
        return self._headers

    def header(self, name: str) -> str | None:
        raw = self._raw_headers
        if raw is None:
            return None
        beginning = _beginning(name)
        if self._headers is None and raw.startswith(beginning):  # the first, and mostly the only one
            at = len(beginning)
            return message_format.header_text(raw[at : raw.find(b"\r\n", at)]).strip()
        return self.headers.get(name)

    @property
    def trace(self) -> trace.TraceContext | None:
        # The first letter may be of either case; most messages have no headers at all.
        if self._raw_headers is None or b"raceparent" not in self._raw_headers:
            return None
        return trace.extract(self.headers, self._wire.count_bad_trace)

    async def respond(self, data: bytes, *, headers: api.Headers | None = None) -> None:
        reply = message_format.reply_subject(self.subject, self.reply)
        if self._wire.send(reply, data, "", message_format.raw_headers(headers)):
            await self._wire.ease()

    def respond_now(self, data: bytes) -> bool:
        reply = message_format.reply_subject(self.subject, self.reply)
        if not self._wire.has_room:
            return False
        self._wire.send(reply, data, "", message_format.raw_headers(None))
        return True

    def __repr__(self) -> str:
        return f"<message {self.subject!r}, {len(self.data)} bytes>"
