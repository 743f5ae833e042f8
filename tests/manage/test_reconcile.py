"""What `reconcile` decides, case by case; `test_reconcile_model` drives it at random."""

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


def test_a_new_pid_is_checkpointed_although_the_state_did_not_change():
    assignment = assign()
    runtime = running(assignment)
    hear(assignment, runtime, msgspec.structs.replace(observed(), properties={"pid": 1}))
    runtime.dirty = False
    hear(assignment, runtime, msgspec.structs.replace(observed(), properties={"pid": 1}))
    assert not runtime.dirty
    hear(assignment, runtime, msgspec.structs.replace(observed(), properties={"pid": 2}))
    assert runtime.dirty
    assert runtime.status(assignment, 1.0, 1000).properties == {"pid": 2}


# Restart policies


@pytest.mark.parametrize(
    ("policy", "exit_code", "again"),
    [
        ("always", 0, True),
        ("always", 1, True),
        ("always", None, True),
        ("on-failure", 0, False),
        ("on-failure", 1, True),
        ("on-failure", -9, True),
        ("on-failure", None, True),  # its exit code is unknown
        ("never", 0, False),
        ("never", 1, False),
        ("never", None, False),
    ],
)
@pytest.mark.parametrize("seen_by", ["its manager", "the next manager", "a manager without a checkpoint"])
def test_an_ended_resource_is_restarted_by_its_policy(policy, exit_code, again, seen_by):
    assignment = assign(restart={"policy": policy})
    runtime = running(assignment)
    if seen_by == "the next manager":
        status = runtime.status(assignment, 2.0, 2000)
        runtime = begin(msgspec.structs.replace(assignment, status=status), 3.0)
    elif seen_by == "a manager without a checkpoint":
        runtime = begin(assignment, 3.0)
    hear(assignment, runtime, observed(State.DOWN, exit_code=exit_code, ran=1), 4.0)
    assert act(assignment, runtime, 10.0) is (Act.START if again else None)
    ended = State.COMPLETED if exit_code == 0 else State.FAILED
    assert state_of(runtime) is (State.DOWN if again else ended)
    assert ("policy" in runtime.health.reason) is (state_of(runtime) is State.FAILED)


@pytest.mark.parametrize("policy", ["on-failure", "never"])
def test_a_new_desired_state_runs_it_once_more(policy):
    first = assign(restart={"policy": policy})
    runtime = running(first)
    hear(first, runtime, observed(State.DOWN, exit_code=0, ran=1))
    assert act(first, runtime, 10.0) is None
    second = msgspec.structs.replace(first, generation=2)
    reconciler.assignment_changed(first, second, runtime)
    assert (runtime.health.state, runtime.health.reason) == (State.DOWN, "the desired state changed")
    assert act(second, runtime, 10.0) is Act.START
    reconciler.step_done(runtime, Act.START, generation=2, started=True, there=True, now=0.0)
    hear(second, runtime, observed(State.DOWN, exit_code=0, ran=2), 11.0)
    assert act(second, runtime, 20.0) is None


def test_a_desired_state_that_arrives_while_it_runs_does_not_run_it_twice():
    """Labels, say: the process is not touched, so its end is that of the new wish's run."""
    first = assign(restart={"policy": "never"})
    runtime = running(first)
    second = msgspec.structs.replace(first, generation=2)
    reconciler.assignment_changed(first, second, runtime)
    assert act(second, runtime) is None
    assert reconciler.mark_converged(second, runtime)
    hear(second, runtime, observed(State.DOWN, exit_code=0))
    assert act(second, runtime, 10.0) is None
    # If the agent reports the version it runs, it gets the new version first.
    runtime = running(first)
    hear(first, runtime, observed(ran=1))
    assert act(first, runtime) is None
    reconciler.assignment_changed(first, second, runtime)
    assert act(second, runtime) is Act.PUT
    ended = observed(State.DOWN, exit_code=0, ran=1)
    hear(second, runtime, ended)
    assert act(second, runtime, 10.0) is Act.START, "its end was before the wish"
    hear(second, runtime, observed(ran=2), 11.0)
    assert act(second, runtime, 11.0) is None
    always = assign(generation=2)
    hear(always, runtime, observed(ran=1), 12.0)
    assert act(always, runtime, 12.0) is None, "whatever it ran for, it is started again"


