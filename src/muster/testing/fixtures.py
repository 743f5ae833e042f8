"""The fixtures, for tests under pytest-asyncio in either of its modes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from muster.testing import clock, plugin

TASK_GRACE_S = 0.25


@pytest.fixture
def fake_clock() -> clock.FakeClock:
    """A wall clock that goes where it is told, and with virtual time."""
    return clock.FakeClock()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not plugin.strict(config):
        return
    for item in items:
        # First in, last out: it judges the loop after every other fixture of the test has let go of it.
        if pytest_asyncio.is_async_test(item) and "_tidy_loop" not in item.fixturenames:
            item.fixturenames.insert(0, "_tidy_loop")


@pytest_asyncio.fixture
async def _tidy_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Tasks that outlive a test, and errors that only the loop heard of, fail it."""
    ignore = plugin.may_leak(request.node)
    heard: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(_story(context)))
    yield
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, others = await asyncio.wait(others, timeout=TASK_GRACE_S)
    complaints = []
    if others and "tasks" not in ignore:
        complaints += [f"task {task.get_name()}: {task.get_coro()}" for task in others]
    if "loop-errors" not in ignore:
        complaints += heard
    if complaints:
        pytest.fail("this test left in its event loop:\n  " + "\n  ".join(complaints), pytrace=False)


def _story(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}: {error!r}" if error else str(context["message"])
