"""What an agent records for one resource: the accepted epoch and the operations. No I/O.

An operation is recorded before it starts and when it has ended. An operation that was started and has no
outcome after a restart is in doubt. A repeated request with the same id returns the recorded outcome and
executes nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from muster.bus import leases
from muster.core import errors, messages
from muster.manage import protocol

RESULTS_MAX = 256
IN_DOUBT = "in-doubt"  # the code of an outcome that even the agent cannot determine


class OperationRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The stored record of a resource."""

    name: str
    type: str = ""
    config: dict[str, Any] | None = None
    digest: str = ""
    epoch: int = 0
    manager: str = ""
    runtime: dict[str, Any] = {}
    operations: dict[str, protocol.OperationResult | None] = {}  # None: started
    formerly: str = ""  # the previous name
    stop_after_s: float = 0.0  # it may move: see `muster.manage.agent.deadlines`; 0: it may not
    mark: str = ""  # of the processes of its last run
    hooks: protocol.Hooks | None = None


class OperationHistory:
    def __init__(self, record: OperationRecord) -> None:
        self.record = record
        self._fence = leases.EpochFence(record.epoch)

    def check(self, epoch: int, manager: str) -> None:
        """Raises `errors.StaleEpoch` if a later manager was accepted."""
        self._fence.check(epoch)
        if epoch > self.record.epoch or manager:
            self.record.epoch, self.record.manager = epoch, manager or self.record.manager

    def adopt_record(self, old: OperationHistory) -> None:
        """Take over the record of a renamed resource."""
        mine, former = self.record, old.record
        mine.type, mine.config, mine.digest = former.type, former.config, former.digest
        mine.runtime, former.runtime = former.runtime, {}
        mine.formerly = former.name
        mine.hooks = former.hooks
        mine.stop_after_s, former.stop_after_s = former.stop_after_s, 0.0
        former.config, former.digest, former.manager = None, "", ""

    def to_store(self) -> bytes:
        """The record without results: a result may be long or contain a secret."""
        slim = {
            id: answer and msgspec.structs.replace(answer, result=None)
            for id, answer in self.record.operations.items()
        }
        return msgspec.json.encode(msgspec.structs.replace(self.record, operations=slim))

    def recorded_result(self, id: str) -> protocol.OperationResult | None:
        """The recorded outcome of an operation; None if it was never requested."""
        if id not in self.record.operations:
            return None
        return self.record.operations[id] or protocol.OperationResult(
            id=id,
            outcome=messages.DecisionOutcome.IN_DOUBT,
            code=IN_DOUBT,
            reason="the agent ended during the operation",
            epoch=self.record.epoch,
        )

    def begin(self, id: str) -> None:
        self.record.operations[id] = None
        while len(self.record.operations) > RESULTS_MAX:
            del self.record.operations[next(iter(self.record.operations))]

    def forget(self, id: str) -> None:
        """The operation was not started."""
        self.record.operations.pop(id, None)

    def end(self, answer: protocol.OperationResult) -> None:
        if answer.id in self.record.operations:
            self.record.operations[answer.id] = answer


def resolve_interrupted_rename(records: list[OperationRecord]) -> list[OperationRecord]:
    """Records after a crash during a rename: the new name owns what both claim."""
    taken = {record.formerly for record in records if record.formerly and record.config is not None}
    for record in records:
        if record.name in taken and record.config is not None:
            record.config, record.digest, record.runtime = None, "", {}
    return records


def failure_result(id: str, error: errors.MusterError, epoch: int) -> protocol.OperationResult:
    """The result of an operation that failed or was refused with ``error``."""
    return protocol.OperationResult(
        id=id,
        outcome=messages.DecisionOutcome.FAILED
        if not isinstance(error, errors.StaleEpoch | errors.InvalidInput | errors.NotFound)
        else messages.DecisionOutcome.REFUSED,
        code=error.code,
        reason=error.message[:4000],
        epoch=epoch,
    )
