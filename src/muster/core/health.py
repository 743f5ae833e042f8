"""The health of a resource or a process: eight states and their transitions.

Only the manager of a resource sets ``down``, ``failed`` and ``completed``; silence alone leads to ``late``.
``unknown`` is not a kind of ``down``: it means that nothing can be concluded (the connection is lost, or all
of the zone is silent), so no action is taken. The table below defines all transitions; `advance` applies it.
The reference page draws it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from muster.core import errors


class HealthState(enum.Enum):
    STARTING = "starting"  # start requested, no heartbeat yet
    UP = "up"  # heartbeat within its period that reports success
    LATE = "late"  # silent for longer than its period; the connection to it works
    # nothing can be concluded: this process is disconnected, or all of the zone is silent
    UNKNOWN = "unknown"
    DOWN = "down"  # known not to run
    FAILED = "failed"  # known not to run; no further restart
    DRAINING = "draining"  # finishes its work, accepts no more
    COMPLETED = "completed"  # ended with success, and its restart policy asks for no further run


class HealthEvent(enum.Enum):
    BEAT = "beat"  # a heartbeat that reports success
    OVERDUE = "overdue"  # no heartbeat for longer than its period allows
    CUT_OFF = "cut-off"  # it cannot be reached, which proves nothing about it
    DIED = "died"  # its end is known: exit, refusal, or silence for a lease period while the connection works
    START = "start"  # an attempt to start it has begun
    GIVE_UP = "give-up"  # too many attempts, or one that cannot succeed
    DRAIN = "drain"  # drain requested
    COMPLETE = "complete"  # its last run ended with success


_S, _E = HealthState, HealthEvent

#: The next state for each event and state. An event that is not listed for a state cannot occur in it.
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
        _E.START: _S.STARTING,  # a requested restart
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
        _E.OVERDUE: _S.LATE,  # the connection is back, and it is still silent
        _E.CUT_OFF: _S.UNKNOWN,
        _E.DIED: _S.DOWN,
        _E.DRAIN: _S.DRAINING,
        # not START: no action on a resource that may be running
    },
    _S.DOWN: {
        _E.BEAT: _S.UP,  # another process started it
        _E.START: _S.STARTING,
        _E.DIED: _S.DOWN,
        _E.CUT_OFF: _S.UNKNOWN,  # another process may start it unnoticed
        _E.GIVE_UP: _S.FAILED,
        _E.COMPLETE: _S.COMPLETED,
    },
    _S.FAILED: {
        _E.BEAT: _S.UP,  # repaired manually
        _E.START: _S.STARTING,  # an operator requested another attempt
        _E.DIED: _S.FAILED,
        _E.CUT_OFF: _S.FAILED,  # no further information is needed: no action was due
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
    _S.COMPLETED: {
        _E.BEAT: _S.UP,  # started manually
        _E.START: _S.STARTING,
        _E.DIED: _S.COMPLETED,
        _E.CUT_OFF: _S.COMPLETED,  # as for `failed`
        _E.COMPLETE: _S.COMPLETED,
    },
}

#: From best to worst, for reports with one state for many resources.
SEVERITY: tuple[HealthState, ...] = (
    HealthState.UP,
    HealthState.COMPLETED,
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
        """Whether it accepts work: the criterion of ``/readyz``."""
        return self.state is HealthState.UP


def advance(health: Health, event: HealthEvent, reason: str, at_ms: int) -> Health:
    """The health after ``event``. `errors.Conflict` where the table has no such step."""
    state = TRANSITIONS[health.state].get(event)
    if state is None:
        possible = ", ".join(sorted(e.value for e in TRANSITIONS[health.state]))
        raise errors.Conflict(
            f"{event.value} cannot occur in state {health.state.value}; possible events: {possible}"
        )
    return Health(state, reason, health.since_ms if state is health.state else at_ms)


def worst(states: Iterable[HealthState]) -> HealthState:
    """One state for many; ``unknown`` for none."""
    return max(states, key=SEVERITY.index, default=HealthState.UNKNOWN)
