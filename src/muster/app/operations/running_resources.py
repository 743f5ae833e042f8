"""Resources of this machine whose processes outlive the domain, which manages them again after its start."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from muster.supervision import os_process


class _StoredRuntime(msgspec.Struct):
    """Of the agent's record of a resource (`muster.manage.agent.operation_log`)."""

    name: str
    runtime: dict[str, Any] = {}


def find(folder: Path) -> list[str]:
    """Names of the resources in an agent's folder that have running processes. Blocks."""
    marks = os_process.marks()
    names = []
    for file in sorted(folder.glob("*.json")) if marks else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            record = msgspec.json.decode(file.read_bytes(), type=_StoredRuntime)
            if record.runtime.get("token") in marks:
                names.append(record.name)
    return names
