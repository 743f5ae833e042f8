"""Changes and decisions, stored for replay: in batches, a beat later, in a bounded stream. Best effort.

The records of a notifier are in the order in which it applied the changes and decided the events, with the
times at which these took effect.  So a replay decides each event by the same states.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from muster.bus import api
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.notify.notifier import state
from muster.predicates import types

WAITING_MAX = 100_000
WAITING_BYTES_MAX = 64 << 20
BATCH = 500
BATCH_BYTES = 4 << 20
NAMES_MAX = 1000  # receivers named in one decision
RECEIVERS_MAX = 4000  # in one record of granted attributes
RECEIVER_BYTES = 50  # approximate size in a record

Record = protocol.DefineModel | protocol.AppliedChanges | protocol.DecisionRecord

MODEL = subjects.log_subject(protocol.PART, "history", "model")
CHANGE = subjects.log_subject(protocol.PART, "history", "change")
DECISION = subjects.log_subject(protocol.PART, "history", "decision")
_SUBJECTS: Final = {
    protocol.DefineModel: MODEL,
    protocol.AppliedChanges: CHANGE,
    protocol.DecisionRecord: DECISION,
}


class DecisionLog:
    def __init__(self, common: state.NotifierState) -> None:
        self._common = common
        self._waiting: deque[tuple[int, Record]] = deque()  # with approximate sizes
        self._bytes = 0

    async def start(self, stream: api.Stream) -> None:
        self._stream = stream

    def defined(self, define: protocol.DefineModel) -> None:
        self._add(RECEIVER_BYTES * (1 + len(define.attributes)), define)

    def changed(
        self, entries: Sequence[tuple[str, Sequence[protocol.Change]]], epoch: int, size: int
    ) -> None:
        """Record changes of receivers that apply from now on."""
        kept = tuple(
            protocol.ShardLogEntry(process=process, changes=tuple(changes)) for process, changes in entries
        )
        self._add(size, protocol.AppliedChanges(entries=kept, at_ms=_now_ms(), epoch=epoch))

    def log_granted(self, receivers: Sequence[str], columns: Mapping[str, Sequence[types.Value]]) -> None:
        """Record granted attributes of receivers that apply from now on."""
        places: dict[str, list[int]] = {}
        for place, receiver in enumerate(receivers):
            places.setdefault(receiver.partition("/")[0], []).append(place)
        for process, own in places.items():
            for start in range(0, len(own), RECEIVERS_MAX):
                chunk = own[start : start + RECEIVERS_MAX]
                update = protocol.UpdateReceivers(
                    receivers=tuple(receivers[place].partition("/")[2] for place in chunk),
                    values={
                        name: [protocol.cell(cells[place]) for place in chunk]
                        for name, cells in columns.items()
                    },
                )
                self.changed([(process, [update])], 0, RECEIVER_BYTES * len(chunk))

    def decided(self, event: protocol.AdmittedEvent, sequence: int, receivers: list[str]) -> None:
        record = protocol.DecisionRecord(
            event=event,
            at_ms=_now_ms(),
            sequence=sequence,
            notifier=self._common.name,
            to=tuple(receivers[:NAMES_MAX]),
            count=len(receivers),
        )
        self._add(500 + RECEIVER_BYTES * len(record.to), record)

    def _add(self, size: int, record: Record) -> None:
        if len(self._waiting) >= WAITING_MAX or self._bytes + size > WAITING_BYTES_MAX:
            self._common.count("history-dropped")
            return
        self._waiting.append((size, record))
        self._bytes += size

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(self._common.settings.beat_s)
            while self._waiting:
                batch = self._take()
                try:
                    # Encoded here, so that the delivery of the event does not wait for it.
                    await self._stream.publish_batch(
                        [_outgoing(record, next(self._common.record_ids)) for record in batch]
                    )
                except errors.MusterError as error:
                    self._common.count("history-dropped", len(batch))
                    state.events.warning("history-dropped", error=error)

    def _take(self) -> list[Record]:
        batch: list[Record] = []
        total = 0
        while self._waiting and len(batch) < BATCH and (not batch or total < BATCH_BYTES):
            size, record = self._waiting.popleft()
            batch.append(record)
            total += size
        self._bytes -= total
        return batch


def _outgoing(record: Record, message_id: str) -> api.OutgoingMessage:
    data = messages.encode(record, "msgpack" if isinstance(record, protocol.AppliedChanges) else "json")
    return api.OutgoingMessage(_SUBJECTS[type(record)], data, message_id=message_id)


def _now_ms() -> int:
    return int(time.time() * 1000)
