"""Activities of several processes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.core import errors
from muster.inform import activities, client
from muster.inform.node import node

pytestmark = pytest.mark.virtual_time


Pair = tuple[activities.Activities, activities.Activities]


@pytest.fixture
async def pair(simulated_network) -> AsyncIterator[Pair]:
    net = simulated_network
    async with await node.start(await net.connect("n"), now_ns=net.now_ns):
        ann, ben = [client.InformClient(await net.connect(name)) for name in ("ann", "ben")]
        yield activities.Activities(ann, net.now_ns), activities.Activities(ben, net.now_ns)


@pytest.mark.parametrize("delay_ms", [0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 6])
async def test_a_child_begins_or_its_parent_completes(pair: Pair, delay_ms: float):
    ann, ben = pair

    async def begin() -> activities.Activity:
        await asyncio.sleep(delay_ms / 1_000)
        return await ben.begin(parent=parent.id)

    for _ in range(10):
        parent = await ann.begin()
        child, completed = await asyncio.gather(begin(), ann.complete(parent.id), return_exceptions=True)
        if isinstance(child, activities.Activity):
            assert isinstance(completed, errors.Conflict)
            assert await ann.status(child.id) is activities.ActivityStatus.ACTIVE
            assert await ann.status(parent.id) is activities.ActivityStatus.ACTIVE
            await ben.complete(child.id)
            await ann.complete(parent.id)
        else:
            assert isinstance(child, activities.InvalidActivityState)
            active_children = await ann._active_children(parent.id)
            assert not active_children


async def test_after_a_refused_completion_others_may_begin_inside(pair):
    ann, ben = pair
    parent = await ann.begin()
    child = await ben.begin(parent=parent.id)
    with pytest.raises(activities.ChildActivityPending):
        await ann.complete(parent.id)
    await ben.complete(child.id)
    await ben.complete((await ben.begin(parent=parent.id)).id)
    assert (await ann.complete(parent.id)).status is activities.ActivityStatus.COMPLETED


async def test_completing_that_was_interrupted_is_finished_by_the_next(pair):
    ann, ben = pair
    parent = await ann.begin()
    await ann._put(activities.begin_completing(parent), expected_version=parent.version)  # and is killed
    with pytest.raises(activities.InvalidActivityState, match="completing"):
        await ben.begin(parent=parent.id)
    assert (await ben.complete(parent.id)).status is activities.ActivityStatus.COMPLETED


@pytest.mark.parametrize("number", [1, 2])
async def test_a_completion_whose_outcome_is_unknown_closes_nothing_for_good(pair, number, monkeypatch):
    """Neither of its two writes is acknowledged; each of them was stored, or was not."""
    ann, ben = pair
    for is_stored in (False, True):
        parent = await ann.begin()
        put, count = ann._contexts.put, 0

        async def lose(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count != number:
                return await put(*arguments, **options)  # noqa: B023
            if is_stored:  # noqa: B023
                await put(*arguments, **options)  # noqa: B023
            raise errors.TimedOut("no answer")

        with monkeypatch.context() as lossy:
            lossy.setattr(ann._contexts, "put", lose)
            with pytest.raises(errors.TimedOut):
                await ann.complete(parent.id)
        if (number, is_stored) == (2, True):
            assert await ben.status(parent.id) is activities.ActivityStatus.COMPLETED
        else:
            assert (await ben.begin(parent=parent.id)).parent == parent.id
