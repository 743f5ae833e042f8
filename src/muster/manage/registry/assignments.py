"""The request processor: the registry's state in memory, and what follows from it. Pure.

It matches resources to managers, spreads them evenly, expires managers that have not renewed, and reassigns
with a higher epoch.  Each decision is a `Changes`, which the shell commits and then hands to `accept`: memory
never knows what the store does not.

Epochs come from one counter for all resources, so that a resource that is deleted and made again has a higher
one than before.  A registry whose store was set back (restored from a copy) would give epochs that agents
have already seen: the manager reports the epoch that the agent obeys (`protocol.Status.superseded_by`), and
its resource gets one above.  That raises the epoch of this resource only, so an agent that lies harms only
what it hosts.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from muster.core import errors, health, subjects
from muster.manage import protocol
from muster.manage.registry import assignment_changes

EPOCH_MAX = 1 << 62  # of what an agent may report: there is always a higher one
# Owners changed in one commit: the rest follows in the next.
ASSIGNED_MAX = 25_000  # equivalent: any bound of this order serves
# Names in `waits_for`: for people to read.
WAITS_MAX = 100  # equivalent: any bound of this order serves
SLACK = 0.1  # managers may differ by this part of an even share before resources are moved for balance


class ResourceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    spec: protocol.ResourceSpec
    generation: int
    by: str = ""
    deleting: bool = False
    formerly: str = ""  # until its manager has renamed it


class ResourceOwner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``boot``: of the manager's process, so that one that was restarted owns anew, with a higher epoch."""

    manager: str
    epoch: int
    boot: int = 0


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``machine`` tells a machine that was set up anew from the one that was enrolled under this name."""

    zone: str = "default"
    labels: dict[str, str] = {}
    facts: dict[str, msgspec.Raw | str | int | float | bool] = {}
    types: tuple[str, ...] = ()
    machine: str = ""
    cordoned: bool = False


@dataclass(slots=True)
class RegistryChanges:
    """Records to write; None deletes."""

    resources: dict[str, ResourceRecord | None] = field(default_factory=dict)
    owners: dict[str, ResourceOwner | None] = field(default_factory=dict)
    statuses: dict[str, tuple[int, protocol.ResourceStatus] | None] = field(
        default_factory=dict
    )  # with its epoch
    agents: dict[str, AgentRecord | None] = field(default_factory=dict)
    epoch: int = 0

    def __bool__(self) -> bool:
        return bool(self.resources or self.owners or self.statuses or self.agents)


@dataclass(slots=True)
class ManagerRecord:
    """A manager that renews. ``expires_at`` is of the loop's clock."""

    boot: int
    expires_at: float
    broker: str
    connection: int
    leaving: bool


