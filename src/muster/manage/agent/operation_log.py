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
IN_DOUBT = "in-doubt"  # the code of an outcome that the agent itself does not know, and never will
REASON_MAX = 1_000
PROPERTIES_BYTES_MAX = 8 << 10


class OperationRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is stored of it."""

    name: str
    type: str = ""
    config: dict[str, Any] | None = None
    digest: str = ""
    epoch: int = 0
    manager: str = ""
    runtime: dict[str, Any] = {}
    operations: dict[str, protocol.OperationResult | None] = {}  # None: begun
    formerly: str = ""  # the name from which it was renamed


class OperationHistory:
    def __init__(self, record: OperationRecord) -> None:
        self.record = record
        self._fence = leases.EpochFence(record.epoch)

    def check(self, epoch: int, manager: str) -> None:
        """`errors.StaleEpoch` where a later manager has been obeyed."""
        self._fence.check(epoch)
        if epoch > self.record.epoch or manager:
            self.record.epoch, self.record.manager = epoch, manager or self.record.manager

    def take_record(self, old: OperationHistory) -> None:
        mine, former = self.record, old.record
        mine.type, mine.config, mine.digest = former.type, former.config, former.digest
        mine.runtime, former.runtime = former.runtime, {}
        mine.formerly = former.name
        former.config, former.digest, former.manager = None, "", ""

    def to_store(self) -> bytes:
        """Outcomes without results: a result may be long, or a secret that somebody asked to see."""
        slim = {
            id: answer and msgspec.structs.replace(answer, result=None)
            for id, answer in self.record.operations.items()
        }
        return msgspec.json.encode(msgspec.structs.replace(self.record, operations=slim))

    def remembered(self, id: str) -> protocol.OperationResult | None:
        """The outcome of an operation that has been asked for before; None if it never was."""
        if id not in self.record.operations:
            return None
        return self.record.operations[id] or protocol.OperationResult(
            id=id,
            outcome=messages.DecisionOutcome.IN_DOUBT,
            code=IN_DOUBT,
            reason="it was begun, and its agent ended before it did",
            epoch=self.record.epoch,
        )

    def begin(self, id: str) -> None:
        self.record.operations[id] = None
        while len(self.record.operations) > REMEMBERED:
            del self.record.operations[next(iter(self.record.operations))]

    def forget(self, id: str) -> None:
        """It was not begun after all."""
        self.record.operations.pop(id, None)

    def end(self, answer: protocol.OperationResult) -> None:
        if answer.id in self.record.operations:
            self.record.operations[answer.id] = answer


def resolve_interrupted_rename(records: list[OperationRecord]) -> list[OperationRecord]:
    """As they are after a crash in the middle of a renaming: what two claim is the new one's."""
    taken = {record.formerly for record in records if record.formerly and record.config is not None}
    for record in records:
        if record.name in taken and record.config is not None:
            record.config, record.digest, record.runtime = None, "", {}
    return records


def truncate_observation(observed: protocol.ObservedState, digest: str) -> protocol.ObservedState:
    """What an adapter says, in a size that can be sent; an adapter is others' code."""
    properties = observed.properties
    if properties:
        try:
            if len(msgspec.json.encode(properties)) > PROPERTIES_BYTES_MAX:
                properties = {"left_out": f"more than {PROPERTIES_BYTES_MAX} bytes"}
        except (TypeError, ValueError, RecursionError) as error:
            properties = {"left_out": str(error)[:200]}
    # A lone surrogate, as in a file name that is not UTF-8, cannot be sent.
    reason = observed.reason[:REASON_MAX].encode("utf-8", "replace").decode()
    return msgspec.structs.replace(
        observed, reason=reason, digest=observed.digest or digest, properties=properties
    )


def refusal(id: str, error: errors.MusterError, epoch: int) -> protocol.OperationResult:
    return protocol.OperationResult(
        id=id,
        outcome=messages.DecisionOutcome.FAILED
        if not isinstance(error, errors.StaleEpoch | errors.InvalidInput | errors.NotFound)
        else messages.DecisionOutcome.REFUSED,
        code=error.code,
        reason=error.message[:4000],
        epoch=epoch,
    )
