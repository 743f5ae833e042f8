"""Rules of `reconcile`, each as a table: what a function returns, what is checkpointed, and exact bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from muster.core import health, messages
from muster.manage import protocol
from muster.manage.manager import reconciler
from tests.manage.reconciler_cases import (
    Act,
    State,
    act,
    assign,
    begin,
    hear,
    observed,
    refusal,
    running,
    state_of,
)

DOWN, DRAINED = protocol.DesiredState.DOWN, protocol.DesiredState.DRAINED


def clean(assignment: protocol.Assignment) -> Any:
    """Running, and checkpointed."""
    runtime = running(assignment)
    runtime.dirty = False
    return runtime


# Beginnings


def test_without_a_checkpoint_nothing_has_happened_yet():
    assignment = assign(generation=3)
    runtime = begin(assignment, 2.0)
    assert runtime.status(assignment, 2.0, 2000) == protocol.ResourceStatus(
        state=State.STARTING, reason="assigned", since_ms=2000, desired_generation=3
    )
    assert runtime.dirty, "the registry does not know this manager's view yet"
    assert reconciler.decide(assignment, runtime, 2.0) == reconciler.ReconcileStep(Act.CLAIM, "assigned")


def test_the_first_observation_counts_however_its_agent_numbers_it():
    assignment = assign()
    runtime = begin(assignment)
    assert hear(assignment, runtime, observed(boot=0, sequence=1))
    assert state_of(runtime) is State.UP


def test_a_new_manager_asks_at_once_for_what_was_given_up_and_waits_with_what_is_retried():
    assignment = assign(restart={"delay_s": 8.0})
    for given_up, step in ((True, Act.CLAIM), (False, None)):
        last = protocol.ResourceStatus(
            state=State.DOWN, generation=1, desired_generation=1, failures_ms=(900,), given_up=given_up
        )
        runtime = begin(msgspec.structs.replace(assignment, status=last), 1.0)
        assert runtime.given_up is given_up
        assert act(assignment, runtime, 1.0) is step


# Whether the state changed


@pytest.mark.parametrize(
    ("before", "observation", "after"),
    [
        (State.STARTING, State.UP, State.UP),
        (State.UP, State.UP, State.UP),
        (State.UP, State.LATE, State.LATE),
        (State.UP, State.DRAINING, State.DRAINING),
        (State.UP, State.STARTING, State.STARTING),
        (State.UP, State.UNKNOWN, State.UNKNOWN),
        (State.UNKNOWN, State.STARTING, State.STARTING),
        (State.UP, State.DOWN, State.DOWN),
        (State.UP, State.FAILED, State.DOWN),
        (State.DOWN, State.DOWN, State.DOWN),
        (State.UNKNOWN, State.DOWN, State.DOWN),
        (State.FAILED, State.DOWN, State.FAILED),
        (State.COMPLETED, State.DOWN, State.COMPLETED),
        (State.FAILED, State.UP, State.UP),
    ],
)
@pytest.mark.parametrize("desired", list(protocol.DesiredState))
def test_observe_returns_whether_the_state_changed(before, observation, after, desired):
    assignment = assign(desired=desired)
    runtime = begin(assignment)
    runtime.health = health.Health(before, "before", 0)
    assert hear(assignment, runtime, observed(observation)) is (after is not before)
    assert state_of(runtime) is after


@pytest.mark.parametrize(
    ("restart", "falls", "reason"),
    [
        ({"policy": "never"}, 1, "crash; the restart policy does not allow a restart"),
        ({"attempts": 1, "window_s": 60.0}, 2, "crash; given up after 1 restarts in 60 s"),
    ],
)
def test_the_observation_that_ends_all_attempts_changes_the_state(restart, falls, reason):
    assignment = assign(restart=restart)
    runtime = running(assignment)
    for _ in range(falls):
        hear(assignment, runtime, observed(), 10.0)
        runtime.dirty = False
        assert hear(assignment, runtime, observed(State.DOWN, reason="crash"), 10.0)
    assert (runtime.health.state, runtime.health.reason) == (State.FAILED, reason)
    assert runtime.dirty
    runtime.dirty = False
    assert not hear(assignment, runtime, observed(State.DOWN, reason="another"), 11.0)
    assert runtime.health.reason == reason, "why it was given up stands"
    assert not runtime.dirty


def test_what_was_given_up_while_it_ran_is_failed_when_it_ends():
    assignment = assign()
    runtime = running(assignment)
    runtime.given_up = True
    assert hear(assignment, runtime, observed(State.DOWN, digest="other", reason="crash"), 10.0)
    assert (runtime.health.state, runtime.health.reason) == (State.FAILED, "crash; given up")


def test_failed_returns_whether_the_state_changed():
    assignment = assign(restart={"attempts": 2})
    runtime = running(assignment)
    results = [
        reconciler.step_failed(assignment, runtime, Act.START, refusal(), float(now), now * 1000)
        for now in (10, 11, 12)
    ]
    assert results == [True, False, True], "down; still down; failed"
    assert runtime.health.reason == "start: boom; given up after 2 attempts"
    for step in (Act.STOP, Act.DRAIN, Act.DELETE, Act.RENAME, Act.CLAIM):
        assert reconciler.step_failed(assignment, clean(assignment), step, refusal(), 1.0, 1000) is False


def test_a_failure_changes_the_state_also_where_giving_up_is_not_due():
    assignment = assign()
    assert reconciler.step_failed(assignment, running(assignment), Act.PUT, refusal(), 1.0, 1000)


# What is checkpointed


def test_a_run_for_the_desired_state_is_checkpointed_once():
    assignment = assign(generation=2)
    runtime = clean(assignment)
    for ran, dirty in ((1, True), (2, False)):
        runtime.ran, runtime.dirty = ran, False
        hear(assignment, runtime, observed())
        assert (runtime.ran, runtime.dirty) == (2, dirty)


@pytest.mark.parametrize("state", [State.DOWN, State.FAILED, State.UNKNOWN])
def test_a_stopped_resource_has_not_run_for_the_desired_state(state):
    assignment = assign(generation=2)
    runtime = running(assignment)
    runtime.ran = 1
    hear(assignment, runtime, observed(state))
    assert runtime.ran == 1


def test_that_it_was_repaired_by_hand_is_checkpointed():
    assignment = assign()
    runtime = clean(assignment)
    runtime.given_up = True
    hear(assignment, runtime, observed())
    assert (runtime.given_up, runtime.dirty) == (False, True)


def test_each_fall_is_checkpointed_although_state_and_reason_stay():
    assignment = assign()
    runtime = running(assignment)
    hear(assignment, runtime, observed(State.DOWN, reason="crash"), 10.0)
    reconciler.step_done(runtime, Act.START, generation=1, started=True, there=True, now=10.0)
    runtime.dirty = False
    hear(assignment, runtime, observed(State.DOWN, reason="crash"), 11.0)
    assert (runtime.failures, runtime.dirty) == ([10.0, 11.0], True)


def test_the_fault_of_a_step_that_is_not_counted_is_checkpointed():
    assignment = assign()
    runtime = clean(assignment)
    reconciler.step_failed(assignment, runtime, Act.STOP, refusal(), 5.0, 5000)
    assert runtime.status(assignment, 5.0, 5000).fault == "stop: boom"
    assert (runtime.dirty, runtime.retry_at) == (True, 5.0 + reconciler.RETRY_S)


def test_a_new_desired_state_clears_failures_and_faults_and_an_equal_one_does_not():
    first = assign()
    for generation, forgets in ((1, False), (2, True)):
        runtime = clean(first)
        runtime.fault, runtime.failures, runtime.retry_at, runtime.given_up = "x", [1.0], 9.0, True
        reconciler.assignment_changed(first, msgspec.structs.replace(first, generation=generation), runtime)
        kept = (runtime.fault, runtime.failures, runtime.retry_at, runtime.given_up)
        assert kept == (("", [], 0.0, False) if forgets else ("x", [1.0], 9.0, True))
        assert runtime.dirty is forgets
        assert state_of(runtime) is State.UP


def test_a_change_of_state_forgets_the_last_fault():
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.UP, "", 0), fault="stop: boom", dirty=False)
    assert reconciler.apply_health_event(runtime, health.HealthEvent.DIED, "crash", 9)
    assert (runtime.fault, runtime.dirty) == ("", True)


# Falls


@pytest.mark.parametrize(
    ("checkpoint", "counted"),
    [
        (State.UP, True),
        (State.LATE, True),
        (State.DRAINING, True),
        (State.STARTING, False),  # it may never have run
        (State.DOWN, False),
        (State.UNKNOWN, False),
    ],
)
def test_what_the_last_manager_saw_running_has_fallen_when_the_next_finds_it_down(checkpoint, counted):
    last = protocol.ResourceStatus(state=checkpoint, generation=1, desired_generation=1)
    assignment = assign(status=last)
    runtime = begin(assignment, 10.0)
    hear(assignment, runtime, observed(State.DOWN), 11.0)
    assert runtime.failures == ([11.0] if counted else [])


@pytest.mark.parametrize(
    ("before", "counted"),
    [
        (protocol.ObservedState(True, State.STARTING), True),
        (protocol.ObservedState(True, State.LATE), True),
        (protocol.ObservedState(True, State.DRAINING), True),
        (protocol.ObservedState(True, State.UNKNOWN), False),
        (protocol.ObservedState(True, State.DOWN), False),
        (protocol.ObservedState(False, State.DOWN), False),
        (protocol.ObservedState(False, State.UP), False),
    ],
)
def test_only_what_ran_can_fall(before, counted):
    assignment = assign()
    runtime = running(assignment)
    runtime.observed = before
    hear(assignment, runtime, observed(State.DOWN), 11.0)
    assert runtime.failures == ([11.0] if counted else [])


def test_what_is_deleted_may_end():
    assignment = msgspec.structs.replace(assign(restart={"policy": "never"}), deleting=True)
    runtime = running(assign())
    assert hear(assignment, runtime, observed(State.DOWN, reason="stopped"), 11.0)
    assert (runtime.health.state, runtime.health.reason) == (State.DOWN, "stopped")
    assert (runtime.failures, runtime.given_up) == ([], False)


def test_the_delay_doubles_at_most_32_times():
    assignment = assign(
        restart={"attempts": 1000, "delay_s": 1e-9, "delay_s_max": 3600.0, "window_s": 86400.0}
    )
    runtime = running(assignment)
    for now in range(1, 50):
        hear(assignment, runtime, observed(), float(now))
        reconciler.step_failed(assignment, runtime, Act.START, refusal(), float(now), now * 1000)
    assert runtime.retry_at - 49.0 == pytest.approx(1e-9 * 2**32)


def test_the_short_delay_after_a_refusal_is_within_the_longest_delay():
    assignment = assign(restart={"delay_s": 0.0, "delay_s_max": 0.05})
    runtime = running(assignment)
    reconciler.step_failed(assignment, runtime, Act.START, refusal(), 5.0, 5000)
    assert runtime.retry_at == pytest.approx(5.05)


@pytest.mark.parametrize(("ran", "generation", "after"), [(0, 2, 2), (2, 2, 2), (3, 2, 3)])
def test_a_start_counts_as_a_run_for_the_latest_desired_state(ran, generation, after):
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.DOWN, "", 0), ran=ran)
    reconciler.step_done(runtime, Act.START, generation=generation, started=True, there=True, now=0.0)
    assert runtime.ran == after


# The order of observations


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ((7, 3), (7, 4), "second"),
        ((7, 4), (7, 3), "first"),
        ((7, 4), (8, 1), "second"),
        ((8, 1), (7, 4), "first"),
        ((7, 3), (0, 0), "second"),  # not numbered: taken as it comes
        ((0, 0), (0, 0), "second"),
    ],
)
def test_the_latest_observation_during_an_operation_counts(first, second, counts):
    assignment = assign()
    runtime = running(assignment)
    runtime.busy = True
    for reason, (boot, sequence) in (("first", first), ("second", second)):
        hear(assignment, runtime, observed(State.DOWN, reason=reason, boot=boot, sequence=sequence), 2.0)
    assert reconciler.release(assignment, runtime, 3.0, 3000)
    assert runtime.health.reason == counts


def test_a_repeated_observation_ends_silence():
    """A heartbeat confirms the last observation."""
    assignment = assign()
    runtime = running(assignment)
    seen = observed(boot=7, sequence=5)
    hear(assignment, runtime, seen, 1.0)
    reconciler.check_silence(runtime, 20.0, 20_000, zone_silent=False, connected_since=0.0)
    assert state_of(runtime) is State.LATE
    assert hear(assignment, runtime, seen, 21.0)
    assert state_of(runtime) is State.UP


# Silence


@pytest.mark.parametrize(
    ("zone_heard_s", "after"),
    [
        (0.0, State.LATE),
        (5.0, State.LATE),
        (12.5, State.LATE),  # 2.5 periods: the zone may have been cut off at the same time
        (12.6, State.DOWN),
        (40.0, State.DOWN),
    ],
)
def test_a_silent_resource_is_down_only_if_its_zone_reported_well_after_it(zone_heard_s, after):
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.UP, "", 0), observed(), last_seen_at=100.0)
    reconciler.check_silence(
        runtime, 140.0, 1, zone_silent=False, connected_since=0.0, zone_last_seen_at=100.0 + zone_heard_s
    )
    assert state_of(runtime) is after


# Steps


@pytest.mark.parametrize(
    ("fields", "seen", "step"),
    [
        ({}, protocol.ObservedState(False), reconciler.ReconcileStep(Act.CREATE, "it does not exist")),
        ({}, observed(State.DOWN), reconciler.ReconcileStep(Act.START, "not running")),
        ({}, observed(State.DOWN, reason="exit code 1"), reconciler.ReconcileStep(Act.START, "exit code 1")),
        ({"desired": DOWN}, observed(), reconciler.ReconcileStep(Act.STOP, "desired state is down")),
        ({"desired": DRAINED}, observed(), reconciler.ReconcileStep(Act.DRAIN, "drained by a user")),
        ({}, observed(digest=""), reconciler.ReconcileStep(Act.PUT, "a new configuration")),
        (
            {"restart": {"policy": "never"}, "generation": 2},
            observed(ran=1),
            reconciler.ReconcileStep(Act.PUT, "record the new generation of a running resource"),
        ),
        ({"restart": {"policy": "never"}, "generation": 2}, observed(ran=2), None),
        ({"restart": {"policy": "always"}, "generation": 2}, observed(ran=1), None),
    ],
)
def test_each_step_has_a_reason(fields, seen, step):
    assignment = assign(**fields)
    runtime = begin(assignment)
    runtime.observed = seen
    assert reconciler.decide(assignment, runtime, 1.0) == step


def test_a_heartbeat_that_differs_is_the_reason_to_ask():
    assignment = assign()
    runtime = running(assignment)
    runtime.recheck = True
    step = reconciler.decide(assignment, runtime, 1.0)
    assert step == reconciler.ReconcileStep(Act.CLAIM, "a heartbeat differs")


def test_an_answer_in_doubt_is_checkpointed_and_changes_no_state():
    assignment = assign()
    runtime = clean(assignment)
    doubt = refusal(outcome=messages.DecisionOutcome.IN_DOUBT)
    assert reconciler.step_failed(assignment, runtime, Act.START, doubt, 5.0, 5000) is False
    assert (runtime.observed, runtime.retry_at) == (None, 5.0 + reconciler.RETRY_S)
    assert (runtime.dirty, state_of(runtime)) == (True, State.UP)


# Whether it stays up


def test_it_is_stable_after_two_heartbeats_that_are_far_enough_apart():
    assignment = assign()
    runtime = running(assignment)
    runtime.dirty = False
    assert not reconciler.confirm_up(runtime, 1_000, 1.0)
    assert not reconciler.confirm_up(runtime, 2_999, 3.0)
    assert not reconciler.confirm_up(runtime, 90_000, 2.9), "the agent's clock was set"
    assert not reconciler.confirm_up(runtime, 2_000, 90.0), "it was delayed"
    assert not runtime.dirty
    assert reconciler.confirm_up(runtime, 3_000, 3.0)
    assert runtime.dirty
    assert runtime.status(assignment, 3.0, 3000).stable


def test_it_becomes_stable_although_the_clock_of_its_agent_was_set_back():
    runtime = running(assign())
    assert not reconciler.confirm_up(runtime, 3_600_000, 1.0)
    assert not reconciler.confirm_up(runtime, 1_000, 2.0)
    assert reconciler.confirm_up(runtime, 3_000, 4.0)


def test_it_has_to_be_seen_anew_after_a_change_of_state_a_step_and_a_new_generation():
    assignment = assign()

    def stable() -> Any:
        runtime = running(assignment)
        reconciler.confirm_up(runtime, 1_000, 1.0)
        assert reconciler.confirm_up(runtime, 3_000, 3.0)
        return runtime

    runtime = stable()
    hear(assignment, runtime, observed(State.STARTING))
    hear(assignment, runtime, observed())
    assert (state_of(runtime), runtime.stable, runtime.up_at) == (State.UP, False, None)
    runtime = stable()
    reconciler.step_done(runtime, Act.PUT, generation=1, started=True, there=True, now=4.0)
    assert not runtime.stable
    status = stable().status(assignment, 4.0, 4000)
    assert begin(assign(status=status)).stable
    assert not begin(assign(generation=2, status=status)).stable


@pytest.mark.parametrize(
    ("digest", "state", "desired", "begins"),
    [
        ("old", State.UP, protocol.DesiredState.UP, True),
        ("old", State.STARTING, protocol.DesiredState.UP, True),
        ("d", State.UP, protocol.DesiredState.UP, False),  # only the generation is recorded
        ("old", State.DOWN, protocol.DesiredState.UP, False),  # its start follows
        ("old", State.UP, protocol.DesiredState.DOWN, False),
    ],
)
def test_a_changed_configuration_begins_a_run_of_what_runs(digest, state, desired, begins):
    assignment = assign(desired=desired)
    runtime = begin(assignment)
    runtime.observed = observed(state, digest=digest)
    assert reconciler.begins_run(assignment, runtime, Act.PUT) is begins
    assert reconciler.begins_run(assignment, runtime, Act.START)
    assert not reconciler.begins_run(assignment, runtime, Act.STOP)
