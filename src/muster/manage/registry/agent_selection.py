"""From manifest entries to specifications: the agent and the dependencies of each resource. Pure."""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from muster.core import errors, units
from muster.manage import manifest, protocol, rows
from muster.manage.registry import assignments, views
from muster.predicates import ast
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser

MOVES_MAX = 500  # of a rebalancing


def place_entries(
    state: assignments.AssignmentProcessor,
    raw: manifest.Entries,
    is_silent: Callable[[str], bool] = lambda agent: False,
) -> list[protocol.ResourceSpec]:
    """Specifications of ``raw`` entries, checked against the existing resources. An agent that ``is_silent``
    gets something new only if no other may have it.

    A fleet is applied in parts, so the cost depends on the number of entries, not on the size of the fleet.
    """
    try:
        entries = msgspec.convert(manifest.unpack_entries(raw), list[manifest.ManifestEntry])
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"the entries are malformed: {error}") from error

    named = {name: entry for entry in entries for name, _ in manifest.instances(entry.name, entry.count)}
    counted = {entry.name: entry.count for entry in entries if entry.count is not None}

    @functools.cache
    def members() -> dict[str, set[str]]:
        """By group, and by entry: the resources that there will be."""
        by_group: dict[str, set[str]] = collections.defaultdict(set)
        for name, resource in state.resources.items():
            spec = resource.spec
            if name not in named and (spec.entry in counted or resource.deleting):
                continue  # it is deleted, because its entry has fewer instances now
            if spec.schedule is not None or spec.is_run:
                continue
            by_group[f"{manifest.GROUP}{spec.group}"].add(name)
            by_group[spec.entry].add(name)
        for name, entry in named.items():
            if entry.schedule is not None:
                continue
            by_group[f"{manifest.GROUP}{entry.group_name}"].add(name)
            by_group[entry.name].add(name)
        return by_group

    def names_of(dependency: str) -> list[str]:
        if dependency.startswith(manifest.GROUP):
            return sorted(members().get(dependency, ()))
        if dependency in counted or (dependency not in named and dependency not in state.resources):
            return sorted(members().get(dependency, ())) or [dependency]
        return [dependency]

    agents = _Agents(state, is_silent=is_silent)
    specs = []
    for entry in entries:
        for name, index in manifest.instances(entry.name, entry.count):
            if entry.schedule is not None:  # an agent is selected for each run
                _matching_agents(state, entry) if entry.agent is None else None
                specs.append(manifest.specification(entry, "", names_of))
                continue
            agent = agents.choose(entry, name)
            zone = state.zone_of(agent)
            spec = manifest.specification(entry, agent, names_of, name=name, index=index, zone=zone)
            agents.placed(spec)
            specs.append(spec)
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
            if there.spec.schedule is not None or there.spec.is_run:
                raise errors.InvalidInput(
                    f"{spec.name!r} depends on {dependency!r}, which is a periodic job or a run of one",
                    hint="depend on a job without a `schedule`",
                )
            if there.deleting:
                raise errors.Conflict(f"{spec.name!r} depends on {dependency!r}, which is being deleted")
    cycle = manifest.find_cycle(_needs(state, by_name))
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


def counted_entries(raw: manifest.Entries) -> set[str]:
    """The names of the entries with a `count`: existing instances beyond it are superfluous."""
    entries = manifest.unpack_entries(raw)
    return {each["name"] for each in entries if isinstance(each, dict) and each.get("count") is not None}


class OtherAgents:
    """Selects agents for resources that leave theirs, among those that are ``suitable``."""

    def __init__(
        self,
        state: assignments.AssignmentProcessor,
        leaving: Collection[str],
        suitable: Callable[[str], bool],
    ) -> None:
        self._state = state
        self._agents = _Agents(state, leaving, suitable)

    def place(self, spec: protocol.ResourceSpec) -> protocol.ResourceSpec:
        """Raises `errors.Unavailable` with the reason if there is none."""
        agent = self._agents.choose(_movable_entry(spec), spec.name)
        moved = manifest.placed(spec, agent, self._state.zone_of(agent))
        self._agents.placed(moved)
        return moved


