"""What a manager does about one resource, and how it says that the resource is. Pure.

Level-triggered: `decide` looks at what should be and at what was last observed, and names the one next step;
called again after each step and each observation, it ends where nothing differs.  The same path serves the
first start, the restart after a crash, a change, a drift and a take-over.

A resource's health follows the table of `muster.core.health`.  Silence says ``late``; after a whole lease
of silence, while others of its zone are heard, it says ``down``; where its whole zone is silent, ``unknown``,
and nothing is done there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from muster.core import health, messages
from muster.manage import protocol

LATE_PERIODS = 2.5
SILENT_PERIODS = 6.0
RETRY_S = 1.0
FLAPS_MAX = 4  # times down within the restart window before it is called flapping
RUNNING = (health.State.UP, health.State.STARTING, health.State.LATE, health.State.DRAINING)


class Act(enum.Enum):
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
class Step:
    act: Act
    why: str


@dataclass(slots=True)
class Runtime:
    """What the manager knows of one resource. Times are of the loop's clock, but for those in ``_ms``."""

    health: health.Health
    observed: protocol.Observed | None = None
    heard_at: float = 0.0
    period_s: float = 5.0
    zone: str = "default"
    generation: int = 0
    drift: str = ""
    restarts: int = 0
    failures_ms: list[int] = field(default_factory=list)
    retry_at: float = 0.0
    gone: bool = False
    moved: bool = False  # the agent was asked to rename it
    busy: bool = False  # an operation is under way
    fault: str = ""  # the last operation's, until one succeeds
    dirty: bool = True  # not checkpointed yet

    @classmethod
    def begin(cls, assignment: protocol.Assignment, now: float, now_ms: int) -> Runtime:
        """At assignment: from the last checkpoint, where there is one."""
        last = assignment.status
        if last is None:
            return cls(health.Health(health.State.STARTING, "assigned", now_ms), heard_at=now)
        return cls(
            health.Health(last.state, last.reason, last.since_ms),
            heard_at=now,
            generation=last.generation,
            drift=last.drift,
            restarts=last.restarts,
            failures_ms=list(last.failures_ms),
            dirty=False,
        )

    def status(self) -> protocol.Status:
        return protocol.Status(
            state=self.health.state,
            reason=self.health.reason,
            since_ms=self.health.since_ms,
            generation=self.generation,
            drift=self.drift,
            restarts=self.restarts,
            failures_ms=tuple(self.failures_ms),
            gone=self.gone,
            properties=self.observed.properties if self.observed else {},
        )


def happen(runtime: Runtime, event: health.Event, reason: str, now_ms: int) -> bool:
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
    runtime.dirty = True
    return True


def observe(
    assignment: protocol.Assignment,
    runtime: Runtime,
    observed: protocol.Observed,
    now: float,
    now_ms: int,
) -> bool:
    """Something was heard of the resource. Whether its state changed."""
    spec, before = assignment.spec, runtime.observed
    runtime.heard_at = now
    if not observed.properties and before is not None and before.properties and observed.exists:
        observed = protocol.Observed(
            True, observed.state, observed.reason, observed.digest, before.properties
        )
    runtime.observed = observed
    drift = ""
    applied = runtime.generation == assignment.generation
    if observed.exists and applied and observed.digest != spec.digest:
        drift = f"its configuration is {observed.digest or 'none'}, not {spec.digest}"
    if drift != runtime.drift:
        runtime.drift, runtime.dirty = drift, True
    if not observed.exists:
        was_there = before is not None and before.exists and not assignment.deleting
        if was_there or runtime.health.state is health.State.UNKNOWN:
            return happen(runtime, health.Event.DIED, observed.reason or "it is not there any more", now_ms)
        return False
    match observed.state:
        case health.State.UP:
            return happen(runtime, health.Event.BEAT, observed.reason, now_ms)
        case health.State.DRAINING:
            return happen(runtime, health.Event.DRAIN, observed.reason, now_ms)
        case health.State.LATE:  # it runs and does not get on, says its adapter
            return happen(runtime, health.Event.OVERDUE, observed.reason, now_ms)
        case health.State.STARTING | health.State.UNKNOWN:
            return False
        case _:
            return _fell(assignment, runtime, before, observed, now, now_ms)


def _fell(
    assignment: protocol.Assignment,
    runtime: Runtime,
    before: protocol.Observed | None,
    observed: protocol.Observed,
    now: float,
    now_ms: int,
) -> bool:
    """It is known not to run: how soon is the next attempt, and is there one?"""
    spec, restart = assignment.spec, assignment.spec.restart
    reason = observed.reason or "it does not run"
    if spec.wanted is not protocol.Wanted.UP or assignment.deleting:
        return happen(runtime, health.Event.DIED, reason, now_ms)
    was_running = before is not None and before.exists and before.state in RUNNING
    if runtime.health.state is health.State.FAILED:
        return False  # and the reason for giving up stands
    if not was_running:
        return happen(runtime, health.Event.DIED, reason, now_ms)
    cut = now_ms - int(restart.window_s * 1000)
    runtime.failures_ms = [at for at in runtime.failures_ms if at > cut] + [now_ms]
    count = len(runtime.failures_ms)
    delay_s = min(restart.delay_s_max, restart.delay_s * 2 ** (count - 1))
    if count > FLAPS_MAX:
        delay_s = max(delay_s, restart.delay_s_max / 2)
        reason = (
            f"{reason}; flapping: fell {count} times in {restart.window_s:g} s, next try in {delay_s:g} s"
        )
    runtime.retry_at = now + delay_s
    clean = observed.properties.get("exit_code") == 0
    changed = happen(runtime, health.Event.DIED, reason, now_ms)
    if restart.policy == "never" or (restart.policy == "on-failure" and clean):
        return happen(runtime, health.Event.GIVE_UP, f"{reason}; its policy is not to restart it", now_ms)
    if count > restart.attempts:
        why = f"{reason}; given up after {restart.attempts} restarts in {restart.window_s:g} s"
        return happen(runtime, health.Event.GIVE_UP, why, now_ms)
    return changed


