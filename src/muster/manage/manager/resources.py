"""A resource of a manager, and the operations that its steps send to the agent. Pure."""

from __future__ import annotations

from muster.manage import protocol
from muster.manage.manager import reconciler

_VERBS = {
    reconciler.ReconcileAction.CREATE: protocol.Verb.CREATE,
    reconciler.ReconcileAction.PUT: protocol.Verb.PUT,
    reconciler.ReconcileAction.DELETE: protocol.Verb.DELETE,
    reconciler.ReconcileAction.DELETE_FORMER: protocol.Verb.DELETE,
    reconciler.ReconcileAction.RENAME: protocol.Verb.RENAME,
}


class ManagedResource:
    """A resource assigned to this manager."""

    __slots__ = ("assignment", "outranked_by", "published_state", "runtime", "superseded")

    def __init__(self, assignment: protocol.Assignment, runtime: reconciler.ResourceRuntime) -> None:
        self.assignment = assignment
        self.runtime = runtime
        self.superseded = False
        self.outranked_by = 0  # the higher epoch that the agent accepts
        self.published_state = runtime.health.state  # the state that was last published

    @property
    def name(self) -> str:
        return self.assignment.spec.name


def operation_for(
    resource: ManagedResource, step: reconciler.ReconcileStep, *, id: str, manager: str
) -> protocol.Operation:
    assignment, spec = resource.assignment, resource.assignment.spec
    former = step.action is reconciler.ReconcileAction.DELETE_FORMER
    verb = _VERBS.get(step.action, protocol.Verb.EXECUTE)
    return protocol.Operation(
        id=id,
        verb=verb,
        resource=assignment.formerly if former else spec.name,
        epoch=assignment.epoch,
        manager=manager,
        type=spec.type,
        config=spec.config if verb in (protocol.Verb.CREATE, protocol.Verb.PUT) else {},
        start=spec.desired is protocol.DesiredState.UP,
        arguments={"from": assignment.formerly} if verb is protocol.Verb.RENAME else {},
        operation=step.action.value if verb is protocol.Verb.EXECUTE else "",
        generation=assignment.generation,
        hooks=spec.hooks if verb in (protocol.Verb.CREATE, protocol.Verb.PUT) else None,
        stop_after_s=spec.reschedule.after_s if verb is protocol.Verb.CREATE and spec.reschedule else 0.0,
    )
