"""A shard's account of durable events: how far it has matched, who still owes an acknowledgement.

Matched once: the recorded set of receivers is what is delivered again, whatever has changed since.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.notify import protocol


class Pending:
    def __init__(self) -> None:
        self.position = 0
        self.owed: dict[int, set[str]] = {}  # sequence -> parties
        self._matched: dict[int, tuple[str, ...]] = {}
        self._acked: dict[int, set[str]] = {}
        self._recorded = 0

    def __len__(self) -> int:
        return sum(map(len, self.owed.values()))

    @property
    def floor(self) -> int:
        """Events below this are not needed any more."""
        return min(self.owed, default=self.position + 1)

    @property
    def is_dirty(self) -> bool:
        return bool(self._matched or self._acked or self.position != self._recorded)

    def match(self, sequence: int, parties: Iterable[str]) -> None:
        self.position = sequence
        if found := tuple(parties):
            self.owed[sequence] = set(found)
            self._matched[sequence] = found

    def acknowledge(self, sequence: int, party: str) -> bool:
        owing = self.owed.get(sequence)
        if owing is None or party not in owing:
            return False
        owing.discard(party)
        if not owing:
            del self.owed[sequence]
        self._acked.setdefault(sequence, set()).add(party)
        return True

    def forget(self, party: str) -> None:
        """It has left: it is owed nothing."""
        for sequence in [sequence for sequence, owing in self.owed.items() if party in owing]:
            self.acknowledge(sequence, party)

    def record(self, epoch: int) -> protocol.Matched:
        """What has happened since the last record, to be stored before it is acted upon."""
        acked = {sequence: tuple(parties) for sequence, parties in self._acked.items()}
        made = protocol.Matched(position=self.position, epoch=epoch, matched=self._matched, acked=acked)
        self._matched, self._acked, self._recorded = {}, {}, self.position
        return made

    def whole(self, epoch: int) -> protocol.Matched:
        """Everything, in place of all records before."""
        self.record(epoch)
        owed = {sequence: tuple(parties) for sequence, parties in self.owed.items()}
        return protocol.Matched(position=self.position, epoch=epoch, matched=owed, reset=True)

    def replay(self, record: protocol.Matched) -> None:
        if record.reset:
            self.owed.clear()
        self.position = self._recorded = record.position
        for sequence, parties in record.matched.items():
            self.owed[sequence] = set(parties)
        for sequence, parties in record.acked.items():
            if sequence in self.owed:
                self.owed[sequence] -= set(parties)
                if not self.owed[sequence]:
                    del self.owed[sequence]
