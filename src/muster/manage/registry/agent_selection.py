"""From the entries of a manifest to specifications: which agent hosts each, what each depends on. Pure."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping
from typing import Any

import msgspec

from muster.core import errors
from muster.manage import dependencies, manifest, protocol
from muster.manage.registry import assignments, views
from muster.predicates import ast
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser


def place_entries(state: assignments.AssignmentProcessor, raw: list[Any]) -> list[protocol.ResourceSpec]:
    """What ``raw`` entries ask for, checked against all that there is already.

    A fleet is applied some at a time: what it costs goes by what is asked for, not by what is there.
    """
    try:
        entries = msgspec.convert(raw, list[manifest.ManifestEntry])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"the entries are malformed: {error}") from error

    @functools.cache
    def groups() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, resource in state.resources.items():
            found.setdefault(resource.spec.group, set()).add(name)
        for entry in entries:
            found.setdefault(entry.group, set()).add(entry.name)
        return found

    agents = _Agents(state)
    specs = [
        manifest.specification(entry, agents.choose(entry), lambda group: groups().get(group, ()))
        for entry in entries
    ]
    for spec in specs:
        if len(msgspec.json.encode(spec.config)) > protocol.CONFIG_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the configuration of {spec.name!r} is over {protocol.CONFIG_BYTES_MAX} bytes",
                hint="keep what is large in a file, and name it",
            )
        if len(msgspec.json.encode(spec)) > protocol.SPEC_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the specification of {spec.name!r} is over {protocol.SPEC_BYTES_MAX} bytes",
                hint="give it fewer labels or dependencies",
            )
        if (where := manifest.find_plaintext_secret(spec.config)) is not None:
            field = ".".join(map(str, ("config", *where)))
            raise errors.InvalidInput(f"{spec.name!r}: {field} holds a secret's value", hint=manifest.REFER)
    wanted = {spec.name: spec for spec in specs}
    for spec in specs:
        for one in spec.depends_on:
            if one not in wanted and one not in state.resources:
                raise errors.InvalidInput(f"{spec.name!r} depends on {one!r}, which is not there")
    circle = dependencies.find_cycle(_needs(state, wanted))
    if circle is not None:
        raise errors.InvalidInput(f"dependencies in a circle: {' -> '.join(circle)}")
    return specs


def _needs(
    state: assignments.AssignmentProcessor, wanted: Mapping[str, protocol.ResourceSpec]
) -> dict[str, tuple[str, ...]]:
    """What those need, what that needs, and so on: a new circle goes through one of them."""
    needs: dict[str, tuple[str, ...]] = {}
    ahead = list(wanted)
    while ahead:
        name = ahead.pop()
        there = state.resources.get(name)
        spec = wanted.get(name) or (there.spec if there else None)
        needs[name] = spec.depends_on if spec else ()  # none: its agent was forgotten
        ahead += (one for one in needs[name] if one not in needs)
    return needs


class _Agents:
    """Which agent hosts an entry.  What an expression selects is looked for once, not for each entry."""

    def __init__(self, state: assignments.AssignmentProcessor) -> None:
        self._state = state
        self._fitting: dict[tuple[str, str], tuple[set[str], list[tuple[int, str]]]] = {}

    @functools.cached_property
    def _counts(self) -> dict[str, int]:
        return views.resources_by_agent(self._state)

    def choose(self, entry: manifest.ManifestEntry) -> str:
        """The named one; or, of those the expression selects, the one that has least. What runs stays."""
        known = self._state.resources.get(entry.name)
        if entry.agent is not None:
            agent = self._state.agents.get(entry.agent)
            if agent is not None and agent.types and entry.type not in agent.types:
                raise errors.InvalidInput(f"{entry.agent!r} has no adapter of type {entry.type!r}")
            return entry.agent
        if entry.where is None:
            raise errors.InvalidInput(f"{entry.name!r}: say where it runs, with `agent` or `where`")
        wanted = (entry.where, entry.type)
        if wanted not in self._fitting:
            names = _fitting(self._state, entry, entry.where)
            least = [(self._counts.get(name, 0), name) for name in names]
            heapq.heapify(least)
            self._fitting[wanted] = (set(names), least)
        fitting, least = self._fitting[wanted]
        if known is not None and known.spec.agent in fitting:
            return known.spec.agent
        while (count := self._counts.get(least[0][1], 0)) != least[0][0]:  # it got more meanwhile
            heapq.heapreplace(least, (count, least[0][1]))
        chosen = least[0][1]
        self._counts[chosen] = self._counts.get(chosen, 0) + 1
        return chosen


def _fitting(state: assignments.AssignmentProcessor, entry: manifest.ManifestEntry, where: str) -> list[str]:
    """Agents that the expression selects: one at least."""
    condition = parser.parse(where)
    matches = python.compile(condition)
    found = [
        name
        for name, agent in state.agents.items()
        if not agent.cordoned
        and entry.type in agent.types
        and matches(views.agent_attributes(name, agent).get)
    ]
    if not found:
        there = {key for name, agent in state.agents.items() for key in views.agent_attributes(name, agent)}
        unknown = sorted({name.key for name in ast.names(condition)} - there) if there else []
        hint = f"no agent has an attribute {unknown[0]}" if unknown else None
        if unknown and (near := type_check.closest_name(unknown[0], there)):
            hint = f"{hint}; {near}"
        raise errors.Unavailable(f"{entry.name!r}: no agent that is there fits {where!r}", hint=hint)
    return found
