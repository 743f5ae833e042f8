"""What a manager does about one resource, and how it says that the resource is. Pure.

Level-triggered: `decide` looks at what should be and at what was last observed, and names the one next step;
called again after each step and each observation, it ends where nothing differs.  The same path serves the
first start, the restart after a crash, a change, a drift and a take-over.

A restart is due where the last run for the wish in force has ended and the policy allows another.  The agent
tells for which wish a resource ran and how that ended, so that this outlives managers and agents alike.

A resource's health follows the table of `muster.core.health`.  Silence says ``late``; after a whole lease
of silence, while others of its zone are heard, it says ``down``; where its whole zone is silent, ``unknown``,
and nothing is done there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from muster.core import health, messages
from muster.manage import protocol

LATE_PERIODS = 2.5
SILENT_PERIODS = 6.0
RETRY_S = 1.0
FLAPS_MAX = 4  # times down within the restart window before it is called flapping
DOUBLINGS_MAX = 32  # of the delay between attempts, which has its own bound
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
)  # not only told to start


class ReconcileAction(enum.Enum):
    CLAIM = "claim"
    CREATE = "create"
    PUT = "put"
    START = "start"
    STOP = "stop"
    DRAIN = "drain"
    DELETE = "delete"
    DELETE_FORMER = "delete-former"  # what it may still be under the name from which it was to be renamed
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class ReconcileStep:
    act: ReconcileAction
    why: str


@dataclass(slots=True)
class ResourceRuntime:
    """What the manager knows of one resource. Times are of the loop's clock, but for those in ``_ms``."""

    health: health.Health
    observed: protocol.ObservedState | None = None
    heard_at: float = 0.0
    period_s: float = 5.0
    zone: str = "default"
    generation: int = 0
    drift: str = ""
    restarts: int = 0
    failures: list[float] = field(default_factory=list)  # falls and failed steps within the restart window
    retry_at: float = 0.0
    ran: int = 0  # the last generation that it is known to have run for, where its agent cannot tell
    given_up: bool = False  # no further attempts, until there is a new wish
    gone: bool = False
    moved: bool = False  # the agent was asked to rename it
    busy: bool = False  # an operation is under way
    pending: protocol.ObservedState | None = None  # the latest that was heard meanwhile
    look: bool = False  # a heartbeat differs from what is known: the agent is to be asked
    fault: str = ""  # why the last step failed, where its health does not say so
    dirty: bool = True  # not checkpointed yet
    boot: int = 0  # of the agent, at the last observation
    sequence: int = 0  # of the last observation; equivalent: they are numbered from 1

    @classmethod
    def begin(cls, assignment: protocol.Assignment, now: float, now_ms: int) -> ResourceRuntime:
        """At assignment: from the last checkpoint, where there is one."""
        last, restart = assignment.status, assignment.spec.restart
        if last is None:
            return cls(health.Health(health.HealthState.STARTING, "assigned", now_ms), heard_at=now)
        runtime = cls(
            health.Health(last.state, last.reason, last.since_ms),
            heard_at=now,
            generation=last.generation,
            drift=last.drift,
            restarts=last.restarts,
            ran=last.ran,
            dirty=False,
        )
        if last.state in SEEN_RUNNING and last.generation == assignment.generation:
            runtime.ran = last.generation
        if last.wish == assignment.generation:
            runtime.given_up = last.given_up or last.state is health.HealthState.FAILED
            # The clock that stamped them may be ahead of ours: none of them lies in the future.
            ages_s = [max(0.0, (now_ms - at_ms) / 1000) for at_ms in last.failures_ms]
            runtime.failures = [now - age_s for age_s in ages_s if age_s < restart.window_s]
            if runtime.failures and not runtime.given_up:
                runtime.retry_at = runtime.failures[-1] + _delay_s(restart, len(runtime.failures))
        else:
            _one_more_chance(runtime)
        return runtime

    def status(self, assignment: protocol.Assignment, now: float, now_ms: int) -> protocol.ResourceStatus:
        return protocol.ResourceStatus(
            state=self.health.state,
            reason=self.health.reason,
            since_ms=self.health.since_ms,
            generation=self.generation,
            wish=assignment.generation,
            drift=self.drift,
            restarts=self.restarts,
            failures_ms=tuple(now_ms - int((now - at) * 1000) for at in self.failures),
            ran=self.ran,
            given_up=self.given_up,
            gone=self.gone,
            fault=self.fault,
            properties=self.observed.properties if self.observed else {},
        )


