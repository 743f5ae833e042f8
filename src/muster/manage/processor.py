"""The request processor: the registry's state in memory, and what follows from it. Pure.

It matches resources to managers, spreads them evenly, expires managers that have not renewed, and reassigns
with a higher epoch.  Each decision is a `Changes`, which the shell commits and then hands to `accept`: memory
never knows what the store does not.

Epochs come from one counter for all resources, so that a resource that is deleted and made again has a higher
one than before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from muster.core import errors, health, subjects
from muster.manage import protocol

SLACK = 0.1  # managers may differ by this part of an even share before resources are moved for balance


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    spec: protocol.Spec
    generation: int
    by: str = ""
    deleting: bool = False
    formerly: str = ""  # until its manager has renamed it


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``boot``: of the manager's process, so that one that was restarted owns anew, with a higher epoch."""

    manager: str
    epoch: int
    boot: int = 0


class Agent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``machine`` tells a machine that was set up anew from the one that was enrolled under this name."""

    zone: str = "default"
    labels: dict[str, str] = {}
    facts: dict[str, msgspec.Raw | str | int | float | bool] = {}
    types: tuple[str, ...] = ()
    machine: str = ""
    cordoned: bool = False


@dataclass(slots=True)
class Changes:
    """Records to write; None deletes."""

    resources: dict[str, Resource | None] = field(default_factory=dict)
    owners: dict[str, Owner | None] = field(default_factory=dict)
    statuses: dict[str, tuple[int, protocol.Status] | None] = field(default_factory=dict)  # with its epoch
    agents: dict[str, Agent | None] = field(default_factory=dict)
    epoch: int = 0

    def __bool__(self) -> bool:
        return bool(self.resources or self.owners or self.statuses or self.agents)


@dataclass(slots=True)
class Member:
    """A manager that renews. ``expires_at`` is of the loop's clock."""

    boot: int
    expires_at: float
    broker: str = ""
    connection: int = 0
    leaving: bool = False