def test_it_is_not_given_up_unseen_where_its_agent_never_started_it():
    assignment = assign(restart={"policy": "never"})
    runtime = begin(assignment)
    hear(assignment, runtime, observed(State.DOWN, ran=0))
    assert act(assignment, runtime) is Act.START


# Attempts


def test_given_up_means_given_up():
    """Of creations, of changes, of starts; until there is a new wish."""
    for what, seen in (
        (Act.CREATE, protocol.ObservedState(False)),
        (Act.PUT, observed(State.UP, digest="other")),
        (Act.START, observed(State.DOWN)),
    ):
        assignment = assign(restart={"attempts": 3, "delay_s": 0.0})
        runtime = begin(assignment)
        tried, now = 0, 0.0
        while now < 1000:
            now += 1.0
            hear(assignment, runtime, seen, now)
            if (step := act(assignment, runtime, now)) is not None:
                assert step is what
                tried += 1
                reconciler.step_failed(assignment, runtime, step, refusal(), now, int(now * 1000))
        assert tried == 4, what
        assert runtime.given_up
        status = runtime.status(assignment, now, int(now * 1000))
        same = begin(msgspec.structs.replace(assignment, status=status), now)
        hear(assignment, same, seen, now)
        assert act(assignment, same, now + 100) is None, "another manager does not try again"
        wished = msgspec.structs.replace(assignment, generation=2, status=status)
        other = begin(wished, now)
        hear(wished, other, seen, now)
        assert act(wished, other, now) is what, "a new wish that no manager was there to hear"
        reconciler.assignment_changed(assignment, wished, runtime)
        assert act(wished, runtime, now) is what


def test_a_failed_checkpoint_belongs_to_its_own_desired_state():
    failed = protocol.ResourceStatus(
        state=State.FAILED, reason="given up", generation=1, desired_generation=1, failures_ms=(1, 2)
    )
    same, other = begin(assign(status=failed)), begin(assign(status=failed, generation=2))
    assert (same.health.state, same.given_up) == (State.FAILED, True)
    assert (other.health.state, other.given_up, other.failures) == (State.DOWN, False, [])
    assert other.dirty
    assert not same.dirty


