from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, health
from muster.core.health import HealthEvent, HealthState


def test_a_life() -> None:
    now = health.Health(HealthState.STARTING, "applied", 0)
    for at_ms, event, state, since_ms in [
        (10, HealthEvent.BEAT, HealthState.UP, 10),
        (20, HealthEvent.BEAT, HealthState.UP, 10),
        (30, HealthEvent.OVERDUE, HealthState.LATE, 30),
        (40, HealthEvent.BEAT, HealthState.UP, 40),
        (50, HealthEvent.CUT_OFF, HealthState.UNKNOWN, 50),
        (60, HealthEvent.OVERDUE, HealthState.LATE, 60),
        (70, HealthEvent.DIED, HealthState.DOWN, 70),
        (80, HealthEvent.START, HealthState.STARTING, 80),
        (90, HealthEvent.GIVE_UP, HealthState.FAILED, 90),
        (99, HealthEvent.START, HealthState.STARTING, 99),
    ]:
        now = health.advance(now, event, f"at {at_ms}", at_ms)
        assert now == health.Health(state, f"at {at_ms}", since_ms)


def test_a_resource_that_may_be_running_is_not_started() -> None:
    with pytest.raises(errors.Conflict, match="start cannot occur in state unknown"):
        health.advance(health.Health(HealthState.UNKNOWN, "zone silent", 0), HealthEvent.START, "", 1)


def test_silence_alone_never_means_down() -> None:
    silent = {HealthEvent.OVERDUE, HealthEvent.CUT_OFF}
    reached = {
        after for steps in health.TRANSITIONS.values() for event, after in steps.items() if event in silent
    }
    ended = {HealthState.FAILED, HealthState.COMPLETED}
    assert reached <= {HealthState.LATE, HealthState.UNKNOWN, HealthState.DRAINING, *ended}
    assert ended.isdisjoint(
        health.TRANSITIONS[state].get(event)
        for event in silent
        for state in HealthState
        if state not in ended
    )


def test_every_state_can_be_left_and_every_state_can_be_reached() -> None:
    assert set(health.TRANSITIONS) == set(HealthState)
    for state, steps in health.TRANSITIONS.items():
        assert set(steps.values()) - {state}
    assert {after for steps in health.TRANSITIONS.values() for after in steps.values()} == set(HealthState)


@given(st.lists(st.tuples(st.sampled_from(HealthEvent), st.integers(0, 100))))
def test_since_is_when_the_state_began(events: list[tuple[HealthEvent, int]]) -> None:
    now, at_ms = health.Health(HealthState.STARTING, "", 0), 0
    for event, step_ms in events:
        at_ms += step_ms
        if event not in health.TRANSITIONS[now.state]:
            continue
        after = health.advance(now, event, event.value, at_ms)
        assert after.since_ms == (now.since_ms if after.state is now.state else at_ms)
        now = after


def test_only_up_is_given_work() -> None:
    assert [state for state in HealthState if health.Health(state, "", 0).is_working] == [HealthState.UP]


def test_one_state_for_many_is_the_worst() -> None:
    assert set(health.SEVERITY) == set(HealthState)
    assert health.worst([HealthState.UP, HealthState.LATE, HealthState.DRAINING]) is HealthState.LATE
    assert health.worst([]) is HealthState.UNKNOWN


def test_the_documented_diagram_is_the_table() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "health.md"
    before, _, rest = page.read_text().partition("```mermaid\n")
    _, _, after = rest.partition("```")
    if os.environ.get("REWRITE"):
        page.write_text(f"{before}```mermaid\n{_diagram()}```{after}")
    assert f"```mermaid\n{_diagram()}```" in page.read_text(), "REWRITE=1 pytest … writes it anew"


def _diagram() -> str:
    """The table as a Mermaid state diagram; events that change nothing are left out."""
    lines = ["stateDiagram-v2", f"    [*] --> {HealthState.STARTING.value}"]
    for state, steps in health.TRANSITIONS.items():
        for target in HealthState:
            events = [
                event.value for event, after in steps.items() if after is target and target is not state
            ]
            if events:
                lines.append(f"    {state.value} --> {target.value}: {', '.join(events)}")
    return "\n".join(lines) + "\n"
