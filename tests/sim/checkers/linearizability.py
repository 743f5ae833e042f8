"""Is there an order of the operations that explains all results? (Wing and Gong, with Lowe's memory.)

Each operation takes effect at one moment between its start and its end.  The search linearizes one operation
after another: first any that started before all remaining ones ended.  Sets of linearized operations that
were reached with the same state are not searched twice.  An operation without an end may also have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tests.sim import history

State = TypeVar("State", bound=Hashable)

#: The states after an operation that takes effect in a state; none if its result is impossible there.
Step = Callable[[State, history.Operation], Iterable[State]]

VISITED_MAX = 400_000


class Undecided(Exception):
    """The search was too large."""


def find_violation(
    operations: Sequence[history.Operation], initial: State, step: Step[State]
) -> list[history.Operation] | None:
    """None if the history is linearizable; otherwise the operations of which none can be next, after the
    longest explanation."""
    ordered = sorted(operations, key=lambda operation: (operation.start_s, operation.number))
    count = len(ordered)
    required = sum(1 << place for place, operation in enumerate(ordered) if operation.end_s < math.inf)
    visited: set[tuple[int, State]] = set()
    stack: list[tuple[int, int, State]] = [(0, 0, initial)]  # linearized, the first that is not, state
    longest, stuck = -1, 0
    while stack:
        done, first, state = stack.pop()
        if done & required == required:
            return None
        while first < count and done >> first & 1:
            first += 1
        number = (done & required).bit_count()
        if number > longest:
            longest, stuck = number, done
        deadline_s = math.inf
        for place in range(first, count):
            operation = ordered[place]
            if done >> place & 1:
                continue
            if operation.start_s > deadline_s:
                break
            deadline_s = min(deadline_s, operation.end_s)
            after = done | 1 << place
            for following in step(state, operation):
                if (after, following) not in visited:
                    visited.add((after, following))
                    stack.append((after, first, following))
        if len(visited) > VISITED_MAX:
            raise Undecided(f"{len(visited)} states")
    waiting = [operation for place, operation in enumerate(ordered) if not stuck >> place & 1]
    deadline_s = min(operation.end_s for operation in waiting)
    return [operation for operation in waiting if operation.start_s <= deadline_s]
