"""Key/value buckets: each is a stream that retains the last value of every key.

The revision of a key is the sequence of its value in the stream, so revisions of a bucket only grow,
deletions included. Deleted and expired keys leave a marker for some time, which notifies watchers. The layout
is that of the NATS tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
from collections.abc import AsyncIterator
from typing import Protocol, Self

from muster.bus import api
from muster.core import errors, lifecycle, subjects

MARKER_TTL_S = 3600  # how long a deletion is visible to watchers that were disconnected
EXPIRY_MARKER_TTL_S = 60
RETRY_S = 0.25
MARKER_REASON = "Nats-Marker-Reason"  # the broker's own header on the marker of an expired key
EXPIRED = "MaxAge"

OPERATION = "KV-Operation"
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9_/-]+\Z")


def encode_key(key: str, *, pattern: bool = False) -> str:
    """Any string as the last levels of a subject, and back without loss.

    Dots separate levels; in each, a character that is not a letter, digit, ``_``, ``-`` or ``/`` becomes
    ``=`` and two hexadecimal digits for each byte; an empty level becomes ``=`` alone.
    """
    return ".".join(_encode_level(level, pattern) for level in key.split("."))


def _encode_level(level: str, pattern: bool) -> str:
    if _PLAIN.match(level) or (pattern and level in ("*", ">")):
        return level
    if not level:
        return "="
    return "".join(
        char
        if _PLAIN.match(char)
        else "".join(f"={byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
        for char in level
    )


def decode_key(encoded: str) -> str:
    return ".".join(_decode_level(level) for level in encoded.split("."))


def _decode_level(level: str) -> str:
    if "=" not in level:
        return level
    if level == "=":
        return ""
    raw = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), level).encode("latin-1")
    return raw.decode("utf-8", "surrogatepass")


def stream_settings(settings: api.KeyValueSettings) -> api.StreamSettings:
    """The stream that a bucket is."""
    bucket = subjects.token(settings.bucket)
    if settings.max_bytes <= 0 or not 1 <= settings.history <= 64:
        raise errors.InvalidInput(f"the bucket {bucket!r} needs a budget, and a history of 1 to 64")
    return api.StreamSettings(
        name=f"KV_{bucket}",
        subjects=(f"$KV.{bucket}.>",),
        max_bytes=settings.max_bytes,
        max_age_s=0,
        max_messages_per_subject=settings.history,
        on_full=api.FullPolicy.REFUSE,
        replicas=settings.replicas,
    )


class Mark(enum.Enum):
    """A place among the messages of a bucket."""

    REPLAY = "replay"
    """Here begins the last message of each key. The first replay is the initial one; another follows whenever
    messages may have been missed, for example after a reconnection."""
    CURRENT = "current"
    """Here ends the replay: everything that was stored when it began has been read."""


class BucketMessages(Protocol):
    """The messages of (part of) a bucket: replays of the last of each key, and the new ones after each."""

    async def step(self) -> api.StoredMessage | Mark: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


class BucketStream(api.Stream, Protocol):
    """The functions of a stream that a bucket uses."""

    def last_of_each(self, pattern: str, *, headers_only: bool) -> BucketMessages: ...
    def check_open(self) -> None:
        """Raise an error if the connection is closed for good."""
        ...


class StreamKeyValue:
    """See `api.KeyValue`."""

    def __init__(self, bucket: str, stream: BucketStream) -> None:
        self._bucket = bucket
        self._stream = stream
        self._prefix = f"$KV.{bucket}."

    def __repr__(self) -> str:
        return f"<bucket {self._bucket!r}>"

    @property
    def bucket(self) -> str:
        return self._bucket

    async def get(self, key: str) -> api.KeyValueEntry | None:
        message = await self._stream.last_for(self._prefix + encode_key(key))
        entry = self.entry(message) if message is not None else None
        return entry if entry is not None and entry.value is not None else None

    def entry(self, message: api.StoredMessage) -> api.KeyValueEntry:
        gone = OPERATION in message.headers or MARKER_REASON in message.headers
        return api.KeyValueEntry(
            key=decode_key(message.subject[len(self._prefix) :]),
            value=None if gone else message.data,
            revision=message.sequence,
            created_at_ns=message.stored_at_ns,
            expired=message.headers.get(MARKER_REASON) == EXPIRED,
        )

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        revision = 0
        for _ in range(8):
            with contextlib.suppress(errors.Conflict):
                return await self.update(key, value, revision=revision, ttl_s=ttl_s)
            last = await self._stream.last_for(self._prefix + encode_key(key))
            if last is None:
                revision = 0
            elif self.entry(last).value is None:
                revision = last.sequence  # it is the marker of a deletion
            else:
                break
        raise errors.AlreadyExists(f"the key {key!r} of {self._bucket!r} is there already")

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._stream.publish(self._prefix + encode_key(key), value, ttl_s=ttl_s)

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return await self._stream.publish(
            self._prefix + encode_key(key), value, expected_last_subject_sequence=revision, ttl_s=ttl_s
        )

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self._stream.publish(
            self._prefix + encode_key(key),
            b"",
            headers={OPERATION: "DEL"},
            expected_last_subject_sequence=revision,
            ttl_s=MARKER_TTL_S,
        )

    async def keys(self, pattern: str = ">") -> list[str]:
        present: dict[str, bool] = {}
        async with self._follow(pattern, headers_only=True) as messages:
            while (message := await messages.step()) is not Mark.CURRENT:
                if isinstance(message, Mark):
                    present.clear()
                else:
                    entry = self.entry(message)
                    present[entry.key] = entry.value is not None
        return sorted(key for key, there in present.items() if there)

    async def holds(self, key: str) -> bool:
        """Whether the key exists now: waits until the storage responds."""
        while True:
            try:
                return await self.get(key) is not None
            except errors.Unavailable:
                self._stream.check_open()
                await asyncio.sleep(RETRY_S)

    async def watch(self, pattern: str = ">") -> StreamKeyWatch:
        return StreamKeyWatch(self, self._follow(pattern))

    def _follow(self, pattern: str, *, headers_only: bool = False) -> BucketMessages:
        return self._stream.last_of_each(
            self._prefix + encode_key(pattern, pattern=True), headers_only=headers_only
        )


class StreamKeyWatch(lifecycle.ClosingContext):
    """See `api.KeyWatch`.

    Markers of deletions expire, so after a disconnection the messages alone do not show which keys were
    deleted. Every replay is therefore compared with the keys reported so far: a key that is missing from it,
    and that the bucket does not contain, is reported as deleted.
    """

    def __init__(self, bucket: StreamKeyValue, messages: BucketMessages) -> None:
        self._bucket = bucket
        self._messages = messages
        self._initial = True
        self._reported: dict[str, tuple[int, int]] = {}  # key: revision and time of the value
        self._replayed: set[str] | None = None  # the keys of the replay under way
        self._missing: list[str] = []  # from the last replay; not yet known to be deleted
        self._revision = 0  # the highest one seen

    async def __aiter__(self) -> AsyncIterator[api.KeyValueEntry | None]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self._next()

    async def _next(self) -> api.KeyValueEntry | None:
        while True:
            if self._missing:
                key = self._missing[-1]
                held = await self._bucket.holds(key)
                self._missing.pop()
                if not held and self._reported.pop(key, None) is not None:
                    return api.KeyValueEntry(key, None, self._revision, created_at_ns=0)
                continue
            message = await self._messages.step()
            if message is Mark.REPLAY:
                self._replayed = set()
            elif message is Mark.CURRENT:
                self._missing = [key for key in self._reported if key not in (self._replayed or ())]
                self._replayed = None
                if self._initial:
                    self._initial = False
                    return None
            else:
                assert isinstance(message, api.StoredMessage)
                entry = self._bucket.entry(message)
                if self._replayed is not None:
                    self._replayed.add(entry.key)
                if self._is_news(entry):
                    return entry

    def _is_news(self, entry: api.KeyValueEntry) -> bool:
        newer = entry.revision > self._revision
        self._revision = max(self._revision, entry.revision)
        before = self._reported.get(entry.key)
        if entry.value is None:
            self._reported.pop(entry.key, None)
            return before is not None or (newer and not self._initial)
        # A lower revision is a change too: a bucket that was restored or created again counts from a lower
        # number.
        self._reported[entry.key] = now = (entry.revision, entry.created_at_ns)
        return now != before

    async def close(self) -> None:
        await self._messages.close()