def test_attempts_are_put_off_twice_as_long_each_time():
    assignment = assign(restart={"attempts": 1000, "delay_s": 0.5, "delay_s_max": 30.0, "window_s": 86400.0})
    runtime = begin(assignment)
    hear(assignment, runtime, protocol.ObservedState(False))
    waits = []
    for number in range(1100):
        now = 100.0 + number
        runtime.given_up = False
        reconciler.step_failed(assignment, runtime, Act.CREATE, refusal(), now, int(now * 1000))
        waits.append(runtime.retry_at - now)
        assert act(assignment, runtime, runtime.retry_at - 0.01) is None
    assert waits[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert waits[-1] == 30.0
    assert len(runtime.failures) == 1001


def test_without_a_delay_there_is_a_short_one_after_a_refusal():
    assignment = assign(restart={"delay_s": 0.0})
    runtime = begin(assignment)
    reconciler.step_failed(assignment, runtime, Act.CREATE, refusal(), 5.0, 5000)
    assert runtime.retry_at == pytest.approx(5.1)


def test_falls_out_of_the_window_are_forgotten():
    assignment = assign(restart={"attempts": 2, "window_s": 100.0, "delay_s": 0.0})
    runtime = running(assignment)
    for now in (10.0, 20.0, 110.0, 215.0):
        hear(assignment, runtime, observed(), now)
        hear(assignment, runtime, observed(State.DOWN), now)
        assert act(assignment, runtime, now + 1) is Act.START
        reconciler.step_done(runtime, Act.START, generation=1, started=True, there=True, now=0.0)
    assert runtime.failures == [215.0], "exactly at its edge one is out"
    for now in (216.0, 217.0):
        hear(assignment, runtime, observed(), now)
        hear(assignment, runtime, observed(State.DOWN), now)
    assert act(assignment, runtime, 300.0) is None
    assert "given up after 2 restarts in 100 s" in runtime.health.reason


def test_the_wall_clock_may_be_set_while_falls_are_counted():
    assignment = assign(restart={"attempts": 2, "window_s": 100.0})
    runtime = running(assignment)
    hear(assignment, runtime, observed(State.DOWN), 10.0)
    stamped_ahead = runtime.status(assignment, 10.0, 3_600_000)
    assert stamped_ahead.failures_ms == (3_600_000,)
    later = begin(msgspec.structs.replace(assignment, status=stamped_ahead), 20.0)
    assert later.failures == [20.0], "a time to come is now"
    at_20 = runtime.status(assignment, 30.0, 50_000)
    assert at_20.failures_ms == (30_000,)
    assert begin(msgspec.structs.replace(assignment, status=at_20), 60.0).failures == [30.0]
    assert begin(msgspec.structs.replace(assignment, status=at_20), 130.0).failures == []


def test_the_next_manager_waits_as_long_as_the_last_one_would_have():
    assignment = assign(restart={"delay_s": 4.0})
    runtime = running(assignment)
    hear(assignment, runtime, observed(State.DOWN), 10.0)
    status = runtime.status(assignment, 11.0, 11_000)
    other = begin(msgspec.structs.replace(assignment, status=status), 12.0)
    assert other.retry_at == pytest.approx(14.0)


def test_flapping_is_reported_and_slowed_down():
    assignment = assign(restart={"attempts": 1000, "delay_s": 0.01, "delay_s_max": 60.0})
    runtime = running(assignment)
    for number in range(1, 6):
        now = 10.0 * number
        hear(assignment, runtime, observed(), now)
        hear(assignment, runtime, observed(State.DOWN, reason="exit code 1"), now)
        flapping = number > reconciler.FLAPS_MAX
        assert ("flapping" in runtime.health.reason) is flapping
        assert (runtime.retry_at - now >= 30.0) is flapping


def test_one_that_dies_as_soon_as_it_is_started_is_counted():
    assignment = assign(restart={"attempts": 2, "delay_s": 1.0})
    runtime = running(assignment)
    hear(assignment, runtime, observed(State.DOWN), 1.0)
    for now in (10.0, 20.0):
        assert act(assignment, runtime, now) is Act.START
        reconciler.apply_health_event(runtime, health.HealthEvent.START, "", 0)
        reconciler.step_done(runtime, Act.START, generation=1, started=True, there=True, now=0.0)
        hear(assignment, runtime, observed(State.DOWN), now)  # the answer says so already
    assert act(assignment, runtime, 1000.0) is None
    assert runtime.given_up


def test_a_change_that_fails_and_ends_it_is_one_failure():
    assignment = assign()
    runtime = running(assignment)
    changed = msgspec.structs.replace(assignment, spec=msgspec.structs.replace(assignment.spec, digest="e"))
    reconciler.step_failed(changed, runtime, Act.PUT, refusal(), 5.0, 5000)
    hear(changed, runtime, observed(State.DOWN, digest="", reason="cannot be started"), 5.0)
    assert runtime.failures == [5.0]


def test_one_that_was_mended_by_hand_is_watched_again():
    assignment = assign(restart={"attempts": 1, "delay_s": 0.0})
    runtime = running(assignment)
    for now in (10.0, 11.0):
        hear(assignment, runtime, observed(), now)
        hear(assignment, runtime, observed(State.DOWN), now)
    assert runtime.given_up
    hear(assignment, runtime, observed(), 500.0)
    assert not runtime.given_up
    assert state_of(runtime) is State.UP
    hear(assignment, runtime, observed(State.DOWN), 600.0)
    assert act(assignment, runtime, 601.0) is Act.START
    # What was given up is its configuration: that it runs does not mend that.
    runtime.given_up = True
    hear(assignment, runtime, observed(digest="other"), 1700.0)
    assert runtime.given_up
    assert act(assignment, runtime, 1701.0) is None
    hear(assignment, runtime, observed(State.DOWN, digest="other", reason="exit code 1"), 1702.0)
    assert (runtime.health.state, runtime.health.reason) == (State.FAILED, "exit code 1; given up")


def test_a_step_in_doubt_is_looked_at_before_anything_else():
    for answer in (
        refusal(outcome=messages.DecisionOutcome.IN_DOUBT),
        refusal("unavailable"),
        refusal("timed-out"),
    ):
        assignment = assign()
        runtime = running(assignment)
        assert not reconciler.step_failed(assignment, runtime, Act.PUT, answer, 5.0, 5000)
        assert runtime.failures == []
        assert act(assignment, runtime, 5.5) is None
        assert act(assignment, runtime, 6.0) is Act.CLAIM


def test_a_stop_that_failed_is_tried_again_and_nothing_is_counted():
    assignment = assign(desired=protocol.DesiredState.DOWN)
    runtime = begin(assignment)
    hear(assignment, runtime, observed())
    assert act(assignment, runtime) is Act.STOP
    reconciler.step_failed(assignment, runtime, Act.STOP, refusal(), 5.0, 5000)
    assert act(assignment, runtime, 5.9) is None
    assert act(assignment, runtime, 6.0) is Act.STOP
    assert runtime.failures == []
    hear(assignment, runtime, observed(State.DOWN, reason="stopped"), 7.0)
    assert runtime.failures == []
    assert act(assignment, runtime, 8.0) is None


# The order of observations


def test_an_older_observation_is_ignored():
    """The answer to a signal, taken before the process was dead, arrives after the news of its death."""
    assignment = assign()
    runtime = running(assignment)
    hear(assignment, runtime, observed(boot=7, sequence=5), 1.0)
    hear(assignment, runtime, observed(State.DOWN, boot=7, sequence=7), 2.0)
    assert not hear(assignment, runtime, observed(boot=7, sequence=6), 2.1)
    assert state_of(runtime) is State.DOWN
    hear(assignment, runtime, observed(State.DOWN, boot=7, sequence=7), 2.2)
    assert runtime.failures == [2.0]
    assert runtime.last_seen_at == 2.2


def test_a_restarted_agent_counts_from_the_beginning():
    assignment = assign()
    runtime = running(assignment)
    hear(assignment, runtime, observed(boot=7, sequence=500), 1.0)
    hear(assignment, runtime, observed(State.DOWN, boot=8, sequence=1), 2.0)
    assert state_of(runtime) is State.DOWN
    hear(assignment, runtime, observed(boot=7, sequence=501), 3.0)
    assert state_of(runtime) is State.DOWN, "what was under way from before says nothing"
    hear(assignment, runtime, observed(boot=8, sequence=2), 4.0)
    assert state_of(runtime) is State.UP
    # One whose folder was lost may count its starts from the beginning: what it answers is taken.
    lost = observed(State.DOWN, boot=2, sequence=1)
    hear(assignment, runtime, lost, 5.0)
    assert state_of(runtime) is State.UP
    reconciler.observe(assignment, runtime, lost, 6.0, 6000, requested=True)
    assert state_of(runtime) is State.DOWN
    reconciler.observe(assignment, runtime, observed(boot=2, sequence=0), 7.0, 7000, requested=True)
    reconciler.observe(assignment, runtime, observed(boot=2, sequence=2), 8.0, 8000, requested=True)
    assert not reconciler.observe(assignment, runtime, lost, 9.0, 9000, requested=True), (
        "an answer that was late"
    )


def test_observations_during_an_operation_count_afterwards():
    assignment = assign()
    runtime = running(assignment)
    runtime.busy = True
    assert not hear(assignment, runtime, observed(State.DOWN, boot=7, sequence=3), 2.0)
    assert not hear(assignment, runtime, observed(boot=7, sequence=2), 2.1)
    assert act(assignment, runtime, 2.2) is None
    assert state_of(runtime) is State.UP
    assert reconciler.release(assignment, runtime, 3.0, 3000)
    assert (runtime.busy, runtime.pending) == (False, None)
    assert state_of(runtime) is State.DOWN
    assert not reconciler.release(assignment, runtime, 3.0, 3000)


def test_a_heartbeat_that_differs_causes_a_query_of_the_agent():
    assignment = assign()
    runtime = running(assignment)
    assert act(assignment, runtime) is None
    runtime.recheck = True
    assert act(assignment, runtime) is Act.CLAIM


# Silence


@pytest.mark.parametrize(
    ("state", "silence_s", "zone_silent", "after"),
    [
        (State.UP, 12.5, False, State.UP),  # 2.5 periods
        (State.UP, 12.6, False, State.LATE),
        (State.UP, 30.0, False, State.LATE),  # 6 periods
        (State.UP, 30.1, False, State.DOWN),
        (State.UP, 12.6, True, State.UNKNOWN),
        (State.UP, 12.5, True, State.UP),
        (State.DOWN, 1000.0, False, State.DOWN),
        (State.DOWN, 1000.0, True, State.DOWN),
        (State.FAILED, 1000.0, True, State.FAILED),
        (State.DRAINING, 20.0, False, State.DRAINING),
        (State.UNKNOWN, 20.0, False, State.LATE),
    ],
)
def test_what_silence_means(state, silence_s, zone_silent, after):
    runtime: Any = reconciler.ResourceRuntime(
        health.Health(state, "before", 0), observed(), last_seen_at=100.0, zone="north"
    )
    now = 100.0 + silence_s
    changed = reconciler.check_silence(
        runtime, now, 1, zone_silent=zone_silent, connected_since=0.0, zone_last_seen_at=now
    )
    assert state_of(runtime) is after
    assert changed is (after is not state)
    if state in (State.DOWN, State.FAILED):
        assert runtime.health.reason == "before", "nothing was to be heard of it"
    if after is State.UNKNOWN:
        assert "zone north" in runtime.health.reason


def test_a_disconnected_manager_detects_no_silence():
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.UP, "", 0), observed(), last_seen_at=0.0)
    assert not reconciler.check_silence(runtime, 110.0, 1, zone_silent=False, connected_since=100.0)
    assert reconciler.check_silence(runtime, 113.0, 1, zone_silent=False, connected_since=100.0)