def apply_health_event(runtime: ResourceRuntime, event: health.HealthEvent, reason: str, now_ms: int) -> bool:
    """Let ``event`` happen to its health, if it can. Whether the state changed."""
    after = health.TRANSITIONS[runtime.health.state].get(event)
    if after is None:
        return False
    if after is runtime.health.state:
        if reason and reason != runtime.health.reason:
            runtime.health = health.Health(after, reason, runtime.health.since_ms)
            runtime.dirty = True
        return False
    runtime.health = health.advance(runtime.health, event, reason, now_ms)
    runtime.fault, runtime.dirty = "", True
    return True


def observe(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    observed: protocol.ObservedState,
    now: float,
    now_ms: int,
    *,
    asked: bool = False,
) -> bool:
    """Something was heard of the resource. Whether its state changed.

    What is older than what is known says nothing.  ``asked``: the agent was just asked, so this counts even
    if its starts are not numbered in order (its folder was lost, or its clock set).  While an operation is
    under way, the latest is kept for `release`: whether it is what the operation did is known only when that
    has ended.
    """
    runtime.heard_at = now
    if runtime.busy:
        if runtime.pending is None or not _is_older(observed, runtime.pending):
            runtime.pending = observed
        return False
    if not _is_news(runtime, observed, asked):
        return False
    spec, before = assignment.spec, runtime.observed
    if not observed.properties and before is not None and before.properties and observed.exists:
        observed = msgspec.structs.replace(observed, properties=before.properties)
    runtime.observed = observed
    if before is None or before.properties != observed.properties:  # a restarted process has another pid
        runtime.dirty = True
    drift = ""
    applied = runtime.generation == assignment.generation
    if observed.exists and applied and observed.digest != spec.digest:
        drift = f"its configuration is {observed.digest or 'none'}, not {spec.digest}"
    if drift != runtime.drift:
        runtime.drift, runtime.dirty = drift, True
    if not observed.exists:
        was_there = before is not None and before.exists and not assignment.deleting
        if was_there or runtime.health.state is health.HealthState.UNKNOWN:
            return apply_health_event(
                runtime, health.HealthEvent.DIED, observed.reason or "it is not there any more", now_ms
            )
        return False
    if observed.state in RUNNING:
        _runs(assignment, runtime, observed)
    match observed.state:
        case health.HealthState.UP:
            return apply_health_event(runtime, health.HealthEvent.BEAT, observed.reason, now_ms)
        case health.HealthState.DRAINING:
            return apply_health_event(runtime, health.HealthEvent.DRAIN, observed.reason, now_ms)
        case health.HealthState.LATE:  # it runs and does not get on, says its adapter
            return apply_health_event(runtime, health.HealthEvent.OVERDUE, observed.reason, now_ms)
        case health.HealthState.STARTING | health.HealthState.UNKNOWN:
            return False
        case _:
            return _fell(assignment, runtime, before, observed, now, now_ms)


def release(assignment: protocol.Assignment, runtime: ResourceRuntime, now: float, now_ms: int) -> bool:
    """The operation under way has ended: what was heard meanwhile counts now. Whether its state changed."""
    runtime.busy = False
    observed, runtime.pending = runtime.pending, None
    return observed is not None and observe(assignment, runtime, observed, now, now_ms)


