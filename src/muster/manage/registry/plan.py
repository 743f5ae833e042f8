"""What an `apply` would do, told before it is done. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from muster.manage import dependencies, protocol
from muster.manage.registry import assignments

CHANGES_BYTES_MAX = 128 << 10  # of one line


def plan(
    before: Mapping[str, assignments.ResourceRecord], specs: list[protocol.ResourceSpec]
) -> list[dict[str, Any]]:
    """One line for each resource, in the order of the steps; those of one wave go at the same time."""
    lines, by_name = [], {spec.name: spec for spec in specs}
    for number, wave in enumerate(
        dependencies.dependency_waves({spec.name: spec.depends_on for spec in specs}), start=1
    ):
        for name in wave:
            spec = by_name[name]
            known = before.get(name)
            changes = differences(known.spec, spec) if known else {}
            act = "create" if known is None else "change" if changes else "keep"
            lines.append(
                {"wave": number, "act": act, "name": name, "type": spec.type, "changes": _bounded(changes)}
            )
    lines += [
        {"wave": 1, "act": "delete", "name": name, "type": before[name].spec.type, "changes": {}}
        for name in removed_topology_brokers(before, specs)
    ]
    return lines


def removed_topology_brokers(
    before: Mapping[str, assignments.ResourceRecord], specs: list[protocol.ResourceSpec]
) -> list[str]:
    """Brokers of a topology that has become smaller: it is one thing, so they go.

    Anything else that a manifest does not name any more stays until it is deleted.
    """
    named = {spec.name for spec in specs}
    whole = {spec.labels[protocol.TOPOLOGY] for spec in specs if protocol.TOPOLOGY in spec.labels}
    if not whole:
        return []
    return sorted(
        name
        for name, one in before.items()
        if one.spec.labels.get(protocol.TOPOLOGY) in whole and name not in named and not one.deleting
    )


def differences(before: protocol.ResourceSpec, after: protocol.ResourceSpec) -> dict[str, list[Any]]:
    """Field by field: what it is, and what it would be."""
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(after))
    return {
        name: [old.get(name), new.get(name)]
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name != "digest"
    }


def _bounded(changes: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Fields that make a line too long to be sent are left out, and counted."""
    if len(msgspec.json.encode(changes)) <= CHANGES_BYTES_MAX:
        return changes
    found: dict[str, list[Any]] = {}
    size = 0
    for name, values in changes.items():
        length = len(msgspec.json.encode({name: values}))
        if size + length <= CHANGES_BYTES_MAX:
            found[name] = values
            size += length
    found["…"] = [None, f"{len(changes) - len(found)} more fields, too long to be shown"]
    return found


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, dict):
            found |= _flat(one, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = one
    return found