def test_the_state_of_a_checkpoint_is_unknown_when_its_agent_does_not_answer():
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.UP, "", 0), None, last_seen_at=0.0)
    assert reconciler.check_silence(runtime, 1000.0, 1, zone_silent=False, connected_since=0.0)
    assert state_of(runtime) is State.UNKNOWN
    starting = reconciler.ResourceRuntime(health.Health(State.STARTING, "", 0), None, last_seen_at=0.0)
    assert not reconciler.check_silence(starting, 1000.0, 1, zone_silent=False, connected_since=0.0)


def test_nothing_is_done_where_nothing_is_known():
    assignment = assign()
    runtime = begin(assignment)
    runtime.health = health.Health(State.UNKNOWN, "", 0)
    assert act(assignment, runtime) is Act.CLAIM, "but it is asked"
    runtime.observed = protocol.ObservedState(False)
    assert act(assignment, runtime) is None
    reported = begin(assignment)
    hear(assignment, reported, observed(State.UNKNOWN, digest="other", reason="its adapter cannot tell"))
    assert act(assignment, reported) is None
    deleting = msgspec.structs.replace(assignment, deleting=True)
    assert act(deleting, reported) is Act.DELETE, "its agent replies, and its adapter may succeed"
    assert act(deleting, runtime) is None


