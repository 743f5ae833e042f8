"""From the entries of a manifest to specifications: which agent hosts each, what each depends on. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from muster.core import errors
from muster.manage import manifest, ordering, processor, protocol, views
from muster.predicates import closure, parser


def specifications(state: processor.Processor, raw: list[Any]) -> list[protocol.Spec]:
    """What ``raw`` entries ask for, checked against all that there is already."""
    try:
        entries = msgspec.convert(raw, list[manifest.Entry])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"the entries are malformed: {error}") from error
    groups: dict[str, set[str]] = {}
    for name, resource in state.resources.items():
        groups.setdefault(resource.spec.group, set()).add(name)
    for entry in entries:
        groups.setdefault(entry.group, set()).add(entry.name)
    load = views.resources_by_agent(state)
    specs = [
        manifest.specification(entry, _agent_for(state, entry, load), lambda group: groups.get(group, ()))
        for entry in entries
    ]
    for spec in specs:
        if len(msgspec.json.encode(spec.config)) > protocol.CONFIG_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the configuration of {spec.name!r} is over {protocol.CONFIG_BYTES_MAX} bytes",
                hint="keep what is large in a file, and name it",
            )
        if (where := manifest.open_secret(spec.config)) is not None:
            field = ".".join(map(str, ("config", *where)))
            raise errors.InvalidInput(f"{spec.name!r}: {field} holds a secret's value", hint=manifest.REFER)
    known = {*state.resources, *(spec.name for spec in specs)}
    for spec in specs:
        missing = [one for one in spec.depends_on if one not in known]
        if missing:
            raise errors.InvalidInput(f"{spec.name!r} depends on {missing[0]!r}, which is not there")
    needs = {name: one.spec.depends_on for name, one in state.resources.items()}
    needs |= {spec.name: spec.depends_on for spec in specs}
    circle = ordering.circle(needs)
    if circle is not None:
        raise errors.InvalidInput(f"dependencies in a circle: {' -> '.join(circle)}")
    return specs


def _agent_for(state: processor.Processor, entry: manifest.Entry, load: dict[str, int]) -> str:
    """The named one; or, of those the expression selects, the one that has least. What runs stays."""
    known = state.resources.get(entry.name)
    if entry.agent is not None:
        agent = state.agents.get(entry.agent)
        if agent is not None and agent.types and entry.type not in agent.types:
            raise errors.InvalidInput(f"{entry.agent!r} has no adapter of type {entry.type!r}")
        return entry.agent
    if entry.where is None:
        raise errors.InvalidInput(f"{entry.name!r}: say where it runs, with `agent` or `where`")
    matches = closure.compile(parser.parse(entry.where))
    fitting = [
        name
        for name, agent in state.agents.items()
        if not agent.cordoned
        and entry.type in agent.types
        and matches(views.agent_attributes(name, agent).get)
    ]
    if known is not None and known.spec.agent in fitting:
        return known.spec.agent
    if not fitting:
        raise errors.Unavailable(f"{entry.name!r}: no agent that is there fits {entry.where!r}")
    chosen = min(fitting, key=lambda name: (load.get(name, 0), name))
    load[chosen] = load.get(chosen, 0) + 1
    return chosen
