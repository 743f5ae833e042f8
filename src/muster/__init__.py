"""Muster: a publish/subscribe control plane for fleets of services.

Folders, from the top of the house to its foundation (ARCHITECTURE.md is the map, and a test compares
the two): ``cli``, ``app``, ``testing``, then the services, then ``bus``, ``store``, ``trust``, then
``predicates``, then ``core``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster import blocking
    from muster.connection import connect

__all__ = ["__version__", "blocking", "connect"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported when first asked for: `import muster` alone must stay quick.
    if name == "connect":
        from muster import connection

        return connection.connect
    if name == "blocking":
        return importlib.import_module("muster.blocking")
    raise AttributeError(f"module 'muster' has no attribute {name!r}")
