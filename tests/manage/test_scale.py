"""A hundred thousand resources in a registry: lists, changes and renewals of the complete fleet, in pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from muster.bus import api
from muster.core import messages
from muster.manage import client, protocol, rows
from muster.manage.registry import endpoint
from muster.testing.eventually import eventually
from tests.manage import assignment_cases

COUNT, AGENTS, PAGE = 100_000, 1_000, 2_000
NAMES = [f"web-{number:06}" for number in range(COUNT)]

T = TypeVar("T")

logger = logging.getLogger("scale")  # shown by --log-cli-level=INFO


class RenewingManager:
    """Renews as a manager does and keeps its assignments, but operates nothing."""

    def __init__(self, bus: api.Bus) -> None:
        self.assigned: set[str] = set()
        self._bus = bus
        self._known = (0, 0, 0)

    async def renew(self) -> int:
        """Returns the number of pages."""
        pages, more = 0, True
        while more:
            term, session, revision = self._known
            request = protocol.RenewRequest(boot=1, term=term, session=session, revision=revision)
            subject = protocol.renew(self._bus.identity)
            reply = await self._bus.request(subject, messages.encode(request), timeout_s=30)
            granted = messages.decode(reply.data, protocol.RenewResult)  # which checks its size
            self._known = (granted.term, granted.session, granted.revision)
            if granted.anew:
                self.assigned.clear()
            self.assigned.difference_update(granted.released)
            self.assigned.update(assignment.spec.name for assignment in granted.assigned)
            pages, more = pages + 1, granted.more
        return pages


def entry(name: str) -> dict[str, Any]:
    number = int(name[4:])
    labels = {"tier": "front" if number % 10 else "back", "number": name[4:]}
    agent, group = f"host-{number % AGENTS}", f"g{number % 100}"
    return {"name": name, "type": "memory", "agent": agent, "labels": labels, "group": group}


async def in_pages(work: Callable[[list[str]], Awaitable[Any]]) -> None:
    for first in range(0, COUNT, PAGE):
        await work(NAMES[first : first + PAGE])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_block(reason="a registry, two managers and a client share one process")
async def test_a_hundred_thousand_resources(fleet, connect):
    async def phase(name: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        result = await work
        logger.info("%s: %.2f s", name, time.perf_counter() - began)
        return result

    registry: endpoint.RegistryEndpoint = await fleet.registry(lease_ttl_s=15.0, manager_ttl_s=60.0)
    await eventually(registry.acting.is_set)
    bus = await connect("bob")
    fleet.client = operator = client.ManageClient(bus, timeout_s=60)
    first = RenewingManager(await connect("manager-1"))
    await first.renew()

    async def apply(part: list[str]) -> None:
        await operator._request(rows.ApplyResult, "apply", entries=[entry(name) for name in part])

    await phase("apply", in_pages(apply))
    await eventually(lambda: len(registry.state.owners) == COUNT, timeout_s=60)
    assert await phase("first renewal", first.renew()) >= COUNT // protocol.PAGE
    assert len(first.assigned) == COUNT

    assert [row.name for row in await phase("get all", operator.get())] == NAMES
    assert len(await phase("get by name", operator.get(*NAMES))) == COUNT
    assert await phase("names", operator.names()) == NAMES
    assert len(await phase("where", operator.names(where="tier = 'back'"))) == COUNT // 10
    assert len(await phase("where, one", operator.get(where="number = '000777'"))) == 1
    assert (await phase("summary", operator.summary())).resources == COUNT
    await phase("agents", operator.agents())
    await phase("create", operator.create({"name": "late", "type": "memory", "agent": "host-0"}))
    await phase("rename", operator.rename("late", "later"))
    await phase("delete one", operator.delete("later", force=True))

    second = RenewingManager(await connect("manager-2"))
    await second.renew()

    async def rebalance() -> None:
        while not len(first.assigned) == len(second.assigned) == COUNT // 2:
            await asyncio.gather(first.renew(), second.renew())

    await phase("rebalance", rebalance())
    assert not first.assigned & second.assigned

    async def checkpoint(manager: RenewingManager) -> None:
        status = protocol.ResourceStatus(generation=1)
        for part in range(0, COUNT // 2, 500):
            names = sorted(manager.assigned)[part : part + 500]
            items = {name: (registry.state.owners[name].epoch, status) for name in names}
            data = messages.encode(protocol.CheckpointBatch(items=items), "msgpack")
            await manager._bus.request(protocol.checkpoint(manager._bus.identity), data, timeout_s=30)

    await phase("checkpoints of half", checkpoint(first))
    assert len(registry.state.statuses) == COUNT // 2

    plan = rows.RolloutPlan(operation="echo", batch="1", pause_s=3600)
    begun = await phase("begin a rollout", operator.rollout(plan, where="name <> ''"))
    await phase("pause it", operator.pause(begun.id))
    assert len(await phase("steps", operator.rollout_steps(begun.id))) == COUNT

    await registry.stop()
    registry = await fleet.registry("registry-2", lease_ttl_s=15.0, manager_ttl_s=60.0)
    await phase("load", registry.acting.wait())
    await phase("renewal at another registry", first.renew())
    assert len(first.assigned) == COUNT // 2

    await phase("delete", in_pages(lambda part: operator.delete(*part, force=True)))
    await phase("wait until gone", operator.wait_gone(*NAMES, timeout_s=60))
    await first.renew()
    assert not first.assigned
    assignment_cases.check(registry.state)
