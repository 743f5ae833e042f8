"""What the standard forbids in an attach (parts 2.7.3, 3.5 and 4.5.1), which proton accepts or drops.

Pure: the decoded fields of the frame (`frames.fields`) to the reason why its link is refused. Properties of a
node that is not dynamic are ignored: a client that repeats those of its dynamic node is served.
"""

from __future__ import annotations

from typing import Any, Final

from muster.core import errors
from muster.gateways.amqp.protocol import frames
from muster.message import errors as message_errors
from muster.message.amqp_format import amqp_types

_SOURCE, _TARGET, _COORDINATOR = 0x28, 0x29, 0x30
_EXPIRY: Final = (None, "link-detach", "session-end", "connection-close", "never")
_LIFETIMES: Final = {
    name
    for code, policy in enumerate(("close", "no-links", "no-messages", "no-links-or-messages"), 0x2B)
    for name in (code, f"amqp:delete-on-{policy}:list")
}
_REJECTED: Final = "amqp:rejected:list"
_OUTCOMES: Final = {
    frames.ACCEPTED: "amqp:accepted:list",
    frames.REJECTED: _REJECTED,
    frames.RELEASED: "amqp:released:list",
    frames.MODIFIED: "amqp:modified:list",
}


def problem(fields: list[Any]) -> errors.MusterError | None:
    """The reason why the link of an attach is refused, if there is one."""
    receives, is_incomplete = (*fields, *[None] * 9)[2:9:6]
    if receives and is_incomplete:
        return message_errors.NotSupported("deliveries are not resumed: attach without unsettled ones")
    try:
        wrong = _wrong_attach(fields)
    except amqp_types.MALFORMED as error:
        wrong = f"an attach that is malformed: {error}"
    return None if wrong is None else errors.InvalidInput(wrong)


def _wrong_attach(fields: list[Any]) -> str | None:
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
    return _wrong_node(properties) if dynamic and properties is not None else None


def _wrong_node(encoded: Any) -> str | None:
    """What is wrong with the properties of a dynamic node."""
    properties = _map(encoded)
    if properties is None:
        return "has dynamic-node-properties that are no map"
    lifetime, modes = properties.get("lifetime-policy"), properties.get("supported-dist-modes")
    policy = getattr(lifetime, "descriptor", None)
    if lifetime is not None and not (isinstance(policy, int | str) and policy in _LIFETIMES):
        return "has a lifetime-policy that is none"
    for mode in modes if isinstance(modes, list) else [modes]:
        if mode is not None and getattr(mode, "value", mode) not in ("move", "copy"):
            return "has supported-dist-modes that are none"
    return None


def _map(encoded: Any) -> dict[Any, Any] | None:
    """A map, if the value is one that has keys of primitive types."""
    value = amqp_types.read(encoded, 0)[0] if isinstance(encoded, bytes) else encoded
    return value if isinstance(value, dict) else None


def _wrong_source(fields: list[Any]) -> str | None:
    mode, filters, default, outcomes = (*fields, *[None] * 10)[6:10]
    if mode not in (None, "move", "copy"):
        return f"the source of an attach has an unknown distribution-mode: {mode!r}"
    if filters is not None and _map(filters) is None:
        return "the filter of a source is no map"
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
