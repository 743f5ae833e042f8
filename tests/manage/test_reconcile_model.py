"""`reconcile` against a model: one resource, its agent and its managers under random faults.

The world is a process that runs or has ended, with the truth about every run.  Observations of it reach the
manager late, twice, in any order or not at all; managers crash with and without a checkpoint, agents restart,
the wall clock is set.  Whatever happens: no run that the restart policy forbids, no failure counted that did
not happen, and in the end the resource is what was wished.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import msgspec
from hypothesis import stateful
from hypothesis import strategies as st

from muster.core import health, messages
from muster.manage import protocol
from muster.manage.manager import reconciler

RESTART = {"attempts": 3, "window_s": 100.0, "delay_s": 0.5, "delay_s_max": 8.0}
POLICIES = ("always", "on-failure", "never")


class OperationRun(msgspec.Struct):
    generation: int
    at: float
    exit_code: int | None = None
    killed_for: int = 0  # it was stopped by an operation, not by itself


class ReconcilerWorld(stateful.RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.wall_ms = 1000.0, 1_700_000_000_000
        # The registry.
        self.spec = protocol.ResourceSpec(name="job", type="process", agent="a", digest="d1")
        self.generation, self.epoch = 1, 1
        self.stored: protocol.ResourceStatus | None = None
        # The agent and its resource.
        self.exists, self.digest, self.running = False, "", False
        self.runs: list[OperationRun] = []
        self.boot, self.sequence = 100, 0
        self.falls = 0  # the true ends and failed steps
        self.counted = self.counted_in_store = 0  # by the managers, according to their checkpoints
        self.refusals = 0  # so many of the next operations fail
        self.obeys = 0  # the last epoch that it received
        self.wires: list[tuple[int, protocol.ObservedState]] = []  # events under way, with that
        # The manager.
        self.assignment: protocol.Assignment
        self.runtime: reconciler.ResourceRuntime
        self._take_over()

    @stateful.initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: str) -> None:
        restart = protocol.RestartPolicy(policy=policy, **RESTART)  # type: ignore[arg-type]
        self.spec = msgspec.structs.replace(self.spec, restart=restart)
        self.generation += 1
        self._take_over()

    # The agent

    @property
    def last(self) -> OperationRun | None:
        return self.runs[-1] if self.runs else None

    def _observed(self) -> protocol.ObservedState:
        if not self.exists:
            return protocol.ObservedState(False, boot=self.boot, sequence=self.sequence)
        last = self.last
        properties: dict[str, Any] = {}
        if last is not None and not self.running and last.exit_code is not None:
            properties = {"exit_code": last.exit_code}
        state = health.HealthState.UP if self.running else health.HealthState.DOWN
        ran = last.generation if last is not None else 0
        return protocol.ObservedState(
            True, state, "", self.digest, properties, ran=ran, boot=self.boot, sequence=self.sequence
        )

    def _changed(self) -> None:
        self.sequence += 1
        self.wires.append((self.obeys, self._observed()))

    def _start(self, generation: int) -> None:
        if self.running:
            return
        self._check_allowed(generation)
        self.runs.append(OperationRun(generation, self.now))
        self.running = True
        self._changed()

    def _check_allowed(self, generation: int) -> None:
        last, policy = self.last, self.spec.restart.policy
        if last is None or last.generation != generation:
            return
        assert policy != "never", "a second run for one wish"
        assert not (policy == "on-failure" and last.exit_code == 0), "a job that was done is done again"

    def _end(self, exit_code: int) -> None:
        assert self.last is not None
        self.running, self.last.exit_code = False, exit_code
        self.falls += 1
        self._changed()

    # The manager, as `muster.manage.manager.manager` does it

    def _take_over(self) -> None:
        self.epoch += 1
        self.assignment = protocol.Assignment(
            spec=self.spec, epoch=self.epoch, generation=self.generation, status=self.stored
        )
        self.runtime = reconciler.ResourceRuntime.begin(self.assignment, self.now, self.wall_ms)
        self.counted = self.counted_in_store

    def _hear(self, observed: protocol.ObservedState, **options: bool) -> None:
        self._tell(reconciler.observe, self.assignment, self.runtime, observed, **options)

    def _tell(self, function: Any, *arguments: Any, **options: bool) -> None:
        before = self.runtime.failures
        function(*arguments, self.now, self.wall_ms, **options)
        self.counted += self.runtime.failures is not before

    def _step(
        self, *, lose_answer: bool = False, die_at_once: int | None = None
    ) -> reconciler.ReconcileAction | None:
        runtime, assignment = self.runtime, self.assignment
        step = reconciler.decide(assignment, runtime, self.now)
        if step is None:
            reconciler.mark_converged(assignment, runtime)
            return None
        self.obeys = self.epoch
        if step.action is reconciler.ReconcileAction.CLAIM:
            if not lose_answer:
                runtime.recheck = False
                self._hear(self._observed(), requested=True)
            return step.action
        if step.action in (reconciler.ReconcileAction.CREATE, reconciler.ReconcileAction.START):
            reconciler.apply_health_event(runtime, health.HealthEvent.START, step.reason, self.wall_ms)
        runtime.busy = True
        refused = self.refusals > 0
        if refused:
            self.refusals -= 1
            self.falls += 1
        else:
            self._carry_out(step.action, assignment)
            if die_at_once is not None and self.running and step.action is not reconciler.ReconcileAction.PUT:
                self._end(die_at_once)
        answered = self._observed()
        for epoch, event in self.wires[-2:]:
            if epoch == self.epoch:
                self._hear(event)  # while it is busy
        runtime.busy = False
        answer: protocol.OperationResult | None
        if lose_answer:
            answer = _answer(messages.DecisionOutcome.IN_DOUBT, "in-doubt")
        else:
            answer = _answer(messages.DecisionOutcome.FAILED, "adapter-failed") if refused else None
        if answer is None:
            start = assignment.spec.desired is protocol.DesiredState.UP
            reconciler.step_done(
                runtime,
                step.action,
                generation=assignment.generation,
                started=start,
                there=answered.exists,
                now=self.now,
            )
        else:
            self._tell(reconciler.step_failed, assignment, runtime, step.action, answer)
        if not lose_answer:
            self._hear(answered)
        self._tell(reconciler.release, assignment, runtime)
        return step.action

    def _carry_out(self, act: reconciler.ReconcileAction, assignment: protocol.Assignment) -> None:
        spec, generation = assignment.spec, assignment.generation
        match act:
            case reconciler.ReconcileAction.CREATE if not self.exists:
                self.exists, self.digest = True, spec.digest
                if spec.desired is protocol.DesiredState.UP:
                    self._start(generation)
                else:
                    self._changed()
            case (
                reconciler.ReconcileAction.PUT | reconciler.ReconcileAction.CREATE
            ):  # of what is there: the same
                same, self.digest = self.digest == spec.digest, spec.digest
                if self.running and same:
                    assert self.last is not None
                    self.last.generation = generation
                    self._changed()
                elif self.running:  # a restart, as the command is another
                    assert self.last is not None
                    self.running, self.last.exit_code, self.last.killed_for = False, -15, generation
                    self._start(generation)
                else:
                    self._changed()
            case reconciler.ReconcileAction.START:
                self._start(generation)
            case reconciler.ReconcileAction.STOP:
                if self.running:
                    self._end(-15)
            case _:
                raise AssertionError(act)

    # What happens

    @stateful.rule(lose=st.booleans(), code=st.sampled_from([None, None, 0, 1]))
    def work(self, lose: bool, code: int | None) -> None:
        self._step(lose_answer=lose, die_at_once=code)

    @stateful.rule(code=st.sampled_from([0, 1, -9]))
    def end(self, code: int) -> None:
        if self.running:
            self._end(code)

    @stateful.rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any event, at any time, as often as it likes; also one from before."""
        if self.wires:
            epoch, event = data.draw(st.sampled_from(self.wires[-8:]))
            if epoch == self.epoch:
                self._hear(event)

    @stateful.rule()
    def beat(self) -> None:
        seen, reported = self.runtime.observed, self._observed()
        if self.obeys != self.epoch:
            return
        if seen is not None and (seen.state, seen.digest) == (reported.state, reported.digest):
            self._hear(seen)
        else:
            self.runtime.recheck = True

    @stateful.rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 150.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.wall_ms += int(seconds * 1000)

    @stateful.rule(hours=st.sampled_from([-1, 1]))
    def set_clock(self, hours: int) -> None:
        self.wall_ms += hours * 3_600_000

    @stateful.rule()
    def checkpoint(self) -> None:
        self.stored = self.runtime.status(self.assignment, self.now, self.wall_ms)
        self.counted_in_store = self.counted

    @stateful.rule(orderly=st.booleans())
    def another_manager(self, orderly: bool) -> None:
        if orderly:
            self.checkpoint()
        self._take_over()

    @stateful.rule(by=st.sampled_from([1, 1, -10]))
    def restart_agent(self, by: int) -> None:
        """Its starts are numbered upwards, but for one whose folder was lost or whose clock was set."""
        if by < 0:
            self.wires.clear()  # and it returns only after its messages have arrived
        self.boot, self.sequence = self.boot + by, 0
        self._changed()

    @stateful.rule(count=st.integers(1, 5))
    def refuse(self, count: int) -> None:
        self.refusals = count

    @stateful.rule(
        digest=st.sampled_from(["d1", "d2"]),
        desired=st.sampled_from([protocol.DesiredState.UP, protocol.DesiredState.DOWN]),
    )
    def wish(self, digest: str, desired: protocol.DesiredState) -> None:
        self.spec = msgspec.structs.replace(self.spec, digest=digest, desired=desired)
        self.generation += 1
        before = self.assignment
        self.assignment = msgspec.structs.replace(before, spec=self.spec, generation=self.generation)
        reconciler.assignment_changed(before, self.assignment, self.runtime)

    @stateful.rule()
    def silence(self) -> None:
        self.now += 40.0
        self.wall_ms += 40_000
        reconciler.check_silence(
            self.runtime,
            self.now,
            self.wall_ms,
            zone_silent=False,
            connected_since=0.0,
            zone_last_seen_at=self.now,
        )

    # What holds

    @stateful.invariant()
    def no_failure_is_counted_that_did_not_happen(self) -> None:
        assert self.counted <= self.falls
        assert len(self.runtime.failures) <= RESTART["attempts"] + 1

    @stateful.invariant()
    def given_up_is_final(self) -> None:
        if self.runtime.given_up and not self.runtime.recheck and self.runtime.observed is not None:
            step = reconciler.decide(self.assignment, self.runtime, self.now)
            assert step is None or step.action is reconciler.ReconcileAction.STOP

    def teardown(self) -> None:
        """Without faults: all messages arrive. Then every resource reaches its desired state."""
        self.refusals = 0
        for _ in range(30):
            self.now += 10.0
            self.beat()
            self._step()
        assert self.exists or self.runtime.given_up
        if self.exists and not self.runtime.given_up:
            assert self.digest == self.spec.digest
        last, policy = self.last, self.spec.restart.policy
        if self.spec.desired is protocol.DesiredState.DOWN:
            assert not self.running
        elif self.running:
            assert self.runtime.health.state is health.HealthState.UP
        else:
            assert self.runtime.given_up
            assert self.runtime.health.state in reconciler.ENDED
            has_run = last is not None and last.generation == self.generation
            clean = last is not None and last.exit_code == 0
            refused_to_restart = has_run and (policy == "never" or (policy == "on-failure" and clean))
            assert refused_to_restart or len(self.runtime.failures) > RESTART["attempts"]
            if self.runtime.health.state is health.HealthState.COMPLETED:
                assert refused_to_restart
                assert clean


def _answer(outcome: messages.DecisionOutcome, code: str) -> protocol.OperationResult:
    return protocol.OperationResult(id="x", outcome=outcome, code=code, reason="boom")


ReconcilerWorld.TestCase.settings = hypothesis.settings(
    max_examples=80, stateful_step_count=40, deadline=None, database=None, print_blob=True
)
TestModel = ReconcilerWorld.TestCase
