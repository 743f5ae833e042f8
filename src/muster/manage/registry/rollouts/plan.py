"""The plan of an `apply`: what it would do, in which waves. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from muster.manage import manifest, protocol, rows
from muster.manage.registry import records

CHANGES_BYTES_MAX = 128 << 10  # for one line
TEMPLATE = "template."  # says again what the filled fields say


def plan(
    before: Mapping[str, records.ResourceRecord],
    specs: list[protocol.ResourceSpec],
    zone_of: Callable[[str], str] = lambda agent: "",
    unhealthy: Collection[str] = (),
    counted: Collection[str] = (),
) -> list[rows.PlanStep]:
    """A step for each resource, in the order of execution; those of one wave run at the same time.

    ``zone_of`` an agent. ``unhealthy``: resources that are not in their desired state. ``counted``: entries
    with a count.
    """
    steps, by_name = [], {spec.name: spec for spec in specs}
    changed = {spec.name for spec in specs if spec.name in before and before[spec.name].spec != spec}
    waves = update_waves(by_name, changed, zone_of, unhealthy)
    for name in sorted(by_name, key=lambda name: (waves[name], name)):
        spec = by_name[name]
        known = before.get(name)
        changes = differences(known.spec, spec) if known else {}
        act = "create" if known is None else "change" if changes else "keep"
        steps.append(
            rows.PlanStep(wave=waves[name], act=act, name=name, type=spec.type, changes=bounded(changes))
        )
    last = max(waves.values(), default=0) + 1
    steps += [
        rows.PlanStep(
            wave=1 if before[name].spec.update is None else last,
            act="delete",
            name=name,
            type=before[name].spec.type,
        )
        for name in superfluous(before, specs, counted)
    ]
    return steps


def update_waves(
    specs: Mapping[str, protocol.ResourceSpec],
    changed: Collection[str],
    zone_of: Callable[[str], str],
    unhealthy: Collection[str],
) -> dict[str, int]:
    """The wave of each resource, from 1: after its dependencies; of those of a group that are ``changed`` and
    have an update policy, at most ``max_parallel`` in a wave and never of two zones. What does not work comes
    first.
    """
    waves: dict[str, int] = {}
    last = 0
    for level in manifest.dependency_waves({name: spec.depends_on for name, spec in specs.items()}):
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for name in level:
            if name in changed and specs[name].update is not None:
                groups[specs[name].group].append(name)
            else:
                waves[name] = last + 1
        most = 1
        for names in groups.values():
            zones = {name: zone_of(specs[name].agent) for name in names}
            names.sort(key=lambda name: (name not in unhealthy, zones[name], name))
            number, size, former = 0, 0, ""
            for name in names:
                policy = specs[name].update or protocol.AT_ONCE
                limit = policy.canary if number == 1 and policy.canary else policy.max_parallel
                if not number or size >= limit or zones[name] != former:
                    number, size = number + 1, 0
                size, former = size + 1, zones[name]
                waves[name] = last + number
            most = max(most, number)
        last += most
    return waves


def superfluous(
    before: Mapping[str, records.ResourceRecord],
    specs: list[protocol.ResourceSpec],
    counted: Collection[str] = (),
) -> list[str]:
    """Brokers that a topology no longer contains, and instances beyond the count of their entry: they are
    deleted, because a topology, or an entry, is one unit.

    Other resources that a manifest no longer names stay until they are deleted.
    """
    named = {spec.name for spec in specs}
    topologies = {spec.labels[protocol.TOPOLOGY] for spec in specs if protocol.TOPOLOGY in spec.labels}
    if not topologies and not counted:
        return []
    return sorted(
        name
        for name, record in before.items()
        if (record.spec.labels.get(protocol.TOPOLOGY) in topologies or record.spec.entry in counted)
        and name not in named
        and not record.deleting
    )


def differences(before: protocol.ResourceSpec, after: protocol.ResourceSpec) -> dict[str, tuple[Any, Any]]:
    """By field: the current and the new value."""
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(after))
    changed = {
        name: (old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name != "digest"
    }
    filled = {name: values for name, values in changed.items() if not name.startswith(TEMPLATE)}
    return filled or changed


def bounded(changes: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
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