# Steps


def test_the_next_step_follows_from_what_is_and_what_should_be():
    up = assign()
    runtime = begin(up)
    assert act(up, runtime) is Act.CLAIM
    hear(up, runtime, protocol.ObservedState(False))
    assert act(up, runtime) is Act.CREATE
    assert act(msgspec.structs.replace(up, formerly="old"), runtime) is Act.RENAME
    reconciler.step_done(runtime, Act.RENAME, generation=1, started=True, there=False, now=0.0)
    assert act(msgspec.structs.replace(up, formerly="old"), runtime) is Act.CREATE
    assert act(msgspec.structs.replace(up, waits_for=("db",)), runtime) is None
    assert act(msgspec.structs.replace(up, deleting=True), runtime) is Act.DELETE
    assert act(msgspec.structs.replace(up, deleting=True, formerly="old"), runtime) is Act.DELETE
    runtime.rename_sent = False
    assert act(msgspec.structs.replace(up, deleting=True, formerly="old"), runtime) is Act.DELETE_FORMER
    runtime.busy = True
    assert act(up, runtime) is None
    runtime.busy = False
    hear(up, runtime, observed(digest="other"))
    assert act(up, runtime) is Act.PUT
    hear(up, runtime, observed())
    assert act(up, runtime) is None
    assert act(msgspec.structs.replace(up, deleting=True), runtime) is Act.DELETE
    for desired, state, step in (
        (protocol.DesiredState.DOWN, State.UP, Act.STOP),
        (protocol.DesiredState.DOWN, State.DRAINING, Act.STOP),
        (protocol.DesiredState.DOWN, State.DOWN, None),
        (protocol.DesiredState.DRAINED, State.UP, Act.DRAIN),
        (protocol.DesiredState.DRAINED, State.DRAINING, None),
        (protocol.DesiredState.DRAINED, State.DOWN, None),
        (protocol.DesiredState.UP, State.LATE, None),
        (protocol.DesiredState.UP, State.STARTING, None),
    ):
        assignment = assign(desired=desired)
        runtime = begin(assignment)
        hear(assignment, runtime, observed(state))
        assert act(assignment, runtime) is step, (desired, state)
    runtime.gone = True
    runtime.observed = protocol.ObservedState(False)
    assert act(up, runtime) is None