def _is_older(one: protocol.ObservedState, other: protocol.ObservedState) -> bool:
    before = (one.boot, one.sequence) < (other.boot, other.sequence)  # equivalent: equal is the same one
    return bool(one.sequence) and before


def _is_news(runtime: ResourceRuntime, observed: protocol.ObservedState, asked: bool) -> bool:
    """Whether it is no older than what is known. Observations without a sequence are taken as they come."""
    if not observed.sequence:
        return True
    is_older = (observed.boot, observed.sequence) < (runtime.boot, runtime.sequence)
    if is_older and (observed.boot == runtime.boot or not asked):
        return False
    runtime.boot, runtime.sequence = observed.boot, observed.sequence
    return True


def _runs(
    assignment: protocol.Assignment, runtime: ResourceRuntime, observed: protocol.ObservedState
) -> None:
    if runtime.generation != assignment.generation:
        return
    if runtime.ran != assignment.generation:
        runtime.ran, runtime.dirty = assignment.generation, True
    if runtime.given_up and observed.digest == assignment.spec.digest:  # mended by hand
        runtime.given_up, runtime.dirty = False, True


def _fell(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    before: protocol.ObservedState | None,
    observed: protocol.ObservedState,
    now: float,
    now_ms: int,
) -> bool:
    """It is known not to run: how soon is the next attempt, and is there one?"""
    restart, reason = assignment.spec.restart, observed.reason or "it does not run"
    if assignment.spec.wanted is not protocol.DesiredState.UP or assignment.deleting:
        return apply_health_event(runtime, health.HealthEvent.DIED, reason, now_ms)
    if runtime.health.state is health.HealthState.FAILED:
        return False  # and the reason for giving up stands
    if before is None:  # another manager saw it last, or a step is in doubt
        fell = runtime.health.state in SEEN_RUNNING
    else:
        fell = before.exists and before.state in RUNNING
    if fell:
        count = _count(runtime, restart, now)
        delay_s = _delay_s(restart, count)
        if count > FLAPS_MAX:
            delay_s = max(delay_s, restart.delay_s_max / 2)
            reason = (
                f"{reason}; flapping: fell {count} times in {restart.window_s:g} s, next try in {delay_s:g} s"
            )
        runtime.retry_at = now + delay_s
    changed = apply_health_event(runtime, health.HealthEvent.DIED, reason, now_ms)
    has_run = (runtime.ran if observed.ran is None else observed.ran) >= assignment.generation
    clean = observed.properties.get("exit_code") == 0
    if has_run and (restart.policy == "never" or (restart.policy == "on-failure" and clean)):
        return _give_up(runtime, f"{reason}; its policy is not to restart it", now_ms)
    if len(runtime.failures) > restart.attempts and fell:
        why = f"{reason}; given up after {restart.attempts} restarts in {restart.window_s:g} s"
        return _give_up(runtime, why, now_ms)
    if runtime.given_up:  # for another reason, while it ran
        return apply_health_event(runtime, health.HealthEvent.GIVE_UP, f"{reason}; given up", now_ms)
    return changed


def _count(runtime: ResourceRuntime, restart: protocol.RestartPolicy, now: float) -> int:
    """One more failure: how many there are within the window."""
    recent = [at for at in runtime.failures if at > now - restart.window_s]
    runtime.failures = [*recent[-restart.attempts :], now]
    runtime.dirty = True
    return len(runtime.failures)


def _delay_s(restart: protocol.RestartPolicy, count: int) -> float:
    return min(restart.delay_s_max, restart.delay_s * float(2 ** min(count - 1, DOUBLINGS_MAX)))


def _give_up(runtime: ResourceRuntime, why: str, now_ms: int) -> bool:
    runtime.given_up = runtime.dirty = True
    return apply_health_event(runtime, health.HealthEvent.GIVE_UP, why, now_ms)


