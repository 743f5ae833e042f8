"""Decisions of a manager about one resource: the next step and the health to report. Pure.

Level-triggered: `decide` compares the desired state with the last observation and names the next step. It is
called again after each step and observation, until nothing differs. The first start, a restart after a crash,
a change, drift and a take-over use the same path.

A restart is due if the last run for the current generation has ended and the restart policy allows another.
The agent records for which generation a resource ran and how the run ended, so this survives restarts of
managers and agents.

Health follows the table of `muster.core.health`. A silent resource is ``late``. After `SILENT_PERIODS` it is
``down`` if other agents of its zone are still seen. If its complete zone is silent it is ``unknown``, and no
action is taken.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import msgspec

from muster.core import health, messages
from muster.manage import operation_results, protocol

LATE_PERIODS = 2.5
SILENT_PERIODS = 6.0
RETRY_S = 1.0
LOST_RUN = "it ran, and its machine does not know any more how it ended"
STABLE_S = 2.0  # a resource that stays up for so long is stable: a crash right after the start is not missed
FLAPS_MAX = 4  # failures within the restart window before it is reported as flapping
DOUBLINGS_MAX = 32  # of the delay between attempts, which is bounded separately
RUNNING = (
    health.HealthState.UP,
    health.HealthState.STARTING,
    health.HealthState.LATE,
    health.HealthState.DRAINING,
)
SEEN_RUNNING = (
    health.HealthState.UP,
    health.HealthState.LATE,
    health.HealthState.DRAINING,
)  # observed as running, not only requested to start
ENDED = (health.HealthState.FAILED, health.HealthState.COMPLETED)  # until the desired state changes


class ReconcileAction(enum.Enum):
    CLAIM = "claim"
    CREATE = "create"
    PUT = "put"
    START = "start"
    STOP = "stop"
    DRAIN = "drain"
    DELETE = "delete"
    DELETE_FORMER = (
        "delete-former"  # delete the resource under its previous name, if the rename did not happen
    )
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class ReconcileStep:
    action: ReconcileAction
    reason: str


@dataclass(slots=True)
class ResourceRuntime:
    """The manager's view of one resource. Times use the loop's clock, except those in ``_ms``."""

    health: health.Health
    observed: protocol.ObservedState | None = None
    last_seen_at: float = 0.0
    period_s: float = 5.0
    zone: str = "default"
    generation: int = 0
    drift: str = ""
    restarts: int = 0
    failures: list[float] = field(default_factory=list)  # failures and failed steps within the restart window
    retry_at: float = 0.0
    ran: int = 0  # the last generation that is known to have run, if the agent does not record it
    began_ms: int = 0  # when it was last started
    overdue_at: float = math.inf  # when the run of a job exceeds its deadline
    is_overdue: bool = False  # the run was stopped for that
    given_up: bool = False  # no further attempts until the desired state changes
    stable: bool = False  # it was seen to stay up since its last start or operation
    up_at: tuple[int, float] | None = None  # its first heartbeat since then, by its agent's clock and by ours
    gone: bool = False
    rename_sent: bool = False  # the agent was requested to rename it
    busy: bool = False  # an operation is in progress
    pending: protocol.ObservedState | None = None  # the latest observation received meanwhile
    recheck: bool = False  # a heartbeat differs from the last observation: ask the agent
    fault: str = ""  # why the last step failed, if its health does not show it
    dirty: bool = True  # not checkpointed yet
    boot: int = 0  # of the agent, at the last observation
    sequence: int = 0  # of the last observation; equivalent: they are numbered from 1

    @classmethod
    def begin(cls, assignment: protocol.Assignment, now: float, now_ms: int) -> ResourceRuntime:
        """The state at assignment: from the last checkpoint, if there is one."""
        last, restart = assignment.status, assignment.spec.restart
        if last is None:
            return cls(health.Health(health.HealthState.STARTING, "assigned", now_ms), last_seen_at=now)
        runtime = cls(
            health.Health(last.state, last.reason, last.since_ms),
            last_seen_at=now,
            generation=last.generation,
            drift=last.drift,
            restarts=last.restarts,
            ran=last.ran,
            began_ms=last.began_ms,
            overdue_at=now + _left_s(assignment, last.began_ms, now_ms),
            stable=last.stable and last.generation == assignment.generation,
            dirty=False,
        )
        if last.state in SEEN_RUNNING and last.generation == assignment.generation:
            runtime.ran = last.generation
        if last.desired_generation == assignment.generation:
            runtime.given_up = last.given_up or last.state is health.HealthState.FAILED
            # The clock that set the timestamps may be ahead of this one.
            ages_s = [max(0.0, (now_ms - at_ms) / 1000) for at_ms in last.failures_ms]
            runtime.failures = [now - age_s for age_s in ages_s if age_s < restart.window_s]
            if runtime.failures and not runtime.given_up:
                runtime.retry_at = runtime.failures[-1] + _delay_s(restart, len(runtime.failures))
        else:
            _reset_failures(runtime)
        return runtime

    def status(self, assignment: protocol.Assignment, now: float, now_ms: int) -> protocol.ResourceStatus:
        return protocol.ResourceStatus(
            state=self.health.state,
            reason=self.health.reason,
            since_ms=self.health.since_ms,
            generation=self.generation,
            desired_generation=assignment.generation,
            drift=self.drift,
            restarts=self.restarts,
            failures_ms=tuple(now_ms - int((now - at) * 1000) for at in self.failures),
            ran=self.ran,
            began_ms=self.began_ms,
            given_up=self.given_up,
            stable=self.stable,
            gone=self.gone,
            fault=self.fault,
            properties=self.observed.properties if self.observed else {},
        )


def apply_health_event(runtime: ResourceRuntime, event: health.HealthEvent, reason: str, now_ms: int) -> bool:
    """Apply ``event`` to the health, if the transition exists. Returns whether the state changed."""
    after = health.TRANSITIONS[runtime.health.state].get(event)
    if after is None:
        return False
    if after is runtime.health.state:
        if reason and reason != runtime.health.reason:
            runtime.health = health.Health(after, reason, runtime.health.since_ms)
            runtime.dirty = True
        return False
    runtime.health = health.advance(runtime.health, event, reason, now_ms)
    runtime.fault = ""
    doubt_stability(runtime)
    return True


def doubt_stability(runtime: ResourceRuntime) -> None:
    """Another run may have begun: it has to be seen to stay up."""
    runtime.stable, runtime.up_at, runtime.dirty = False, None, True


def confirm_up(runtime: ResourceRuntime, at_ms: int, now: float) -> bool:
    """Process a heartbeat, sent at ``at_ms``, of a resource that is up. Returns whether it is stable now.

    The time is measured with the agent's clock, because heartbeats may be delayed, and with this one, because
    the other may be set.
    """
    if runtime.up_at is None or at_ms < runtime.up_at[0]:  # the agent's clock was set back
        runtime.up_at = at_ms, now
    elif min((at_ms - runtime.up_at[0]) / 1000, now - runtime.up_at[1]) >= STABLE_S:
        runtime.stable = runtime.dirty = True
    return runtime.stable


def observe(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    observed: protocol.ObservedState,
    now: float,
    now_ms: int,
    *,
    requested: bool = False,
) -> bool:
    """Process an observation of the resource. Returns whether its state changed.

    Older observations are ignored. ``requested``: the agent was just queried, so the observation counts even
    if its start number is lower (its folder was lost, or its clock was set back). During an operation the
    latest observation is kept for `release`, because only the end of the operation shows whether the
    operation caused it.
    """
    runtime.last_seen_at = now
    if runtime.busy:
        if runtime.pending is None or not _is_older(observed, runtime.pending):
            runtime.pending = observed
        return False
    if not _accept_if_newer(runtime, observed, requested):
        return False
    observed = operation_results.truncate_observation(observed)
    spec, before = assignment.spec, runtime.observed
    if not observed.properties and before is not None and before.properties and observed.exists:
        observed = msgspec.structs.replace(observed, properties=before.properties)
    runtime.observed = observed
    if before is None or before.properties != observed.properties:  # a restarted process has a new pid
        runtime.dirty = True
    drift = ""
    applied = runtime.generation == assignment.generation
    if observed.exists and applied and observed.digest != spec.digest:
        drift = f"its configuration is {observed.digest or 'none'} instead of {spec.digest}"
    if drift != runtime.drift:
        runtime.drift, runtime.dirty = drift, True
    if not observed.exists:
        if _is_lost_run(assignment, runtime):
            apply_health_event(runtime, health.HealthEvent.DIED, LOST_RUN, now_ms)
            return _give_up(runtime, LOST_RUN, now_ms)
        was_there = before is not None and before.exists and not assignment.deleting
        if was_there or runtime.health.state is health.HealthState.UNKNOWN:
            return apply_health_event(
                runtime, health.HealthEvent.DIED, observed.reason or "the resource no longer exists", now_ms
            )
        return False
    if observed.state in RUNNING:
        _record_running(assignment, runtime, observed)
    match observed.state:
        case health.HealthState.UP:
            return apply_health_event(runtime, health.HealthEvent.BEAT, observed.reason, now_ms)
        case health.HealthState.DRAINING:
            return apply_health_event(runtime, health.HealthEvent.DRAIN, observed.reason, now_ms)
        case health.HealthState.LATE:  # the adapter reports that it runs without progress
            return apply_health_event(runtime, health.HealthEvent.OVERDUE, observed.reason, now_ms)
        case health.HealthState.STARTING:  # also one that was up: this run has not worked yet
            if runtime.health.state is health.HealthState.UNKNOWN:  # its agent replies again
                apply_health_event(runtime, health.HealthEvent.OVERDUE, observed.reason, now_ms)
            return apply_health_event(runtime, health.HealthEvent.START, observed.reason, now_ms)
        case health.HealthState.UNKNOWN:  # the adapter cannot determine the state
            return not assignment.deleting and apply_health_event(
                runtime, health.HealthEvent.CUT_OFF, observed.reason, now_ms
            )
        case _:
            return _on_down(assignment, runtime, before, observed, now, now_ms)


def release(assignment: protocol.Assignment, runtime: ResourceRuntime, now: float, now_ms: int) -> bool:
    """The operation has ended: process the pending observation. Returns whether the state changed."""
    runtime.busy = False
    observed, runtime.pending = runtime.pending, None
    return observed is not None and observe(assignment, runtime, observed, now, now_ms)


def _is_older(observed: protocol.ObservedState, other: protocol.ObservedState) -> bool:
    before = (observed.boot, observed.sequence) < (other.boot, other.sequence)
    return bool(observed.sequence) and before


def _accept_if_newer(runtime: ResourceRuntime, observed: protocol.ObservedState, requested: bool) -> bool:
    """Accept an observation that is not older than the last one. Without a sequence it is always accepted."""
    if not observed.sequence:
        return True
    is_older = (observed.boot, observed.sequence) < (runtime.boot, runtime.sequence)
    if is_older and (observed.boot == runtime.boot or not requested):
        return False
    runtime.boot, runtime.sequence = observed.boot, observed.sequence
    return True


def _record_running(
    assignment: protocol.Assignment, runtime: ResourceRuntime, observed: protocol.ObservedState
) -> None:
    if runtime.generation != assignment.generation:
        return
    if runtime.ran != assignment.generation:
        runtime.ran, runtime.dirty = assignment.generation, True
    if runtime.given_up and observed.digest == assignment.spec.digest:  # repaired manually
        runtime.given_up, runtime.dirty = False, True


def _is_lost_run(assignment: protocol.Assignment, runtime: ResourceRuntime) -> bool:
    """Whether a job ran that its machine does not know any more: it must not run again."""
    spec = assignment.spec
    has_run = (
        spec.job is not None and runtime.ran >= assignment.generation and runtime.health.state not in ENDED
    )
    return has_run and spec.restart.policy == "never" and not assignment.deleting


def _left_s(assignment: protocol.Assignment, began_ms: int, now_ms: int) -> float:
    """The time that a run of a job has left."""
    job = assignment.spec.job
    if job is None or not job.deadline_s or not began_ms:
        return math.inf
    return job.deadline_s - max(0, now_ms - began_ms) / 1000


def _on_down(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    before: protocol.ObservedState | None,
    observed: protocol.ObservedState,
    now: float,
    now_ms: int,
) -> bool:
    """The resource does not run: decide whether and when to retry."""
    restart, reason = assignment.spec.restart, observed.reason or "not running"
    if runtime.is_overdue and assignment.spec.job is not None:
        reason = f"stopped, because it ran longer than {assignment.spec.job.deadline_s:g} s"
    if assignment.spec.desired is not protocol.DesiredState.UP or assignment.deleting:
        return apply_health_event(runtime, health.HealthEvent.DIED, reason, now_ms)
    if runtime.health.state in ENDED:
        return False  # the reason remains
    if before is None:  # observed by another manager before, or a step is in doubt
        failed = runtime.health.state in SEEN_RUNNING
    else:
        failed = before.exists and before.state in RUNNING
    if failed:
        count = _count(runtime, restart, now)
        delay_s = _delay_s(restart, count)
        if count > FLAPS_MAX:
            delay_s = max(delay_s, restart.delay_s_max / 2)
            reason = (
                f"{reason}; flapping: failed {count} times in {restart.window_s:g} s, "
                f"next attempt in {delay_s:g} s"
            )
        runtime.retry_at = now + delay_s
    changed = apply_health_event(runtime, health.HealthEvent.DIED, reason, now_ms)
    has_run = (runtime.ran if observed.ran is None else observed.ran) >= assignment.generation
    clean = observed.properties.get("exit_code") == 0 and not runtime.is_overdue
    if has_run and (restart.policy == "never" or (restart.policy == "on-failure" and clean)):
        if clean:
            return _give_up(runtime, reason, now_ms, health.HealthEvent.COMPLETE)
        return _give_up(runtime, f"{reason}; the restart policy does not allow a restart", now_ms)
    if len(runtime.failures) > restart.attempts and failed:
        why = f"{reason}; given up after {restart.attempts} restarts in {restart.window_s:g} s"
        return _give_up(runtime, why, now_ms)
    if runtime.given_up:  # for another reason, while it was running
        return apply_health_event(runtime, health.HealthEvent.GIVE_UP, f"{reason}; given up", now_ms)
    return changed


def _count(runtime: ResourceRuntime, restart: protocol.RestartPolicy, now: float) -> int:
    """Record a failure. Returns the number of failures within the window."""
    recent = [at for at in runtime.failures if at > now - restart.window_s]
    runtime.failures = [*recent[-restart.attempts :], now]
    runtime.dirty = True
    return len(runtime.failures)


def _delay_s(restart: protocol.RestartPolicy, count: int) -> float:
    return min(restart.delay_s_max, restart.delay_s * float(2 ** min(count - 1, DOUBLINGS_MAX)))


def _give_up(
    runtime: ResourceRuntime,
    why: str,
    now_ms: int,
    event: health.HealthEvent = health.HealthEvent.GIVE_UP,
) -> bool:
    runtime.given_up = runtime.dirty = True
    return apply_health_event(runtime, event, why, now_ms)


def check_silence(
    runtime: ResourceRuntime,
    now: float,
    now_ms: int,
    *,
    zone_silent: bool,
    connected_since: float,
    zone_last_seen_at: float = 0.0,
) -> bool:
    """Update the health of a resource whose agent is silent. Returns whether the state changed.

    Silence counts from ``connected_since``, when this manager connected, at the earliest. A resource is down
    only if its zone was seen (``zone_last_seen_at``) well after the resource fell silent; until then the zone
    may be cut off.
    """
    silence_s = now - max(runtime.last_seen_at, connected_since)
    ended = runtime.health.state in (health.HealthState.DOWN, *ENDED)
    if silence_s <= LATE_PERIODS * runtime.period_s or ended:
        return False
    if runtime.observed is None:  # the state comes from a checkpoint, or a step had no reply
        if runtime.health.state is health.HealthState.STARTING and not runtime.generation:
            return False
        reason = f"its agent has not replied to this manager for {silence_s:.0f} s"
        return apply_health_event(runtime, health.HealthEvent.CUT_OFF, reason, now_ms)
    if zone_silent:
        reason = f"the zone {runtime.zone} has been silent for {silence_s:.0f} s: no action is taken there"
        return apply_health_event(runtime, health.HealthEvent.CUT_OFF, reason, now_ms)
    others_seen = zone_last_seen_at - runtime.last_seen_at > LATE_PERIODS * runtime.period_s
    if silence_s > SILENT_PERIODS * runtime.period_s and others_seen:
        return apply_health_event(runtime, health.HealthEvent.DIED, protocol.AGENT_SILENT, now_ms)
    return apply_health_event(runtime, health.HealthEvent.OVERDUE, "its agent is silent", now_ms)


def decide(assignment: protocol.Assignment, runtime: ResourceRuntime, now: float) -> ReconcileStep | None:
    """The next step, None if nothing is to be done now."""
    spec, observed = assignment.spec, runtime.observed
    if runtime.busy or runtime.gone or now < runtime.retry_at:
        return None
    if observed is None or runtime.recheck:  # a claim has no side effects
        return ReconcileStep(ReconcileAction.CLAIM, "assigned" if observed is None else "a heartbeat differs")
    cannot_tell = observed.state is health.HealthState.UNKNOWN  # its adapter, which may still delete it
    is_cut_off = runtime.health.state is health.HealthState.UNKNOWN and not cannot_tell
    if is_cut_off or assignment.waits_for:
        return None
    if assignment.deleting:
        if assignment.formerly and not runtime.rename_sent:
            return ReconcileStep(
                ReconcileAction.DELETE_FORMER, f"it may still exist as {assignment.formerly}"
            )
        # Also if it does not exist: a creation in doubt may still be in progress.
        return ReconcileStep(ReconcileAction.DELETE, "deleted by a user")
    if not observed.exists:
        if runtime.given_up:
            return None
        if assignment.formerly and not runtime.rename_sent:
            return ReconcileStep(ReconcileAction.RENAME, f"renamed from {assignment.formerly}")
        return ReconcileStep(ReconcileAction.CREATE, "it does not exist")
    if cannot_tell:  # it may be running
        return None
    if observed.digest != spec.digest:
        return (
            None
            if runtime.given_up
            else ReconcileStep(ReconcileAction.PUT, "drift" if runtime.drift else "a new configuration")
        )
    running = observed.state in RUNNING
    match spec.desired:
        case protocol.DesiredState.UP:
            if running and now >= runtime.overdue_at:
                return ReconcileStep(ReconcileAction.STOP, "it runs longer than its deadline")
            if running and not _generation_is_recorded(assignment, observed):
                return ReconcileStep(ReconcileAction.PUT, "record the new generation of a running resource")
            if running or runtime.given_up:
                return None
            return ReconcileStep(ReconcileAction.START, observed.reason or "not running")
        case protocol.DesiredState.DOWN:
            return ReconcileStep(ReconcileAction.STOP, "desired state is down") if running else None
        case protocol.DesiredState.DRAINED:
            if not running or observed.state is health.HealthState.DRAINING:
                return None
            return ReconcileStep(ReconcileAction.DRAIN, "drained by a user")


def _generation_is_recorded(assignment: protocol.Assignment, observed: protocol.ObservedState) -> bool:
    """Whether the agent has recorded the generation of the run, if the restart policy depends on it."""
    by_run = assignment.spec.restart.policy != "always" and observed.ran is not None
    return not by_run or observed.ran == assignment.generation


def begins_run(assignment: protocol.Assignment, runtime: ResourceRuntime, act: ReconcileAction) -> bool:
    """Whether the step begins a run. Until that works, the resource is starting, as at first."""
    spec, observed = assignment.spec, runtime.observed
    if act is not ReconcileAction.PUT or observed is None:
        return act in (ReconcileAction.CREATE, ReconcileAction.START)
    is_kept = observed.state in RUNNING and spec.desired is protocol.DesiredState.UP
    return is_kept and observed.digest != spec.digest


def step_done(
    runtime: ResourceRuntime, act: ReconcileAction, *, generation: int, started: bool, there: bool, now: float
) -> None:
    """A step for ``generation`` succeeded; ``started``: the step was to start the resource."""
    runtime.fault, runtime.retry_at = "", 0.0
    doubt_stability(runtime)
    if act in (ReconcileAction.RENAME, ReconcileAction.DELETE_FORMER):
        runtime.rename_sent = True
    if act is ReconcileAction.DELETE:
        runtime.gone = not there
        runtime.retry_at = 0.0 if runtime.gone else now + RETRY_S
    if act in (ReconcileAction.CREATE, ReconcileAction.PUT) or (runtime.rename_sent and there):
        runtime.generation = generation
    if act is ReconcileAction.START or (act is ReconcileAction.CREATE and started):
        runtime.ran = max(runtime.ran, generation)
        # It may end before it is observed as running: that is a failure like any other.
        runtime.observed = protocol.ObservedState(True, health.HealthState.STARTING)


def run_begins(assignment: protocol.Assignment, runtime: ResourceRuntime, now: float, now_ms: int) -> None:
    """A step that begins a run is sent."""
    runtime.began_ms, runtime.is_overdue = now_ms, False
    runtime.overdue_at = now + _left_s(assignment, now_ms, now_ms)


def step_failed(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    act: ReconcileAction,
    answer: protocol.OperationResult,
    now: float,
    now_ms: int,
) -> bool:
    """A step failed: decide whether and when to retry. Returns whether the state changed."""
    restart = assignment.spec.restart
    fault, runtime.dirty = f"{act.value}: {answer.reason}", True
    if answer.outcome is messages.DecisionOutcome.IN_DOUBT or answer.code in ("unavailable", "timed-out"):
        runtime.retry_at = now + RETRY_S
        runtime.observed = None  # observe before the next step
        return False
    if act not in (ReconcileAction.CREATE, ReconcileAction.START, ReconcileAction.PUT):
        runtime.fault, runtime.retry_at = fault, now + RETRY_S
        return False
    count = _count(runtime, restart, now)
    runtime.retry_at = now + max(min(0.1, restart.delay_s_max), _delay_s(restart, count))
    if runtime.observed is not None:  # if it failed with this step, that is counted
        runtime.observed = msgspec.structs.replace(runtime.observed, state=health.HealthState.DOWN)
    changed = apply_health_event(runtime, health.HealthEvent.DIED, fault, now_ms)
    if count > restart.attempts:
        why = f"{fault}; given up after {restart.attempts} attempts"
        changed |= _give_up(runtime, why, now_ms)
    return changed


def mark_converged(assignment: protocol.Assignment, runtime: ResourceRuntime) -> bool:
    """Nothing is to be done: record the generation as applied if the observation matches it. Returns whether
    it did.

    A previous manager may have done the work, or the change may not concern the adapter.
    """
    observed = runtime.observed
    if observed is None or runtime.busy or runtime.generation == assignment.generation:
        return False
    if not observed.exists or observed.digest != assignment.spec.digest:
        return False
    runtime.generation, runtime.dirty = assignment.generation, True
    if observed.state in RUNNING:
        _record_running(assignment, runtime, observed)
    return True


def assignment_changed(
    before: protocol.Assignment, after: protocol.Assignment, runtime: ResourceRuntime
) -> None:
    """The assignment was updated: a new generation resets the failures."""
    if after.generation != before.generation:
        _reset_failures(runtime)


def _reset_failures(runtime: ResourceRuntime) -> None:
    runtime.retry_at, runtime.failures, runtime.given_up = 0.0, [], False
    runtime.fault, runtime.dirty = "", True
    if runtime.health.state in ENDED:
        runtime.health = health.Health(
            health.HealthState.DOWN, "the desired state changed", runtime.health.since_ms
        )
