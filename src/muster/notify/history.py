"""What was said and decided, kept for replay: in batches, a beat late, bounded. No part of any promise."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from muster.bus import api
from muster.core import errors, messages, subjects
from muster.notify import common as common_
from muster.notify import protocol

WAITING_MAX = 100_000
WAITING_BYTES_MAX = 64 << 20
BATCH = 500
BATCH_BYTES = 4 << 20
NAMES_MAX = 1000  # of receivers in one decision

MODEL = subjects.logged(protocol.PART, "history", "model")
CHANGE = subjects.logged(protocol.PART, "history", "change")
DECISION = subjects.logged(protocol.PART, "history", "decision")


class History:
    def __init__(self, common: common_.Common) -> None:
        self._common = common
        self._waiting: deque[tuple[int, api.Outgoing | protocol.Decided]] = deque()  # with their sizes
        self._bytes = 0

    async def start(self, stream: api.Stream) -> None:
        self._stream = stream

    def defined(self, define: protocol.Define) -> None:
        data = messages.encode(define)
        self._add(len(data), api.Outgoing(MODEL, data))

    def changed(self, data: bytes) -> None:
        self._add(len(data), api.Outgoing(CHANGE, data))

    def decided(self, event: protocol.Event, sequence: int, parties: list[str]) -> None:
        record = protocol.Decided(
            event=event,
            at_ms=int(time.time() * 1000),
            sequence=sequence,
            notifier=self._common.name,
            to=tuple(parties[:NAMES_MAX]),
            count=len(parties),
        )
        self._add(500 + 50 * len(record.to), record)

    def _add(self, size: int, record: api.Outgoing | protocol.Decided) -> None:
        if len(self._waiting) >= WAITING_MAX or self._bytes + size > WAITING_BYTES_MAX:
            self._common.count("history-dropped")
            return
        self._waiting.append((size, record))
        self._bytes += size

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(self._common.settings.beat_s)
            while self._waiting:
                some = self._take()
                try:
                    # Encoded here, and not while somebody waits for the event.
                    await self._stream.publish_batch([_outgoing(one) for one in some])
                except errors.MusterError as error:
                    self._common.count("history-dropped", len(some))
                    common_.events.warning("history-dropped", error=error)

    def _take(self) -> list[api.Outgoing | protocol.Decided]:
        some: list[api.Outgoing | protocol.Decided] = []
        total = 0
        while self._waiting and len(some) < BATCH and (not some or total < BATCH_BYTES):
            size, record = self._waiting.popleft()
            some.append(record)
            total += size
        self._bytes -= total
        return some


def _outgoing(record: api.Outgoing | protocol.Decided) -> api.Outgoing:
    return record if isinstance(record, api.Outgoing) else api.Outgoing(DECISION, messages.encode(record))
