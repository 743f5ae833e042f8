"""Shared by tests of `muster.manage.manager.reconciler`: an assignment, and reports of its resource."""

from __future__ import annotations

from typing import Any

from muster.core import health, messages
from muster.manage import protocol
from muster.manage.manager import reconciler

State, Act = health.HealthState, reconciler.ReconcileAction


def assign(
    *, generation: int = 1, status: protocol.ResourceStatus | None = None, restart: Any = None, **spec: Any
) -> protocol.Assignment:
    arguments = {"name": "job", "type": "process", "agent": "a", "digest": "d", **spec}
    made = protocol.ResourceSpec(restart=protocol.RestartPolicy(**(restart or {})), **arguments)
    return protocol.Assignment(spec=made, epoch=1, generation=generation, status=status)


def begin(assignment: protocol.Assignment, now: float = 0.0) -> Any:
    return reconciler.ResourceRuntime.begin(assignment, now, int(now * 1000))


def observed(state: Any = State.UP, digest: str = "d", exit_code: int | None = None, **more: Any) -> Any:
    properties = {} if exit_code is None else {"exit_code": exit_code}
    return protocol.ObservedState(True, state, more.pop("reason", ""), digest, properties, **more)


def hear(assignment: Any, runtime: Any, seen: protocol.ObservedState, now: float = 1.0) -> bool:
    return reconciler.observe(assignment, runtime, seen, now, int(now * 1000))


def act(assignment: Any, runtime: Any, now: float = 1.0) -> Any:
    step = reconciler.decide(assignment, runtime, now)
    return step and step.action


def state_of(runtime: reconciler.ResourceRuntime) -> Any:
    return runtime.health.state


def running(assignment: protocol.Assignment) -> Any:
    """As it is when it was created and is up."""
    runtime = begin(assignment)
    hear(assignment, runtime, protocol.ObservedState(False))
    reconciler.apply_health_event(runtime, health.HealthEvent.START, "", 0)
    reconciler.step_done(
        runtime, Act.CREATE, generation=assignment.generation, started=True, there=True, now=0.0
    )
    hear(assignment, runtime, observed())
    assert state_of(runtime) is State.UP
    return runtime


def refusal(
    code: str = "adapter-failed", outcome: Any = messages.DecisionOutcome.FAILED
) -> protocol.OperationResult:
    return protocol.OperationResult(id="x", outcome=outcome, code=code, reason="boom")
