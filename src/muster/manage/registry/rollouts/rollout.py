"""A rollout: a gradual change of many resources. Pure.

Either one operation on many resources, in batches, or an update: the desired state of many resources changes
wave by wave (`plan.update_waves`). Both follow the same rules:

- A step is done when its resource has been in its desired state for `UpdatePolicy.min_healthy_time_s`. It has
  failed if its manager gave it up, or if that takes longer than `healthy_deadline_s`.
- A wave begins when all steps before it have ended. A resource that works is not touched while more than
  `max_parallel` of its group would not work. One that does not work costs nothing: it goes first if the
  others have to wait.
- Failures beyond ``errors_max`` end the rollout. If nothing makes progress for `progress_deadline_s`, it ends
  too. An update then returns to the former specifications (`Rollout.reversal`), by the same rules.

Resources without an `update` policy, and those that are created, are changed at once: the rollout watches
them.

A step is stored before it begins, so another registry continues from the stored steps; its deadlines count
anew. Unreachable resources of an operation are listed separately and do not stop a rollout, because nothing
was done to them; but a rollout that could not reach all of its resources ends as stopped, and to resume it
tries them again. A step whose outcome is unknown is in doubt; it counts as an error and is not repeated.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from muster.core import errors, messages
from muster.manage import protocol, rows
from muster.manage.registry import records

# States of a step
PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
UNREACHABLE, IN_DOUBT, SKIPPED = "unreachable", "in-doubt", "skipped"
REPLACED = "replaced"  # it had begun, and another update changes its resource
# A rollout is running, paused, done or one of these. An update is stopping until its logs are read and what
# reverts it has begun.
PAUSED, STOPPING, STOPPED, SUPERSEDED = "paused", "stopping", "stopped", "superseded"
UPDATE = "update"  # the operation of a rollout that changes desired state

NAMED_MAX = 20  # resources in a summary; `RolloutExecutor.steps` lists all
REASON_MAX, RESULT_BYTES_MAX = 1_000, 4_096  # stored of a step

NOT_REACHED = ("unavailable", "timed-out", "not-connected", protocol.NOT_MANAGED)


class RolloutStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``before`` and ``after``: of an update, the specifications; None: it does not exist. ``proven``: what
    it returns to, if ``before`` is of an update that had not ended and so may not work."""

    state: str = PENDING
    reason: str = ""
    result: Any = None
    wave: int = 0
    before: protocol.ResourceSpec | None = None
    after: protocol.ResourceSpec | None = None
    proven: protocol.ResourceSpec | None = None

    @property
    def spec(self) -> protocol.ResourceSpec | None:
        return self.after or self.before

    @property
    def policy(self) -> protocol.UpdatePolicy | None:
        """None: it is changed at once, with what it was changed together."""
        return (self.after and self.after.update) or (self.before and self.before.update) or None

    @property
    def is_gated(self) -> bool:
        return self.before is not None and self.policy is not None


class StepHealth(NamedTuple):
    """A resource, as its manager reports it. ``is_healthy``: in its desired state; ``is_settled``: it was
    seen to stay there. ``run`` differs after a restart."""

    is_healthy: bool
    is_settled: bool
    is_given_up: bool
    run: tuple[Any, ...]
    reason: str