def check_silence(
    runtime: ResourceRuntime,
    now: float,
    now_ms: int,
    *,
    zone_silent: bool,
    heard_since: float,
    zone_heard_at: float = 0.0,
) -> bool:
    """Time passed: what does silence mean? ``heard_since``: when this manager began to hear anything.

    Silence is counted from no earlier than that.  Only a zone that was heard (``zone_heard_at``) well after
    the resource fell silent shows that the resource is down; until then the zone may be cut off.
    """
    silence_s = now - max(runtime.heard_at, heard_since)
    if silence_s <= LATE_PERIODS * runtime.period_s or runtime.health.state in (
        health.HealthState.DOWN,
        health.HealthState.FAILED,
    ):
        return False
    if runtime.observed is None:  # its state is a checkpoint's, or of before a step that nobody answered
        if runtime.health.state is health.HealthState.STARTING:
            return False
        reason = f"its agent has not answered this manager for {silence_s:.0f} s"
        return apply_health_event(runtime, health.HealthEvent.CUT_OFF, reason, now_ms)
    if zone_silent:
        reason = f"its whole zone {runtime.zone} is silent for {silence_s:.0f} s: nothing is done there"
        return apply_health_event(runtime, health.HealthEvent.CUT_OFF, reason, now_ms)
    others_heard = zone_heard_at - runtime.heard_at > LATE_PERIODS * runtime.period_s
    if silence_s > SILENT_PERIODS * runtime.period_s and others_heard:
        return apply_health_event(
            runtime, health.HealthEvent.DIED, "its agent is silent while others are heard", now_ms
        )
    return apply_health_event(runtime, health.HealthEvent.OVERDUE, "its agent is silent", now_ms)


def decide(assignment: protocol.Assignment, runtime: ResourceRuntime, now: float) -> ReconcileStep | None:
    """The next step, or None where nothing is to be done now."""
    spec, observed = assignment.spec, runtime.observed
    if runtime.busy or runtime.gone or now < runtime.retry_at:
        return None
    if observed is None or runtime.look:  # to ask is always right
        return ReconcileStep(
            ReconcileAction.CLAIM, "assigned" if observed is None else "a heartbeat says otherwise"
        )
    if runtime.health.state is health.HealthState.UNKNOWN or assignment.waits_for:
        return None
    if assignment.deleting:
        if assignment.formerly and not runtime.moved:
            return ReconcileStep(ReconcileAction.DELETE_FORMER, f"it may still be {assignment.formerly}")
        # Also where it is not there: a creation whose outcome is in doubt may be under way.
        return ReconcileStep(ReconcileAction.DELETE, "deleted by a user")
    if not observed.exists:
        if runtime.given_up:
            return None
        if assignment.formerly and not runtime.moved:
            return ReconcileStep(ReconcileAction.RENAME, f"it was {assignment.formerly}")
        return ReconcileStep(ReconcileAction.CREATE, "it is not there")
    if observed.state is health.HealthState.UNKNOWN:  # its adapter cannot tell, so it may well run
        return None
    if observed.digest != spec.digest:
        return (
            None
            if runtime.given_up
            else ReconcileStep(ReconcileAction.PUT, "drift" if runtime.drift else "a new configuration")
        )
    running = observed.state in RUNNING
    match spec.wanted:
        case protocol.DesiredState.UP:
            if running and not _is_noted(assignment, observed):
                return ReconcileStep(ReconcileAction.PUT, "it runs on for a new wish")
            if running or runtime.given_up:
                return None
            return ReconcileStep(ReconcileAction.START, observed.reason or "it does not run")
        case protocol.DesiredState.DOWN:
            return ReconcileStep(ReconcileAction.STOP, "wanted down") if running else None
        case protocol.DesiredState.DRAINED:
            if not running or observed.state is health.HealthState.DRAINING:
                return None
            return ReconcileStep(ReconcileAction.DRAIN, "drained by a user")