def rebalance(
    state: assignments.AssignmentProcessor, names: Iterable[str], suitable: Callable[[str], bool]
) -> dict[str, rows.MoveRow]:
    """Those of the resources that fit better on another agent, by the rules of their placement, when the
    others of them have moved."""
    agents, moved = _Agents(state, set(), suitable), dict[str, rows.MoveRow]()
    left = list(names)
    while left and len(moved) < MOVES_MAX:
        before, stay = len(moved), []
        for name in left:
            spec = state.resources[name].spec
            better = agents.leave(spec) if len(moved) < MOVES_MAX else None
            if better is None:
                stay.append(name)
                continue
            agent, reason = better
            moved[name] = rows.MoveRow(
                name=name, type=spec.type, group=spec.group, agent=spec.agent, to=agent, reason=reason
            )
        left = stay if len(moved) > before else []
    return moved


class _Agents:
    """Selects the agents of resources. An expression is evaluated once, not for each of them."""

    def __init__(
        self,
        state: assignments.AssignmentProcessor,
        leaving: Collection[str] = (),
        suitable: Callable[[str], bool] = lambda agent: True,
        is_silent: Callable[[str], bool] = lambda agent: False,
    ) -> None:
        self._state = state
        self._is_silent = functools.cache(is_silent)
        self._leaving = set(leaving)  # resources that do not stay where they are
        self._left_by: collections.Counter[str] = collections.Counter()  # by agent: their number, as `leave`
        self._suitable = suitable
        self._requested: dict[str, list[float]] = {}  # by agent: cores and memory
        self._chosen: dict[str, list[protocol.ResourceSpec]] = collections.defaultdict(list)  # by agent
        # By expression and type: all agents that match, and those that accept resources, by their load
        self._matching: dict[tuple[str | None, str], tuple[set[str], list[tuple[bool, int, str]]]] = {}
        # By predicate: how many resources that match an agent hosts
        self._hosting: dict[str, collections.Counter[str]] = {}
        self._new: set[str] = set()

    def _count(self, agent: str) -> int:
        """The number of its resources, those chosen here included."""
        return len(self._state.hosted(agent)) - self._left_by[agent] + len(self._chosen[agent])

    def placed(self, spec: protocol.ResourceSpec) -> None:
        """What is placed later considers this one as well."""
        if spec.name not in self._state.resources or spec.name in self._leaving:
            self._account(spec, 1)
            self._chosen[spec.agent].append(spec)

    def _account(self, spec: protocol.ResourceSpec, sign: int) -> None:
        """It comes to its agent, or leaves it (-1)."""
        self._request(spec, sign)
        if spec.entry:
            self._spread[spec.entry][spec.agent] += sign
        for predicate, hosting in self._hosting.items():
            if python.compile(parser.parse(predicate))(_attributes(self._state, spec).get):
                hosting[spec.agent] += sign

    def leave(self, spec: protocol.ResourceSpec) -> tuple[str, str] | None:
        """The agent on which a resource fits better than on its own, and why; None: it stays."""
        if spec.name not in self._leaving:
            self._account(spec, -1)
            self._leaving.add(spec.name)
            self._left_by[spec.agent] += 1
        else:  # it was to stay, when others had not moved yet
            self._chosen[spec.agent].remove(spec)
            self._account(spec, -1)
        entry, better = _movable_entry(spec), None
        with contextlib.suppress(errors.Unavailable):
            agents = self._suited(self._accepting(entry, spec.name), entry, spec.name)
            rank = self._ranking(entry)
            best = min(agents, key=rank)
            if spec.agent not in agents:
                better = best, f"{spec.agent} does not match any more"
            else:
                new, old = rank(best)[1:4], rank(spec.agent)[1:4]
                reasons = (
                    "its zone has more of its instances",
                    "its agent has more of its instances",
                    "its agent has more resources",
                )
                whys = (why for why, there, here in zip(reasons, new, old, strict=True) if there != here)
                better = (best, next(whys)) if new < old else None
        place = spec if better is None else msgspec.structs.replace(spec, agent=better[0])
        self.placed(place)
        return better

    @functools.cached_property
    def _spread(self) -> dict[str, collections.Counter[str]]:
        """By entry: the number of its instances on each agent."""
        spread: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for resource in self._state.resources.values():
            is_there = not resource.deleting and resource.spec.name not in self._leaving
            if resource.spec.entry and is_there:
                spread[resource.spec.entry][resource.spec.agent] += 1
        return spread

    def choose(self, entry: manifest.ManifestEntry, name: str) -> str:
        """The named agent, or of those that match the expression the one that `Placement` demands. An
        existing resource stays where it is.
        """
        known = self._state.resources.get(name)
        if entry.agent is not None:
            agent = self._state.agents.get(entry.agent)
            if agent is not None and agent.forgotten:
                raise errors.Conflict(
                    f"{name!r}: the agent {entry.agent!r} was forgotten",
                    hint=f"muster drain {entry.agent} --undo returns it to service",
                )
            if agent is not None and agent.types and entry.type not in agent.types:
                raise errors.InvalidInput(f"{entry.agent!r} has no adapter of type {entry.type!r}")
            return entry.agent
        is_anywhere = entry.count is not None or entry.placement is not None
        if entry.where is None and not is_anywhere:
            raise errors.InvalidInput(f"{name!r}: `agent` or `where` is required")
        least = self._least_loaded(entry)
        matching = self._matching[entry.where, entry.type][0]
        if known is not None and known.spec.agent in matching and name not in self._leaving:
            return known.spec.agent  # also while its machine is drained
        if is_anywhere:
            agents = self._suited(self._accepting(entry, name), entry, name)
            return min(agents, key=self._ranking(entry))
        if not least:
            raise self._none_accepts(entry, name)
        while (count := self._count(least[0][-1])) != least[0][1]:  # the load has changed meanwhile
            heapq.heapreplace(least, (least[0][0], count, least[0][-1]))
        return least[0][-1]

    def _least_loaded(self, entry: manifest.ManifestEntry) -> list[tuple[bool, int, str]]:
        """Agents that match the expression and accept resources: a heap, by a load that may be outdated."""
        key = (entry.where, entry.type)
        if key not in self._matching:
            names = _matching_agents(self._state, entry)
            least = [
                (self._is_silent(name), self._count(name), name)
                for name in names
                if not self._state.agents[name].cordoned and self._suitable(name)
            ]
            heapq.heapify(least)
            self._matching[key] = (set(names), least)
        return self._matching[key][1]

    def _accepting(self, entry: manifest.ManifestEntry, name: str) -> list[str]:
        """Raises `errors.Unavailable` if there are none."""
        agents = [agent for _, _, agent in self._least_loaded(entry)]
        if not agents:
            raise self._none_accepts(entry, name)
        return agents

    def _none_accepts(self, entry: manifest.ManifestEntry, name: str) -> errors.Unavailable:
        matches = f"match {entry.where!r}" if entry.where else f"have the type {entry.type}"
        return errors.Unavailable(
            f"{name!r}: all agents that {matches} are drained" + (" or lost" if self._leaving else ""),
            hint="muster drain NAME --undo returns one to service",
        )

    def _suited(self, agents: list[str], entry: manifest.ManifestEntry, name: str) -> list[str]:
        """Those of the agents that `Placement` does not exclude. Raises `errors.Unavailable` if it excludes
        all."""
        placement = entry.placement or protocol.Placement()
        left, excluded = agents, dict[str, int]()

        def keep(reason: str, fits: Callable[[str], bool]) -> None:
            nonlocal left
            kept = [agent for agent in left if fits(agent)]
            if len(kept) < len(left):
                excluded[reason] = len(left) - len(kept)
            left = kept

        if (near := placement.affinity) is not None:
            keep(
                f"host nothing that matches the affinity {near!r}", lambda agent: self._hosts(near)[agent] > 0
            )
        if (far := placement.anti_affinity) is not None:
            reason = f"host something that matches the anti-affinity {far!r}"
            keep(reason, lambda agent: not self._hosts(far)[agent])
        for fact, requested in (("cpus", placement.cpu), ("memory_mb", placement.memory_mb)):
            if requested:
                reason = f"have less than {requested:g} {fact} left"
                keep(reason, lambda agent: self._left(agent, fact) >= requested)  # noqa: B023
        if not left:
            why = "; ".join(f"{count} {reason}" for reason, count in excluded.items())
            raise errors.Unavailable(
                f"{name!r}: none of {units.format_count(len(agents), 'agent')} is suitable: {why}",
                hint="add machines, or relax `placement`",
            )
        return left

    def _ranking(self, entry: manifest.ManifestEntry) -> Callable[[str], tuple[bool, int, int, int, str]]:
        """The lower, the better."""
        placement, spread = entry.placement or protocol.Placement(), self._spread[entry.name]
        zones: collections.Counter[str] = collections.Counter()
        for agent, count in spread.items():
            zones[self._state.zone_of(agent)] += count

        def rank(agent: str) -> tuple[bool, int, int, int, str]:
            in_zone = zones[self._state.zone_of(agent)] if placement.spread == "zone" else 0
            on_agent = spread[agent] if placement.spread != "none" else 0
            return self._is_silent(agent), in_zone, on_agent, self._count(agent), agent

        return rank

    def _hosts(self, predicate: str) -> collections.Counter[str]:
        """How many resources that match an agent hosts."""
        if predicate not in self._hosting:
            matches = python.compile(parser.parse(predicate))
            specs = [
                resource.spec
                for resource in self._state.resources.values()
                if not resource.deleting and resource.spec.name not in self._leaving
            ]
            specs += [spec for chosen in self._chosen.values() for spec in chosen]
            self._hosting[predicate] = collections.Counter(
                spec.agent for spec in specs if matches(_attributes(self._state, spec).get)
            )
        return self._hosting[predicate]

    def _left(self, agent: str, fact: str) -> float:
        """What its machine reports, less what its resources request. A machine without a report has room."""
        total = self._state.agents[agent].facts.get(fact)
        if isinstance(total, bool) or not isinstance(total, int | float):
            return math.inf
        if agent not in self._requested:
            self._requested[agent] = [0.0, 0.0]
            stay = set(self._state.hosted(agent)) - self._leaving
            hosted = filter(None, map(self._state.resources.get, stay))  # a snapshot may not have some
            for spec in (*(resource.spec for resource in hosted), *self._chosen[agent]):
                self._request(spec, 1)
        return total - self._requested[agent][fact != "cpus"]

    def _request(self, spec: protocol.ResourceSpec, sign: int) -> None:
        if spec.placement is not None and spec.agent in self._requested:
            self._requested[spec.agent][0] += sign * spec.placement.cpu
            self._requested[spec.agent][1] += sign * spec.placement.memory_mb


