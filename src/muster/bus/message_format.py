"""The forms of subjects, headers and messages on their way into a stream: checked before anything is sent."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

from muster.bus import api
from muster.core import errors, subjects
from muster.core.telemetry import trace

MAX_SUBJECT_BYTES = 3500  # a protocol line has at most 4096 bytes, with other fields
MAX_ATOMIC = 1000  # messages in a batch: the broker's own limit
HEADERS_MAX = 1000  # of a message; further ones are not read
GARBLED_BYTES_MAX = 8 << 10  # of headers that are not text; the rest is not read

# One level of a subject: no space, control, dot or wildcard. Beyond ASCII, the bytes of UTF-8.
_SIGNS = r"!-)+,\-/-=?-~"
TOKEN_ASCII = f"[{_SIGNS}]++"
TOKEN = rf"[{_SIGNS}\x80-\xff]++"

_BAD_IN_SUBJECT = re.compile(r"[\x00-\x20\x7f]")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


@functools.lru_cache(maxsize=8192)
def check_subject(subject: str, *, wildcards: bool = False) -> None:
    """Reject subjects that the broker would misread. Cached: a process uses few subjects for many
    messages."""
    if not subject or _BAD_IN_SUBJECT.search(subject):
        raise errors.InvalidInput(f"{subject[:100]!r} cannot be a subject: empty, or holds space or control")
    if len(_utf8(subject)) > MAX_SUBJECT_BYTES:
        raise errors.InvalidInput(f"a subject of more than {MAX_SUBJECT_BYTES} bytes: {subject[:60]!r}…")
    tokens = subject.split(".")
    for place, token in enumerate(tokens):
        if not token:
            raise errors.InvalidInput(f"{subject!r} cannot be a subject: it has an empty level")
        if "*" in token or ">" in token:
            if not wildcards:
                raise errors.InvalidInput(f"{subject!r} names many subjects; to publish, name one")
            if len(token) > 1:
                raise errors.InvalidInput(f"{subject!r}: '*' and '>' stand for a level, not for a part of it")
            if token == ">" and place != len(tokens) - 1:
                raise errors.InvalidInput(f"{subject!r}: '>' can only be the last level")


def is_subject(text: str) -> bool:
    """Whether it is well-formed; replacement characters stand for bytes that are not text."""
    try:
        check_subject(text)
    except errors.InvalidInput:
        return False
    return "\ufffd" not in text


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidInput(f"{text[:100]!r} is not text: it holds half a character") from error


def reply_subject(subject: str, reply: str | None) -> str:
    """The reply subject of the message on ``subject``; see `api.Message.respond`."""
    if reply is None:
        raise errors.InvalidInput(f"the message on {subject!r} has no reply subject")
    if not subjects.may_reply(subject, reply):
        raise errors.InvalidInput(
            f"the message on {subject!r} names {reply[:100]!r} for its reply, which is not below "
            f"{subjects.reply_prefix(subject)!r}"
        )
    return reply


def publish_parts(
    subject: str, data: bytes, reply: str = "", raw_headers: bytes | None = None
) -> tuple[bytes, ...]:
    """A message in the form in which it is sent to a broker."""
    if raw_headers is None:
        return f"PUB {subject} {reply} {len(data)}\r\n".encode(), data, b"\r\n"
    head = f"HPUB {subject} {reply} {len(raw_headers)} {len(raw_headers) + len(data)}\r\n"
    return head.encode(), raw_headers, data, b"\r\n"


def encode_headers(headers: Mapping[str, str]) -> bytes:
    return b"NATS/1.0\r\n%b\r\n" % header_lines(headers)


def header_lines(headers: Mapping[str, str]) -> bytes:
    if len(headers) > HEADERS_MAX:
        raise errors.LimitExceeded(f"a message with {len(headers)} headers: the maximum is {HEADERS_MAX}")
    lines = ""
    for name, value in headers.items():
        _check_name(name)
        if "\r" in value or "\n" in value or value[:1].isspace() or value[-1:].isspace():
            raise errors.InvalidInput(
                f"the header {name} cannot hold line breaks or begin or end with space: {value[:60]!r}"
            )
        lines += f"{name}: {value}\r\n"
    return _utf8(lines)


@functools.lru_cache(maxsize=1024)
def _check_name(name: str) -> None:
    if not _HEADER_NAME.match(name):
        raise errors.InvalidInput(f"{name!r} cannot be the name of a header")


def decode_headers(raw: bytes | None) -> dict[str, str]:
    """Decode headers; the number of a status line is under ``Status`` and its text under ``Description``."""
    if not raw:
        return {}
    lines = header_text(raw).split("\r\n", HEADERS_MAX + 1)[: HEADERS_MAX + 1]
    headers: dict[str, str] = {}
    status = lines[0][8:].strip()
    if status:
        headers["Status"], _, headers["Description"] = status.partition(" ")
    for line in lines[1:]:
        if line:
            name, colon, value = line.partition(":")
            if colon:
                headers.setdefault(name, value.strip())  # as `ReceivedMessage.header` reads it
    return headers


def header_text(raw: bytes) -> str:
    """Any client may send a megabyte that is not text, which takes 30 ms to decode."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw[:GARBLED_BYTES_MAX].decode("utf-8", "replace")


def status_of(raw: bytes | None) -> int:
    """The number on the status line, 0 where there is none."""
    if raw is None or raw[8:9] != b" ":
        return 0
    digits = raw[9:12]
    return int(digits) if digits.isdigit() else 0


def check_group(group: str) -> None:
    if group and _BAD_IN_SUBJECT.search(group):
        raise errors.InvalidInput(f"{group!r} cannot be the name of a group")


def with_trace_headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """With the trace that the running task works for."""
    working_for = trace.current.get()
    if working_for is None:
        return headers or {}
    return trace.inject(working_for, headers)


def raw_headers(headers: api.Headers | None) -> bytes | None:
    """Encode headers, with the current trace."""
    if not headers and trace.current.get() is None:
        return None
    return encode_headers(with_trace_headers(headers))


def check_outgoing(message: api.OutgoingMessage) -> None:
    """Reject messages that a stream could not store as intended."""
    check_subject(message.subject)
    for name in message.headers:
        if name.lower().startswith("nats-"):
            raise errors.InvalidInput(f"the header {name!r} is the broker's own: use the named arguments")
    if message.ttl_s is not None:
        whole_seconds(message.ttl_s)


def whole_seconds(ttl_s: float) -> int:
    """A time to live as the broker counts it: rounded up, since forgetting late is safer than early."""
    if not 1 <= ttl_s < 10**9:
        raise errors.InvalidInput(f"a time to live of {ttl_s:g} s: the minimum is 1 s")
    return math.ceil(ttl_s)


def check_count(messages: int) -> None:
    if not 1 <= messages <= MAX_ATOMIC:
        raise errors.LimitExceeded(f"a batch of {messages} messages: 1 to {MAX_ATOMIC} can be stored at once")
