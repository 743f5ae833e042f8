"""Run a Python block of a text: ``run_block.py FILE BROKER_URL``. It may await at its top level."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path
from types import CodeType

from muster import connection


async def run(code: CodeType) -> None:
    result = eval(code, {"__name__": "__main__"})
    if inspect.isawaitable(result):
        await result


def main(path: str, broker_url: str) -> None:
    # A block that names no broker means the domain here or, without one, the usual broker: the test's.
    connection.DEFAULT_SERVER = broker_url
    asyncio.run(run(compile(Path(path).read_text(), path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)))


main(*sys.argv[1:])