def test_drift_is_reported_after_the_desired_state_was_applied():
    assignment = assign()
    runtime = begin(assignment)
    hear(assignment, runtime, observed(digest="other"))
    assert runtime.drift == "", "it was never brought there"
    assert reconciler.decide(assignment, runtime, 1.0) == reconciler.ReconcileStep(
        Act.PUT, "a new configuration"
    )
    reconciler.step_done(runtime, Act.PUT, generation=1, started=True, there=True, now=0.0)
    hear(assignment, runtime, observed())
    assert (runtime.drift, runtime.generation) == ("", 1)
    runtime.dirty = False
    hear(assignment, runtime, observed(digest="other"))
    assert "other instead of d" in runtime.drift
    assert runtime.dirty
    assert reconciler.decide(assignment, runtime, 1.0) == reconciler.ReconcileStep(Act.PUT, "drift")
    hear(assignment, runtime, observed())
    assert runtime.drift == ""


def test_what_is_found_done_is_settled():
    assignment = assign(generation=3)
    runtime = begin(assignment)
    assert not reconciler.mark_converged(assignment, runtime)
    hear(assignment, runtime, protocol.ObservedState(False))
    assert not reconciler.mark_converged(assignment, runtime)
    hear(assignment, runtime, observed(digest="other"))
    assert not reconciler.mark_converged(assignment, runtime)
    hear(assignment, runtime, observed())
    runtime.busy = True
    assert not reconciler.mark_converged(assignment, runtime)
    runtime.busy = runtime.dirty = False
    assert reconciler.mark_converged(assignment, runtime)
    assert (runtime.generation, runtime.ran, runtime.dirty) == (3, 3, True)
    assert not reconciler.mark_converged(assignment, runtime), "once"
    down = assign(generation=3, desired=protocol.DesiredState.DOWN)
    runtime = begin(down)
    hear(down, runtime, observed(State.DOWN))
    assert reconciler.mark_converged(down, runtime)
    assert runtime.ran == 0


def test_what_vanishes_is_down_and_what_was_deleted_is_not():
    assignment = assign()
    runtime = running(assignment)
    assert hear(assignment, runtime, protocol.ObservedState(False), 5.0)
    assert (runtime.health.state, runtime.health.reason) == (State.DOWN, "the resource no longer exists")
    assert runtime.failures == []
    deleting = msgspec.structs.replace(assignment, deleting=True)
    runtime = running(assignment)
    assert not hear(deleting, runtime, protocol.ObservedState(False), 5.0)
    runtime.health = health.Health(State.UNKNOWN, "", 0)
    assert hear(deleting, runtime, protocol.ObservedState(False), 6.0)
    assert not hear(assignment, begin(assignment), protocol.ObservedState(False))


def test_the_state_that_an_adapter_reports_is_the_health():
    assignment = assign()
    runtime = running(assignment)
    for state, after in (
        (State.LATE, State.LATE),
        (State.STARTING, State.STARTING),
        (State.UNKNOWN, State.UNKNOWN),
        (State.UP, State.UP),
        (State.DRAINING, State.DRAINING),
    ):
        hear(assignment, runtime, observed(state), 5.0)
        assert state_of(runtime) is after, state


def test_properties_stay_until_new_ones_are_reported():
    assignment = assign()
    runtime = begin(assignment)
    hear(assignment, runtime, msgspec.structs.replace(observed(), properties={"pid": 7}))
    hear(assignment, runtime, observed())
    assert runtime.observed is not None
    assert runtime.observed.properties == {"pid": 7}
    assert runtime.status(assignment, 1.0, 1).properties == {"pid": 7}
    hear(assignment, runtime, protocol.ObservedState(False))
    assert runtime.observed.properties == {}


