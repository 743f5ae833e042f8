"""Selects the event loop of a test: the normal one, or the virtual one for the marker ``virtual_time`` and
for domains in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from muster.testing import plugin, virtual_clock


@pytest.hookimpl(trylast=True, optionalhook=True)  # a hook of pytest-asyncio, which may be disabled
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    in_memory = "domain" in getattr(item, "fixturenames", ()) and not plugin.real_domain(item.config)
    if in_memory or item.get_closest_marker("virtual_time") is not None:
        return {"virtual": virtual_clock.VirtualLoop}
    return {"real": asyncio.new_event_loop}
