"""Response rules: they turn an alert into notifications.

    responses:
      - alert: infected                 # the rule that raised it; * for any
        when: severity = 'critical'     # over the alert's rule, about, kind, name, severity, state, value
        event: command                  # what is sent: an event of this type,
        content: {operation: isolate, reason: "{rule} of {name}"}
        to: "region = {name}"           # to the receivers that this address selects

``{rule}``, ``{about}``, ``{kind}``, ``{name}``, ``{severity}`` and ``{state}`` are replaced by the values of
the alert; for ``group:web`` the kind is ``group`` and the name ``web``.  In an address they become quoted
strings, so that a name cannot change the meaning of the address.

A response only notifies.  The receiver's policy decides whether it accepts the event; an accepted command
goes to the resource's manager.

Pure: `matching_notifications` decides, `muster.loop.responder` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from muster.core import errors, messages
from muster.core.formats import yaml
from muster.core.settings import sections
from muster.loop import placeholders
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser, printer

doc = sections.field_doc

_MODEL = {
    "rule": types.STRING,
    "about": types.STRING,
    "kind": types.STRING,
    "name": types.STRING,
    "severity": types.STRING,
    "state": types.STRING,
    "value": types.FLOAT,
}
_PLACEHOLDERS = tuple(name for name, kind in _MODEL.items() if kind == types.STRING)


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which alert sends which event to which receivers."""

    alert: Annotated[str, doc("The rule that raised the alert; * for any.")]
    event: Annotated[str, doc("The type of the event.")]
    to: Annotated[str, doc("Address: a predicate over receivers' states. Placeholders become strings.")]
    content: Annotated[
        dict[str, placeholders.Value],
        doc("The event's content. {rule}, {about}, {kind}, {name}, {severity} and {state} are replaced."),
    ] = {}
    when: Annotated[
        str, doc("Predicate over the alert's rule, about, kind, name, severity, state and value.")
    ] = "state = 'firing'"
    durable: Annotated[bool, doc("Whether the event is stored until its receivers acknowledge it.")] = True


class ResponseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of responses."""

    responses: tuple[ResponseSpec, ...]


@dataclass(frozen=True, slots=True)
class NotificationTemplate:
    type: str
    content: Mapping[str, placeholders.Value]
    address: str
    durable: bool


@dataclass(frozen=True, slots=True)
class ResponseRule:
    response: ResponseSpec
    applies: Callable[[Callable[[str], object]], bool]


def load(source: str) -> tuple[ResponseRule, ...]:
    """All rules of a file or none; an error names the invalid response."""
    try:
        file = msgspec.convert(yaml.read(source, "not a file of responses"), ResponseFile)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"not a file of responses: {error}") from error
    return tuple(_rule(place, response) for place, response in enumerate(file.responses, 1))


def matching_notifications(
    rules: tuple[ResponseRule, ...], alert: messages.Alert
) -> list[NotificationTemplate]:
    """The notifications for this alert, in the order of the rules."""
    attributes = _attributes(alert)
    texts = {name: attributes[name] for name in _PLACEHOLDERS}
    quoted = {name: printer.quoted(text) for name, text in texts.items()}
    return [
        NotificationTemplate(
            response.event,
            placeholders.fill_all(response.content, texts),
            placeholders.fill(response.to, quoted),
            response.durable,
        )
        for rule in rules
        if (response := rule.response).alert in ("*", alert.rule) and rule.applies(attributes.get)
    ]


def _rule(place: int, response: ResponseSpec) -> ResponseRule:
    sample = dict.fromkeys(_PLACEHOLDERS, printer.quoted("x"))
    try:
        condition = _parsed(response.when, _MODEL)
        _parsed(placeholders.fill(response.to, sample), None)
    except errors.InvalidInput as error:
        raise errors.InvalidInput(f"response {place} (to alert {response.alert!r}): {error}") from error
    return ResponseRule(response, python.compile(condition))


def _parsed(source: str, model: Mapping[str, types.AttributeType] | None) -> ast.Condition:
    condition = parser.parse(source)
    if model is not None:
        type_check.require(condition, model, source)
    return condition


def _attributes(alert: messages.Alert) -> dict[str, Any]:
    kind, colon, name = alert.about.partition(":")
    return {
        "rule": alert.rule,
        "about": alert.about,
        "kind": kind,
        "name": name if colon else alert.about,
        "severity": alert.severity.value,
        "state": alert.state.value,
        "value": alert.value,
    }
