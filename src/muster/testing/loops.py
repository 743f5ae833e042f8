"""Which event loop a test gets: the ordinary one, or the virtual one where it is marked ``virtual_time``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from muster.testing import virtual_clock


@pytest.hookimpl(trylast=True, optionalhook=True)  # of pytest-asyncio, which may be switched off
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual": virtual_clock.VirtualLoop}
    return {"real": asyncio.new_event_loop}
