from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, health
from muster.core.health import Event, State


def test_a_life() -> None:
    now = health.Health(State.STARTING, "applied", 0)
    for at_ms, event, state, since_ms in [
        (10, Event.BEAT, State.UP, 10),
        (20, Event.BEAT, State.UP, 10),
        (30, Event.OVERDUE, State.LATE, 30),
        (40, Event.BEAT, State.UP, 40),
        (50, Event.CUT_OFF, State.UNKNOWN, 50),
        (60, Event.OVERDUE, State.LATE, 60),
        (70, Event.DIED, State.DOWN, 70),
        (80, Event.START, State.STARTING, 80),
        (90, Event.GIVE_UP, State.FAILED, 90),
        (99, Event.START, State.STARTING, 99),
    ]:
        now = health.advance(now, event, f"at {at_ms}", at_ms)
        assert now == health.Health(state, f"at {at_ms}", since_ms)


def test_nobody_starts_what_may_be_running() -> None:
    with pytest.raises(errors.Conflict, match="start cannot happen to what is unknown"):
        health.advance(health.Health(State.UNKNOWN, "zone silent", 0), Event.START, "", 1)


def test_silence_alone_never_says_down() -> None:
    silent = {Event.OVERDUE, Event.CUT_OFF}
    reached = {
        after for steps in health.TRANSITIONS.values() for event, after in steps.items() if event in silent
    }
    assert reached <= {State.LATE, State.UNKNOWN, State.DRAINING, State.FAILED}
    assert State.FAILED not in {
        health.TRANSITIONS[state].get(event)
        for event in silent
        for state in State
        if state is not State.FAILED
    }


def test_every_state_can_be_left_and_every_state_can_be_reached() -> None:
    assert set(health.TRANSITIONS) == set(State)
    for state, steps in health.TRANSITIONS.items():
        assert set(steps.values()) - {state}
    assert {after for steps in health.TRANSITIONS.values() for after in steps.values()} == set(State)


@given(st.lists(st.tuples(st.sampled_from(Event), st.integers(0, 100))))
def test_since_is_when_the_state_began(events: list[tuple[Event, int]]) -> None:
    now, at_ms = health.Health(State.STARTING, "", 0), 0
    for event, step_ms in events:
        at_ms += step_ms
        if event not in health.TRANSITIONS[now.state]:
            continue
        after = health.advance(now, event, event.value, at_ms)
        assert after.since_ms == (now.since_ms if after.state is now.state else at_ms)
        now = after


def test_only_up_is_given_work() -> None:
    assert [state for state in State if health.Health(state, "", 0).is_working] == [State.UP]


def test_one_state_for_many_is_the_worst() -> None:
    assert set(health.SEVERITY) == set(State)
    assert health.worst([State.UP, State.LATE, State.DRAINING]) is State.LATE
    assert health.worst([]) is State.UNKNOWN


def test_the_documented_diagram_is_the_table() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "health.md"
    before, _, rest = page.read_text().partition("```mermaid\n")
    _, _, after = rest.partition("```")
    if os.environ.get("REWRITE"):
        page.write_text(f"{before}```mermaid\n{health.diagram()}```{after}")
    assert f"```mermaid\n{health.diagram()}```" in page.read_text(), "REWRITE=1 pytest … writes it anew"
