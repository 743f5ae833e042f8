"""What happened in a simulation: operations with their outcomes, in the order of virtual time.

Workloads, services and the nemesis add to it; checkers read it.  An operation whose outcome is unknown, as
after a timeout or the end of its client, has no end: it may have taken effect at any time after its start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

TRACE_MAX = 200_000


@dataclasses.dataclass(slots=True, eq=False)
class Operation:
    """``outcome``: "ok", "unknown", or the code of an error after which nothing has changed."""

    number: int
    actor: str
    action: str
    facts: dict[str, Any]
    start_s: float
    end_s: float = math.inf
    outcome: str = "unknown"
    result: Any = None

    @property
    def key(self) -> str:
        return str(self.facts["key"])

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value!r}" for name, value in self.facts.items())
        span = f"{self.start_s:.3f} to {self.end_s:.3f}" if self.end_s < math.inf else f"{self.start_s:.3f}"
        return f"#{self.number} {self.actor} {self.action} {facts}: {self.outcome} {self.result!r} ({span} s)"


class History:
    def __init__(self, *, verbose: bool = False) -> None:
        self.operations: list[Operation] = []
        self.trace: list[str] = []
        self.verbose = verbose
        self._digest = hashlib.sha256()

    def note(self, actor: str, text: str) -> None:
        """A line of the trace."""
        line = f"{asyncio.get_running_loop().time():10.3f} {actor:<12} {text}"
        self._digest.update(line.encode(errors="replace"))
        if len(self.trace) < TRACE_MAX:
            self.trace.append(line)

    def mark(self, data: str) -> None:
        """Something that two runs of a seed have in common, and that no reader needs."""
        self._digest.update(data.encode())

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def begin(self, actor: str, action: str, **facts: Any) -> Operation:
        operation = Operation(len(self.operations), actor, action, facts, asyncio.get_running_loop().time())
        self.operations.append(operation)
        self.note(actor, f"#{operation.number} {action} {_text(facts)}")
        return operation

    def end(self, operation: Operation, outcome: str, result: Any = None) -> None:
        operation.outcome, operation.result = outcome, result
        if outcome != "unknown":
            operation.end_s = asyncio.get_running_loop().time()
        self.note(operation.actor, f"#{operation.number} {operation.action} -> {outcome} {_short(result)}")

    def fact(self, action: str, **facts: Any) -> None:
        """Something that a checker needs, and no reader of the trace."""
        now_s = asyncio.get_running_loop().time()
        operation = Operation(len(self.operations), "-", action, facts, now_s, now_s, "ok")
        self.operations.append(operation)
        self.mark(str(operation))

    def event(self, actor: str, action: str, **facts: Any) -> Operation:
        """Something that takes no time."""
        operation = self.begin(actor, action, **facts)
        operation.end_s, operation.outcome = operation.start_s, "ok"
        return operation

    def of(self, *actions: str) -> Iterator[Operation]:
        return (operation for operation in self.operations if operation.action in actions)


def _text(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in facts.items())


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 160 else f"{text[:150]}… ({len(text)} characters)"