def _movable_entry(spec: protocol.ResourceSpec) -> manifest.ManifestEntry:
    """What decides where a resource that may move is placed."""
    return manifest.ManifestEntry(
        name=spec.entry or spec.name,
        type=spec.type,
        where=spec.where or None,
        placement=spec.placement or protocol.Placement(),
    )


def _attributes(state: assignments.AssignmentProcessor, spec: protocol.ResourceSpec) -> dict[str, Any]:
    """Of a resource on its agent, as `views.attributes`, without its state."""
    agent = state.agents.get(spec.agent)
    own = {"name": spec.name, "type": spec.type, "group": spec.group, "agent": spec.agent}
    return {**(views.agent_attributes(spec.agent, agent) if agent else {}), **spec.labels, **own}


def _matching_agents(state: assignments.AssignmentProcessor, entry: manifest.ManifestEntry) -> list[str]:
    """Agents that match the expression: at least one."""
    condition = parser.parse(entry.where) if entry.where is not None else None
    matches = python.compile(condition) if condition is not None else lambda _: True
    names = [
        name
        for name, agent in state.agents.items()
        if entry.type in agent.types and matches(views.agent_attributes(name, agent).get)
    ]
    if not names and condition is None:
        raise errors.Unavailable(f"{entry.name!r}: no known agent has an adapter of type {entry.type!r}")
    if not names:
        there = {key for name, agent in state.agents.items() for key in views.agent_attributes(name, agent)}
        unknown = sorted({name.key for name in ast.names(condition)} - there) if there and condition else []
        hint = f"no agent has an attribute {unknown[0]}" if unknown else None
        if unknown and (near := type_check.closest_name(unknown[0], there)):
            hint = f"{hint}; {near}"
        raise errors.Unavailable(f"{entry.name!r}: no known agent matches {entry.where!r}", hint=hint)
    return names
