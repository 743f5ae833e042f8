from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.app import settings as app_settings
from muster.core.settings import loader
from tests.app import otlp_sink

Make = Callable[..., app_settings.Settings]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Settings of a domain in a folder of this test, on free ports; flags as ``bus__brokers=3``."""

    def make(**flags: Any) -> app_settings.Settings:
        arguments = {name.replace("__", "."): value for name, value in flags.items()}
        return loader.load(app_settings.Settings, flags={"domain.data_dir": str(tmp_path), **arguments})

    return make


@pytest.fixture
def collector() -> Iterator[otlp_sink.Collector]:
    with otlp_sink.Collector() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()
