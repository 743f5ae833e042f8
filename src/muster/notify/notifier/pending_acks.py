"""Pending acknowledgements of a shard: how far it has matched the events, and which receivers are missing.

An event is matched once: it is delivered again to the recorded receivers, whatever has changed since.
Changes are taken out as records, which have to be stored before they take effect.  Pure.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from muster.notify import protocol


class PendingAcks:
    def __init__(self) -> None:
        self.position = 0
        self.owed: dict[int, set[str]] = {}  # sequence -> receivers
        self.owing = 0  # pending acknowledgements of all events
        self.owing_of: collections.Counter[str] = collections.Counter()  # of each process
        self._matched: protocol.ReceiversByEvent = {}
        self._acked: dict[int, set[str]] = {}
        self._recorded = 0

    def __len__(self) -> int:
        return self.owing

    @property
    def floor(self) -> int:
        """Events with a lower sequence are not needed any more."""
        return min(self.owed, default=self.position + 1)

    @property
    def is_dirty(self) -> bool:
        return bool(self._matched or self._acked or self.position != self._recorded)

    def match(self, sequence: int, receivers: Iterable[str]) -> None:
        self.position = sequence
        if matched := tuple(receivers):
            self._owe(sequence, matched)
            self._matched[sequence] = matched

    def _owe(self, sequence: int, receivers: Iterable[str]) -> None:
        former, owing = self.owed.get(sequence, set()), set(receivers)
        self.owed[sequence] = owing
        self.owing += len(owing) - len(former)
        self.owing_of.update(map(_process, owing))
        self.owing_of.subtract(map(_process, former))

    def acknowledge(self, sequence: int, receiver: str) -> bool:
        if not self._settle(sequence, receiver):
            return False
        self._acked.setdefault(sequence, set()).add(receiver)
        return True

    def _settle(self, sequence: int, receiver: str) -> bool:
        owing = self.owed.get(sequence)
        if owing is None or receiver not in owing:
            return False
        owing.discard(receiver)
        self.owing -= 1
        process = _process(receiver)
        self.owing_of[process] -= 1
        if not self.owing_of[process]:
            del self.owing_of[process]
        if not owing:
            del self.owed[sequence]
        return True

    def forget(self, receiver: str) -> None:
        """Remove a receiver that has left."""
        for sequence in [sequence for sequence, owing in self.owed.items() if receiver in owing]:
            self.acknowledge(sequence, receiver)

    def give_up(self, process: str, count: int) -> int:
        """Remove the oldest events of the receivers of a process; how many acknowledgements these were."""
        given_up = 0
        for sequence in sorted(self.owed):
            if given_up >= count:
                break
            for receiver in [each for each in self.owed[sequence] if _process(each) == process]:
                given_up += self.acknowledge(sequence, receiver)
        return given_up

    def drop(self, sequence: int) -> None:
        """Remove an event that is no longer stored."""
        for receiver in tuple(self.owed.get(sequence, ())):
            self.acknowledge(sequence, receiver)

    def records(self, epoch: int) -> list[protocol.MatchRecord]:
        """Return the changes since the last records."""
        matched = list(protocol.split_receivers(self._matched))
        acked = list(protocol.split_receivers(self._acked))
        self._matched, self._acked, self._recorded = {}, {}, self.position

        def record(
            matched: protocol.ReceiversByEvent, acked: protocol.ReceiversByEvent
        ) -> protocol.MatchRecord:
            return protocol.MatchRecord(position=self.position, epoch=epoch, matched=matched, acked=acked)

        if len(matched) <= 1 and len(acked) <= 1:
            return [record(matched[0] if matched else {}, acked[0] if acked else {})]
        return [*(record(part, {}) for part in matched), *(record({}, part) for part in acked)]

    def full_records(self, epoch: int) -> list[protocol.MatchRecord]:
        """Return the complete state, which replaces all earlier records."""
        self.records(epoch)
        first = protocol.MatchRecord(position=self.position, epoch=epoch, reset=True)
        more = (
            protocol.MatchRecord(position=self.position, epoch=epoch, matched=part)
            for part in protocol.split_receivers(self.owed)
        )
        return [first, *more]

    def replay(self, record: protocol.MatchRecord) -> None:
        if record.reset:
            self.owed.clear()
            self.owing_of.clear()
            self.owing = 0
        self.position = self._recorded = record.position
        for sequence, receivers in record.matched.items():
            self._owe(sequence, {*self.owed.get(sequence, ()), *receivers})
        for sequence, receivers in record.acked.items():
            for receiver in receivers:
                self._settle(sequence, receiver)


def _process(receiver: str) -> str:
    return receiver.partition("/")[0]
