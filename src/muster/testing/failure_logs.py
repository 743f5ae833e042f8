"""Additional output of a failed test: the logs of its brokers, the output of its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FILE_BYTES_SHOWN = 4000

_ATTACHED = pytest.StashKey[list[tuple[str, Callable[[], str]]]]()


def attach(item: pytest.Item, title: str, read: Callable[[], str]) -> None:
    """``read`` is called if the test fails."""
    item.stash.setdefault(_ATTACHED, []).append((title, read))


def attach_file(item: pytest.Item, title: str, path: Path) -> None:
    def tail() -> str:
        return path.read_bytes()[-FILE_BYTES_SHOWN:].decode(errors="replace") if path.exists() else "(none)"

    attach(item, title, tail)


def show(item: pytest.Item, report: pytest.TestReport) -> None:
    for title, read in item.stash.get(_ATTACHED, []):
        report.sections.append((title, read()))