class RolloutView(Protocol):
    """What a rollout sees of the fleet."""

    @property
    def unhealthy(self) -> Collection[str]:
        """All resources that are not in their desired state."""

    def members(self, group: str) -> Collection[str]:
        """The resources of the group that have an update policy."""

    def health(self, name: str) -> StepHealth | None:
        """None: it does not exist."""


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """Stored without its steps; each step is a separate record, from which another registry can continue.

    The work for a batch depends on its size, not on the number of steps. ``counts`` and ``unreachable`` are
    those of a stored rollout; `header` has the current ones. ``revision`` numbers the updates, ``groups`` are
    those that one has changed, ``reverts`` and ``reverted_by`` are ids of rollouts.
    """

    id: str
    by: str
    plan: rows.RolloutPlan
    at_ms: int = 0
    state: str = RUNNING
    reason: str = ""
    counts: dict[str, int] = {}
    unreachable: list[str] = []  # the first names
    steps: dict[str, RolloutStep] = {}
    revision: int = 0
    groups: tuple[str, ...] = ()
    reverts: str = ""
    reverted_by: str = ""
    is_reverting: bool = False  # while it is stopping
    wave: int = 0  # that began last
    waves: int = 0
    size: int = 0  # of the stored steps, in bytes

    @functools.cached_property
    def _by_state(self) -> dict[str, set[str]]:
        by_state: dict[str, set[str]] = {}
        for name, step in self.steps.items():
            by_state.setdefault(step.state, set()).add(name)
        return by_state

    @functools.cached_property
    def _pending(self) -> collections.deque[str]:
        """In order; the first ones may have begun meanwhile."""
        pending = [name for name, step in self.steps.items() if step.state == PENDING]
        return collections.deque(sorted(pending, key=lambda name: self.steps[name].wave))

    @property
    def is_update(self) -> bool:
        return self.revision > 0

    def number(self, *states: str) -> int:
        return sum(len(self._by_state.get(state, ())) for state in states)

    def named(self, state: str) -> list[str]:
        return sorted(self._by_state.get(state, ()))

    def first_pending(self) -> str | None:
        while self._pending and self.steps[self._pending[0]].state != PENDING:
            self._pending.popleft()
        return self._pending[0] if self._pending else None

    def next_batch(self) -> list[str]:
        """The pending steps of the next wave, or as many as the batch of an operation has."""
        first = self.first_pending()
        if first is None:
            return []
        wave = self.steps[first].wave
        waiting = (name for name in self._pending if self.steps[name].state == PENDING)
        if self.is_update:
            return list(itertools.takewhile(lambda name: self.steps[name].wave == wave, waiting))
        return list(itertools.islice(waiting, self.batch_size()))

    def move(self, name: str, state: str, reason: str = "") -> None:
        step = self.steps[name]
        self._by_state.setdefault(step.state, set()).discard(name)
        self._by_state.setdefault(state, set()).add(name)
        step.state, step.reason = state, reason[:REASON_MAX]

    def header(self) -> Rollout:
        """The rollout without its steps, which are counted."""
        counts = {state: len(names) for state, names in sorted(self._by_state.items()) if names}
        unreachable = heapq.nsmallest(NAMED_MAX, self._by_state.get(UNREACHABLE, ()))
        return msgspec.structs.replace(self, counts=counts, unreachable=unreachable, steps={})

    def batch_size(self) -> int:
        text = self.plan.batch.strip()
        try:
            # A percentage of an empty rollout is one; there is nothing to execute.
            many = max(1, len(self.steps))
            size = math.ceil(many * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        except (ValueError, OverflowError):
            size = 0
        if size < 1:
            raise errors.InvalidInput(f"invalid batch {text!r}: use a count (5) or a percentage (10%)")
        return size

    def retry(self) -> dict[str, RolloutStep]:
        """Try again what an operation could not reach, or what an update failed to change. Returns these
        steps."""
        names = self.named(UNREACHABLE) + (self.named(FAILED) if self.is_update else [])
        for name in names:
            self.move(name, PENDING)
        self.__dict__.pop("_pending", None)
        return {name: self.steps[name] for name in names}

    def reversal(self) -> dict[str, RolloutStep]:
        """The steps that return to what was before this update: of what it changed, and of resources that it
        added to a group. A new group is kept, because there is nothing to return to."""
        known = {step.before.group for step in self.steps.values() if step.before is not None}
        return {
            name: RolloutStep(before=step.after, after=step.proven or step.before)
            for name, step in self.steps.items()
            if step.state not in (PENDING, SKIPPED, REPLACED)
            and (step.before is not None or (step.after is not None and step.after.group in known))
        }

    def proven(self, name: str) -> protocol.ResourceSpec | None:
        """What a later update returns this resource to, if what it is now was not proven to work."""
        step = self.steps[name]
        if self.reverts:
            return step.after if step.state in (PENDING, RUNNING, FAILED) else None
        doubtful = (
            (RUNNING, FAILED, DONE) if self.state == STOPPING and self.is_reverting else (RUNNING, FAILED)
        )
        return step.proven or step.before if step.state in doubtful else None

    def summary(self) -> rows.RolloutRow:
        """The summary of a header."""
        fields = msgspec.structs.asdict(self) | {"operation": self.plan.operation}
        return msgspec.convert(fields, rows.RolloutRow)


class RolloutEngine:
    """The decisions about a rollout, and the times that they need. ``changed``: steps to be stored.
    ``replaces``: by rollout, the steps that end when this one is stored."""

    def __init__(self, rollout: Rollout, now: float) -> None:
        self.rollout = rollout
        self.changed: set[str] = set()
        self.replaces: dict[str, set[str]] = {}
        # Of an operation: those whose result is not known yet
        self.operating: set[str] = set() if rollout.is_update else set(rollout.named(RUNNING))
        self._began_at = dict.fromkeys(rollout.named(RUNNING), now)
        self._continued = set(self._began_at)  # they began with a former registry
        self._healthy_since: dict[str, tuple[float, tuple[Any, ...]]] = {}
        self._progress_at = now
        self._not_before = now  # after the pause between two batches
        self._was_running = bool(self._began_at)
        # Of an update: what begins with it
        self._at_once: list[str] = []
        if rollout.is_update:
            steps = rollout.steps.items()
            self._at_once = [name for name, step in steps if step.state == PENDING and not step.is_gated]

    def tick(self, now: float, view: RolloutView) -> list[str]:
        """Judge what has begun, and return the names of the steps that begin now."""
        self._judge(now, view)
        if self._was_running and not self.rollout.number(RUNNING):
            self._not_before = now + self.rollout.plan.pause_s
        self.conclude(now)
        begun = self._next(now, view)
        self._was_running = bool(self.rollout.number(RUNNING) or begun)
        for name in begun:
            self._move(name, RUNNING)
            self._began_at[name] = self._progress_at = now
            self.rollout.wave = self.rollout.steps[name].wave
        if not self.rollout.is_update:
            self.operating.update(begun)
        return begun

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do, unless a user resumes it."""
        rollout = self.rollout
        is_ending = rollout.state == PAUSED and rollout.number(RUNNING)
        return rollout.state not in (RUNNING, STOPPING) and not is_ending

    def age_s(self, name: str, now: float) -> float | None:
        """How long ago a step began that runs or has failed; None: unknown."""
        began_at = self._began_at.get(name)
        return None if began_at is None or name in self._continued else now - began_at

    def operated(self, name: str, answer: protocol.OperationResult, now: float) -> None:
        """The operation of a step has ended."""
        self.operating.discard(name)
        step = self.rollout.steps[name]
        result, reason = answer.result, answer.reason
        if len(msgspec.json.encode(result)) > RESULT_BYTES_MAX:
            result, reason = None, reason or "the result is too long to be stored"
        step.result, step.reason = result, reason
        match answer.outcome:
            case messages.DecisionOutcome.DONE if self._policy(name).healthy_deadline_s:
                self._began_at[name] = now
                if answer.code == protocol.NOT_CHECKPOINTED:
                    self._move(name, FAILED, "its manager could not report its state")
            case messages.DecisionOutcome.DONE:
                self._move(name, DONE, reason)
            case messages.DecisionOutcome.IN_DOUBT:
                self._move(name, IN_DOUBT, reason)
            case _:
                self._move(name, UNREACHABLE if answer.code in NOT_REACHED else FAILED, reason)

    def skip(self, name: str, reason: str) -> None:
        """The step does not apply any more."""
        self._move(name, SKIPPED, reason)

    def replace(self, names: Iterable[str], by: str) -> None:
        """Another update changes these resources."""
        for name in names:
            self._move(name, *replacement(self.rollout.steps[name], by))

    def fail(self, name: str, reason: str) -> None:
        self._move(name, FAILED, reason)

    def resume(self, now: float) -> None:
        """A user resumes it: what could not be reached, or failed, is tried again."""
        rollout = self.rollout
        if rollout.state == STOPPED:
            self.changed |= rollout.retry().keys()
            if not rollout.is_update:
                rollout.plan = msgspec.structs.replace(rollout.plan, errors_max=len(rollout.steps))
        rollout.state, rollout.reason = RUNNING, ""
        self._progress_at = self._not_before = now
        self.conclude(now)

    def _move(self, name: str, state: str, reason: str = "") -> None:
        self.rollout.move(name, state, reason)
        self.changed.add(name)
        if state not in (RUNNING, FAILED):
            self._began_at.pop(name, None)
        if state != RUNNING:
            self._healthy_since.pop(name, None)

    def _policy(self, name: str) -> protocol.UpdatePolicy:
        if not self.rollout.is_update:
            plan = self.rollout.plan
            return protocol.UpdatePolicy(
                max_parallel=self._batch_size,
                min_healthy_time_s=0.0,
                healthy_deadline_s=plan.healthy_s,
                progress_deadline_s=plan.healthy_s,
            )
        step = self.rollout.steps[name]
        policy = step.policy or protocol.AT_ONCE
        if step.after is not None and step.after.job is not None:  # it has a deadline of its own
            return msgspec.structs.replace(policy, healthy_deadline_s=math.inf)
        return policy

    @functools.cached_property
    def _batch_size(self) -> int:
        return self.rollout.batch_size()

    def _judge(self, now: float, view: RolloutView) -> None:
        for name in self.rollout.named(RUNNING):
            if name in self.operating:
                continue
            step, policy, seen = self.rollout.steps[name], self._policy(name), view.health(name)
            if seen is None:  # it was deleted meanwhile
                self._move(name, DONE)
                self._progress_at = now
                continue
            since, run = self._healthy_since.get(name, (now, seen.run))
            if not seen.is_healthy or run != seen.run:
                since = now
            self._healthy_since[name] = since, seen.run
            is_over = now - self._began_at[name] > policy.healthy_deadline_s
            if self.rollout.is_update and step.after is None:
                if is_over:
                    self._move(name, FAILED, "it is not deleted yet")
            elif seen.is_settled and now - since >= policy.min_healthy_time_s:
                self._move(name, DONE, step.reason)
                self._progress_at = now
            elif seen.is_given_up or is_over:
                self._move(name, FAILED, f"it is {seen.reason}")

    def conclude(self, now: float) -> None:
        """End the rollout if nothing is left, too much has failed, or nothing makes progress."""
        rollout = self.rollout
        if rollout.state not in (RUNNING, PAUSED):
            return
        running, failed = rollout.number(RUNNING), rollout.number(FAILED, IN_DOUBT)
        if failed > rollout.plan.errors_max and (rollout.is_update or not running):
            first = min(rollout.named(FAILED) + rollout.named(IN_DOUBT))
            reason = rollout.steps[first].reason
            if rollout.is_update:
                self._stop(f"{first} is {reason.removeprefix('it is ')}", first)
            else:
                allowed = f"{failed} steps failed; at most {rollout.plan.errors_max} may fail"
                self._stop(f"{allowed}. {first}: {reason}", first)
        elif not running and not rollout.number(PENDING):
            missed = rollout.number(UNREACHABLE)
            if missed:
                self._stop(f"{missed} of {len(rollout.steps)} resources could not be reached")
            else:
                rollout.state = DONE
        elif not running and rollout.state == RUNNING and (first_ := rollout.first_pending()):
            policy = self._policy(first_)
            idle_s = now - max(self._progress_at, self._not_before)
            if policy.progress_deadline_s and idle_s > policy.progress_deadline_s:
                limit = f"no progress for {policy.progress_deadline_s:g} s"
                self._stop(f"{limit}: too many of its group do not work to change {first_}", first_)

    def _stop(self, reason: str, because_of: str = "") -> None:
        rollout = self.rollout
        rollout.reason, rollout.state = reason[:REASON_MAX], STOPPING if rollout.is_update else STOPPED
        rollout.is_reverting = bool(
            because_of and rollout.is_update and not rollout.reverts and self._policy(because_of).auto_revert
        )

    def abort(self, reason: str) -> None:
        """A user ends it: an update is reverted if it reverts itself."""
        gated = (name for name, step in self.rollout.steps.items() if step.is_gated)
        self._stop(reason, next(gated, ""))

    def _next(self, now: float, view: RolloutView) -> list[str]:
        rollout = self.rollout
        if rollout.state != RUNNING:
            return []
        at_once, self._at_once = self._at_once, []
        if at_once or rollout.number(RUNNING) or now < self._not_before:
            return at_once
        batch = rollout.next_batch()
        if not batch or not self._policy(batch[0]).healthy_deadline_s:
            return batch
        if allowed := self._within_budget(batch, view):
            return allowed
        broken = (name for name in view.unhealthy if name in rollout.steps)
        ahead = (name for name in broken if rollout.steps[name].state == PENDING)
        return self._within_budget(heapq.nsmallest(len(batch), ahead), view)

    def _within_budget(self, names: Iterable[str], view: RolloutView) -> list[str]:
        """Those that may be interrupted now: at most ``max_parallel`` of a group do not work."""
        allowed = []
        out: dict[str, int] = {}  # by group: how many do not work, those that are allowed here included
        begun: collections.Counter[str] = collections.Counter()
        for name in names:
            spec = self.rollout.steps[name].spec
            group = spec.group if spec else ""
            most = self._policy(name).max_parallel
            if group not in out:
                out[group] = self._unhealthy_in(group, view, most)
            costs = name not in view.unhealthy
            if begun[group] == most or (costs and out[group] >= most):
                continue
            out[group] += costs
            begun[group] += 1
            allowed.append(name)
        return allowed

    def _unhealthy_in(self, group: str, view: RolloutView, most: int) -> int:
        """How many do not work, as far as it matters. Those that are known to have failed are not waited
        for."""
        steps = self.rollout.steps
        given_up = (FAILED, UNREACHABLE, IN_DOUBT)
        if self.rollout.is_update:
            broken = (name for name in view.members(group) if name in view.unhealthy)
        else:
            broken = (name for name in view.unhealthy if name in steps and steps[name].state not in given_up)
        return sum(1 for _ in itertools.islice(broken, most + 1))


def replacement(step: RolloutStep, by: str) -> tuple[str, str]:
    """State and reason of a step whose resource the rollout ``by`` changes now."""
    return SKIPPED if step.state in (PENDING, SKIPPED) else REPLACED, f"rollout {by} replaces it"


def rollout_id(request: str) -> str:
    """The id of a rollout that a request starts: a repetition of the request starts no other one."""
    return records.derived_id(request, 8)


def order_id(rollout: str, resource: str) -> str:
    return f"rollout-{rollout}-{resource}"
