"""From manifest entries to specifications: the agent and the dependencies of each resource. Pure."""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Mapping

import msgspec

from muster.core import errors
from muster.manage import dependencies, manifest, protocol
from muster.manage.registry import assignments, views
from muster.predicates import ast
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser


def place_entries(
    state: assignments.AssignmentProcessor, raw: manifest.Entries
) -> list[protocol.ResourceSpec]:
    """Specifications of ``raw`` entries, checked against the existing resources.

    A fleet is applied in parts, so the cost depends on the number of entries, not on the size of the fleet.
    """
    try:
        entries = msgspec.convert(manifest.unpack_entries(raw), list[manifest.ManifestEntry])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"the entries are malformed: {error}") from error

    @functools.cache
    def groups() -> dict[str, set[str]]:
        members: dict[str, set[str]] = {}
        for name, resource in state.resources.items():
            members.setdefault(resource.spec.group, set()).add(name)
        for entry in entries:
            members.setdefault(entry.group, set()).add(entry.name)
        return members

    agents = _Agents(state)
    specs = [
        manifest.specification(entry, agents.choose(entry), lambda group: groups().get(group, ()))
        for entry in entries
    ]
    for spec in specs:
        try:
            msgspec.msgpack.encode(spec.config)
        except OverflowError as error:  # one such resource would stop the renewal of its manager
            raise errors.InvalidInput(
                f"the configuration of {spec.name!r} has an integer of more than 64 bits",
                hint="write it as a text",
            ) from error
        if len(msgspec.json.encode(spec.config)) > protocol.CONFIG_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the configuration of {spec.name!r} is over {protocol.CONFIG_BYTES_MAX} bytes",
                hint="store large values in a file and refer to it",
            )
        if len(msgspec.json.encode(spec)) > protocol.SPEC_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the specification of {spec.name!r} is over {protocol.SPEC_BYTES_MAX} bytes",
                hint="use fewer labels or dependencies",
            )
        if (where := manifest.find_plaintext_secret(spec.config)) is not None:
            field = ".".join(map(str, ("config", *where)))
            raise errors.InvalidInput(
                f"{spec.name!r}: {field} contains the value of a secret", hint=manifest.REFERENCE_HINT
            )
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        for dependency in spec.depends_on:
            if dependency in by_name:
                continue
            if (there := state.resources.get(dependency)) is None:
                raise errors.InvalidInput(f"{spec.name!r} depends on {dependency!r}, which does not exist")
            if there.deleting:
                raise errors.Conflict(f"{spec.name!r} depends on {dependency!r}, which is being deleted")
    cycle = dependencies.find_cycle(_needs(state, by_name))
    if cycle is not None:
        raise errors.InvalidInput(f"the dependencies form a cycle: {' -> '.join(cycle)}")
    return specs


def _needs(
    state: assignments.AssignmentProcessor, specs: Mapping[str, protocol.ResourceSpec]
) -> dict[str, tuple[str, ...]]:
    """The dependencies of these specifications, transitively: any new cycle contains one of them."""
    needs: dict[str, tuple[str, ...]] = {}
    ahead = list(specs)
    while ahead:
        name = ahead.pop()
        there = state.resources.get(name)
        spec = specs.get(name) or (there.spec if there else None)
        needs[name] = spec.depends_on if spec else ()  # none if its agent was removed
        ahead += (dependency for dependency in needs[name] if dependency not in needs)
    return needs


class _Agents:
    """Selects the agent of an entry. An expression is evaluated once, not for each entry."""

    def __init__(self, state: assignments.AssignmentProcessor) -> None:
        self._state = state
        self._chosen = collections.Counter[str]()
        # By expression and type: all agents that match, and those that accept resources, by their load
        self._matching: dict[tuple[str, str], tuple[set[str], list[tuple[int, str]]]] = {}

    def _count(self, agent: str) -> int:
        """The number of its resources, those chosen here included."""
        return len(self._state.hosted(agent)) + self._chosen[agent]

    def choose(self, entry: manifest.ManifestEntry) -> str:
        """The named agent, or the least loaded one that matches the expression. An existing resource stays
        where it is.
        """
        known = self._state.resources.get(entry.name)
        if entry.agent is not None:
            agent = self._state.agents.get(entry.agent)
            if agent is not None and agent.forgotten:
                raise errors.Conflict(
                    f"{entry.name!r}: the agent {entry.agent!r} was forgotten",
                    hint=f"muster drain {entry.agent} --undo returns it to service",
                )
            if agent is not None and agent.types and entry.type not in agent.types:
                raise errors.InvalidInput(f"{entry.agent!r} has no adapter of type {entry.type!r}")
            return entry.agent
        if entry.where is None:
            raise errors.InvalidInput(f"{entry.name!r}: `agent` or `where` is required")
        key = (entry.where, entry.type)
        if key not in self._matching:
            names = _matching_agents(self._state, entry, entry.where)
            least = [(self._count(name), name) for name in names if not self._state.agents[name].cordoned]
            heapq.heapify(least)
            self._matching[key] = (set(names), least)
        matching, least = self._matching[key]
        if known is not None and known.spec.agent in matching:
            return known.spec.agent  # also while its machine is drained
        if not least:
            raise errors.Unavailable(
                f"{entry.name!r}: all agents that match {entry.where!r} are drained",
                hint="muster drain NAME --undo returns one to service",
            )
        while (count := self._count(least[0][1])) != least[0][0]:  # the load has changed meanwhile
            heapq.heapreplace(least, (count, least[0][1]))
        chosen = least[0][1]
        self._chosen[chosen] += 1
        return chosen


def _matching_agents(
    state: assignments.AssignmentProcessor, entry: manifest.ManifestEntry, where: str
) -> list[str]:
    """Agents that match the expression: at least one."""
    condition = parser.parse(where)
    matches = python.compile(condition)
    names = [
        name
        for name, agent in state.agents.items()
        if entry.type in agent.types and matches(views.agent_attributes(name, agent).get)
    ]
    if not names:
        there = {key for name, agent in state.agents.items() for key in views.agent_attributes(name, agent)}
        unknown = sorted({name.key for name in ast.names(condition)} - there) if there else []
        hint = f"no agent has an attribute {unknown[0]}" if unknown else None
        if unknown and (near := type_check.closest_name(unknown[0], there)):
            hint = f"{hint}; {near}"
        raise errors.Unavailable(f"{entry.name!r}: no known agent matches {where!r}", hint=hint)
    return names
