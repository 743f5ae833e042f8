"""A rollout: one operation on many resources, in batches, stopping after too many errors. Pure.

A step is done when its resource is in its desired state after the operation. Unreachable resources are listed
separately and do not stop a rollout, because nothing was done to them; but a rollout that could not reach all
of its resources ends as stopped, and to resume it tries them again. A step whose outcome is unknown is in
doubt; it counts as an error and is not repeated.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import math
from typing import Any

import msgspec

from muster.core import errors, messages
from muster.manage import protocol, rows
from muster.manage.registry import records

# States of a step; a rollout is running, paused, done or stopped.
PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
UNREACHABLE, IN_DOUBT = "unreachable", "in-doubt"
PAUSED, STOPPED = "paused", "stopped"

NAMED_MAX = 20  # resources in a summary; `RolloutExecutor.steps` lists all
REASON_MAX, RESULT_BYTES_MAX = 1_000, 4_096  # stored of a step

NOT_REACHED = ("unavailable", "timed-out", "not-connected", protocol.NOT_MANAGED)


class RolloutStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    state: str = PENDING
    reason: str = ""
    result: Any = None


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True, dict=True):
    """Stored without its steps; each step is a separate record, from which another registry can continue.

    The work for a batch depends on its size, not on the number of steps. ``counts`` and ``unreachable`` are
    those of a stored rollout; `header` has the current ones.
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

    @functools.cached_property
    def _by_state(self) -> dict[str, set[str]]:
        by_state: dict[str, set[str]] = {}
        for name, step in self.steps.items():
            by_state.setdefault(step.state, set()).add(name)
        return by_state

    @functools.cached_property
    def _pending(self) -> collections.deque[str]:
        """In order; the first ones may have begun meanwhile."""
        return collections.deque(name for name, step in self.steps.items() if step.state == PENDING)

    def _number(self, *states: str) -> int:
        return sum(len(self._by_state.get(state, ())) for state in states)

    def _move(self, name: str, state: str) -> None:
        step = self.steps[name]
        self._by_state.setdefault(step.state, set()).discard(name)
        self._by_state.setdefault(state, set()).add(name)
        step.state = state

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

    def next_batch(self) -> list[str]:
        """The names of the next batch.

        Steps that were running when a previous registry ended are repeated under the same id: the agents know
        their outcome.
        """
        if self.state != RUNNING:
            return []
        if again := self._by_state.get(RUNNING):
            return sorted(again)
        while self._pending and self.steps[self._pending[0]].state != PENDING:
            self._pending.popleft()
        return list(itertools.islice(self._pending, self.batch_size()))

    def begin(self, names: list[str]) -> None:
        for name in names:
            self._move(name, RUNNING)

    def end(self, name: str, answer: protocol.OperationResult, problem: str = "") -> None:
        """``problem``: why the resource is not in its desired state after the operation."""
        step = self.steps[name]
        step.reason, step.result = (problem or answer.reason)[:REASON_MAX], answer.result
        if len(msgspec.json.encode(step.result)) > RESULT_BYTES_MAX:
            step.result, step.reason = None, step.reason or "the result is too long to be stored"
        match answer.outcome:
            case messages.DecisionOutcome.DONE:
                state = FAILED if problem else DONE
            case messages.DecisionOutcome.IN_DOUBT:
                state = IN_DOUBT
            case _:
                state = UNREACHABLE if answer.code in NOT_REACHED else FAILED
        self._move(name, state)

    def update_state(self) -> None:
        """Update the state after a batch. A rollout that was paused meanwhile stays paused while steps
        remain.
        """
        failed = self._number(FAILED, IN_DOUBT)
        if failed > self.plan.errors_max:
            self.state = STOPPED
            first = min(name for state in (FAILED, IN_DOUBT) for name in self._by_state.get(state, ()))
            allowed = f"{failed} steps failed; at most {self.plan.errors_max} may fail"
            self.reason = f"{allowed}. {first}: {self.steps[first].reason}"
        elif not self._number(PENDING, RUNNING):
            missed = self._number(UNREACHABLE)
            self.state = STOPPED if missed else DONE
            if missed:
                self.reason = f"{missed} of {len(self.steps)} resources could not be reached"

    def retry_unreachable(self) -> dict[str, RolloutStep]:
        """Try them again. Returns their steps."""
        names = sorted(self._by_state.get(UNREACHABLE, ()))
        for name in names:
            self._move(name, PENDING)
        self.__dict__.pop("_pending", None)
        return {name: self.steps[name] for name in names}

    def summary(self) -> rows.RolloutRow:
        """The summary of a header."""
        return rows.RolloutRow(
            id=self.id,
            at_ms=self.at_ms,
            state=self.state,
            reason=self.reason,
            by=self.by,
            operation=self.plan.operation,
            counts=self.counts,
            unreachable=self.unreachable,
        )


def rollout_id(request: str) -> str:
    """The id of a rollout that a request starts: a repetition of the request starts no other one."""
    return records.derived_id(request, 8)


def order_id(rollout: str, resource: str) -> str:
    return f"rollout-{rollout}-{resource}"
