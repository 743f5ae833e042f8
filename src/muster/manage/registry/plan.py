"""The plan of an `apply`: what it would do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from muster.manage import dependencies, protocol, rows
from muster.manage.registry import records

CHANGES_BYTES_MAX = 128 << 10  # for one line


def plan(
    before: Mapping[str, records.ResourceRecord], specs: list[protocol.ResourceSpec]
) -> list[rows.PlanStep]:
    """A step for each resource, in the order of execution; those of one wave run at the same time."""
    steps, by_name = [], {spec.name: spec for spec in specs}
    for number, wave in enumerate(
        dependencies.dependency_waves({spec.name: spec.depends_on for spec in specs}), start=1
    ):
        for name in wave:
            spec = by_name[name]
            known = before.get(name)
            changes = differences(known.spec, spec) if known else {}
            act = "create" if known is None else "change" if changes else "keep"
            steps.append(
                rows.PlanStep(wave=number, act=act, name=name, type=spec.type, changes=_bounded(changes))
            )
    steps += [
        rows.PlanStep(wave=1, act="delete", name=name, type=before[name].spec.type)
        for name in removed_topology_brokers(before, specs)
    ]
    return steps


def removed_topology_brokers(
    before: Mapping[str, records.ResourceRecord], specs: list[protocol.ResourceSpec]
) -> list[str]:
    """Brokers that a topology no longer contains: they are deleted, because a topology is one unit.

    Other resources that a manifest no longer names stay until they are deleted.
    """
    named = {spec.name for spec in specs}
    topologies = {spec.labels[protocol.TOPOLOGY] for spec in specs if protocol.TOPOLOGY in spec.labels}
    if not topologies:
        return []
    return sorted(
        name
        for name, record in before.items()
        if record.spec.labels.get(protocol.TOPOLOGY) in topologies
        and name not in named
        and not record.deleting
    )


def differences(before: protocol.ResourceSpec, after: protocol.ResourceSpec) -> dict[str, tuple[Any, Any]]:
    """By field: the current and the new value."""
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(after))
    return {
        name: (old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name != "digest"
    }


def _bounded(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Omit and count fields that make a line too long."""
    if len(msgspec.json.encode(changes)) <= CHANGES_BYTES_MAX:
        return changes
    shown: dict[str, tuple[Any, Any]] = {}
    size = 0
    for name, values in changes.items():
        length = len(msgspec.json.encode({name: values}))
        if size + length <= CHANGES_BYTES_MAX:
            shown[name] = values
            size += length
    shown["…"] = (None, f"{len(changes) - len(shown)} more fields, too long to show")
    return shown


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = inner
    return flat
