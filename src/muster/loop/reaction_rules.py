"""Reaction rules: they make managed resources receivers, and turn accepted events into operations.

    reactions:
      - where: group = 'web'              # the resources, as `muster get --where` selects them
        model: Server                     # the model of their state as receivers
        state: {application: "{group}", host: "{agent}"}
        policy: "command AND sender: (_trust_level >= 2)"
        operations: [restart, stop]       # what an event may request in its attribute `operation`

``{name}``, ``{type}``, ``{group}``, ``{agent}`` and ``{state}`` in values of ``state`` are those of
the resource.  With ``operation``, each accepted event executes this operation, and the event needs no
attribute of that name.

Pure: `receivers` decides, `muster.loop.reactions` acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from muster.core import errors
from muster.core.formats import yaml
from muster.core.settings import sections
from muster.loop import placeholders
from muster.manage import rows
from muster.predicates.backends import python
from muster.predicates.syntax import parser

doc = sections.field_doc

PLACEHOLDERS = ("name", "type", "group", "agent", "state")


class ReactionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which resources are receivers, and which operations their accepted events execute."""

    where: Annotated[
        str,
        doc("Predicate over the resources: name, type, group, agent, state, labels and facts."),
    ]
    model: Annotated[str, doc("The model of the receivers' states.")]
    policy: Annotated[str, doc("Which events the resources accept, from which senders.")]
    state: Annotated[
        dict[str, placeholders.Value],
        doc("The receivers' states. {name}, {type}, {group}, {agent} and {state} are replaced."),
    ] = {}
    operation: Annotated[str, doc("The operation that each accepted event executes.")] = ""
    operations: Annotated[
        tuple[str, ...],
        doc("Operations that an event may request in its attribute `operation`. Empty: all."),
    ] = ()
    durable: Annotated[bool, doc("Whether durable events are stored while the domain is down.")] = True


class ReactionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of reactions."""

    reactions: tuple[ReactionSpec, ...]


@dataclass(frozen=True, slots=True)
class ResourceReceiver:
    """A resource as a receiver."""

    rule: ReactionSpec
    state: Mapping[str, placeholders.Value]


def load(source: str) -> tuple[ReactionSpec, ...]:
    """All rules of a file or none; an error names the invalid reaction."""
    try:
        file = msgspec.convert(yaml.read(source, "not a file of reactions"), ReactionFile)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"not a file of reactions: {error}") from error
    for place, rule in enumerate(file.reactions, 1):
        try:
            python.compile(parser.parse(rule.where))
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"reaction {place}: where: {error}", hint=error.hint) from error
        if rule.operation and rule.operations:
            raise errors.InvalidInput(
                f"reaction {place}: `operation` is executed for every event: omit `operations`"
            )
    return file.reactions


def receivers(
    rules: Sequence[ReactionSpec], resources: Sequence[Sequence[rows.ResourceRow]]
) -> dict[str, ResourceReceiver]:
    """The receivers by resource; ``resources`` are the rows that each rule selects. The first rule wins."""
    receivers_by_name: dict[str, ResourceReceiver] = {}
    for rule, selected in zip(rules, resources, strict=True):
        for row in selected:
            facts = {name: getattr(row, name) for name in PLACEHOLDERS}
            state = placeholders.fill_all(rule.state, facts)
            receivers_by_name.setdefault(row.name, ResourceReceiver(rule, state))
    return receivers_by_name


def requested_operation(rule: ReactionSpec, content: Mapping[str, Any]) -> str | None:
    """The operation that an accepted event requests; None if it requests none that is allowed."""
    if rule.operation:
        return rule.operation
    operation = content.get("operation")
    if not isinstance(operation, str) or (rule.operations and operation not in rule.operations):
        return None
    return operation
