"""Rollouts carried out: batch after batch, each stored before it begins, so that another registry goes on.

What a rollout decides is in `rollout`; the orders themselves go through the resources' managers (`orders`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, messages
from muster.manage import orders, protocol, rollout

if TYPE_CHECKING:
    from muster.manage import service

ROLLOUTS = "manage.rollouts"


class Rollouts:
    def __init__(self, registry: service.Registry) -> None:
        self._registry = registry
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, rollout.Rollout] = {}

    async def begin(self, by: str, plan: dict[str, Any], names: list[str]) -> dict[str, Any]:
        try:
            wanted = msgspec.convert(plan, rollout.Plan)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(str(error)) from error
        steps = {name: rollout.Step() for name in names}
        begun = rollout.Rollout(id=secrets.token_hex(4), by=by, plan=wanted, steps=steps)
        begun.batch_size()
        begun.judge()
        await self._save(begun)
        self._carry_on(begun)
        return begun.summary()

    async def all(self, id: str | None) -> list[dict[str, Any]]:
        records = await self._registry.store.scan(ROLLOUTS)
        found = [msgspec.json.decode(record.value, type=rollout.Rollout) for record in records]
        found = [self._live.get(one.id, one) for one in found if id is None or one.id == id]
        if id is not None and not found:
            raise errors.NotFound(f"no rollout {id!r}")
        return [one.summary() for one in found]

    async def turn(self, id: str, state: str, reason: str) -> dict[str, Any]:
        """Pause it, or go on."""
        record = await self._registry.store.get(ROLLOUTS, id)
        if record is None:
            raise errors.NotFound(f"no rollout {id!r}")
        one = self._live.get(id) or msgspec.json.decode(record.value, type=rollout.Rollout)
        if one.state not in (rollout.RUNNING, rollout.PAUSED, rollout.STOPPED):
            raise errors.Conflict(f"rollout {id} is {one.state}")
        if one.state == rollout.STOPPED and state == rollout.RUNNING:
            one.plan = msgspec.structs.replace(one.plan, errors_max=len(one.steps))
        one.state, one.reason = state, reason
        await self._save(one)
        self._carry_on(one)
        return one.summary()

    async def resume(self) -> None:
        """Go on with those that an earlier registry left running; until cancelled."""
        with contextlib.suppress(errors.Unavailable):
            for record in await self._registry.store.scan(ROLLOUTS):
                one = msgspec.json.decode(record.value, type=rollout.Rollout)
                if one.state == rollout.RUNNING:
                    self._carry_on(one)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _carry_on(self, one: rollout.Rollout) -> None:
        if one.state == rollout.RUNNING and one.id not in self._tasks:
            self._live[one.id] = one
            task = self._tasks[one.id] = asyncio.create_task(self._run(one), name=f"rollout {one.id}")
            task.add_done_callback(lambda _: (self._tasks.pop(one.id, None), self._live.pop(one.id, None)))

    async def _run(self, one: rollout.Rollout) -> None:
        while batch := one.next_batch():
            one.begin(batch)
            await self._save(one)
            wanted = [
                protocol.Order(
                    id=rollout.order_id(one.id, name),
                    resource=name,
                    operation=one.plan.operation,
                    arguments=one.plan.arguments,
                    timeout_s=one.plan.timeout_s,
                )
                for name in batch
            ]
            for name, answer in zip(batch, await orders.send(self._registry, wanted, one.by), strict=True):
                one.end(name, answer)
            one.judge()
            await self._save(one)
            if one.state == rollout.RUNNING and one.next_batch():
                await asyncio.sleep(one.plan.pause_s)
        if one.state == rollout.PAUSED:
            return
        await self._registry.record(
            "rollout",
            one.id,
            one.reason or f"{one.plan.operation} on {len(one.steps)} resources",
            who=self._registry.name,
            on_behalf_of=one.by,
            outcome=messages.Outcome.DONE if one.state == rollout.DONE else messages.Outcome.FAILED,
            **{state: str(count) for state, count in one.summary()["counts"].items()},
        )

    async def _save(self, one: rollout.Rollout) -> None:
        """However long the store is away: a batch that is not noted must not begin."""
        while True:
            try:
                async with self._registry.store.transaction() as tx:
                    tx.fence(protocol.LEASE, self._registry.term)
                    tx.put(ROLLOUTS, one.id, msgspec.json.encode(one))
                return
            except errors.Unavailable:
                if asyncio.current_task() not in self._tasks.values():
                    raise  # somebody waits for the answer
                await asyncio.sleep(0.5)
