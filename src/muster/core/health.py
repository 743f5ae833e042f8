"""The health of a resource or a process: seven states that tell the truth, and how they follow each other.

Only a resource's manager says ``down`` and ``failed``; silence alone says ``late``.  ``unknown`` is not a
kind of ``down``: it means that nothing can be concluded (the road is cut, the whole zone is silent), and so
nobody acts.  The table below is the whole of it; `diagram` draws it for the documentation, and `advance`
obeys it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from muster.core import errors


class HealthState(enum.Enum):
    STARTING = "starting"  # told to start, not heard of yet
    UP = "up"  # heard of within its period, and says it works
    LATE = "late"  # silent for longer than it should be; the road to it works
    UNKNOWN = "unknown"  # nothing can be concluded: we are cut off, or its whole zone is silent
    DOWN = "down"  # known not to run
    FAILED = "failed"  # known not to run, and starting it again has been given up
    DRAINING = "draining"  # finishes what it has, takes no more


class HealthEvent(enum.Enum):
    BEAT = "beat"  # a heartbeat that says it works
    OVERDUE = "overdue"  # no heartbeat for longer than its period allows
    CUT_OFF = "cut-off"  # we cannot hear it, and that proves nothing about it
    DIED = "died"  # its end is known: exit, refusal, or silence for a whole lease while the road works
    START = "start"  # an attempt to start it has begun
    GIVE_UP = "give-up"  # too many attempts, or one that cannot succeed
    DRAIN = "drain"  # told to finish


_S, _E = HealthState, HealthEvent

#: What each event makes of each state. An event that is not listed for a state cannot happen to it.
TRANSITIONS: dict[HealthState, dict[HealthEvent, HealthState]] = {
    _S.STARTING: {
        _E.BEAT: _S.UP,
        _E.START: _S.STARTING,
        _E.OVERDUE: _S.LATE,
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.GIVE_UP: _S.FAILED,
        _E.DRAIN: _S.DRAINING,
    },
    _S.UP: {
        _E.BEAT: _S.UP,
        _E.OVERDUE: _S.LATE,
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.START: _S.STARTING,  # a restart that was asked for
        _E.DRAIN: _S.DRAINING,
    },
    _S.LATE: {
        _E.BEAT: _S.UP,
        _E.OVERDUE: _S.LATE,
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.START: _S.STARTING,
        _E.DRAIN: _S.DRAINING,
    },
    _S.UNKNOWN: {
        _E.BEAT: _S.UP,
        _E.OVERDUE: _S.LATE,  # the road is back, and it is still silent
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.DRAIN: _S.DRAINING,
        # not START: nobody acts upon what may well be running
    },
    _S.DOWN: {
        _E.BEAT: _S.UP,  # it was started by somebody else
        _E.START: _S.STARTING,
        _E.DIED: _S.DOWN,
        _E.CUT_OFF: _S.UNKNOWN,  # somebody else may start it unseen
        _E.GIVE_UP: _S.FAILED,
    },
    _S.FAILED: {
        _E.BEAT: _S.UP,  # mended by hand
        _E.START: _S.STARTING,  # an operator asked for one more attempt
        _E.DIED: _S.FAILED,
        _E.CUT_OFF: _S.FAILED,  # no news is needed: nobody was going to act
        _E.GIVE_UP: _S.FAILED,
    },
    _S.DRAINING: {
        _E.BEAT: _S.DRAINING,
        _E.OVERDUE: _S.DRAINING,  # it may be busy finishing; its end is what counts
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.DRAIN: _S.DRAINING,
        _E.START: _S.STARTING,  # the drain is over: start again
    },
}

#: From the best to the worst, for reports that show one state for many.
SEVERITY: tuple[HealthState, ...] = (
    HealthState.UP,
    HealthState.DRAINING,
    HealthState.STARTING,
    HealthState.LATE,
    HealthState.UNKNOWN,
    HealthState.DOWN,
    HealthState.FAILED,
)


@dataclass(frozen=True, slots=True)
class Health:
    """``since_ms`` is when this state began; the reason may change while the state stays."""

    state: HealthState
    reason: str
    since_ms: int

    @property
    def is_working(self) -> bool:
        """May be given work: that is the question behind ``/readyz``."""
        return self.state is HealthState.UP


def advance(health: Health, event: HealthEvent, reason: str, at_ms: int) -> Health:
    """The health after ``event``. `errors.Conflict` where the table has no such step."""
    state = TRANSITIONS[health.state].get(event)
    if state is None:
        possible = ", ".join(sorted(e.value for e in TRANSITIONS[health.state]))
        raise errors.Conflict(
            f"{event.value} cannot happen to what is {health.state.value}; what can: {possible}"
        )
    return Health(state, reason, health.since_ms if state is health.state else at_ms)


def worst(states: Iterable[HealthState]) -> HealthState:
    """One state for many; of none at all, nothing is known."""
    return max(states, key=SEVERITY.index, default=HealthState.UNKNOWN)


def diagram() -> str:
    """The table as a Mermaid state diagram; events that change nothing are left out."""
    lines = ["stateDiagram-v2", f"    [*] --> {HealthState.STARTING.value}"]
    for state, steps in TRANSITIONS.items():
        for target in HealthState:
            events = [
                event.value for event, after in steps.items() if after is target and target is not state
            ]
            if events:
                lines.append(f"    {state.value} --> {target.value}: {', '.join(events)}")
    return "\n".join(lines) + "\n"
