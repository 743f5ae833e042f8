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


def command(folder: Path, url: str, **settings: Any) -> list[str]:
    return [sys.executable, "-m", "muster", *words(folder, url, **settings)]