def test_a_checkpoint_carries_all_that_the_next_manager_needs():
    assignment = assign(generation=4)
    runtime = running(assignment)
    runtime.restarts, runtime.drift = 3, "drift"
    status = runtime.status(assignment, 1.0, 1000)
    assert (status.generation, status.desired_generation, status.ran, status.given_up) == (4, 4, 4, False)
    other = begin(msgspec.structs.replace(assignment, status=status), 50.0)
    assert (other.generation, other.ran, other.restarts, other.drift) == (4, 4, 3, "drift")
    assert (other.health, other.last_seen_at, other.dirty) == (runtime.health, 50.0, False)
    assert (other.retry_at, other.failures, other.observed) == (0.0, [], None)
    # Even without ``ran``: what was seen to run has run for the wish that it had.
    bare = msgspec.structs.replace(status, ran=0)
    assert begin(msgspec.structs.replace(assignment, status=bare)).ran == 4
    assert begin(msgspec.structs.replace(assignment, status=bare, generation=5)).ran == 0
    starting = msgspec.structs.replace(bare, state=State.STARTING)
    assert begin(msgspec.structs.replace(assignment, status=starting)).ran == 0


def test_a_reason_that_changes_is_checkpointed():
    runtime: Any = reconciler.ResourceRuntime(health.Health(State.UP, "", 5), dirty=False)
    assert not reconciler.apply_health_event(runtime, health.HealthEvent.BEAT, "slow", 9)
    assert (runtime.health, runtime.dirty) == (health.Health(State.UP, "slow", 5), True)
    runtime.dirty = False
    assert not reconciler.apply_health_event(runtime, health.HealthEvent.BEAT, "", 9)
    assert not reconciler.apply_health_event(runtime, health.HealthEvent.BEAT, "slow", 9)
    assert not reconciler.apply_health_event(
        runtime, health.HealthEvent.GIVE_UP, "cannot happen to what is up", 9
    )
    assert not runtime.dirty
    assert reconciler.apply_health_event(runtime, health.HealthEvent.DIED, "exit code 1", 9)
    assert (runtime.health, runtime.dirty) == (health.Health(State.DOWN, "exit code 1", 9), True)


def test_a_renaming_that_succeeded_has_applied_the_desired_state():
    runtime: Any = reconciler.ResourceRuntime(
        health.Health(State.UP, "", 0), fault="x", retry_at=5.0, dirty=False
    )
    reconciler.step_done(runtime, Act.RENAME, generation=2, started=True, there=True, now=0.0)
    assert (runtime.generation, runtime.rename_sent, runtime.fault, runtime.retry_at) == (2, True, "", 0.0)
    assert (runtime.ran, runtime.dirty) == (0, True)
    stopped = reconciler.ResourceRuntime(health.Health(State.UP, "", 0), observed())
    reconciler.step_done(stopped, Act.STOP, generation=2, started=True, there=True, now=0.0)
    assert (stopped.generation, stopped.ran, stopped.observed) == (0, 0, observed())
    former = reconciler.ResourceRuntime(health.Health(State.UP, "", 0))
    reconciler.step_done(former, Act.DELETE_FORMER, generation=2, started=True, there=False, now=0.0)
    assert (former.rename_sent, former.generation) == (True, 0)
    deleted = reconciler.ResourceRuntime(health.Health(State.UP, "", 0))
    reconciler.step_done(deleted, Act.DELETE, generation=2, started=True, there=True, now=7.0)
    assert (deleted.gone, deleted.retry_at) == (False, 7.0 + reconciler.RETRY_S)
    reconciler.step_done(deleted, Act.DELETE, generation=2, started=True, there=False, now=8.0)
    assert (deleted.gone, deleted.retry_at) == (True, 0.0)
    unstarted = reconciler.ResourceRuntime(health.Health(State.UP, "", 0))
    reconciler.step_done(unstarted, Act.CREATE, generation=2, started=False, there=True, now=0.0)
    assert (unstarted.generation, unstarted.ran, unstarted.observed) == (2, 0, None)
