"""The registry's state in memory and the decisions that follow from it. Pure.

It assigns resources to managers evenly, expires managers that did not renew, and reassigns their resources
with a higher epoch. Each decision is a `records.RegistryChanges`. The endpoint appends it to the log, and
what is stored is passed to `accept` (`registry_log`): memory never contains what the log does not.

Epochs come from one counter for all resources, so a resource that is deleted and created again has a higher
epoch than before. A registry whose log was restored from a backup could assign epochs that agents have
already seen. In that case the manager reports the epoch that the agent accepted
(`protocol.ResourceStatus.superseded_by`), and the resource gets a higher one. This raises the epoch of that
resource only, so a malicious agent affects only the resources it hosts.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import itertools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from muster.core import errors, health, subjects
from muster.manage import manifest, protocol
from muster.manage.registry import records

if TYPE_CHECKING:
    from muster.manage.registry import views

EPOCH_MAX = 1 << 62  # bound for epochs that an agent reports: a higher one always exists
# Owners changed in one commit; the rest follows in the next.
ASSIGNED_MAX = 25_000
# Names in `waits_for`, which is meant for people.
WAITS_MAX = 100
NAMED_MAX = 5  # names in an error message
# A renewal outlasts the time of the registry that grants it by at most this fraction of the time to live.
OUTLAST = 0.25
# A manager renews within this fraction of its time to live after a registry has begun to act or to act again.
REPEAT = 0.3
UP = protocol.DesiredState.UP
WORKS = (health.HealthState.UP, health.HealthState.COMPLETED)
ENDS = (*WORKS, health.HealthState.FAILED)  # what the desired state leads to, in the end
SLACK = 0.1  # managers may deviate from an even share by this fraction before resources are moved


class AssignmentChanges:
    """Changes for each manager, in an order that allows sending them in pages.

    Each change has its own revision. A manager states the revision up to which it knows its assignments and
    receives the changes after it. A page may end anywhere; a change that arrives between two pages is on a
    later page.
    """

    def __init__(self) -> None:
        self.revision = 1
        self.released: dict[
            str, dict[str, int]
        ] = {}  # by manager: the released resources and the revision of each
        self._assigned: dict[
            str, tuple[str, int]
        ] = {}  # by resource: its manager and the revision of the last change
        # By manager: (revision, resource), oldest first; a later change of a resource adds another entry.
        self._logs: dict[str, list[tuple[int, str]]] = {}
        self._live: dict[str, int] = {}  # by manager: the number of valid entries in its log

    def assign(self, manager: str, resource: str) -> None:
        """The resource belongs to this manager, and something about it changed."""
        before = self._assigned.get(resource)
        if before is None or before[0] != manager:
            self._live[manager] = self._live.get(manager, 0) + 1
        self.released.get(manager, {}).pop(resource, None)
        self._assigned[resource] = (manager, self.revision + 1)
        self._append(manager, resource)

    def release(self, manager: str, resource: str, *, notify: bool) -> None:
        """The resource no longer belongs to this manager; ``notify``: the manager has to be informed."""
        if self._assigned.pop(resource, ("", 0))[0] == manager:
            self._live[manager] -= 1
        if notify:
            self.released.setdefault(manager, {})[resource] = self.revision + 1
            self._append(manager, resource)

    def confirm(self, manager: str, revision: int) -> None:
        """The manager has received all changes up to this revision."""
        released = self.released.get(manager, {})
        for resource in [name for name, at in released.items() if at <= revision]:
            del released[resource]

    def forget(self, manager: str) -> None:
        """The manager will receive all its assignments again."""
        self.released.pop(manager, None)
        self._compact(manager)

    def since(self, manager: str, revision: int) -> Iterator[tuple[int, str, bool]]:
        """Later changes, oldest first: revision, resource, and whether it was released."""
        log, released = self._logs.get(manager, []), self.released.get(manager, {})
        for index in range(bisect.bisect_right(log, revision, key=lambda entry: entry[0]), len(log)):
            at, resource = log[index]
            if self._assigned.get(resource) == (manager, at):
                yield at, resource, False
            elif released.get(resource) == at:
                yield at, resource, True

    def _append(self, manager: str, resource: str) -> None:
        self.revision += 1
        log = self._logs.setdefault(manager, [])
        log.append((self.revision, resource))
        if len(log) > 2 * (self._live.get(manager, 0) + len(self.released.get(manager, ()))) + 1_000:
            self._compact(manager)

    def _compact(self, manager: str) -> None:
        self._logs[manager] = [(at, resource) for at, resource, _ in self.since(manager, 0)]


class AssignmentProcessor:
    def __init__(self, *, term: int, ttl_s: float, session: int = 0) -> None:
        """``session`` is random, so revisions of another processor are never taken for those of this one."""
        self.term = term  # the acting registry's epoch
        self.ttl_s = ttl_s
        self.session = session
        self.resources: dict[str, records.ResourceRecord] = {}
        self.owners: dict[str, records.ResourceOwner] = {}
        self.statuses: dict[str, protocol.ResourceStatus] = {}
        self.agents: dict[str, records.AgentRecord] = {}
        self.managers: dict[str, records.ManagerRecord] = {}
        self.renewed: set[str] = set()  # managers that renewed in this term, including expired ones
        self.deviating: set[str] = set()  # resources that are not in their desired state
        self.waiting: dict[str, str] = {}  # resources that cannot move, and why; not stored
        self.machines: views.MachineStates | None = None  # what is known of machines now; not stored
        self.epoch = 0  # the highest assigned epoch
        # After the first and up to the second of a pair: assigned after a backup that was restored
        self.lost_epochs: list[tuple[int, int]] = []
        self.index = records.ResourceIndex()
        self.changes = AssignmentChanges()
        self._expiries: dict[str, int] = {}  # by manager: how often its pending changes were discarded
        self._sorted_names: list[str] | None = None

    def begin_term(self, term: int, session: int) -> None:
        """The registry becomes active. Managers renew again; each gets all that it owns."""
        self.term, self.session = term, session
        for name in self.managers:
            self.changes.forget(name)
        self.managers.clear()
        self.renewed.clear()
        self._expiries.clear()

    # Stored changes

    def accept(self, changes: records.RegistryChanges) -> set[str]:
        """Apply committed changes. Returns the managers to notify."""
        touched: set[str] = set()
        judged = {*changes.resources, *changes.statuses}
        self.epoch = max(self.epoch, changes.epoch)
        for name, agent in changes.agents.items():
            before_agent = self.agents.pop(name, None)
            if agent is not None:
                self.agents[name] = agent
                if agent.cordoned != (before_agent is not None and before_agent.cordoned):
                    touched.update(self.hosted(name))
                    judged.update(self.hosted(name))
        for name, resource in changes.resources.items():
            for version in (self.resources.get(name), resource):
                touched |= set(version.spec.depends_on) if version is not None else set()
            self._set_resource(name, resource)
            touched |= {name, *self.index.dependants.get(name, ())}
        for name, owner in changes.owners.items():
            self._set_owner(name, owner)
            touched.add(name)
        for name, status in changes.statuses.items():
            if status is None:
                self.statuses.pop(name, None)
                continue
            before = self.statuses.get(name)
            self.statuses[name] = status
            if before is None or _progress(before) != _progress(status):
                touched |= self.index.dependants.get(name, set())
        for name in judged:
            (self.deviating.discard if self.is_as_desired(name) else self.deviating.add)(name)
        return self._touch(touched)

    def is_as_desired(self, name: str) -> bool:
        """Whether nothing about it is to be waited for; also if it does not exist."""
        resource, status = self.resources.get(name), self.statuses.get(name)
        if resource is None or resource.deleting:
            return True
        if status is None or status.generation != resource.generation:
            return False
        if self.desired_state(name) is UP:
            return self.state_of(name) in WORKS
        return status.state is health.HealthState.DOWN

    @property
    def sorted_names(self) -> list[str]:
        """The names of all resources in order; cached, because lists are read page by page."""
        if self._sorted_names is None:
            self._sorted_names = sorted(self.resources)
        return self._sorted_names

    def snapshot(self) -> AssignmentProcessor:
        """A copy of resources, owners, statuses and agents, for a computation in another thread.

        The records are immutable and shared. Everything else is not copied and continues to change.
        """
        copied = copy.copy(self)
        copied._sorted_names = self.sorted_names
        copied.resources, copied.owners = dict(self.resources), dict(self.owners)
        copied.statuses, copied.agents = dict(self.statuses), dict(self.agents)
        return copied

    def owned_count(self, manager: str) -> int:
        return sum(len(names) for (owner, _), names in self.index.owned.items() if owner == manager)

    @property
    def owning_managers(self) -> set[str]:
        """The managers that own resources."""
        return {manager for manager, _ in self.index.owned}

    def hosted(self, agent: str) -> Collection[str]:
        """The resources of an agent."""
        return self.index.hosted.get(agent, ())

    def zone_of(self, agent: str) -> str:
        known = self.agents.get(agent)
        return known.zone if known is not None else ""

    def agent_of(self, name: str) -> str | None:
        """The agent on which a resource belongs, also under the name from which it is being renamed."""
        resource = self.resources.get(self.index.renamed.get(name, name))
        return None if resource is None else resource.spec.agent

    def _touch(self, names: Iterable[str]) -> set[str]:
        managers = set()
        for name in names:
            owner = self.owners.get(name)
            if owner is not None and owner.manager:
                self.changes.assign(owner.manager, name)
                managers.add(owner.manager)
        return managers

    def _set_resource(self, name: str, resource: records.ResourceRecord | None) -> None:
        before = self.resources.pop(name, None)
        if (before is None) != (resource is None):
            self._sorted_names = None
        self.index.set_resource(name, before, resource, has_owner=name in self.owners)
        if resource is None:
            self.statuses.pop(name, None)
        else:
            self.resources[name] = resource

    def _set_owner(self, name: str, owner: records.ResourceOwner | None) -> None:
        before = self.owners.pop(name, None)
        self.index.set_owner(name, before, owner, exists=name in self.resources)
        if before is not None and (owner is None or owner.manager != before.manager):
            self.changes.release(before.manager, name, notify=before.manager in self.managers)
        if owner is not None:
            self.owners[name] = owner

    # Managers

    def granted_s(self, lease_s: float) -> float:
        """How long a renewal is valid that a registry grants whose own lease lasts for ``lease_s`` more."""
        return min(self.ttl_s, lease_s + self.ttl_s * OUTLAST)

    def unknown_until(self, now: float, former_until: float | None) -> float:
        """Until when managers that did not renew in this term may act with the renewal of an earlier one.

        ``former_until``: when the time of the former registry ended.
        """
        if former_until is None:
            return now + self.ttl_s
        return min(now + self.ttl_s, max(former_until + self.ttl_s * OUTLAST, now + self.ttl_s * REPEAT))

    def renew(
        self, name: str, request: protocol.RenewRequest, now: float, *, ttl_s: float | None = None
    ) -> bool:
        """Renew a manager. Returns whether assignments may change because of it."""
        before = self.managers.get(name)
        self.renewed.add(name)
        expires_at = now + (self.ttl_s if ttl_s is None else ttl_s)
        self.managers[name] = records.ManagerRecord(
            request.boot, expires_at, request.broker, request.connection, request.leaving
        )
        return before is None or before.boot != request.boot or before.leaving != request.leaving

    def renewal_page(self, name: str, request: protocol.RenewRequest) -> protocol.RenewResult:
        """A page of changes that this manager has not received yet, oldest first."""
        session, revision = self.session + self._expiries.get(name, 0), self.changes.revision
        resync = (request.term, request.session) != (self.term, session) or request.revision > revision
        since = 0 if resync else request.revision
        self.changes.confirm(name, revision if resync else since)
        beyond = protocol.PAGE + 1
        page = list(itertools.islice(self.changes.since(name, since), beyond))
        assigned: list[protocol.Assignment] = []
        size = count = 0
        for _, resource, released in page[: protocol.PAGE]:
            assignment = None if released else self.assignment(resource)
            size += len(resource) + 8 if assignment is None else len(msgspec.msgpack.encode(assignment))
            if count and size > protocol.PAGE_BYTES:
                break
            count += 1
            if assignment is not None:
                assigned.append(assignment)
        more = count < len(page)
        return protocol.RenewResult(
            term=self.term,
            session=session,
            revision=page[count - 1][0] if more else revision,
            ttl_s=self.ttl_s,
            anew=resync,
            more=more,
            assigned=tuple(assigned),
            released=tuple(resource for _, resource, released in page[:count] if released),
        )

    def assignment(self, name: str) -> protocol.Assignment:
        resource, owner = self.resources[name], self.owners[name]
        return protocol.Assignment(
            spec=msgspec.structs.replace(resource.spec, desired=self.desired_state(name)),
            epoch=owner.epoch,
            generation=resource.generation,
            deleting=resource.deleting or resource.is_leaving,
            formerly=resource.formerly,
            waits_for=self.waits_for(name),
            status=self.statuses.get(name),
        )

    def desired_state(self, name: str) -> protocol.DesiredState:
        """The desired state in force: on a drained machine, resources are drained."""
        spec = self.resources[name].spec
        agent = self.agents.get(spec.agent)
        drained = agent is not None and agent.cordoned and spec.desired is protocol.DesiredState.UP
        return protocol.DesiredState.DRAINED if drained else spec.desired

    def waits_for(self, name: str) -> tuple[str, ...]:
        """Dependencies that have to be up before a start, or dependants that have to be gone before a
        deletion.

        A running resource waits for nothing: the failure of a dependency does not stop it.
        """
        resource, status = self.resources[name], self.statuses.get(name)
        if resource.is_leaving and not resource.deleting:
            return ()
        if resource.deleting:
            dependants = (
                dependant for dependant in self.index.dependants.get(name, ()) if dependant in self.resources
            )
            deleting = (dependant for dependant in dependants if self.resources[dependant].deleting)
            return tuple(heapq.nsmallest(WAITS_MAX, deleting))
        if status is not None and status.generation:
            return ()
        return tuple(
            dependency for dependency in resource.spec.depends_on if not self._satisfies(dependency)
        )[:WAITS_MAX]

    def _satisfies(self, name: str) -> bool:
        """Whether dependants may start: it is up, or a job and completed, or its desired state is not up."""
        if name not in self.resources:
            return False
        enough = (health.HealthState.COMPLETED,) if self.resources[name].spec.job is not None else WORKS
        return self.desired_state(name) is not protocol.DesiredState.UP or self.state_of(name) in enough

    def state_of(self, name: str) -> health.HealthState:
        """Its state under the current desired state: starting until that is applied, or was given up."""
        resource, status = self.resources[name], self.statuses.get(name)
        if status is None:
            return health.HealthState.STARTING
        if status.state not in ENDS or resource.deleting or resource.spec.desired is not UP:
            return status.state
        is_up = status.state is health.HealthState.UP
        known = status.generation if is_up else max(status.generation, status.desired_generation)
        return status.state if known >= resource.generation else health.HealthState.STARTING

    def connection_closed(self, broker: str, connection: int, now: float, grace_s: float) -> str | None:
        """A broker reported a closed connection. Its manager has ``grace_s`` to renew over another one."""
        for name, member in self.managers.items():
            if (member.broker, member.connection) == (broker, connection):
                member.expires_at = min(member.expires_at, now + grace_s)
                return name
        return None

    def next_expiry(self) -> float | None:
        return min((member.expires_at for member in self.managers.values()), default=None)

    def resume(self, now: float) -> None:
        """The registry acts again after it could not renew its lease. Its managers get time to renew."""
        for member in self.managers.values():
            member.expires_at = max(member.expires_at, now + self.ttl_s * REPEAT)

    def expire(self, now: float) -> list[str]:
        """Remove managers that did not renew in time. Returns their names."""
        late = [name for name, member in self.managers.items() if member.expires_at <= now]
        for name in late:
            del self.managers[name]
            self.changes.forget(name)
            self._expiries[name] = self._expiries.get(name, 0) + 1
        return late

    def assign(self) -> records.RegistryChanges:
        """Assign resources without an owner to the least loaded managers and balance the load, in bounded
        batches.
        """
        candidates = sorted(name for name, member in self.managers.items() if not member.leaving)
        changes = records.RegistryChanges(epoch=self.epoch)
        if not candidates:
            return changes
        boots = {name: self.managers[name].boot for name in candidates}
        lost = [names for (manager, boot), names in self.index.owned.items() if boots.get(manager) != boot]
        moving = sorted(self.index.unowned.union(*lost))
        owned = {name: self.index.owned.get((name, boot), set()) for name, boot in boots.items()}
        counts = {name: len(names) for name, names in owned.items()}
        share = -(-len(self.resources) // len(candidates))
        slack = max(1, int(share * SLACK))
        for name in candidates:
            surplus = counts[name] - share
            is_above = surplus > 0
            if surplus > slack or (is_above and min(counts.values()) < share - slack):
                moving += heapq.nsmallest(surplus, owned[name])
                counts[name] -= surplus
        least = [(count, name) for name, count in counts.items()]
        heapq.heapify(least)
        for name in moving:
            count, manager = least[0]
            heapq.heapreplace(least, (count + 1, manager))
            before = self.owners.get(name)
            if before is not None and (before.manager, before.boot) == (manager, boots[manager]):
                continue  # it returned to its previous owner
            epoch = changes.next_epoch(before.epoch if before else 0)
            changes.owners[name] = records.ResourceOwner(manager=manager, epoch=epoch, boot=boots[manager])
            if len(changes.owners) == ASSIGNED_MAX:
                break
        return changes

    # Resources

    def apply(self, specs: Iterable[protocol.ResourceSpec], by: str) -> records.RegistryChanges:
        changes = records.RegistryChanges(epoch=self.epoch)
        for spec in specs:
            before = self.resources.get(spec.name)
            if spec.name in self.index.renamed:
                raise errors.Conflict(f"{spec.name!r} is being renamed", hint="apply again after the rename")
            if before is not None and before.deleting:
                raise errors.Conflict(
                    f"{spec.name!r} is being deleted", hint="apply again after the deletion"
                )
            if before is not None and before.spec == spec:
                continue
            if before is not None and (before.spec.schedule is None) != (spec.schedule is None):
                raise errors.Conflict(
                    f"{spec.name!r} cannot become a job with or without a `schedule`", hint="delete it first"
                )
            leaves = before is not None and before.spec.agent != spec.agent
            if before is not None and leaves:
                if not before.stop_after_s or spec.reschedule is None:
                    raise errors.Conflict(
                        f"{spec.name!r} is on {before.spec.agent!r} and cannot move to {spec.agent!r}",
                        hint="delete it there, then apply again; with `reschedule` it can be moved",
                    )
                spec = manifest.placed(spec, before.spec.agent, self.zone_of(before.spec.agent))
                if before.is_leaving and before.spec == spec:
                    continue
            if before is not None and before.spec.type != spec.type:
                raise errors.Conflict(
                    f"{spec.name!r} is a {before.spec.type} and cannot become a {spec.type}"
                )
            generation = before.generation + 1 if before else 1
            formerly = before.formerly if before else ""
            changes.resources[spec.name] = records.ResourceRecord(
                spec=spec,
                generation=generation,
                by=by,
                formerly=formerly,
                stop_after_s=self.certain_stop_s(spec, before),
                is_leaving=leaves or (before is not None and before.is_leaving),
                moves_ms=before.moves_ms if before else (),
            )
        return changes

    def certain_stop_s(
        self, spec: protocol.ResourceSpec, before: records.ResourceRecord | None = None
    ) -> float:
        """The time without contact after which the resource has certainly been stopped; 0: it never is. The
        agent of an existing one is told of a change later."""
        agent = self.agents.get(spec.agent)
        if spec.reschedule is None or agent is None or not agent.has_deadlines:
            return 0.0
        if before is None:
            return spec.reschedule.after_s
        return max(before.stop_after_s, spec.reschedule.after_s) if before.stop_after_s else 0.0

    def confirm_deadlines(
        self, agent: str, hello: protocol.AgentHello
    ) -> tuple[dict[str, records.ResourceRecord | None], dict[str, float]]:
        """What an agent reports to enforce: the changed records, and what it has to enforce instead."""
        changed: dict[str, records.ResourceRecord | None] = {}
        expected: dict[str, float] = {}
        for item in hello.hosted or ():
            resource = self.resources.get(item.name)
            if resource is None or resource.spec.agent != agent:
                continue
            policy, enforced = resource.spec.reschedule, item.stop_after_s if hello.has_deadlines else 0.0
            after_s = policy.after_s if policy is not None else 0.0
            if hello.has_deadlines and enforced != after_s:
                expected[item.name] = after_s
            if resource.stop_after_s != enforced and enforced in (0.0, after_s):
                changed[item.name] = msgspec.structs.replace(resource, stop_after_s=enforced)
        return changed, expected

    def runs(self, job: str) -> list[str]:
        """The runs of a periodic job that exist, in order."""
        return sorted(self.index.runs.get(job, ()))

    def set_desired(
        self, name: str, desired: protocol.DesiredState, by: str, kind: protocol.DrainKind | None = None
    ) -> records.RegistryChanges:
        """Drain (``DRAINED``) or undrain (``UP``) a resource or a complete machine.

        A resource whose desired state is ``down`` stays down. A drained machine accepts no more resources;
        the desired states of its resources are kept for the undrain (see `desired_state`).
        """
        changes, drain = records.RegistryChanges(epoch=self.epoch), desired is protocol.DesiredState.DRAINED
        resource = self.resources.get(name) if kind != "agent" else None
        agent = self.agents.get(name) if kind != "resource" else None
        if resource is not None and agent is not None:
            raise errors.InvalidInput(
                f"{name!r} is the name of a resource and of an agent", hint="say which: resource or agent"
            )
        if resource is not None:
            if not drain and self.desired_state(name) is not resource.spec.desired:
                raise errors.Conflict(
                    f"{name!r} is on {resource.spec.agent!r}, which is drained", hint="undrain the machine"
                )
            before = protocol.DesiredState.UP if drain else protocol.DesiredState.DRAINED
            if resource.spec.desired is before and not resource.deleting:
                spec = msgspec.structs.replace(resource.spec, desired=desired)
                changes.resources[name] = msgspec.structs.replace(
                    resource, spec=spec, generation=resource.generation + 1, by=by
                )
        elif agent is not None:
            if agent.cordoned != drain:
                forgotten = agent.forgotten and drain
                changes.agents[name] = msgspec.structs.replace(agent, cordoned=drain, forgotten=forgotten)
        else:
            raise errors.NotFound(f"no {kind or 'resource or agent'} {name!r}")
        return changes

    def rename(self, name: str, to: str, by: str) -> records.RegistryChanges:
        """Rename a resource; its dependants refer to the new name.

        The registry uses the new name at once. The manager then has the agent rename the resource
        (`Assignment.formerly`).
        """
        subjects.token(to)
        resource = self.resources.get(name)
        if resource is None:
            raise errors.NotFound(f"no resource {name!r}")
        if to in self.resources:
            raise errors.AlreadyExists(f"the resource {to!r} already exists")
        if self.index.renamed.get(to, name) != name:
            raise errors.Conflict(f"{to!r} is being renamed", hint="retry after the rename")
        if resource.deleting or (resource.formerly and resource.formerly != to):
            hint = (
                None
                if resource.deleting
                else f"until then it can only be renamed back to {resource.formerly!r}"
            )
            being = "deleted" if resource.deleting else "renamed"
            raise errors.Conflict(f"{name!r} is being {being}", hint=hint)
        if resource.spec.schedule is not None or resource.spec.is_run:
            raise errors.Refused(f"{name!r} is a periodic job or a run of one, which cannot be renamed")
        if resource.spec.index:
            raise errors.Refused(f"{name!r} is an instance of {resource.spec.entry!r}, which names it")
        if protocol.TOPOLOGY in resource.spec.labels:
            raise errors.Refused(f"{name!r} belongs to a topology, whose brokers refer to each other by name")
        changes = records.RegistryChanges(epoch=self.epoch)
        changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
        for dependant in self.index.dependants.get(name, ()):
            other = self.resources[dependant]
            needs = tuple(to if need == name else need for need in other.spec.depends_on)
            spec = msgspec.structs.replace(other.spec, depends_on=needs)
            changes.resources[dependant] = msgspec.structs.replace(other, spec=spec)
        changes.resources[to] = msgspec.structs.replace(
            resource,
            spec=msgspec.structs.replace(resource.spec, name=to),
            generation=resource.generation + 1,
            by=by,
            formerly=name,
        )
        owner = self.owners.get(name)
        if owner is not None:
            epoch = changes.next_epoch(owner.epoch)
            changes.owners[to] = msgspec.structs.replace(owner, epoch=epoch)
            if name in self.statuses:
                changes.statuses[to] = self.statuses[name]
        return changes

    def delete(
        self,
        names: Iterable[str],
        by: str,
        *,
        force: bool = False,
        after: Mapping[str, records.ResourceRecord | None] = types.MappingProxyType({}),
    ) -> records.RegistryChanges:
        """Mark resources for deletion. Their managers remove them, dependants first.

        ``force`` removes them at once, without their agents: for machines that are lost. ``after``: resources
        that change as well; they count with their new dependencies.
        """
        changes, deleted = records.RegistryChanges(epoch=self.epoch), set(names)
        deleted.update(run for name in tuple(deleted) for run in self.index.runs.get(name, ()))
        for name in sorted(deleted):
            resource = self.resources.get(name)
            if resource is None:
                raise errors.NotFound(f"no resource {name!r}")
            remaining = [
                dependant
                for dependant in self.index.dependants.get(name, ())
                if dependant not in deleted
                and dependant in self.resources
                and not self.resources[dependant].deleting
                and ((changed := after.get(dependant)) is None or name in changed.spec.depends_on)
            ]
            if remaining:
                more = f" and {len(remaining) - NAMED_MAX} more" if len(remaining) > NAMED_MAX else ""
                raise errors.Conflict(
                    f"{', '.join(heapq.nsmallest(NAMED_MAX, remaining))}{more} depend(s) on {name!r}",
                    hint="delete those as well",
                )
            if force or resource.spec.schedule is not None:  # which is nowhere
                self.remove(changes, name)
            elif not resource.deleting:
                changes.resources[name] = _ending(resource, by)
        return changes

    def remove(self, changes: records.RegistryChanges, name: str) -> None:
        """Without its agent, which has to report all that it hosts before it renews again."""
        changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
        self.require_report(changes, self.resources[name].spec.agent)

    def require_report(self, changes: records.RegistryChanges, agent: str) -> None:
        known = changes.agents.get(agent) or self.agents.get(agent)
        if known is not None and known.has_deadlines:
            changes.agents[agent] = msgspec.structs.replace(known, must_report=True)

    def forget(self, agent: str, by: str = "", *, is_live: bool = False) -> records.RegistryChanges:
        """Remove the resources of an agent that will not return, without contacting it. If it is live, their
        managers delete them. Its record remains until `remove_agent`."""
        if (known := self.agents.get(agent)) is None:
            raise errors.NotFound(f"no agent {agent!r}")
        changes = records.RegistryChanges(epoch=self.epoch)
        changes.agents[agent] = msgspec.structs.replace(known, cordoned=True, forgotten=True)
        for name in self.hosted(agent):
            resource = self.resources[name]
            if not is_live:
                self.remove(changes, name)
            elif not resource.deleting:
                changes.resources[name] = _ending(resource, by)
        return changes

    def remove_agent(self, agent: str) -> records.RegistryChanges:
        """Remove the record of a forgotten agent, whose credentials have ended."""
        known = self.agents.get(agent)
        if known is not None and not known.forgotten:
            raise errors.Conflict(f"the agent {agent!r} was not forgotten")
        return records.RegistryChanges(epoch=self.epoch, agents={agent: None} if known else {})

    def apply_checkpoints(
        self, manager: str, items: dict[str, tuple[int, protocol.ResourceStatus]]
    ) -> tuple[records.RegistryChanges, dict[str, int]]:
        """Changes from a manager's checkpoints, and the rejected ones with the valid epoch."""
        changes, refused = records.RegistryChanges(epoch=self.epoch), {}
        for name, (epoch, status) in items.items():
            owner = self.owners.get(name)
            if owner is None or name not in self.resources:
                refused[name] = 0
            elif owner.manager != manager or owner.epoch != epoch:
                refused[name] = owner.epoch
            elif status.superseded_by > epoch:
                if status.superseded_by >= EPOCH_MAX:
                    refused[name] = owner.epoch
                    continue
                # Only a registry restored from a backup assigns a lower epoch than an agent has accepted.
                later = changes.next_epoch(status.superseded_by)
                changes.owners[name] = msgspec.structs.replace(owner, epoch=later)
            elif status.gone and self.resources[name].deleting:
                changes.resources[name] = None
                changes.owners[name] = None
                changes.statuses[name] = None
            else:
                changes.statuses[name] = status
                resource = self.resources[name]
                if resource.formerly and status.generation == resource.generation:
                    changes.resources[name] = msgspec.structs.replace(resource, formerly="")
        return changes, refused


def _ending(resource: records.ResourceRecord, by: str) -> records.ResourceRecord:
    generation = resource.generation + 1
    return msgspec.structs.replace(resource, deleting=True, by=by, generation=generation)


def _progress(status: protocol.ResourceStatus) -> tuple[bool, bool, int]:
    """What dependants wait for."""
    return status.state in WORKS, status.state is health.HealthState.COMPLETED, status.generation
