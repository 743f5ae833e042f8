"""The page of a context while those who read it move from one node to another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from muster.core import errors
from muster.inform import client
from muster.trust.permissions import roles
from tests.web import conftest

EXTRA = """
[inform]
nodes = 4
replicas = 1
interval_s = 2.0
refresh_s = 1.0
"""
NODES = [f"inform-default-{number}" for number in (1, 2, 3, 4)]


@contextlib.asynccontextmanager
async def reading(held: client.InformClient, key: str) -> AsyncIterator[None]:
    async def read() -> None:
        while True:
            with contextlib.suppress(errors.Unavailable):
                await held.get(key)
            await asyncio.sleep(0.05)  # pace: 20 in a second

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_page_shows_replicas_that_follow_their_readers(tmp_path, browser):
    running = await asyncio.to_thread(conftest.start, tmp_path / "home", EXTRA)
    try:
        async with await running.connect("reader", roles.Role.USER) as bus:
            await client.InformClient(bus, node=NODES[0]).put("printers/3", b"colour")
            page = await browser.new_page(viewport={"width": 1280, "height": 850})
            here = conftest.Visit(running, page)
            await here.login("vera")
            await here.open("/contexts/details?key=printers%2F3")
            await here.live()
            for node in NODES[2:]:
                async with reading(client.InformClient(bus, node=node), "printers/3"):
                    # Without a hand on it, the page shows a copy where the readers are.
                    held = f"#replicas tbody tr > td:first-child:has-text('{node}')"
                    await page.wait_for_selector(held, timeout=60_000)
                    await here.keep(f"replicas-{node}")
            # Without readers, only the permanent replica remains.
            await here.until("document.querySelectorAll('#replicas tbody tr').length === 1", timeout_s=60)
            assert here.complaints == []
    finally:
        await asyncio.to_thread(conftest.stop, running)
