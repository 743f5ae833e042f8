"""The records of the registry, and indexes of its resources: by agent, manager, dependency and former name.

With the indexes, the work for a change depends on the change and not on the size of the fleet. Pure.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from muster.manage import protocol

ORDER_ID_MAX = 256  # characters: see `protocol.Operation.id`

K = TypeVar("K")


class ResourceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    spec: protocol.ResourceSpec
    generation: int
    by: str = ""
    deleting: bool = False
    formerly: str = ""  # the previous name, until the agent has renamed it
    stop_after_s: float = (
        0.0  # its agent has certainly stopped it if it could not renew for so long; 0: never
    )
    is_leaving: bool = False  # its agent deletes it, so that it can be started on another one
    moves_ms: tuple[int, ...] = ()  # when it was moved, within the window of its policy


class ResourceOwner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``boot`` identifies the manager's process: a restarted manager gets higher epochs."""

    manager: str
    epoch: int
    boot: int = 0


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``machine`` distinguishes a reinstalled machine from the one that was enrolled under this name.
    ``forgotten``: kept until the agent has reported that it hosts nothing, or its credentials were revoked.
    """

    zone: str = "default"
    labels: dict[str, str] = {}
    facts: dict[str, msgspec.Raw | str | int | float | bool] = {}
    types: tuple[str, ...] = ()
    machine: str = ""
    cordoned: bool = False
    forgotten: bool = False
    has_deadlines: bool = False
    must_report: bool = False  # something was moved from it: it renews only by reporting all that it hosts


@dataclass(slots=True)
class RegistryChanges:
    """Records to write; None deletes."""

    resources: dict[str, ResourceRecord | None] = field(default_factory=dict)
    owners: dict[str, ResourceOwner | None] = field(default_factory=dict)
    statuses: dict[str, protocol.ResourceStatus | None] = field(default_factory=dict)
    agents: dict[str, AgentRecord | None] = field(default_factory=dict)
    epoch: int = 0

    def next_epoch(self, above: int) -> int:
        """The next value of the counter, or a higher one if that of the resource was raised separately."""
        self.epoch += 1
        return max(self.epoch, above + 1)

    def __bool__(self) -> bool:
        return bool(self.resources or self.owners or self.statuses or self.agents)


@dataclass(slots=True)
class ManagerRecord:
    """A manager with a valid renewal. ``expires_at`` uses the loop's clock."""

    boot: int
    expires_at: float
    broker: str
    connection: int
    leaving: bool


class ResourceIndex:
    def __init__(self) -> None:
        self.owned: dict[tuple[str, int], set[str]] = {}  # by manager and boot
        self.unowned: set[str] = set()
        self.hosted: dict[str, set[str]] = {}  # by agent
        self.renamed: dict[str, str] = {}  # by former name, until the agent has renamed it
        self.dependants: dict[str, set[str]] = {}  # by the name that they depend on
        self.movable: dict[str, set[str]] = {}  # by agent: what it stops if it cannot renew
        self.arrived: set[str] = set()  # what may move, and came to its agent since this was last cleared
        self.ending: set[str] = set()  # resources that are deleted, or leave their agents
        self.jobs: set[str] = set()  # one-off jobs, periodic ones, and runs of these
        self.runs: dict[str, set[str]] = {}  # by periodic job

    def set_resource(
        self,
        name: str,
        before: ResourceRecord | None,
        resource: ResourceRecord | None,
        *,
        has_owner: bool,
    ) -> None:
        if before is not None:
            for dependency in before.spec.depends_on:
                self.dependants.get(dependency, set()).discard(name)
            if self.renamed.get(before.formerly) == name:
                del self.renamed[before.formerly]
            _discard(self.hosted, before.spec.agent, name)
            if before.stop_after_s:
                _discard(self.movable, before.spec.agent, name)
            self.ending.discard(name)
            self.jobs.discard(name)
            if before.spec.is_run:
                _discard(self.runs, before.spec.entry, name)
        if resource is None:
            self.unowned.discard(name)
            return
        self.hosted.setdefault(resource.spec.agent, set()).add(name)
        if resource.stop_after_s:
            self.movable.setdefault(resource.spec.agent, set()).add(name)
            if before is None or not before.stop_after_s or before.spec.agent != resource.spec.agent:
                self.arrived.add(name)
        if resource.deleting or resource.is_leaving:
            self.ending.add(name)
        for dependency in resource.spec.depends_on:
            self.dependants.setdefault(dependency, set()).add(name)
        if resource.formerly:
            self.renamed[resource.formerly] = name
        if resource.spec.job is not None:
            self.jobs.add(name)
        if resource.spec.is_run:
            self.runs.setdefault(resource.spec.entry, set()).add(name)
        if not has_owner and resource.spec.schedule is None:  # only its runs have agents
            self.unowned.add(name)

    def set_owner(
        self,
        name: str,
        before: ResourceOwner | None,
        owner: ResourceOwner | None,
        *,
        exists: bool,
    ) -> None:
        if before is not None:
            _discard(self.owned, (before.manager, before.boot), name)
        if owner is not None:
            self.unowned.discard(name)
            self.owned.setdefault((owner.manager, owner.boot), set()).add(name)
        elif exists:
            self.unowned.add(name)


def _discard(index: dict[K, set[str]], key: K, name: str) -> None:
    names = index[key]
    names.discard(name)
    if not names:
        del index[key]


def derived_id(request: str, characters: int) -> str:
    """The id of what a request starts: a repetition of the request, to any registry, has the same id."""
    id = hashlib.sha256(request.encode()).hexdigest() if request else secrets.token_hex(32)
    return id[:characters]


def order_id(request: str, resource: str) -> str:
    """The id of an operation on one resource, in a length that agents accept."""
    id = f"{request}-{resource}"
    return id if len(id) <= ORDER_ID_MAX else derived_id(id, 64)
