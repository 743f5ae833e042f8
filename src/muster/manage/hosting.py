"""What an agent knows of one resource: the epoch it obeys, the operations it remembers. No I/O here.

An operation is written down before it begins and again when it has ended.  One that was begun and has no
outcome after a restart is in doubt: nobody can know.  Asking again by the same id gets the remembered
outcome and does nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from muster.bus import leases
from muster.core import errors, messages
from muster.manage import protocol

REMEMBERED = 256


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is stored of it."""

    name: str
    type: str = ""
    config: dict[str, Any] | None = None
    digest: str = ""
    epoch: int = 0
    manager: str = ""
    runtime: dict[str, Any] = {}
    operations: dict[str, protocol.Answer | None] = {}  # None: begun


class Hosted:
    def __init__(self, record: Record) -> None:
        self.record = record
        self._fence = leases.Fence(record.epoch)

    def check(self, epoch: int, manager: str) -> None:
        """`errors.StaleEpoch` where a later manager has been obeyed."""
        self._fence.check(epoch)
        if epoch > self.record.epoch or manager:
            self.record.epoch, self.record.manager = epoch, manager or self.record.manager

    def to_store(self) -> bytes:
        """Outcomes without results: a result may be long, or a secret that somebody asked to see."""
        slim = {
            id: answer and msgspec.structs.replace(answer, result=None)
            for id, answer in self.record.operations.items()
        }
        return msgspec.json.encode(msgspec.structs.replace(self.record, operations=slim))

    def remembered(self, id: str) -> protocol.Answer | None:
        """The outcome of an operation that has been asked for before; None if it never was."""
        if id not in self.record.operations:
            return None
        return self.record.operations[id] or protocol.Answer(
            id=id,
            outcome=messages.Outcome.IN_DOUBT,
            code="in-doubt",
            reason="it was begun, and its agent ended before it did",
            epoch=self.record.epoch,
        )

    def begin(self, id: str) -> None:
        self.record.operations[id] = None
        while len(self.record.operations) > REMEMBERED:
            del self.record.operations[next(iter(self.record.operations))]

    def end(self, answer: protocol.Answer) -> None:
        if answer.id in self.record.operations:
            self.record.operations[answer.id] = answer


def refusal(id: str, error: errors.MusterError, epoch: int) -> protocol.Answer:
    return protocol.Answer(
        id=id,
        outcome=messages.Outcome.FAILED
        if not isinstance(error, errors.StaleEpoch | errors.InvalidInput | errors.NotFound)
        else messages.Outcome.REFUSED,
        code=error.code,
        reason=error.message[:4000],
        epoch=epoch,
    )
