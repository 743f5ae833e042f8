"""Which resources are started on another machine, and which deletions end without a machine. Pure.

A resource moves only when it is certain that it does not run where it was:

- Its machine is lost: the registry has had no contact with its agent for longer than the agent, or its
  watchdog, needs to stop it (`muster.manage.agent.deadlines`, `records.ResourceRecord.stop_after_s`). The
  agent then has to report all that it hosts before it renews again (`records.AgentRecord.must_report`), and
  deletes what has moved.
- It leaves its machine (`records.ResourceRecord.is_leaving`): its manager has deleted it there, with an epoch
  that is higher than that of any earlier operation, so none of these can create it again. That is so for
  resources of a drained machine, as soon as they are drained, and for those that are moved on request.

A registry that has just become active does not know when agents had contact with the former one: it counts
from when it became active.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from muster.core import errors, health
from muster.manage import protocol, rows
from muster.manage.registry import agent_selection, assignments, records, views

MOVES_MAX = 500  # in one commit
DELETE_LOST_S = views.ABSENT_S  # a deletion does not wait longer for a machine without contact
RENEWALS_MISSED = 0.5  # of the time of a machine: it may be lost, and gets nothing new
DONE = (health.HealthState.COMPLETED, health.HealthState.FAILED)
STOPPED = (health.HealthState.DOWN, *DONE)


@dataclass(slots=True)
class MovePlan:
    """``moved`` and ``ended``: by the agent that they leave; ``waiting``: what cannot move, and why."""

    changes: records.RegistryChanges
    moved: dict[str, list[str]] = field(default_factory=dict)
    ended: dict[str, list[str]] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.changes.resources)


def plan(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float, now_ms: int
) -> MovePlan:
    """At most `MOVES_MAX` changes; the rest follows with the next plan."""
    decided = MovePlan(records.RegistryChanges(epoch=state.epoch))
    candidates = list(_candidates(state, presence, now, decided))
    others = agent_selection.OtherAgents(
        state, {name for name, _ in candidates}, lambda agent: is_suitable(state, presence, agent, now)
    )
    for name, is_lost in candidates:
        if decided.size >= MOVES_MAX:
            break
        resource = state.resources[name]
        policy = resource.spec.reschedule or protocol.ReschedulePolicy()
        recent = tuple(at for at in resource.moves_ms if abs(now_ms - at) < policy.window_s * 1000)
        if is_lost and len(recent) >= policy.attempts:
            decided.waiting[name] = f"it was moved {len(recent)} times within {policy.window_s:g} s"
            continue
        try:
            spec = others.place(resource.spec)
        except errors.Unavailable as error:
            decided.waiting[name] = f"no other machine: {error.message}"
            continue
        _move(state, decided, resource, spec, (*recent, now_ms) if is_lost else recent)
        if is_lost:
            state.require_report(decided.changes, resource.spec.agent)
            decided.moved.setdefault(resource.spec.agent, []).append(name)
    _end_deletions(state, presence, now, decided)
    return decided


def is_suitable(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, agent: str, now: float
) -> bool:
    """Whether an agent had contact lately."""
    return presence.state(agent, now) == "up" and not is_silent(state, presence, agent, now)


def is_silent(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, agent: str, now: float
) -> bool:
    """Whether an agent had no contact for longer than usual, or since something was moved from it: its
    machine may be lost."""
    if agent in presence.awaited:
        return True
    movable = tuple(state.index.movable.get(agent, ()))  # a snapshot may not have some
    times = [known.stop_after_s for name in movable if (known := state.resources.get(name))]
    limit = min(times) * RENEWALS_MISSED if times else 1.5 * protocol.HELLO_S
    return now - presence.contact_at(agent) >= limit


def note_arrivals(state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float) -> None:
    """Remember when resources that may move came to their agents, until these have contact."""
    noted = presence.arrived_at | dict.fromkeys(state.index.arrived, now)
    state.index.arrived.clear()
    presence.arrived_at = {
        name: at
        for name, at in noted.items()
        if (known := state.resources.get(name)) and presence.contact_at(known.spec.agent) < at
    }


def _candidates(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float, decided: MovePlan
) -> Iterator[tuple[str, bool]]:
    """What has certainly stopped, or left; and whether its machine is lost."""
    note_arrivals(state, presence, now)
    for agent, names in state.index.movable.items():
        contact_at = presence.contact_at(agent)
        if now - contact_at < protocol.AFTER_S_MIN:
            continue
        for name in sorted(names):
            resource = state.resources[name]
            if resource.deleting:
                continue
            silent_s = now - max(contact_at, presence.arrived_at.get(name, contact_at))
            if silent_s > resource.stop_after_s and _is_to_run(state, name):
                yield name, True
    for name in sorted(state.index.ending):
        resource, status = state.resources[name], state.statuses.get(name)
        if resource.is_leaving and not resource.deleting and status is not None and status.gone:
            yield name, False


def leave_drained(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float
) -> records.RegistryChanges:
    """Drained machines lose the resources that have stopped and can run elsewhere."""
    changes = records.RegistryChanges(epoch=state.epoch)
    for agent, movable in state.index.movable.items():
        if not state.agents[agent].cordoned or not is_suitable(state, presence, agent, now):
            continue
        names = [name for name in sorted(movable) if _has_drained(state, name)][:MOVES_MAX]
        others = agent_selection.OtherAgents(
            state, names, lambda other: is_suitable(state, presence, other, now)
        )
        for name in names:
            try:
                others.place(state.resources[name].spec)
            except errors.Unavailable as error:
                state.waiting[name] = f"drained; no other machine: {error.message}"
                continue
            leave(state, changes, name)
    return changes


def leave(state: assignments.AssignmentProcessor, changes: records.RegistryChanges, name: str) -> None:
    """Have the resource deleted where it is, under a new epoch; then it moves."""
    changes.resources[name] = msgspec.structs.replace(state.resources[name], is_leaving=True)
    if (owner := state.owners.get(name)) is not None:
        changes.owners[name] = msgspec.structs.replace(owner, epoch=changes.next_epoch(owner.epoch))


def _has_drained(state: assignments.AssignmentProcessor, name: str) -> bool:
    resource, status = state.resources[name], state.statuses.get(name)
    return (
        not resource.is_leaving
        and not resource.deleting
        and resource.spec.desired is protocol.DesiredState.UP
        and status is not None
        and status.state is health.HealthState.DOWN
        and status.generation == resource.generation
    )


def _is_to_run(state: assignments.AssignmentProcessor, name: str) -> bool:
    resource, status = state.resources[name], state.statuses.get(name)
    if resource.is_leaving:
        return True
    is_done = status is not None and status.state in DONE and status.generation == resource.generation
    return resource.spec.desired is protocol.DesiredState.UP and not is_done


def _move(
    state: assignments.AssignmentProcessor,
    decided: MovePlan,
    resource: records.ResourceRecord,
    spec: protocol.ResourceSpec,
    moves_ms: tuple[int, ...],
) -> None:
    name, changes = spec.name, decided.changes
    changes.resources[name] = msgspec.structs.replace(
        resource,
        spec=spec,
        generation=resource.generation + 1,
        formerly="",
        stop_after_s=state.certain_stop_s(spec),
        is_leaving=False,
        moves_ms=moves_ms,
    )
    changes.statuses[name] = None
    if (owner := state.owners.get(name)) is not None:
        changes.owners[name] = msgspec.structs.replace(owner, epoch=changes.next_epoch(owner.epoch))


def _end_deletions(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float, decided: MovePlan
) -> None:
    """A deletion ends although its machine is lost; a machine that returns deletes what it still hosts."""
    for name in sorted(state.index.ending):
        resource = state.resources[name]
        silent_s = now - presence.contact_at(resource.spec.agent)
        if (
            resource.deleting
            and silent_s > max(DELETE_LOST_S, resource.stop_after_s)
            and not state.waits_for(name)
            and decided.size < MOVES_MAX
        ):
            state.remove(decided.changes, name)
            decided.ended.setdefault(resource.spec.agent, []).append(name)


def rebalance(
    state: assignments.AssignmentProcessor, presence: views.AgentPresence, now: float, where: str
) -> dict[str, rows.MoveRow]:
    """What may move, runs, and fits better elsewhere; only of those that match ``where``."""

    def suits(agent: str) -> bool:
        return not state.agents[agent].cordoned and is_suitable(state, presence, agent, now)

    names = {name for agent, movable in state.index.movable.items() if suits(agent) for name in movable}
    chosen = views.select(state, None, where, "") if where else names
    movable = [
        name
        for name in sorted(names & set(chosen))
        if not (state.resources[name].deleting or state.resources[name].is_leaving)
        and _is_to_run(state, name)
    ]
    return agent_selection.rebalance(state, movable, suits)
