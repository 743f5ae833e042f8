"""What tests of `muster.manage.registry.assignments` share: a registry's state, its managers and what they
report."""

from __future__ import annotations

from typing import Any

from muster.core import health
from muster.manage import protocol
from muster.manage.registry import assignments, records

State, Wanted = health.HealthState, protocol.DesiredState
UP, DOWN, DRAINED = Wanted.UP, Wanted.DOWN, Wanted.DRAINED


def spec(name: str, **fields: Any) -> protocol.ResourceSpec:
    return protocol.ResourceSpec(**{"name": name, "type": "memory", "agent": "a", **fields})


def having(*specs: protocol.ResourceSpec) -> assignments.AssignmentProcessor:
    core = assignments.AssignmentProcessor(term=1, ttl_s=15.0, session=100)
    core.accept(core.apply(specs, "ann"))
    return core


def renew(
    core: assignments.AssignmentProcessor, *names: str, boot: int = 1, now: float = 0.0, **fields: Any
) -> None:
    for name in names:
        core.renew(name, protocol.RenewRequest(boot=boot, **fields), now)


def assign(core: assignments.AssignmentProcessor) -> dict[str, str]:
    """All owners, as far as there are managers."""
    while changes := core.assign():
        core.accept(changes)
    check(core)
    return {name: owner.manager for name, owner in core.owners.items()}


def check(core: assignments.AssignmentProcessor) -> None:
    """Assert what must hold after any change."""
    anew = records.ResourceIndex()
    for name, resource in core.resources.items():
        anew.set_resource(name, None, resource, has_owner=name in core.owners)
    for name, owner in core.owners.items():
        anew.set_owner(name, None, owner, exists=True)
    dependants = {name: others for name, others in core.index.dependants.items() if others}
    assert vars(core.index) | {"dependants": dependants, "arrived": anew.arrived} == vars(anew)
    assert set(core.owners) <= set(core.resources)
    assert set(core.statuses) <= set(core.resources)
    assert set(core.changes.released) <= set(core.managers)
    assert core.deviating == {name for name in core.resources if not core.is_as_desired(name)}


def own(core: assignments.AssignmentProcessor, owners: dict[str, str]) -> None:
    changes = records.RegistryChanges(epoch=core.epoch)
    for name, manager in owners.items():
        changes.epoch += 1
        changes.owners[name] = records.ResourceOwner(manager=manager, epoch=changes.epoch, boot=1)
    core.accept(changes)


def report(
    core: assignments.AssignmentProcessor, name: str, state: health.HealthState = State.UP, **fields: Any
) -> set[str]:
    """A checkpoint of its owner. Returns the managers that have to be informed."""
    owner, status = core.owners[name], protocol.ResourceStatus(state=state, **{"generation": 1, **fields})
    changes, refused = core.apply_checkpoints(owner.manager, {name: (owner.epoch, status)})
    assert not refused
    return core.accept(changes)


def pages(
    core: assignments.AssignmentProcessor, name: str, request: protocol.RenewRequest
) -> tuple[list[protocol.RenewResult], protocol.RenewRequest]:
    """All pages of assignments for a manager, and its renewal after them."""
    results: list[protocol.RenewResult] = []
    while not results or results[-1].more:
        granted = core.renewal_page(name, request)
        results.append(granted)
        request = protocol.RenewRequest(
            boot=request.boot, term=granted.term, session=granted.session, revision=granted.revision
        )
        assert len(results) < 100, "no end of pages"
    return results, request


def two() -> assignments.AssignmentProcessor:
    """``web`` on agent a with manager m depends on ``db`` on agent b with manager n."""
    core = having(spec("db", agent="b"), spec("web", depends_on=("db",)), spec("alone", agent="c"))
    renew(core, "m", "n")
    own(core, {"web": "m", "db": "n"})
    return core
