"""The next version of Muster, for tests of upgrades: a copy of this tree with another version number, and a
new field in every wire message."""

from __future__ import annotations

import shutil
from pathlib import Path

import muster
from tests.cli import driver

NUMBER = "0.3.0"
FIELD = "added_in_the_next_version"
#: File, text, replacement.
CHANGES = (
    ("__init__.py", f'__version__ = "{muster.__version__}"', f'__version__ = "{NUMBER}"'),
    (
        "core/messages.py",
        'that services declare in their own ``protocol.py``."""\n',
        'that services declare in their own ``protocol.py``."""\n\n'
        f'    {FIELD}: str = msgspec.field(default_factory=lambda: "new")\n',
    ),
)


def copy(source: Path) -> None:
    """Write the package to the folder ``source``."""
    shutil.copytree(driver.SOURCE / "muster", source / "muster")  # with the compiled files: they stay valid
    for name, before, after in CHANGES:
        file = source / "muster" / name
        text = file.read_text()
        assert text.count(before) == 1, name
        file.write_text(text.replace(before, after))