class Processor:
    def __init__(self, *, term: int, ttl_s: float) -> None:
        self.term = term  # the acting registry's epoch
        self.ttl_s = ttl_s
        self.resources: dict[str, Resource] = {}
        self.owners: dict[str, Owner] = {}
        self.statuses: dict[str, protocol.Status] = {}
        self.agents: dict[str, Agent] = {}
        self.managers: dict[str, Member] = {}
        self.seen: set[str] = set()  # managers that have renewed in this term, also those that are gone since
        self.epoch = 0  # the highest given
        self.revision = 1
        self._owned: dict[str, set[str]] = {}
        self._revisions: dict[str, int] = {}  # of a resource: when its assignment last changed
        self._released: dict[str, dict[str, int]] = {}  # of a manager: what it lost, and when
        self._dependants: dict[str, set[str]] = {}

    # What was stored

    def accept(self, changes: Changes) -> set[str]:
        """It is committed. Returns the managers that have to hear of it."""
        touched: set[str] = set()
        self.epoch = max(self.epoch, changes.epoch)
        for name, agent in changes.agents.items():
            if agent is None:
                self.agents.pop(name, None)
            else:
                self.agents[name] = agent
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
            if before is None or (before.state is health.State.UP) != (status.state is health.State.UP):
                touched |= self._dependants.get(name, set())
        return self._touch(touched)

    def _touch(self, names: Iterable[str]) -> set[str]:
        """Each has a revision of its own, so that a manager can be told of them in pages of any size."""
        self.revision += 1
        managers = set()
        for name in names:
            owner = self.owners.get(name)
            if owner is not None and owner.manager:
                self.revision += 1
                self._revisions[name] = self.revision
                managers.add(owner.manager)
        return managers

    def _set_resource(self, name: str, resource: Resource | None) -> None:
        before = self.resources.pop(name, None)
        if before is not None:
            for one in before.spec.depends_on:
                self._dependants.get(one, set()).discard(name)
        if resource is None:
            self.statuses.pop(name, None)
            return
        self.resources[name] = resource
        for one in resource.spec.depends_on:
            self._dependants.setdefault(one, set()).add(name)

    def _set_owner(self, name: str, owner: Owner | None) -> None:
        before = self.owners.pop(name, None)
        if before is not None:
            self._owned.get(before.manager, set()).discard(name)
            if owner is None or owner.manager != before.manager:
                self._released.setdefault(before.manager, {})[name] = self.revision + 1
        if owner is None:
            return
        self.owners[name] = owner
        self._owned.setdefault(owner.manager, set()).add(name)
        self._released.get(owner.manager, {}).pop(name, None)

    # Managers

    def renew(self, name: str, said: protocol.Renew, now: float) -> bool:
        """A manager lives. Whether anything may follow for assignments."""
        before = self.managers.get(name)
        self.seen.add(name)
        self.managers[name] = Member(said.boot, now + self.ttl_s, said.broker, said.connection, said.leaving)
        return before is None or before.boot != said.boot or before.leaving != said.leaving

    def granted(self, name: str, said: protocol.Renew) -> protocol.Granted:
        """What this manager has to know, beyond what it says it knows."""
        anew = said.term != self.term or said.revision > self.revision
        since = 0 if anew else said.revision
        owned = self._owned.get(name, set())
        known = self._revisions.get
        news = heapq.nsmallest(
            protocol.PAGE + 1, ((revision, one) for one in owned if (revision := known(one, 1)) > since)
        )
        page: list[protocol.Assignment] = []
        size = 0
        for _, one in news[: protocol.PAGE]:
            assignment = self.assignment(one)
            size += len(msgspec.msgpack.encode(assignment))
            if page and size > protocol.PAGE_BYTES:
                break
            page.append(assignment)
        more = len(page) < len(news)
        released = (
            () if anew else tuple(one for one, at in self._released.get(name, {}).items() if at > since)
        )
        return protocol.Granted(
            term=self.term,
            revision=news[len(page) - 1][0] if more else self.revision,
            ttl_s=self.ttl_s,
            anew=anew,
            more=more,
            assigned=tuple(page),
            released=released,
        )

    def assignment(self, name: str) -> protocol.Assignment:
        resource, owner = self.resources[name], self.owners[name]
        return protocol.Assignment(
            spec=resource.spec,
            epoch=owner.epoch,
            generation=resource.generation,
            deleting=resource.deleting,
            formerly=resource.formerly,
            waits_for=self.waits_for(name),
            status=self.statuses.get(name),
        )

    def waits_for(self, name: str) -> tuple[str, ...]:
        """What has to be up before it is started; what has to be gone before it is deleted.

        What runs already waits for nothing: the fall of a dependency takes nobody down with it.
        """
        resource, status = self.resources[name], self.statuses.get(name)
        if resource.deleting:
            dependants = (one for one in self._dependants.get(name, ()) if one in self.resources)
            return tuple(sorted(one for one in dependants if self.resources[one].deleting))
        if status is not None and status.generation:
            return ()
        return tuple(one for one in resource.spec.depends_on if not self._satisfies(one))

    def _satisfies(self, name: str) -> bool:
        """Whether those who depend on it may start: it is up, or nobody wants it up."""
        resource = self.resources.get(name)
        return resource is not None and (resource.spec.wanted is not protocol.Wanted.UP or self._is_up(name))

    def _is_up(self, name: str) -> bool:
        status = self.statuses.get(name)
        return status is not None and status.state is health.State.UP

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
        return late

    def assign(self) -> Changes:
        """Give what nobody has to those who have least, and even out what is uneven."""
        takers = sorted(name for name, member in self.managers.items() if not member.leaving)
        changes = Changes(epoch=self.epoch)
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
            if surplus > slack or (surplus > 0 and min(counts.values()) < share - slack):
                moving += sorted(self._owned[name] - lost)[:surplus]
                counts[name] -= surplus
        least = [(count, name) for name, count in counts.items()]
        heapq.heapify(least)
        for name in moving:
            count, manager = least[0]
            heapq.heapreplace(least, (count + 1, manager))
            before = self.owners.get(name)
            if before is not None and (before.manager, before.boot) == (manager, boots[manager]):
                continue  # it came back to where it was
            changes.epoch += 1
            changes.owners[name] = Owner(manager=manager, epoch=changes.epoch, boot=boots[manager])
        return changes

    # Resources

    def apply(self, specs: Iterable[protocol.Spec], by: str) -> Changes:
        changes = Changes(epoch=self.epoch)
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
            changes.resources[spec.name] = Resource(
                spec=spec, generation=generation, by=by, formerly=formerly
            )
        return changes

    def want(self, name: str, wanted: protocol.Wanted, by: str) -> Changes:
        """Of one resource; or of all of an agent's, which takes more only while they are wanted up."""
        changes = Changes(epoch=self.epoch)
        names = [name] if name in self.resources else []
        if not names and name in self.agents:
            cordoned = wanted is protocol.Wanted.DRAINED
            changes.agents[name] = msgspec.structs.replace(self.agents[name], cordoned=cordoned)
            names = [one for one, resource in self.resources.items() if resource.spec.agent == name]
        elif not names:
            raise errors.NotFound(f"no resource and no agent {name!r}")
        for one in names:
            resource = self.resources[one]
            spec = msgspec.structs.replace(resource.spec, wanted=wanted)
            if spec != resource.spec and not resource.deleting:
                changes.resources[one] = msgspec.structs.replace(
                    resource, spec=spec, generation=resource.generation + 1, by=by
                )
        return changes

    def rename(self, name: str, to: str, by: str) -> Changes:
        """The same resource under another name; those who depend on it follow.

        It is the registry's at once; its manager then has the agent rename it (`Assignment.formerly`).
        """
        subjects.token(to)
        resource = self.resources.get(name)
        if resource is None:
            raise errors.NotFound(f"no resource {name!r}")
        if to in self.resources:
            raise errors.AlreadyExists(f"there is a resource {to!r} already")
        if resource.deleting or resource.formerly:
            raise errors.Conflict(f"{name!r} is being {'deleted' if resource.deleting else 'renamed'}")
        if protocol.TOPOLOGY in resource.spec.labels:
            raise errors.Refused(f"{name!r} belongs to a topology, whose brokers know each other by name")
        changes = Changes(epoch=self.epoch)
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
        if name in self.owners:
            changes.epoch += 1
            changes.owners[to] = msgspec.structs.replace(self.owners[name], epoch=changes.epoch)
        if name in self.statuses:
            changes.statuses[to] = (changes.epoch, self.statuses[name])
        return changes

    def delete(self, names: Iterable[str], by: str) -> Changes:
        """Marks them: they are gone when their managers have taken them down, dependants first."""
        changes, wanted = Changes(epoch=self.epoch), set(names)
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
            changes.resources[name] = msgspec.structs.replace(
                resource, deleting=True, by=by, generation=resource.generation + 1
            )
        return changes

    def checkpointed(
        self, manager: str, items: dict[str, tuple[int, protocol.Status]]
    ) -> tuple[Changes, dict[str, int]]:
        """What to write of a manager's checkpoints, and which are refused, with the epoch that holds."""
        changes, refused = Changes(epoch=self.epoch), {}
        for name, (epoch, status) in items.items():
            owner = self.owners.get(name)
            if owner is None or name not in self.resources:
                refused[name] = 0
            elif owner.manager != manager or owner.epoch != epoch:
                refused[name] = owner.epoch
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
