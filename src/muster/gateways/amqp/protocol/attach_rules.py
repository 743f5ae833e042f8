"""What the standard forbids in an attach (parts 2.7.3, 3.5 and 4.5.1), which proton accepts or drops.

Pure: the decoded fields of the frame (`frames.fields`) to the reason why its link is refused.
"""

from __future__ import annotations

from typing import Any, Final

from muster.gateways.amqp.protocol import frames

_SOURCE, _TARGET, _COORDINATOR = 0x28, 0x29, 0x30
_EXPIRY: Final = (None, "link-detach", "session-end", "connection-close", "never")
_REJECTED: Final = "amqp:rejected:list"
_OUTCOMES: Final = {
    frames.ACCEPTED: "amqp:accepted:list",
    frames.REJECTED: _REJECTED,
    frames.RELEASED: "amqp:released:list",
    frames.MODIFIED: "amqp:modified:list",
}


def problem(fields: list[Any]) -> str | None:
    """The reason why the link of an attach is refused, if there is one."""
    receives, send_mode, receive_mode, source, target = (*fields, *[None] * 7)[2:7]
    if send_mode not in (None, 0, 1, 2) or receive_mode not in (None, 0, 1):
        return "an attach with an unknown settle mode"
    if source is not None and frames.code_of(source) != _SOURCE:
        return "the source of an attach is no source"
    kinds = (_TARGET,) if receives else (_TARGET, _COORDINATOR)
    if target is not None and frames.code_of(target) not in kinds:
        return "the target of an attach is no target" + ("" if receives else " and no coordinator")
    for name, terminus, is_ours in (("source", source, receives), ("target", target, not receives)):
        if terminus is not None and frames.code_of(terminus) != _COORDINATOR:
            wrong = _wrong_terminus(frames.state_fields(terminus), is_ours=is_ours)
            if wrong is not None:
                return f"the {name} of an attach {wrong}"
    return None if source is None else _wrong_source(frames.state_fields(source))


def _wrong_terminus(fields: list[Any], *, is_ours: bool) -> str | None:
    address, durable, expiry, _, dynamic, properties = (*fields, *[None] * 6)[:6]
    if not isinstance(address, str | None):
        return "has an address that is no string"
    if durable not in (None, 0, 1, 2):
        return f"has an unknown durability: {durable!r}"
    if expiry not in _EXPIRY:
        return f"has an unknown expiry-policy: {expiry!r}"
    if is_ours and dynamic and address is not None:
        return "is dynamic and has an address"
    if properties is not None and not dynamic:
        return "has properties of a dynamic node, but is not dynamic"
    return None


def _wrong_source(fields: list[Any]) -> str | None:
    mode, _, default, outcomes = (*fields, *[None] * 10)[6:10]
    if mode not in (None, "move", "copy"):
        return f"the source of an attach has an unknown distribution-mode: {mode!r}"
    if default is None:
        return None
    outcome = _OUTCOMES.get(frames.code_of(default))
    if outcome is None or not _contains(outcomes, outcome):
        return "the default-outcome of a source is none of its outcomes"
    return None


def can_reject(source: bytes | None) -> bool:
    """Whether the source of a link has the outcome rejected."""
    fields = frames.state_fields(source) if isinstance(source, bytes) else []
    return len(fields) < 10 or _contains(fields[9], _REJECTED)


def _contains(outcomes: str | bytes | None, outcome: str) -> bool:
    """Whether the symbol, the encoded array of symbols or no limit contains an outcome."""
    if isinstance(outcomes, bytes):
        return outcome.encode() in outcomes
    return outcomes in (None, outcome)
