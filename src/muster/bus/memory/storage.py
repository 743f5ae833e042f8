"""The storage of the simulated bus: the content of streams on the quorum of brokers.

Plain data and rules; the clock is given.  Nothing here waits or is sent: `muster.bus.memory` does that.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence

from muster.bus import api, message_format
from muster.bus.streams import key_value
from muster.core import errors, subjects

OVERHEAD_BYTES = 34  # of a stored message, about the same as in NATS


def check_settings(settings: api.StreamSettings) -> None:
    subjects.token(settings.name)
    if settings.max_bytes <= 0:
        raise errors.InvalidInput(f"the stream {settings.name!r} needs a budget: max_bytes must be positive")
    for subject in settings.subjects:
        message_format.check_subject(subject, wildcards=True)


class SimulatedLog:
    """One stream."""

    def __init__(self, settings: api.StreamSettings, created_ns: int, *, markers: bool = False) -> None:
        self.settings = settings
        self.created_ns = created_ns
        self.markers = markers  # an expired message leaves a marker, as in key/value buckets
        self.messages: dict[int, api.StoredMessage] = {}
        self.last = 0
        self.bytes = 0
        self._by_subject: dict[str, deque[int]] = {}
        self._expiry: list[tuple[int, int]] = []  # a heap: when (in ns), sequence
        self._ids: dict[str, tuple[int, int]] = {}  # message id: sequence, when

    def covers(self, subject: str) -> bool:
        return any(subjects.matches(pattern, subject) for pattern in self.settings.subjects)

    def reconfigure(self, settings: api.StreamSettings) -> None:
        """To new settings, but for the budget."""
        there = self.settings
        self.settings = dataclasses.replace(
            settings,
            max_bytes=there.max_bytes,
            max_age_s=there.max_age_s,
            on_full=there.on_full,
            replicas=there.replicas,
        )
        for sequences in list(self._by_subject.values()):
            while 0 < settings.max_messages_per_subject < len(sequences):
                self.remove(sequences[0])
        self._keep_within_budget()

    def limit(self, *, max_bytes: int, max_age_s: float, on_full: api.FullPolicy, replicas: int) -> None:
        self.settings = dataclasses.replace(
            self.settings, max_bytes=max_bytes, max_age_s=max_age_s, on_full=on_full, replicas=replicas
        )
        if on_full is api.FullPolicy.DROP_OLDEST:
            self._keep_within_budget()

    def budget(self) -> api.StreamBudget:
        settings = self.settings
        return api.StreamBudget(
            settings.name,
            self.bytes,
            settings.max_bytes,
            len(self.messages),
            settings.on_full,
            settings.max_age_s,
            settings.replicas,
        )

    # Writing.

    def store(self, batch: Sequence[api.OutgoingMessage], now_ns: int) -> int:
        """All or none; the last one's sequence."""
        self.expire(now_ns)
        if self.settings.replicas == 1:  # like the broker: replicated streams check the id first
            for message in batch:
                self._check_expectations(message)
        known = [self._known(message.message_id, now_ns) for message in batch]
        if known[0] and known == list(range(known[0], known[0] + len(batch))):
            return api.Duplicate(known[-1])
        ids = [message.message_id for message in batch if message.message_id is not None]
        if any(known) or len(set(ids)) < len(ids):
            raise errors.AlreadyExists(f"{self.settings.name}: the batch contains a duplicate message id")
        for message in batch:
            self._check_expectations(message)
        self._check_room(batch)
        for message in batch:
            self._append(message, now_ns)
        return self.last

    def _known(self, message_id: str | None, now_ns: int) -> int:
        window_ns = round(self.settings.duplicate_window_s * 1e9)
        sequence, at_ns = self._ids.get(message_id or "", (0, 0))
        return sequence if sequence and now_ns - at_ns <= window_ns else 0

    def _check_expectations(self, message: api.OutgoingMessage) -> None:
        expectations = (
            (message.expected_last_sequence, self.last),
            (message.expected_last_subject_sequence, self.last_of(message.subject)),
        )
        for expected, actual in expectations:
            if expected is not None and expected != actual:
                raise errors.Conflict(f"{self.settings.name}: wrong last sequence: {actual}", actual=actual)

    def _check_room(self, batch: Sequence[api.OutgoingMessage]) -> None:
        if self.settings.on_full is not api.FullPolicy.REFUSE:
            return
        size = sum(_size(message) for message in batch)
        if self.bytes + size > self.settings.max_bytes:
            raise errors.LimitExceeded(f"{self.settings.name}: maximum bytes exceeded")

    def _append(self, message: api.OutgoingMessage, now_ns: int) -> None:
        self.last += 1
        if message.message_id is not None:
            self._ids[message.message_id] = (self.last, now_ns)
        stored = api.StoredMessage(message.subject, message.data, dict(message.headers), self.last, now_ns)
        self.messages[self.last] = stored
        self.bytes += _size(stored)
        sequences = self._by_subject.setdefault(message.subject, deque())
        sequences.append(self.last)
        if message.ttl_s is not None:
            expires_ns = now_ns + message_format.whole_seconds(message.ttl_s) * 1_000_000_000
            heapq.heappush(self._expiry, (expires_ns, self.last))
        limit = self.settings.max_messages_per_subject
        while limit and len(sequences) > limit:
            self.remove(sequences[0])
        self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        while self.bytes > self.settings.max_bytes:
            self.remove(next(iter(self.messages)))

    def remove(self, sequence: int) -> None:
        message = self.messages.pop(sequence, None)
        if message is None:
            raise errors.NotFound(f"{self.settings.name}: no message {sequence}")
        self.bytes -= _size(message)
        sequences = self._by_subject[message.subject]
        sequences.remove(sequence)
        if not sequences:
            del self._by_subject[message.subject]

    def purge(self, subject: str | None, before: int | None) -> int:
        if subject is None:
            sequences = list(self.messages)
        else:
            # A stored subject has no wildcards: it matches only itself.
            candidates = (subject,) if subject in self._by_subject else self._by_subject
            sequences = [
                sequence
                for stored in candidates
                if subjects.matches(subject, stored)
                for sequence in self._by_subject[stored]
            ]
        gone = [sequence for sequence in sequences if before is None or sequence < before]
        for sequence in gone:
            self.remove(sequence)
        return len(gone)

    # Time.

    def next_expiry_ns(self) -> int | None:
        while self._expiry and self._expiry[0][1] not in self.messages:
            heapq.heappop(self._expiry)  # it was deleted before its expiry
        return self._expiry[0][0] if self._expiry else None

    def expire(self, now_ns: int) -> None:
        """Delete messages that are too old; in a bucket, an expiry leaves a marker."""
        age_ns = round(self.settings.max_age_s * 1e9)
        while age_ns and self.messages:
            first = next(iter(self.messages.values()))
            if now_ns - first.stored_at_ns <= age_ns:
                break
            self.remove(first.sequence)
        while self._expiry and self._expiry[0][0] <= now_ns:
            message = self.messages.get(heapq.heappop(self._expiry)[1])
            if message is None:
                continue
            newest = self.last_of(message.subject) == message.sequence
            self.remove(message.sequence)
            marker = key_value.MARKER_REASON in message.headers or key_value.OPERATION in message.headers
            if self.markers and newest and not marker:
                headers = {key_value.MARKER_REASON: "MaxAge"}
                ttl_s = key_value.EXPIRY_MARKER_TTL_S
                self._append(api.OutgoingMessage(message.subject, b"", headers, ttl_s=ttl_s), now_ns)

    # Reading.

    def last_of(self, subject: str) -> int:
        sequences = self._by_subject.get(subject)
        return sequences[-1] if sequences else 0

    def state(self, now_ns: int) -> api.StreamState:
        return api.StreamState(
            first_sequence=next(iter(self.messages), self.last + 1),
            last_sequence=self.last,
            messages=len(self.messages),
            bytes=self.bytes,
            consumers=0,
            now_ns=now_ns,
            created_ns=self.created_ns,
            replicas=self.settings.replicas,
        )

    def page(self, first: int, patterns: Sequence[str], count: int) -> list[api.StoredMessage]:
        matches: list[api.StoredMessage] = []
        for sequence in range(max(first, next(iter(self.messages), 1)), self.last + 1):
            message = self.messages.get(sequence)
            if message is not None and (
                not patterns or any(subjects.matches(pattern, message.subject) for pattern in patterns)
            ):
                matches.append(message)
                if len(matches) == count:
                    break
        return matches

    def last_of_each(self, pattern: str) -> list[int]:
        """The sequence of the last message of each subject, in order."""
        return sorted(
            sequences[-1]
            for subject, sequences in self._by_subject.items()
            if subjects.matches(pattern, subject)
        )


def _size(message: api.OutgoingMessage | api.StoredMessage) -> int:
    headers = sum(len(name) + len(value) + 4 for name, value in message.headers.items())
    return len(message.subject) + len(message.data) + headers + OVERHEAD_BYTES