class AssignmentProcessor:
    def __init__(self, *, term: int, ttl_s: float, session: int = 0) -> None:
        """``session``: random, so that revisions of another processor are never mistaken for this one's."""
        self.term = term  # the acting registry's epoch
        self.ttl_s = ttl_s
        self.session = session
        self.resources: dict[str, ResourceRecord] = {}
        self.owners: dict[str, ResourceOwner] = {}
        self.statuses: dict[str, protocol.ResourceStatus] = {}
        self.agents: dict[str, AgentRecord] = {}
        self.managers: dict[str, ManagerRecord] = {}
        self.seen: set[str] = set()  # managers that have renewed in this term, also those that are gone since
        self.epoch = 0  # the highest given
        self._owned: dict[str, set[str]] = {}
        self._news = assignment_changes.AssignmentChanges()
        self._expiries: dict[str, int] = {}  # of a manager: how often what it knew was forgotten here
        self._dependants: dict[str, set[str]] = {}
        self._ordered: list[str] | None = None

    # What was stored

    def accept(self, changes: RegistryChanges) -> set[str]:
        """It is committed. Returns the managers that have to hear of it."""
        touched: set[str] = set()
        self.epoch = max(self.epoch, changes.epoch)
        for name, agent in changes.agents.items():
            before_agent = self.agents.pop(name, None)
            if agent is not None:
                self.agents[name] = agent
                if agent.cordoned != (before_agent is not None and before_agent.cordoned):
                    touched |= self._hosted_by(name)
        for name, resource in changes.resources.items():
            for one in (self.resources.get(name), resource):
                touched |= set(one.spec.depends_on) if one is not None else set()
            self._set_resource(name, resource)
            touched |= {name, *self._dependants.get(name, ())}
        for name, owner in changes.owners.items():
            self._set_owner(name, owner)
            touched.add(name)
        for name, record in changes.statuses.items():
            if record is None:
                self.statuses.pop(name, None)
                continue
            before, status = self.statuses.get(name), record[1]
            self.statuses[name] = status
            if before is None or (before.state is health.HealthState.UP) != (
                status.state is health.HealthState.UP
            ):
                touched |= self._dependants.get(name, set())
        return self._touch(touched)

    @property
    def ordered(self) -> list[str]:
        """The names of all resources in their order; kept, because lists are read page by page."""
        if self._ordered is None:
            self._ordered = sorted(self.resources)
        return self._ordered

    def snapshot(self) -> AssignmentProcessor:
        """A copy of resources, owners, statuses and agents, for a computation in another thread.

        The records are immutable and shared.  What else a processor has is not copied, and changes on.
        """
        found = copy.copy(self)
        found._ordered = self.ordered
        found.resources, found.owners = dict(self.resources), dict(self.owners)
        found.statuses, found.agents = dict(self.statuses), dict(self.agents)
        return found

    def owned_count(self, manager: str) -> int:
        return len(self._owned.get(manager, ()))

    def _hosted_by(self, agent: str) -> set[str]:
        return {name for name, resource in self.resources.items() if resource.spec.agent == agent}

    def _touch(self, names: Iterable[str]) -> set[str]:
        managers = set()
        for name in names:
            owner = self.owners.get(name)
            if owner is not None and owner.manager:
                self._news.assign(owner.manager, name)
                managers.add(owner.manager)
        return managers

    @property
    def revision(self) -> int:
        return self._news.revision

    def _set_resource(self, name: str, resource: ResourceRecord | None) -> None:
        before = self.resources.pop(name, None)
        if (before is None) != (resource is None):
            self._ordered = None
        if before is not None:
            for one in before.spec.depends_on:
                self._dependants.get(one, set()).discard(name)
        if resource is None:
            self.statuses.pop(name, None)
            return
        self.resources[name] = resource
        for one in resource.spec.depends_on:
            self._dependants.setdefault(one, set()).add(name)

    def _set_owner(self, name: str, owner: ResourceOwner | None) -> None:
        before = self.owners.pop(name, None)
        if before is not None:
            self._owned.get(before.manager, set()).discard(name)
            if owner is None or owner.manager != before.manager:
                self._news.release(before.manager, name, tell=before.manager in self.managers)
        if owner is None:
            return
        self.owners[name] = owner
        self._owned.setdefault(owner.manager, set()).add(name)

    # Managers

    def renew(self, name: str, said: protocol.RenewRequest, now: float) -> bool:
        """A manager lives. Whether anything may follow for assignments."""
        before = self.managers.get(name)
        self.seen.add(name)
        self.managers[name] = ManagerRecord(
            said.boot, now + self.ttl_s, said.broker, said.connection, said.leaving
        )
        return before is None or before.boot != said.boot or before.leaving != said.leaving

    def granted(self, name: str, said: protocol.RenewRequest) -> protocol.RenewResult:
        """A page of what this manager has to know, beyond what it says it knows: oldest changes first."""
        session = self.session + self._expiries.get(name, 0)
        anew = (said.term, said.session) != (self.term, session) or said.revision > self.revision
        since = 0 if anew else said.revision  # equivalent: the first change has revision 2
        self._news.confirm(name, self.revision if anew else since)
        beyond = protocol.PAGE + 1  # equivalent (1 -> 2): one beyond the page tells that there is more
        page = list(itertools.islice(self._news.since(name, since), beyond))
        assigned: list[protocol.Assignment] = []
        size = count = 0
        for _, one, released in page[: protocol.PAGE]:
            assignment = None if released else self.assignment(one)
            size += len(one) + 8 if assignment is None else len(msgspec.msgpack.encode(assignment))
            if count and size > protocol.PAGE_BYTES:
                break
            count += 1
            if assignment is not None:
                assigned.append(assignment)
        more = count < len(page)
        return protocol.RenewResult(
            term=self.term,
            session=session,
            revision=page[count - 1][0] if more else self.revision,
            ttl_s=self.ttl_s,
            anew=anew,
            more=more,
            assigned=tuple(assigned),
            released=tuple(one for _, one, released in page[:count] if released),
        )

    def assignment(self, name: str) -> protocol.Assignment:
        resource, owner = self.resources[name], self.owners[name]
        return protocol.Assignment(
            spec=msgspec.structs.replace(resource.spec, wanted=self.wanted(name)),
            epoch=owner.epoch,
            generation=resource.generation,
            deleting=resource.deleting,
            formerly=resource.formerly,
            waits_for=self.waits_for(name),
            status=self.statuses.get(name),
        )

    def wanted(self, name: str) -> protocol.DesiredState:
        """The desired state in force: on a drained machine nothing runs."""
        spec = self.resources[name].spec
        agent = self.agents.get(spec.agent)
        drained = agent is not None and agent.cordoned and spec.wanted is protocol.DesiredState.UP
        return protocol.DesiredState.DRAINED if drained else spec.wanted

    def waits_for(self, name: str) -> tuple[str, ...]:
        """What has to be up before it is started; what has to be gone before it is deleted.

        What runs already waits for nothing: the fall of a dependency takes nobody down with it.
        """
        resource, status = self.resources[name], self.statuses.get(name)
        if resource.deleting:
            dependants = (one for one in self._dependants.get(name, ()) if one in self.resources)
            deleting = (one for one in dependants if self.resources[one].deleting)
            return tuple(heapq.nsmallest(WAITS_MAX, deleting))
        if status is not None and status.generation:
            return ()
        return tuple(one for one in resource.spec.depends_on if not self._satisfies(one))[:WAITS_MAX]

    def _satisfies(self, name: str) -> bool:
        """Whether those who depend on it may start: it is up, or nobody wants it up."""
        if name not in self.resources:
            return False
        return self.wanted(name) is not protocol.DesiredState.UP or self._is_up(name)

    def _is_up(self, name: str) -> bool:
        status = self.statuses.get(name)
        return status is not None and status.state is health.HealthState.UP

    def closed(self, broker: str, connection: int, now: float, grace_s: float) -> str | None:
        """A broker says that this connection is closed: whose it was has ``grace_s`` to renew by another."""
        for name, member in self.managers.items():
            if (member.broker, member.connection) == (broker, connection):
                member.expires_at = min(member.expires_at, now + grace_s)
                return name
        return None

    def next_expiry(self) -> float | None:
        return min((member.expires_at for member in self.managers.values()), default=None)

    def expire(self, now: float) -> list[str]:
        """Managers that have not renewed in time are none any more."""
        late = [name for name, member in self.managers.items() if member.expires_at <= now]
        for name in late:
            del self.managers[name]
            self._news.forget(name)
            self._expiries[name] = self._expiries.get(name, 0) + 1
        return late

    def assign(self) -> RegistryChanges:
        """Give what has no owner to those who have least, and even out: a bounded number at once."""
        takers = sorted(name for name, member in self.managers.items() if not member.leaving)
        changes = RegistryChanges(epoch=self.epoch)
        if not takers:
            return changes
        boots = {name: self.managers[name].boot for name in takers}
        moving = [
            name
            for name in self.resources
            if (owner := self.owners.get(name)) is None or boots.get(owner.manager) != owner.boot
        ]
        lost = set(moving)
        counts = {name: len(self._owned.get(name, set()) - lost) for name in takers}
        share = -(-len(self.resources) // len(takers))
        slack = max(1, int(share * SLACK))
        for name in takers:
            surplus = counts[name] - share
            is_above = surplus > 0  # equivalent (Gt -> GtE): to move none changes nothing
            if surplus > slack or (is_above and min(counts.values()) < share - slack):
                moving += sorted(self._owned[name] - lost)[:surplus]
                counts[name] -= surplus  # equivalent: those below the share get all that is moved
        least = [(count, name) for name, count in counts.items()]
        heapq.heapify(least)
        for name in moving:
            count, manager = least[0]
            heapq.heapreplace(least, (count + 1, manager))
            before = self.owners.get(name)
            if before is not None and (before.manager, before.boot) == (manager, boots[manager]):
                continue  # it came back to where it was
            epoch = _next_epoch(changes, before.epoch if before else 0)
            changes.owners[name] = ResourceOwner(manager=manager, epoch=epoch, boot=boots[manager])
            if len(changes.owners) == ASSIGNED_MAX:
                break
        return changes

    # Resources

    def apply(self, specs: Iterable[protocol.ResourceSpec], by: str) -> RegistryChanges:
        changes = RegistryChanges(epoch=self.epoch)
        moving = {one.formerly for one in self.resources.values() if one.formerly}
        for spec in specs:
            before = self.resources.get(spec.name)
            if spec.name in moving:
                raise errors.Conflict(f"{spec.name!r} is being renamed", hint="apply again when it has moved")
            if before is not None and before.deleting:
                raise errors.Conflict(f"{spec.name!r} is being deleted", hint="apply again when it is gone")
            if before is not None and before.spec == spec:
                continue
            if before is not None and before.spec.agent != spec.agent:
                raise errors.Conflict(
                    f"{spec.name!r} is on {before.spec.agent!r} and cannot move to {spec.agent!r}",
                    hint="delete it there, then apply",
                )
            if before is not None and before.spec.type != spec.type:
                raise errors.Conflict(
                    f"{spec.name!r} is a {before.spec.type} and cannot become a {spec.type}"
                )
            generation = before.generation + 1 if before else 1
            formerly = before.formerly if before else ""
            changes.resources[spec.name] = ResourceRecord(
                spec=spec, generation=generation, by=by, formerly=formerly
            )
        return changes

    def want(self, name: str, wanted: protocol.DesiredState, by: str) -> RegistryChanges:
        """Drain (``DRAINED``) or stop draining (``UP``) a resource, or a whole machine.

        A resource that is wanted ``down`` stays so.  A drained machine takes nothing more, and what each of
        its resources should be is kept for when it works again (see `wanted`).
        """
        changes, drain = RegistryChanges(epoch=self.epoch), wanted is protocol.DesiredState.DRAINED
        resource, agent = self.resources.get(name), self.agents.get(name)
        if resource is not None:
            if not drain and self.wanted(name) is not resource.spec.wanted:
                raise errors.Conflict(
                    f"{name!r} is on {resource.spec.agent!r}, which is drained", hint="undrain the machine"
                )
            before = protocol.DesiredState.UP if drain else protocol.DesiredState.DRAINED
            if resource.spec.wanted is before and not resource.deleting:
                spec = msgspec.structs.replace(resource.spec, wanted=wanted)
                changes.resources[name] = msgspec.structs.replace(
                    resource, spec=spec, generation=resource.generation + 1, by=by
                )
        elif agent is not None:
            if agent.cordoned != drain:
                changes.agents[name] = msgspec.structs.replace(agent, cordoned=drain)
        else:
            raise errors.NotFound(f"no resource and no agent {name!r}")
        return changes

    def rename(self, name: str, to: str, by: str) -> RegistryChanges:
        """The same resource under another name; those who depend on it follow.

        It is the registry's at once; its manager then has the agent rename it (`Assignment.formerly`).
        """
        subjects.token(to)
        resource = self.resources.get(name)
        if resource is None:
            raise errors.NotFound(f"no resource {name!r}")
        if to in self.resources:
            raise errors.AlreadyExists(f"there is a resource {to!r} already")
        if any(one.formerly == to and other != name for other, one in self.resources.items()):
            raise errors.Conflict(f"{to!r} is being renamed", hint="rename again when it has moved")
        if resource.deleting or (resource.formerly and resource.formerly != to):
            hint = None if resource.deleting else f"only back to {resource.formerly!r} until that is done"
            being = "deleted" if resource.deleting else "renamed"
            raise errors.Conflict(f"{name!r} is being {being}", hint=hint)
        if protocol.TOPOLOGY in resource.spec.labels:
            raise errors.Refused(f"{name!r} belongs to a topology, whose brokers know each other by name")
        changes = RegistryChanges(epoch=self.epoch)
        changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
        for one in self._dependants.get(name, ()):
            other = self.resources[one]
            needs = tuple(to if need == name else need for need in other.spec.depends_on)
            spec = msgspec.structs.replace(other.spec, depends_on=needs)
            changes.resources[one] = msgspec.structs.replace(other, spec=spec)
        changes.resources[to] = msgspec.structs.replace(
            resource,
            spec=msgspec.structs.replace(resource.spec, name=to),
            generation=resource.generation + 1,
            by=by,
            formerly=name,
        )
        owner = self.owners.get(name)
        if owner is not None:
            epoch = _next_epoch(changes, owner.epoch)
            changes.owners[to] = msgspec.structs.replace(owner, epoch=epoch)
            if name in self.statuses:
                changes.statuses[to] = (epoch, self.statuses[name])
        return changes

    def delete(self, names: Iterable[str], by: str, *, force: bool = False) -> RegistryChanges:
        """Marks them: they are gone when their managers have taken them down, dependants first.

        ``force`` removes them at once, without their agents: for machines that are lost.
        """
        changes, wanted = RegistryChanges(epoch=self.epoch), set(names)
        for name in sorted(wanted):
            resource = self.resources.get(name)
            if resource is None:
                raise errors.NotFound(f"no resource {name!r}")
            staying = [
                one
                for one in self._dependants.get(name, ())
                if one not in wanted and one in self.resources and not self.resources[one].deleting
            ]
            if staying:
                raise errors.Conflict(
                    f"{', '.join(sorted(staying))} depend(s) on {name!r}", hint="delete those as well"
                )
            if force:
                changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
            elif not resource.deleting:
                changes.resources[name] = msgspec.structs.replace(
                    resource, deleting=True, by=by, generation=resource.generation + 1
                )
        return changes

    def forget(self, agent: str) -> RegistryChanges:
        """An agent that will not come back: it and its resources are removed without asking it."""
        if agent not in self.agents:
            raise errors.NotFound(f"no agent {agent!r}")
        changes = RegistryChanges(epoch=self.epoch, agents={agent: None})
        for name in self._hosted_by(agent):
            changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
        return changes

    def checkpointed(
        self, manager: str, items: dict[str, tuple[int, protocol.ResourceStatus]]
    ) -> tuple[RegistryChanges, dict[str, int]]:
        """What to write of a manager's checkpoints, and which are refused, with the epoch that holds."""
        changes, refused = RegistryChanges(epoch=self.epoch), {}
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
                # Only a registry that was set back has given less than an agent has obeyed.
                later = _next_epoch(changes, status.superseded_by)
                changes.owners[name] = msgspec.structs.replace(owner, epoch=later)
            elif status.gone and self.resources[name].deleting:
                changes.resources[name] = None
                changes.owners[name] = None
                changes.statuses[name] = None
            else:
                changes.statuses[name] = (epoch, status)
                resource = self.resources[name]
                if resource.formerly and status.generation == resource.generation:
                    changes.resources[name] = msgspec.structs.replace(resource, formerly="")
        return changes, refused

    def invariants(self) -> None:
        """For tests: what must hold whatever happened."""
        for manager, names in self._owned.items():
            assert all(self.owners[name].manager == manager for name in names)
        assert set(self.owners) <= set(self.resources)
        assert set(self.statuses) <= set(self.resources)
        assert set(self._news.released) <= set(self.managers)


def _next_epoch(changes: RegistryChanges, above: int) -> int:
    """The next of the counter; higher where a resource was raised by itself."""
    changes.epoch += 1
    return max(changes.epoch, above + 1)
