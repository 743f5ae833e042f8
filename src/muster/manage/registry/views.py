"""The registry's state as users see it: rows, descriptions, and the attributes for predicates. Pure."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from muster.core import errors, health
from muster.manage import protocol, rows
from muster.manage.registry import assignments, inventory, records
from muster.predicates import ast
from muster.predicates.analysis import type_check
from muster.predicates.backends import python
from muster.predicates.syntax import parser

PAGE = 2_000  # rows of one page, as far as they fit
PAGE_BYTES = 512 << 10  # of the rows of one page: half the size of a message
SILENT = {health.HealthState.UNKNOWN, health.HealthState.LATE}
ENDED = {health.HealthState.DOWN, health.HealthState.FAILED, health.HealthState.COMPLETED}
ABSENT_S = 2.5 * protocol.HELLO_S  # without an announcement, an agent without running resources is down
SUMMARY_MAX = 200  # groups, types and managers in one reply: those with the most resources


def attributes(
    state: assignments.AssignmentProcessor,
    name: str,
    machine: Callable[[str], Mapping[str, Any]] = lambda agent: {},
) -> dict[str, Any]:
    """Labels of the resource, facts and labels of its machine, and its own fields. ``machine``: what is known
    of an agent's machine now."""
    spec = state.resources[name].spec
    agent = state.agents.get(spec.agent)
    owner = state.owners.get(name)
    of_agent = agent_attributes(spec.agent, agent) if agent else {}
    return {
        **machine(spec.agent),
        **of_agent,
        **spec.labels,
        "name": name,
        "type": spec.type,
        "group": spec.group,
        "agent": spec.agent,
        "state": state.state_of(name).value,
        "manager": owner.manager if owner else None,
    }


def _machines(
    state: assignments.AssignmentProcessor, keys: Collection[str]
) -> Callable[[str], Mapping[str, Any]]:
    """What is known of an agent's machine now: at least ``keys``, as far as they are known."""
    return functools.partial(state.machines.attributes, keys=keys) if state.machines else lambda agent: {}


def selected_attributes(
    state: assignments.AssignmentProcessor, name: str, keys: Iterable[str]
) -> dict[str, Any]:
    """Those of the attributes that the resource has; empty if it does not exist."""
    values = attributes(state, name, _machines(state, {*keys})) if name in state.resources else {}
    return {key: values[key] for key in keys if key in values}


#: Attributes for predicates, beside labels, facts and metrics.
FIELDS = (
    *("name", "type", "group", "agent", "state", "manager", "zone"),
    *("machine_state", "alerts", "alert_count"),
)


def condition(
    state: assignments.AssignmentProcessor, where: str, fields: Iterable[str] = ()
) -> ast.Condition:
    """Raises `errors.ParseError` if the condition names an attribute that no resource or machine has,
    and that is none of ``fields``.

    Such a condition selects nothing (or everything, with IS NULL) and is usually misspelt.
    """
    parsed = parser.parse(where)
    unknown = {name.key: name for name in ast.names(parsed) if name.key not in {*FIELDS, *fields}}
    if not unknown or not state.resources:
        return parsed
    known = {*FIELDS, *fields}
    for agent in state.agents.values():
        known |= {*agent.labels, *agent.facts}
    known.update(state.machines.metric_names if state.machines else ())
    for resource in state.resources.values():
        known |= resource.spec.labels.keys()
    for key, name in unknown.items():
        if key not in known:
            hint = type_check.closest_name(key, known) or f"known attributes: {', '.join(sorted(known)[:20])}"
            raise errors.ParseError(
                f"no resource has an attribute {key}", text=where, position=name.span[0], hint=hint
            )
    return parsed


def agent_attributes(name: str, agent: records.AgentRecord) -> dict[str, Any]:
    return {**agent.facts, **agent.labels, "agent": name, "zone": agent.zone}


