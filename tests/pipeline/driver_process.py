"""The pipeline as a process of its own, on brokers without identities unless ``words`` name credentials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def words(folder: Path, url: str, **settings: Any) -> list[str]:
    """What follows ``muster`` on the command line; its data are in ``folder``."""
    known = {"domain.data_dir": folder.parent, "domain.name": folder.name}
    known |= {f"pipeline.{name}": value for name, value in settings.items()}
    options = [word for key, value in known.items() for word in ("--set", f"{key}={value}")]
    return ["run", "pipeline", "--home", str(folder), "--server", url, *options]


def command(folder: Path, url: str, *, merged_by: str = "driver", **settings: Any) -> list[str]:
    """``merged_by``: who adds up groups: the driver, as in any small fleet, or executors."""
    program = ["-m", "muster"] if merged_by == "driver" else ["-c", _BY_EXECUTORS]
    return [sys.executable, *program, *words(folder, url, **settings)]


_BY_EXECUTORS = """
import runpy
from muster.pipeline.job import window_rows
window_rows.MERGED_BY_DRIVER = -1
runpy.run_module("muster", run_name="__main__", alter_sys=True)
"""
