"""Bodies that are too large for one message of the bus: chunks in the log, until no message refers to them.

A client stores the chunks of a body, then sends a message with a `messages.LargeBody` and without a payload.
Copies of the message (dead letters, moved messages) refer to the same body. The dispatcher counts the
messages in the log that refer to a body, and deletes it when there are none. After a start it reads the log
once to count them, if there are bodies.

A body without a message in the log remains for a while: its upload may continue, or current subscribers of a
topic read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from muster.core import errors
from muster.core import messages as core_messages
from muster.message import destinations, messages, partitions, protocol
from muster.message.dispatcher.log import journal, ledger, log_reader, message_log, pages
from muster.message.dispatcher.peers import peer_protocol, transfers

UPLOADS_MAX = 10_000  # bodies of an identity without their messages
UPLOAD_S: Final = 3600.0  # how long after its last chunk a body may wait for its message
SWEEP_S = 1.0
TOPIC_S: Final = 60.0  # how long current subscribers of a topic may read a body
_ID: Final = re.compile(r"[0-9a-f]{32}")
_TOPICS: Final = ""  # the key of messages of topics
_TRANSFER: Final = "transfer:"  # begins the key of messages on their way to another partition


class LargeBodies:
    def __init__(
        self, log: message_log.MessageLog, now_s: Callable[[], float], message_bytes_max: int
    ) -> None:
        self._log = log
        self._ledger = log.ledger
        self._now_s = now_s
        self._message_bytes_max = message_bytes_max
        self._messages: dict[tuple[str, int], str] = {}  # bodies by backlog and number of the message
        self._references: dict[str, int] = {}  # number of these messages by body
        self._uploads: dict[str, tuple[str, int]] = {}  # by body without a message: identity, bytes stored
        self._uploading = Counter[str]()  # number of these by identity
        self._needed_until: dict[str, float] = {}  # by body, regardless of its messages
        self._started_at = now_s()
        self._counted = False
        log.on_record = self._applied
        log.on_moved = self._note

    async def store(
        self, request: protocol.StoreChunk | peer_protocol.StoreBody, identity: str = ""
    ) -> protocol.DispatcherReply:
        """``identity``: of the client; of another partition there is none, and no limit."""
        size, log = len(request.data), self._log
        if not _ID.fullmatch(request.body) or size > protocol.CHUNK_BYTES:
            raise errors.InvalidInput(f"a chunk has a body id and at most {protocol.CHUNK_BYTES} bytes")
        owner, before = self._uploads.get(request.body, (identity, 0))
        total = before + size
        # Another partition has accepted the message, perhaps when the limit was higher.
        if identity and total > self._message_bytes_max:
            raise core_messages.MessageTooLarge(
                f"a message has at most {self._message_bytes_max} bytes",
                hint="the limit is `message.max_message_bytes`",
            )
        if identity and request.body not in self._uploads and self._uploading[identity] >= UPLOADS_MAX:
            raise errors.LimitExceeded(f"{identity} has stored {UPLOADS_MAX} bodies without their messages")
        log.check_room(size)
        log.used_bytes += size
        self._uploading[owner] += request.body not in self._uploads
        self._uploads[request.body] = owner, total
        self._needed_until[request.body] = self._now_s() + UPLOAD_S
        chunk = journal.JournalMessage(
            destinations.topic("body"),
            messages.MessageMeta(),
            "{}",
            request.data,
            log.subjects.body(request.body),
        )
        known = request.body in self._ledger.bodies
        record = ledger.LogRecord() if known else ledger.LogRecord(bodies=[request.body])
        try:
            (number,) = await log.store(journal.JournalItem([chunk], record))
        except errors.MusterError:
            if request.body not in self._ledger.bodies:
                self._end_upload(request.body)
            raise
        return protocol.DispatcherReply(count=pages.sequence_of(number))

    async def read(self, request: protocol.ReadChunk) -> protocol.DispatcherReply:
        data = await self._log.reader.chunk(request.body, request.chunk)
        if data is None:
            raise errors.NotFound("the body of the message is not stored any more")
        return protocol.DispatcherReply(data=data)

    def check(self, body: messages.LargeBody, destination: destinations.Destination) -> None:
        """It has to be in this partition, or in that of the destination."""
        partition, log = body.partition, self._log
        if partition == log.partition:
            is_stored = body.id in self._ledger.bodies
        else:
            is_stored = partition == partitions.of_destination(destination, log.partition_count)
        if not is_stored:
            raise errors.NotFound("the body of the message is not stored: send it again")

    def _end_upload(self, body: str) -> None:
        owner, _ = self._uploads.pop(body, ("", 0))
        self._uploading[owner] -= 1  # without an owner there is no limit

    def release(self, body: str) -> None:
        self._end_upload(body)
        if body in self._needed_until:
            self._needed_until[body] = self._now_s() + TOPIC_S

    def placed(self, copy: journal.JournalMessage, number: int) -> None:
        """A message that refers to a body was stored or, without a number, published."""
        assert copy.meta.large is not None
        body = copy.meta.large.id
        if copy.meta.large.partition != self._log.partition:
            return  # it is in the partition to which the message is transferred
        self._end_upload(body)
        now = self._now_s()
        if copy.destination.is_queue or copy.deferred:
            self._needed_until[body] = now
        else:
            self._needed_until[body] = now + TOPIC_S
        if number and copy.subject is not None:
            self._add(self._key(copy.subject), number, body)

    def _key(self, subject: str) -> str:
        subjects = self._log.subjects
        if subject == subjects.delay:
            return ledger.DELAY_KEY
        if subject.startswith(subjects.transfer_prefix):
            return f"{_TRANSFER}{subject.removeprefix(subjects.transfer_prefix)}"
        if subject.startswith(subjects.topic_prefix):
            return _TOPICS
        return ledger.queue_key(subjects.of_queue(subject))

    def _add(self, key: str, number: int, body: str) -> None:
        if (key, number) not in self._messages:
            self._messages[key, number] = body
            self._references[body] = self._references.get(body, 0) + 1

    def _release(self, key: str, number: int) -> None:
        body = self._messages.pop((key, number), None)
        if body is not None:
            self._references[body] -= 1
            if not self._references[body]:
                del self._references[body]

    def _applied(self, record: ledger.LogRecord) -> None:
        if not self._messages:
            return
        for key, numbers in record.acked.items():
            for number in numbers:
                self._release(key, number)
        for partition, last in record.transferred.items():
            key = f"{_TRANSFER}{partition}"
            for place in [place for place in self._messages if place[0] == key and place[1] <= last]:
                self._release(*place)
        dropped = set(record.dropped)
        for key, number in [place for place in self._messages if place[0] in dropped]:
            self._release(key, number)

    async def run(self) -> None:
        """Delete bodies that are not needed any more. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            with contextlib.suppress(errors.LimitExceeded):  # the log is full: retry next time
                await self.delete_unused(self._now_s())

    async def delete_unused(self, now: float) -> None:
        if not self._ledger.bodies:
            self._counted = True
            return
        if not self._counted:
            await self._count()
            self._counted = True
        floor = self._ledger.floor_of_topics()
        for key, number in [place for place in self._messages if not place[0] and place[1] <= floor]:
            self._release(key, number)
        unused = [
            body
            for body in self._ledger.bodies
            if body not in self._references
            and self._needed_until.get(body, self._started_at + UPLOAD_S) <= now
        ]
        for body in unused:
            await self._log.stream.purge(subject=self._log.subjects.body(body))
            await self._log.store(journal.JournalItem([], ledger.LogRecord(deleted_bodies=[body])))
            self._needed_until.pop(body, None)
            self._end_upload(body)

    async def _count(self) -> None:
        """Find the messages in the log that refer to bodies."""
        sorted_to = self._log.shared_pages.sorted_to
        async for page in self._log.reader.read_pages(1):
            if page.subject != self._log.subjects.shared or page.sequence > sorted_to:  # else they are sorted
                self._note(pages.read(page))

    def _note(self, read: Iterable[log_reader.Numbered]) -> None:
        """Messages that were read, or moved: these may not be found where they are now."""
        for number, subject, held in read:
            if messages.MAY_BE_LARGE not in held.raw:
                continue
            key = self._key(subject)
            if self._is_done(key, number):
                continue
            raw = transfers.meta_of(held.raw) if key.startswith(_TRANSFER) else held.raw
            large = messages.decode_meta(raw).large
            if large is not None and large.partition == self._log.partition:
                self._add(key, number, large.id)
                self._needed_until.setdefault(large.id, self._started_at)

    def _is_done(self, key: str, number: int) -> bool:
        if key == ledger.DELAY_KEY:
            return number in self._ledger.delayed_done
        if key.startswith(_TRANSFER):
            return number <= self._ledger.transferred.get(int(key.removeprefix(_TRANSFER)), 0)
        if key == _TOPICS:
            return False
        source = self._ledger.backlogs.get(key)
        return source is None or source.is_done(number)
