"""Runs one SQL query in a process of its own: ``python -m muster.pipeline.history.sql_process``.

The request is JSON on standard input, the answer JSON on standard output.  A query that exceeds its limits
ends this process, not the one that asked; memory that DuckDB does not count, such as results, is limited too.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import msgspec

from muster.core import errors

OVERHEAD_BYTES = 2 << 30  # of Python and the libraries
ANSWER_MAX = 32 << 20

#: Variables of the process: allocators and thread pools that reserve little memory.
ENVIRONMENT = {
    "TOKIO_WORKER_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
}


class SqlRequest(msgspec.Struct, frozen=True, kw_only=True):
    root: str
    text: str
    seconds: float
    memory_bytes: int
    rows: int
    as_of_ms: int | None = None


class SqlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    columns: list[str] = msgspec.field(default_factory=list)
    rows: list[dict[str, Any]] = msgspec.field(default_factory=list)
    truncated: bool = False
    code: str = ""  # of an error
    message: str = ""
    hint: str = ""


def run(request: SqlRequest) -> SqlAnswer:
    import datetime

    from muster.pipeline.history import sql

    limits = sql.SqlLimits(request.seconds, request.memory_bytes, request.rows)
    try:
        as_of = (
            None
            if request.as_of_ms is None
            else datetime.datetime.fromtimestamp(request.as_of_ms / 1000, datetime.UTC)
        )
    except (OverflowError, ValueError):
        return SqlAnswer(code=errors.InvalidInput.code, message=f"{request.as_of_ms} is not a time")
    try:
        result = sql.query(request.root, request.text, limits, as_of=as_of)
        return SqlAnswer(
            columns=result.table.column_names, rows=sql.rows(result.table), truncated=result.truncated
        )
    except errors.MusterError as error:
        return SqlAnswer(code=error.code, message=error.message, hint=error.hint or "")
    except MemoryError:
        return too_large()


def too_large() -> SqlAnswer:
    return SqlAnswer(
        code=errors.LimitExceeded.code,
        message="SQL: the query or its result needs too much memory",
        hint="select fewer columns or days, or aggregate",
    )


def main() -> int:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SqlRequest)
    limit = request.memory_bytes + OVERHEAD_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer = msgspec.json.encode(run(request))
    if len(answer) > ANSWER_MAX:
        answer = msgspec.json.encode(too_large())
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