def select(
    state: assignments.AssignmentProcessor, names: Sequence[str] | None, where: str, after: str
) -> Iterator[str]:
    """Names in order, after ``after``; `errors.NotFound` if a given name does not exist."""
    if names:
        missing = next((name for name in names if name not in state.resources), None)
        if missing is not None:
            raise errors.NotFound(f"no resource {missing!r}")
        return iter(names)
    names = state.sorted_names
    behind = itertools.islice(names, bisect.bisect_right(names, after) if after else 0, None)
    if not where:
        return behind
    # The attribute names are checked with the first page only, because that visits every resource.
    parsed = parser.parse(where) if after else condition(state, where)
    matches, keys = python.compile(parsed), {name.key for name in ast.names(parsed)}
    machine = functools.cache(_machines(state, keys))
    return (name for name in behind if matches(attributes(state, name, machine).get))


def resource_row(state: assignments.AssignmentProcessor, name: str) -> rows.ResourceRow:
    resource, status, owner = state.resources[name], state.statuses.get(name), state.owners.get(name)
    shown, reason = state.state_of(name), "not managed yet"
    if status is not None:
        is_current = status.state is shown
        reason = status.fault or (status.reason if is_current else "the new desired state is not applied yet")
    if resource.is_leaving:
        reason = (
            f"it leaves {resource.spec.agent}" if status is None or not status.gone else "it has no agent"
        )
    if (waits := state.waiting.get(name)) is not None:
        reason = waits
    return rows.ResourceRow(
        name=name,
        type=resource.spec.type,
        group=resource.spec.group,
        agent=resource.spec.agent,
        desired="absent" if resource.deleting else state.desired_state(name).value,
        state=shown.value,
        reason=reason,
        since_ms=status.since_ms if status else 0,
        drift=status.drift if status else "",
        restarts=status.restarts if status else 0,
        manager=owner.manager if owner else None,
        epoch=owner.epoch if owner else 0,
        generation=resource.generation,
        applied=bool(status and status.generation == resource.generation),
        stable=bool(status and status.stable) and (resource.spec.job is None or owner is None),
    )


def resource_description(state: assignments.AssignmentProcessor, name: str) -> rows.ResourceDescription:
    resource = state.resources.get(name)
    if resource is None:
        raise errors.NotFound(f"no resource {name!r}")
    return rows.ResourceDescription(
        **msgspec.structs.asdict(resource_row(state, name)),
        spec=resource.spec,
        applied_by=resource.by,
        waits_for=list(state.waits_for(name)),
        status=state.statuses.get(name),
    )


def summary(state: assignments.AssignmentProcessor) -> rows.FleetSummary:
    """Number of resources in each state, group, type and manager."""
    counts: dict[str, collections.Counter[str]] = {
        key: collections.Counter() for key in ("states", "groups", "types", "managers")
    }
    not_applied = down_as_desired = 0
    for name, resource in state.resources.items():
        status, owner = state.statuses.get(name), state.owners.get(name)
        counts["states"][state.state_of(name).value] += 1
        counts["groups"][resource.spec.group] += 1
        counts["types"][resource.spec.type] += 1
        counts["managers"][owner.manager if owner else ""] += 1
        not_applied += not (status and status.generation == resource.generation)
        down_as_desired += bool(
            status
            and status.state is health.HealthState.DOWN
            and resource.spec.desired is not protocol.DesiredState.UP
        )
    return rows.FleetSummary(
        resources=len(state.resources),
        agents=len(state.agents),
        not_applied=not_applied,
        down_as_desired=down_as_desired,
        **{key: dict(counter.most_common(SUMMARY_MAX)) for key, counter in counts.items()},
    )


def _agent_state(statuses: Sequence[protocol.ResourceStatus]) -> str:
    """The state of an agent by those of its resources; empty if all have ended, whether it runs or not."""
    states = {status.state for status in statuses} - ENDED
    if not states <= SILENT:
        return "up"
    if any(status.reason.startswith(protocol.AGENT_SILENT) for status in statuses):
        return "down"
    return "unknown" if states else ""


def agent_state(
    state: assignments.AssignmentProcessor,
    presence: AgentPresence,
    name: str,
    hosted: Iterable[str],
    now: float,
) -> str:
    statuses = [status for resource in hosted if (status := state.statuses.get(resource))]
    seen = _agent_state(statuses) or presence.state(name, now)
    return "unknown" if seen == "up" and name in presence.awaited else seen


