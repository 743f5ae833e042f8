"""Operation results and observations in a size that can be sent. Pure.

An executed operation always gets a reply, however long its result is: a result that is too long is truncated
and marked as such. Observations are truncated twice: by the agent, because adapters are third-party code, and
by the manager, because it sends them on together with those of other agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from muster.bus.rpc import error_replies
from muster.core import errors, messages
from muster.manage import protocol

RESULT_BYTES_MAX = 512 << 10  # for one operation
RESULTS_BYTES_MAX = 640 << 10  # for all operations in one message
REASON_BYTES_MAX = 400  # for one that has to be truncated
OBSERVED_REASON_MAX = 1_000
DIGEST_MAX = 128
PROPERTIES_BYTES_MAX = 8 << 10


def truncate_result(answer: protocol.OperationResult) -> protocol.OperationResult:
    """The result as an agent stores and sends it; adapters are third-party code."""
    reason = answer.reason.encode("utf-8", "replace").decode()
    answer = msgspec.structs.replace(answer, reason=reason)
    try:
        size = len(msgspec.json.encode(answer.result))
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the result cannot be sent: {error}"[:4000].encode("utf-8", "replace").decode()
        return msgspec.structs.replace(answer, result=None, code="bad-result", reason=why)
    return answer if size <= RESULT_BYTES_MAX else _truncated(answer, RESULT_BYTES_MAX)


def truncate_observation(observed: protocol.ObservedState, digest: str = "") -> protocol.ObservedState:
    """An observation that can be sent and stored, in JSON and in MessagePack; ``digest`` if it has none."""
    properties = observed.properties
    if properties:
        try:
            # Each has values that the other has not, as integers of more than 64 bits.
            size = max(len(encode(properties)) for encode in (msgspec.json.encode, msgspec.msgpack.encode))
            if size > PROPERTIES_BYTES_MAX:
                properties = {"left_out": f"more than {PROPERTIES_BYTES_MAX} bytes"}
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            properties = {"left_out": str(error)[:200]}
    reason = errors.sendable(observed.reason[:OBSERVED_REASON_MAX])  # it may quote a file name
    return msgspec.structs.replace(
        observed, reason=reason, digest=(observed.digest or digest)[:DIGEST_MAX], properties=properties
    )


def to_error(
    resource: str, operation: str, outcome: messages.DecisionOutcome, code: str, reason: str
) -> errors.MusterError:
    """The error that says why an operation was not executed."""
    if outcome is messages.DecisionOutcome.IN_DOUBT:
        return errors.TimedOut(f"{resource}: {operation} is in doubt: {reason}")
    fault = error_replies.ErrorReply(
        code=code or errors.Refused.code,
        kind=errors.Refused.code,
        message=f"{resource}: {reason}",
        exit_code=errors.Refused.exit_code,
    )
    return error_replies.from_error_reply(fault)


def fit_message(answers: Sequence[protocol.OperationResult]) -> list[protocol.OperationResult]:
    """Results for one message. If they do not fit together, each gets an equal share."""
    sizes = [len(msgspec.json.encode(answer)) for answer in answers]
    if sum(sizes) <= RESULTS_BYTES_MAX:
        return list(answers)
    share = RESULTS_BYTES_MAX // len(answers)
    return [
        answer if size <= share else _truncated(answer, share)
        for answer, size in zip(answers, sizes, strict=True)
    ]


def _truncated(answer: protocol.OperationResult, size: int) -> protocol.OperationResult:
    reason = answer.reason
    if len(reason.encode()) > REASON_BYTES_MAX:
        reason = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore") + "…"
    rest = msgspec.structs.replace(answer, result=None, reason=reason, observed=None, truncated=True)
    room = max(0, size - len(msgspec.json.encode(rest)))
    result = None if answer.result is None else _cut(answer.result, room)
    return msgspec.structs.replace(rest, result=result, observed=answer.observed)


def _cut(result: Any, room: int) -> Any:
    """The end of a text (the end of a log matters most), or the beginning of another value as JSON."""
    is_text = isinstance(result, str)
    text = result if is_text else msgspec.json.encode(result).decode()
    while (size := len(msgspec.json.encode(text))) > room and text:
        keep = min(len(text) - 1, len(text) * room // size)
        text = text[len(text) - keep :] if is_text else text[:keep]
    return text
