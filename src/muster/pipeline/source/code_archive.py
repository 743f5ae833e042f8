"""Muster's own code as an archive that a job sends to Spark's executors."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import muster
from muster.core import files

NAME = "muster-code.zip"


def write(folder: Path) -> Path:
    """Write the archive of the running version to ``folder``."""
    package = Path(muster.__file__).parent
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, path.relative_to(package.parent))
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / NAME, content.getvalue())
    return folder / NAME