def listen(
    runtime: Runtime,
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
        health.State.DOWN,
        health.State.FAILED,
    ):
        return False
    if runtime.observed is None:  # its state is a checkpoint's, or of before a step that nobody answered
        if runtime.health.state is health.State.STARTING:
            return False
        reason = f"its agent has not answered this manager for {silence_s:.0f} s"
        return happen(runtime, health.Event.CUT_OFF, reason, now_ms)
    if zone_silent:
        reason = f"its whole zone {runtime.zone} is silent for {silence_s:.0f} s: nothing is done there"
        return happen(runtime, health.Event.CUT_OFF, reason, now_ms)
    others_heard = zone_heard_at - runtime.heard_at > LATE_PERIODS * runtime.period_s
    if silence_s > SILENT_PERIODS * runtime.period_s and others_heard:
        return happen(runtime, health.Event.DIED, "its agent is silent while others are heard", now_ms)
    return happen(runtime, health.Event.OVERDUE, "its agent is silent", now_ms)


def decide(assignment: protocol.Assignment, runtime: Runtime, now: float) -> Step | None:
    """The next step, or None where nothing is to be done now."""
    spec, observed = assignment.spec, runtime.observed
    if runtime.busy or runtime.gone or now < runtime.retry_at:
        return None
    if runtime.health.state is health.State.UNKNOWN:
        return None
    if observed is None:
        return Step(Act.CLAIM, "assigned")
    if assignment.waits_for:
        return None
    if assignment.deleting:
        if assignment.formerly and not runtime.moved:
            return Step(Act.DELETE_FORMER, f"it may still be {assignment.formerly}")
        # Also where it is not there: a creation whose outcome is in doubt may be under way.
        return Step(Act.DELETE, "deleted by a user")
    if not observed.exists:
        if assignment.formerly and not runtime.moved:
            return Step(Act.RENAME, f"it was {assignment.formerly}")
        return Step(Act.CREATE, "it is not there")
    if observed.digest != spec.digest:
        return Step(Act.PUT, "drift" if runtime.drift else "a new configuration")
    running = observed.state in RUNNING
    match spec.wanted:
        case protocol.Wanted.UP:
            if running or runtime.health.state is health.State.FAILED:
                return None
            return Step(Act.START, observed.reason or "it does not run")
        case protocol.Wanted.DOWN:
            return Step(Act.STOP, "wanted down") if running else None
        case protocol.Wanted.DRAINED:
            if not running or observed.state is health.State.DRAINING:
                return None
            return Step(Act.DRAIN, "drained by a user")


def failed(
    assignment: protocol.Assignment,
    runtime: Runtime,
    act: Act,
    answer: protocol.Answer,
    now: float,
    now_ms: int,
) -> bool:
    """A step came to nothing: when is the next attempt, and is there one? Whether its state changed."""
    restart = assignment.spec.restart
    runtime.fault, runtime.dirty = f"{act.value}: {answer.reason}", True
    if answer.outcome is messages.Outcome.IN_DOUBT or answer.code in ("unavailable", "timed-out"):
        runtime.retry_at = now + RETRY_S
        runtime.observed = None  # look again before anything else is done
        return False
    if act not in (Act.CREATE, Act.START, Act.PUT):
        runtime.retry_at = now + RETRY_S
        return False
    cut = now_ms - int(restart.window_s * 1000)
    runtime.failures_ms = [at for at in runtime.failures_ms if at > cut] + [now_ms]
    count = len(runtime.failures_ms)
    runtime.retry_at = now + min(restart.delay_s_max, max(0.1, restart.delay_s) * 2 ** (count - 1))
    changed = happen(runtime, health.Event.DIED, runtime.fault, now_ms)
    if count > restart.attempts:
        why = f"{runtime.fault}; given up after {restart.attempts} attempts"
        changed |= happen(runtime, health.Event.GIVE_UP, why, now_ms)
    return changed


def settle(assignment: protocol.Assignment, runtime: Runtime) -> bool:
    """Nothing is to be done: does the resource have what was wished, whoever brought it there? Whether so.

    A manager may find done what one before it began, and a wish may change nothing that an adapter knows.
    """
    observed = runtime.observed
    if observed is None or runtime.busy or runtime.generation == assignment.generation:
        return False
    if not observed.exists or observed.digest != assignment.spec.digest:
        return False
    runtime.generation, runtime.dirty = assignment.generation, True
    return True


def changed(before: protocol.Assignment, after: protocol.Assignment, runtime: Runtime) -> None:
    """The assignment was renewed: a new wish gives one more chance to what was given up."""
    if after.generation != before.generation:
        runtime.retry_at = 0.0
        runtime.failures_ms = []
        if runtime.health.state is health.State.FAILED:
            runtime.health = health.Health(health.State.DOWN, "a new wish", runtime.health.since_ms)
            runtime.dirty = True
