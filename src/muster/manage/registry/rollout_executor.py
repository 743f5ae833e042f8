"""Rollouts carried out: batch after batch, each stored before it begins, so that another registry goes on.

What a rollout decides is in `rollout`; the orders themselves go through the resources' managers (`orders`).
`keep` looks again and again for rollouts that should run and have no task: after a take-over, after a loss of
connection, after a beginning whose outcome was in doubt.  One that cannot go on is stopped, with the reason.

A rollout is a record, and each of its steps is another, so that a batch writes what it changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.registry import operations, rollout, views
from muster.store import transactions

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

events = log.EventLog("manage")

ROLLOUTS, STEPS = "manage.rollouts", "manage.rollout-steps"
STEPS_MAX = 200_000
KEPT = 100  # that have ended
LOOK_S = 2.0
RETRY_S = 0.5


class RolloutExecutor:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, rollout.Rollout] = {}
        self._writing = asyncio.Lock()

    async def begin(self, by: str, plan: dict[str, Any], names: list[str]) -> dict[str, Any]:
        try:
            wanted = msgspec.convert(plan, rollout.RolloutPlan)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(str(error)) from error
        if len(names) > STEPS_MAX:
            raise errors.LimitExceeded(
                f"a rollout on {len(names)} resources; the most is {STEPS_MAX}", hint="narrow the selection"
            )
        steps = {name: rollout.RolloutStep() for name in names}
        begun = rollout.Rollout(
            id=secrets.token_hex(4), by=by, plan=wanted, steps=steps, at_ms=int(time.time() * 1000)
        )
        begun.batch_size()
        begun.judge()
        old = await self._old()
        await self._write(begun, names, old)
        self._carry_on(begun)
        return begun.header().summary()

    async def listed(self, id: str | None, after: str, limit: int) -> dict[str, Any]:
        """A page of them, the oldest first; or the one with this id."""
        found = {_key(one): one for one in await self._headers() if id is None or one.id == id}
        if id is not None and not found:
            raise errors.NotFound(f"no rollout {id!r}")

        def row(key: str) -> dict[str, Any]:
            live = self._live.get(found[key].id)
            return (live.header() if live is not None else found[key]).summary()

        return views.page(sorted(key for key in found if key > after), row, limit)

    async def steps(self, id: str, after: str, limit: int) -> dict[str, Any]:
        """A page of what became of each resource, in the order of their names."""
        if await self._registry.store.get(ROLLOUTS, id) is None:
            raise errors.NotFound(f"no rollout {id!r}")
        start = f"{id}/{after}\0" if after else None
        records = await self._registry.store.scan(STEPS, prefix=f"{id}/", start=start, limit=limit + 1)
        values = {record.key.removeprefix(f"{id}/"): record.value for record in records}

        def row(name: str) -> dict[str, Any]:
            step = msgspec.json.decode(values[name], type=rollout.RolloutStep)
            return {"name": name, "state": step.state, "reason": step.reason, "result": step.result}

        return views.page(values, row, limit)

    async def turn(self, id: str, state: str, reason: str) -> dict[str, Any]:
        """Pause it, or go on."""
        async with self._writing:
            one = self._live.get(id) or await self._load(id)
            if one.state not in (rollout.RUNNING, rollout.PAUSED, rollout.STOPPED):
                raise errors.Conflict(f"rollout {id} is {one.state}")
            plan = one.plan
            if one.state == rollout.STOPPED and state == rollout.RUNNING:
                plan = msgspec.structs.replace(plan, errors_max=len(one.steps))
            header = msgspec.structs.replace(one, state=state, reason=reason, plan=plan).header()
            await self._registry.write(lambda tx: _put(tx, header, {}))
            one.state, one.reason, one.plan = state, reason, plan
            self._carry_on(one)
        return header.summary()

    async def keep(self) -> None:
        """Go on with whatever is running; until cancelled."""
        try:
            while True:
                with contextlib.suppress(errors.MusterError):
                    for one in await self._headers():
                        if one.state == rollout.RUNNING and one.id not in self._tasks:
                            async with self._writing:
                                self._carry_on(await self._load(one.id))
                await asyncio.sleep(LOOK_S)
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
        try:
            await self._carry_out(one)
        except errors.Unavailable as error:  # `keep` begins again with what is stored
            events.warning("rollout-interrupted", rollout=one.id, error=error)
            return
        except Exception as error:  # noqa: BLE001  (it must not stay "running" for ever)
            events.error("rollout-failed", rollout=one.id, error=error)
            one.state, one.reason = rollout.STOPPED, f"it cannot go on: {error}"[: rollout.REASON_MAX]
            await self._save(one, ())
        if one.state == rollout.PAUSED:
            return
        header = one.header()
        await self._registry.record(
            "rollout",
            one.id,
            one.reason or f"{one.plan.operation} on {len(one.steps)} resources",
            who=self._registry.name,
            on_behalf_of=one.by,
            outcome=messages.DecisionOutcome.DONE
            if one.state == rollout.DONE
            else messages.DecisionOutcome.FAILED,
            **{state: str(count) for state, count in header.counts.items()},
        )

    async def _carry_out(self, one: rollout.Rollout) -> None:
        while batch := one.next_batch():
            one.begin(batch)
            await self._save(one, batch)
            wanted = [
                protocol.OperationOrder(
                    id=rollout.order_id(one.id, name),
                    resource=name,
                    operation=one.plan.operation,
                    arguments=one.plan.arguments,
                    timeout_s=one.plan.timeout_s,
                )
                for name in batch
            ]
            for name, answer in zip(
                batch, await operations.submit_operation(self._registry, wanted, one.by), strict=True
            ):
                one.end(name, answer)
            one.judge()
            await self._save(one, batch)
            if one.state == rollout.RUNNING and one.next_batch():
                await asyncio.sleep(one.plan.pause_s)

    # Records

    async def _headers(self) -> list[rollout.Rollout]:
        records = await self._registry.store.scan(ROLLOUTS)
        return [msgspec.json.decode(record.value, type=rollout.Rollout) for record in records]

    async def _load(self, id: str) -> rollout.Rollout:
        record = await self._registry.store.get(ROLLOUTS, id)
        if record is None:
            raise errors.NotFound(f"no rollout {id!r}")
        one = msgspec.json.decode(record.value, type=rollout.Rollout)
        prefix = f"{id}/"
        one.steps = {
            record.key.removeprefix(prefix): msgspec.json.decode(record.value, type=rollout.RolloutStep)
            for record in await self._registry.store.scan(STEPS, prefix=prefix)
        }
        return one

    async def _old(self) -> list[str]:
        """Keys of steps of rollouts that ended longest ago."""
        over = [one for one in await self._headers() if one.state in (rollout.DONE, rollout.STOPPED)]
        over.sort(key=lambda one: one.at_ms)
        found = []
        for one in over[: max(0, len(over) - KEPT + 1)]:
            found += [record.key for record in await self._registry.store.scan(STEPS, prefix=f"{one.id}/")]
            found.append(one.id)
        return found

    async def _save(self, one: rollout.Rollout, names: Iterable[str]) -> None:
        """However long the store is away: a batch that is not recorded must not begin."""
        while True:
            try:
                await self._write(one, names, ())
                return
            except errors.Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _write(self, one: rollout.Rollout, names: Iterable[str], old: Iterable[str]) -> None:
        def fill(tx: transactions.Transaction) -> None:
            for key in old:
                tx.delete(STEPS if "/" in key else ROLLOUTS, key)
            _put(tx, one.header(), {name: one.steps[name] for name in names})

        async with self._writing:
            await self._registry.write(fill)


def _key(one: rollout.Rollout) -> str:
    """The order of a list: by time, and by id where two began in the same millisecond."""
    return f"{one.at_ms:015}-{one.id}"


def _put(
    tx: transactions.Transaction, header: rollout.Rollout, steps: dict[str, rollout.RolloutStep]
) -> None:
    tx.put(ROLLOUTS, header.id, msgspec.json.encode(header))
    for name, step in steps.items():
        tx.put(STEPS, f"{header.id}/{name}", msgspec.json.encode(step))
