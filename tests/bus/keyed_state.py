"""A state for owned logs that holds the present value of each key."""

from __future__ import annotations

import msgspec

from muster.bus.log import pages


class KeyedRecord(msgspec.Struct, frozen=True):
    value: bytes
    version: int
    position: int


class KeyedState:
    def __init__(self) -> None:
        self.records: dict[bytes, KeyedRecord] = {}
        self.live_bytes = 0

    def apply(self, record: pages.OwnedRecord, version: int, position: int) -> None:
        former = self.records.pop(record.key, None)
        if former is not None:
            self.live_bytes -= len(record.key) + len(former.value)
        if record.value is not None:
            self.records[record.key] = KeyedRecord(record.value, version, position)
            self.live_bytes += len(record.key) + len(record.value)

    def holds(self, key: bytes, position: int) -> bool:
        record = self.records.get(key)
        return record is not None and record.position == position

    def reset(self) -> None:
        self.records.clear()
        self.live_bytes = 0
