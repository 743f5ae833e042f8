from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster.core.settings import domain, loader

Make = Callable[..., domain.BaseSettings]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Settings of a domain in a folder of this test, on free ports; flags as ``bus__brokers=3``."""

    def make(**flags: Any) -> domain.BaseSettings:
        arguments = {name.replace("__", "."): value for name, value in flags.items()}
        return loader.load(domain.BaseSettings, flags={"domain.data_dir": str(tmp_path), **arguments})

    return make
