"""SQL queries of web users over the history, each in a process of its own with limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors
from muster.web.data import turns

if TYPE_CHECKING:
    from muster.pipeline.history import sql_process

SECONDS_MAX = 30.0
MEMORY_BYTES = 512 << 20
ROWS_MAX = 10_000
TEXT_MAX = 10_000
AT_ONCE = 2
START_S = 15.0  # of the process, on a busy machine


class SqlRows(msgspec.Struct, frozen=True):
    columns: list[str]
    rows: list[dict[str, Any]]
    truncated: bool


class SqlRunner:
    def __init__(self, root: str) -> None:
        self._root = root
        self._turns = turns.WorkTurns(AT_ONCE, "SQL queries")

    async def run(self, text: str, *, rows: int = ROWS_MAX, as_of_ms: int | None = None) -> SqlRows:
        from muster.pipeline.history import sql_process

        request = sql_process.SqlRequest(
            root=self._root,
            text=text,
            seconds=SECONDS_MAX,
            memory_bytes=MEMORY_BYTES,
            rows=min(rows, ROWS_MAX),
            as_of_ms=as_of_ms,
        )
        async with self._turns.turn():
            answer = await self._ask(request)
        if not answer.code:
            return SqlRows(answer.columns, answer.rows, answer.truncated)
        kinds = (errors.InvalidInput, errors.LimitExceeded, errors.TimedOut, errors.NotFound)
        kind = next((kind for kind in kinds if kind.code == answer.code), errors.Unavailable)
        raise kind(answer.message, hint=answer.hint or None)

    async def _ask(self, request: object) -> sql_process.SqlAnswer:
        from muster.pipeline.history import sql_process

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "muster.pipeline.history.sql_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **sql_process.ENVIRONMENT},
        )
        try:
            async with asyncio.timeout(SECONDS_MAX + START_S):
                output, _ = await process.communicate(msgspec.json.encode(request))
        except TimeoutError:
            raise errors.TimedOut(f"SQL: the query took longer than {SECONDS_MAX:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:
            return sql_process.too_large()
        return msgspec.json.decode(output, type=sql_process.SqlAnswer)