def _is_noted(assignment: protocol.Assignment, observed: protocol.ObservedState) -> bool:
    """Whether its agent knows which wish it runs for, where its end will be judged by that."""
    by_run = assignment.spec.restart.policy != "always" and observed.ran is not None
    return not by_run or observed.ran == assignment.generation


def done(
    runtime: ResourceRuntime, act: ReconcileAction, *, generation: int, started: bool, there: bool, now: float
) -> None:
    """A step for ``generation`` was carried out; ``started``: with it the resource was to run."""
    runtime.fault, runtime.retry_at, runtime.dirty = "", 0.0, True
    if act in (ReconcileAction.RENAME, ReconcileAction.DELETE_FORMER):
        runtime.moved = True
    if act is ReconcileAction.DELETE:
        runtime.gone = not there
        runtime.retry_at = 0.0 if runtime.gone else now + RETRY_S
    if act in (ReconcileAction.CREATE, ReconcileAction.PUT) or (runtime.moved and there):
        runtime.generation = generation
    if act is ReconcileAction.START or (act is ReconcileAction.CREATE and started):
        runtime.ran = max(runtime.ran, generation)
        # It may have ended before it was seen to run: that is a fall like any other.
        runtime.observed = protocol.ObservedState(True, health.HealthState.STARTING)


def failed(
    assignment: protocol.Assignment,
    runtime: ResourceRuntime,
    act: ReconcileAction,
    answer: protocol.OperationResult,
    now: float,
    now_ms: int,
) -> bool:
    """A step came to nothing: when is the next attempt, and is there one? Whether its state changed."""
    restart = assignment.spec.restart
    fault, runtime.dirty = f"{act.value}: {answer.reason}", True
    if answer.outcome is messages.DecisionOutcome.IN_DOUBT or answer.code in ("unavailable", "timed-out"):
        runtime.retry_at = now + RETRY_S
        runtime.observed = None  # look again before anything else is done
        return False
    if act not in (ReconcileAction.CREATE, ReconcileAction.START, ReconcileAction.PUT):
        runtime.fault, runtime.retry_at = fault, now + RETRY_S
        return False
    count = _count(runtime, restart, now)
    runtime.retry_at = now + max(min(0.1, restart.delay_s_max), _delay_s(restart, count))
    if runtime.observed is not None:  # if it fell with this step, that is counted
        runtime.observed = msgspec.structs.replace(runtime.observed, state=health.HealthState.DOWN)
    changed = apply_health_event(runtime, health.HealthEvent.DIED, fault, now_ms)
    if count > restart.attempts:
        why = f"{fault}; given up after {restart.attempts} attempts"
        changed |= _give_up(runtime, why, now_ms)
    return changed


def mark_converged(assignment: protocol.Assignment, runtime: ResourceRuntime) -> bool:
    """Nothing is to be done: does the resource have what was wished, whoever brought it there? Whether so.

    A manager may find done what one before it began, and a wish may change nothing that an adapter knows.
    """
    observed = runtime.observed
    if observed is None or runtime.busy or runtime.generation == assignment.generation:
        return False
    if not observed.exists or observed.digest != assignment.spec.digest:
        return False
    runtime.generation, runtime.dirty = assignment.generation, True
    if observed.state in RUNNING:
        _runs(assignment, runtime, observed)
    return True


def changed(before: protocol.Assignment, after: protocol.Assignment, runtime: ResourceRuntime) -> None:
    """The assignment was renewed: a new wish gives one more chance to what was given up."""
    if after.generation != before.generation:
        _one_more_chance(runtime)


def _one_more_chance(runtime: ResourceRuntime) -> None:
    runtime.retry_at, runtime.failures, runtime.given_up = 0.0, [], False
    runtime.fault, runtime.dirty = "", True
    if runtime.health.state is health.HealthState.FAILED:
        runtime.health = health.Health(health.HealthState.DOWN, "a new wish", runtime.health.since_ms)