class AgentPresence:
    """When agents last announced themselves to this registry, which is active since ``since``, what they
    reported to host, and their last metrics.

    Not stored: a registry that takes over knows an agent after its next announcement.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.inventories = inventory.AgentInventories()
        self.metrics: dict[str, Mapping[str, float]] = {}
        # Something was moved from them, or removed without them, since they reported
        self.awaited: set[str] = set()
        # Of resources that may move: their agents may have had no reason to renew before
        self.arrived_at: dict[str, float] = {}
        self._announced_at: dict[str, float] = {}

    def announced(self, name: str, now: float) -> None:
        self._announced_at[name] = now
        self.awaited.discard(name)

    def contact_at(self, name: str) -> float:
        """When the agent had contact with a registry, at the latest."""
        return max(self.since, self._announced_at.get(name, self.since))

    def forget(self, name: str) -> None:
        self._announced_at.pop(name, None)
        self.metrics.pop(name, None)
        self.awaited.discard(name)
        self.inventories.forget(name)

    def state(self, name: str, now: float) -> str:
        at = self._announced_at.get(name)
        if now - max(self.since, at or self.since) > ABSENT_S:
            return "down"
        return "unknown" if at is None else "up"


class MachineStates:
    """What is known of machines now: attributes for predicates. ``alerts`` returns the rules whose alerts
    about machines have not ended, by machine."""

    def __init__(
        self,
        state: assignments.AssignmentProcessor,
        presence: AgentPresence,
        alerts: Callable[[], Mapping[str, Collection[str]]],
        now: Callable[[], float],
    ) -> None:
        self._state = state
        self._presence = presence
        self._alerts = alerts
        self._now = now

    @property
    def metric_names(self) -> set[str]:
        return {name for metrics in list(self._presence.metrics.values()) for name in metrics}

    def attributes(self, agent: str, keys: Collection[str]) -> Mapping[str, Any]:
        values: dict[str, Any] = dict(self._presence.metrics.get(agent, {}))
        if "machine_state" in keys:
            hosted = tuple(self._state.hosted(agent))
            values["machine_state"] = agent_state(self._state, self._presence, agent, hosted, self._now())
        if not {"alerts", "alert_count"}.isdisjoint(keys):
            known = self._state.agents.get(agent)
            sensor = known.facts.get(protocol.SENSOR, agent) if known is not None else agent
            rules = sorted(self._alerts().get(str(sensor), ()))
            values |= {"alerts": ",".join(rules), "alert_count": len(rules)}
        return values


def agents(
    state: assignments.AssignmentProcessor, presence: AgentPresence, now: float, after: str, limit: int
) -> dict[str, Any]:
    """A page of agents."""

    def row_of(name: str) -> rows.AgentRow:
        record = state.agents[name]
        hosted = tuple(state.hosted(name))  # at once: it changes while a thread visits a snapshot
        return rows.AgentRow(
            name=name,
            state="forgotten" if record.forgotten else agent_state(state, presence, name, hosted, now),
            resources=len(hosted),
            orphans=presence.inventories.count(name),
            zone=record.zone,
            labels=record.labels,
            facts=msgspec.to_builtins(record.facts),
            types=list(record.types),
            machine=record.machine,
            cordoned=record.cordoned,
        )

    return page(sorted(name for name in state.agents if name > after), row_of, limit)


def page(
    keys: Iterable[str], item: Callable[[str], Any], limit: int = PAGE, *, limit_max: int = 0
) -> dict[str, Any]:
    """The items of the first ``keys``: at most ``limit``, and as many as fit into a message.

    ``next`` is the key to continue ``after``, None at the end: see `rpc.client.pages`.
    """
    limit = max(1, min(limit, limit_max or PAGE))
    items: list[Any] = []
    size, last = 0, ""
    for key in keys:
        row = item(key)
        size += len(msgspec.json.encode(row))
        if items and (len(items) >= limit or size > PAGE_BYTES):
            return {"items": items, "next": last}
        items.append(row)
        last = key
    return {"items": items, "next": None}


def managers(state: assignments.AssignmentProcessor, now: float, after: str, limit: int) -> dict[str, Any]:
    """A page of managers."""

    def row_of(name: str) -> rows.ManagerRow:
        member = state.managers[name]
        return rows.ManagerRow(
            name=name,
            resources=state.owned_count(name),
            expires_in_s=round(member.expires_at - now, 1),
            leaving=member.leaving,
        )

    return page(sorted(name for name in state.managers if name > after), row_of, limit)
