"""Histories of runs, stored as they happen: one JSON line for each beginning and each end of an operation.

The first line describes the run.  An operation without an end has an unknown outcome, also if the run itself
was interrupted.  Operations and checkers are those of the simulator (`tests.sim.history`).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, TextIO

from tests.sim import history


class StoredHistory(history.History):
    def __init__(self, file: Path, **run: Any) -> None:
        super().__init__()
        file.parent.mkdir(parents=True, exist_ok=True)
        self.run = run
        self._file: TextIO = file.open("w", encoding="utf-8")
        self._write(run=run)

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")

    def note(self, actor: str, text: str) -> None:
        """The operations are the trace."""

    def begin(self, actor: str, action: str, **facts: Any) -> history.Operation:
        operation = super().begin(actor, action, **facts)
        self._write(begin=operation.number, actor=actor, action=action, facts=facts, at_s=operation.start_s)
        return operation

    def end(self, operation: history.Operation, outcome: str, result: Any = None) -> None:
        super().end(operation, outcome, result)
        self._write(
            end=operation.number,
            outcome=outcome,
            result=result,
            at_s=asyncio.get_running_loop().time(),
        )

    def event(self, actor: str, action: str, **facts: Any) -> history.Operation:
        operation = super().event(actor, action, **facts)
        self._write(end=operation.number, outcome="ok", result=None, at_s=operation.start_s)
        return operation

    def fact(self, action: str, **facts: Any) -> None:
        self.event("-", action, **facts)

    def close(self) -> None:
        self._file.close()


class LoadedHistory(history.History):
    """A stored history. ``run`` is the description of the run."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.run: dict[str, Any] = {}
        # The last line is incomplete if the run was killed.
        for text in file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
            line = json.loads(text)
            if "run" in line:
                self.run = line["run"]
            elif "begin" in line:
                number, at_s = line["begin"], line["at_s"]
                self.operations.append(
                    history.Operation(number, line["actor"], line["action"], line["facts"], at_s)
                )
            else:
                operation = self.operations[line["end"]]
                operation.outcome, operation.result = line["outcome"], line["result"]
                if operation.outcome != "unknown":
                    operation.end_s = line["at_s"]
