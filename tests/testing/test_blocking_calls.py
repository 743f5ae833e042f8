"""Which code may block the event loop. The check is active in this session: see ``muster_strict``."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import blockbuster
import pytest

from muster.testing import plugin

MUSTER = Path(plugin.__file__).parents[1]

CODE = """
import asyncio, os, time

async def sleeps():
    time.sleep(0.001)

async def syncs(file):
    os.fsync(file)

async def waits_for(lock):
    lock.acquire(timeout=0.001)

async def writes(path):
    path.write_text("small")

async def sleeps_in_a_thread():
    await asyncio.to_thread(time.sleep, 0.001)

def plain():
    time.sleep(0.001)
"""


@pytest.fixture
def product() -> dict[str, Any]:
    """Functions whose code seems to be in a file of Muster."""
    names: dict[str, Any] = {}
    exec(compile(CODE, str(MUSTER / "bus" / "imagined.py"), "exec"), names)
    return names


async def test_a_coroutine_of_ours_may_not_sleep(product: dict[str, Any]):
    with pytest.raises(blockbuster.BlockingError, match=r"time\.sleep"):
        await product["sleeps"]()


async def test_a_coroutine_of_ours_may_not_sync_a_file(product: dict[str, Any], tmp_path: Path):
    with (tmp_path / "file").open("w") as file, pytest.raises(blockbuster.BlockingError, match=r"fsync"):
        await product["syncs"](file.fileno())


async def test_a_coroutine_of_ours_may_not_wait_for_a_lock(product: dict[str, Any]):
    lock = threading.Lock()
    await product["waits_for"](lock)  # free: nothing to wait for
    with pytest.raises(blockbuster.BlockingError, match=r"acquire"):
        await product["waits_for"](lock)


@pytest.mark.may_leak("loop-errors", reason="the error in the callback is what is tested")
async def test_a_callback_of_ours_may_not_sleep(product: dict[str, Any]):
    loop = asyncio.get_running_loop()
    received: asyncio.Future[object] = loop.create_future()
    loop.set_exception_handler(lambda _, context: received.set_result(context.get("exception")))
    loop.call_soon(product["plain"])
    assert isinstance(await received, blockbuster.BlockingError)


async def test_small_files_and_threads_are_allowed(product: dict[str, Any], tmp_path: Path):
    await product["writes"](tmp_path / "file")
    await product["sleeps_in_a_thread"]()


async def test_a_test_answers_for_its_own_coroutine(product: dict[str, Any]):
    product["plain"]()


@pytest.mark.may_block(reason="shows the marker")
async def test_the_marker_lifts_the_rule(product: dict[str, Any]):
    await product["sleeps"]()
