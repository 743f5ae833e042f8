"""Execution of rollouts: batch after batch, each stored before it starts, so that another registry can
continue.

`rollout` contains the decisions; the operations go through the managers of the resources (`operations`).
`run` periodically looks for running rollouts without a task: after a take-over, a lost connection, or a start
in doubt. A rollout that cannot continue is stopped with the reason.

A rollout is one record and each of its steps another, so a batch writes only what it changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import protocol, rows
from muster.manage.registry import operations, registry_log, rollout, views
from muster.supervision import tasks

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

events = log.EventLog("manage")

ROLLOUTS, STEPS = "manage.rollouts", "manage.rollout-steps"
STEPS_MAX = 200_000
KEPT, STEPS_KEPT = 100, 2 * STEPS_MAX  # rollouts that are kept, and their steps
LOOK_S = 2.0
RETRY_S = 0.5
HEALTH_LOOK_S, HEALTH_LOOK_EACH_S = 0.1, 1e-4  # longer for a large batch, because all of it is visited


class RolloutExecutor:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry
        self._tasks = tasks.TaskSupervisor(f"rollouts of registry {registry.name}")
        self._running: set[str] = set()
        self._live: dict[str, rollout.Rollout] = {}
        self._ended = False
        self._writing = asyncio.Lock()  # held from the decision about a state until it is stored

    async def begin(self, by: str, plan: dict[str, Any], names: list[str]) -> rows.RolloutRow:
        try:
            rollout_plan = msgspec.convert(plan, rows.RolloutPlan)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(str(error)) from error
        if len(names) > STEPS_MAX:
            raise errors.LimitExceeded(
                f"a rollout of {len(names)} resources exceeds the limit of {STEPS_MAX}",
                hint="narrow the selection",
            )
        steps = {name: rollout.RolloutStep() for name in names}
        begun = rollout.Rollout(
            id=rollout.rollout_id(registry_log.executing.get()),
            by=by,
            plan=rollout_plan,
            steps=steps,
            at_ms=int(time.time() * 1000),
        )
        begun.batch_size()
        begun.update_state()
        old = self._expired_keys()
        await self._write(begun, names, old)
        self._start_task(begun)
        return begun.header().summary()

    async def page(self, id: str | None, after: str, limit: int) -> dict[str, Any]:
        """A page of rollouts, oldest first, or the one with this id."""
        headers = {_key(header): header for header in self._headers() if id is None or header.id == id}
        if id is not None and not headers:
            raise errors.NotFound(f"no rollout {id!r}")

        def row(key: str) -> rows.RolloutRow:
            live = self._live.get(headers[key].id)
            return (live.header() if live is not None else headers[key]).summary()

        return views.page(sorted(key for key in headers if key > after), row, limit)

    async def row(self, id: str) -> rows.RolloutRow:
        result: rows.RolloutRow = (await self.page(id, "", 1))["items"][0]
        return result

    async def steps(self, id: str, after: str, limit: int) -> dict[str, Any]:
        """A page of the steps, in the order of their names."""
        if self._registry.log.get(ROLLOUTS, id) is None:
            raise errors.NotFound(f"no rollout {id!r}")
        prefix = f"{id}/"
        records = self._registry.log.scan(
            STEPS, prefix=prefix, after=f"{prefix}{after}" if after else "", limit=limit + 1
        )
        values = {record.key.removeprefix(prefix): record.value for record in records}

        def row(name: str) -> rows.RolloutStepRow:
            step = msgspec.json.decode(values[name], type=rollout.RolloutStep)
            return rows.RolloutStepRow(name=name, state=step.state, reason=step.reason, result=step.result)

        return views.page(values, row, limit)

    async def set_state(self, id: str, state: str, reason: str) -> rows.RolloutRow:
        """Pause or resume a rollout."""
        async with self._writing:
            current = self._live.get(id) or self._load(id)
            if current.state not in (rollout.RUNNING, rollout.PAUSED, rollout.STOPPED):
                raise errors.Conflict(f"rollout {id} is {current.state}")
            plan, again = current.plan, dict[str, rollout.RolloutStep]()
            if current.state == rollout.STOPPED and state == rollout.RUNNING:
                plan = msgspec.structs.replace(plan, errors_max=len(current.steps))
                again = current.retry_unreachable()
            changed = msgspec.structs.replace(current, state=state, reason=reason, plan=plan)
            changed.update_state()  # it may have been stopped by its last batch
            header = changed.header()
            await self._registry.write(_records(header, again))
            current.state, current.reason, current.plan = header.state, header.reason, header.plan
            self._start_task(current)
        return header.summary()

    async def run(self) -> None:
        """Continue running rollouts, until cancelled."""
        self._ended = False  # it is called again after a failure
        try:
            while True:
                with contextlib.suppress(errors.MusterError):
                    for header in self._headers():
                        if header.state == rollout.RUNNING and header.id not in self._running:
                            async with self._writing:
                                self._start_task(self._load(header.id))
                await asyncio.sleep(LOOK_S)
        finally:
            self._ended = True  # another registry continues rollouts that begin from now on
            await self._tasks.close()

    def _start_task(self, running: rollout.Rollout) -> None:
        if running.state == rollout.RUNNING and running.id not in self._running and not self._ended:
            self._running.add(running.id)
            self._live[running.id] = running
            task = self._tasks.spawn(f"rollout {running.id}", self._run(running))
            task.add_done_callback(lambda _: self._forget(running.id))

    def _forget(self, id: str) -> None:
        self._running.discard(id)
        self._live.pop(id, None)

    async def _run(self, running: rollout.Rollout) -> None:
        registry_log.executing.set("")  # the request that started it has been recorded
        try:
            await self._run_batches(running)
        except errors.Unavailable as error:  # `run` continues from the stored state
            events.warning("rollout-interrupted", rollout=running.id, error=error)
            return
        except Exception as error:  # noqa: BLE001  (it must not stay "running" forever)
            events.error("rollout-failed", rollout=running.id, error=error)
            running.state, running.reason = (
                rollout.STOPPED,
                f"it cannot continue: {error}"[: rollout.REASON_MAX],
            )
            await self._save(running, ())
        if running.state == rollout.PAUSED:
            return
        header = running.header()
        await self._registry.record(
            "rollout",
            running.id,
            running.reason or f"{running.plan.operation} on {len(running.steps)} resources",
            who=self._registry.name,
            on_behalf_of=running.by,
            outcome=messages.DecisionOutcome.DONE
            if running.state == rollout.DONE
            else messages.DecisionOutcome.FAILED,
            **{state: str(count) for state, count in header.counts.items()},
        )

    async def _run_batches(self, running: rollout.Rollout) -> None:
        while batch := running.next_batch():
            running.begin(batch)
            await self._save(running, batch)
            orders = [
                protocol.OperationOrder(
                    id=rollout.order_id(running.id, name),
                    resource=name,
                    operation=running.plan.operation,
                    arguments=running.plan.arguments,
                    timeout_s=running.plan.timeout_s,
                )
                for name in batch
            ]
            answers = await operations.submit_operation(self._registry, orders, running.by)
            done = {
                name: answer.code
                for name, answer in zip(batch, answers, strict=True)
                if answer.outcome is messages.DecisionOutcome.DONE
            }
            problems = (
                await self._find_unhealthy(done, running.plan.healthy_s) if running.plan.healthy_s else {}
            )
            async with self._writing:  # a pause or resume that is being stored comes first
                for name, answer in zip(batch, answers, strict=True):
                    running.end(name, answer, problems.get(name, ""))
                running.update_state()
            await self._save(running, batch)
            if running.state == rollout.RUNNING and running.next_batch():
                await asyncio.sleep(running.plan.pause_s)

    async def _find_unhealthy(self, codes: dict[str, str], within_s: float) -> dict[str, str]:
        """Wait until the resources are settled in their desired state. Returns why others are not.

        ``codes`` has those of their operations.
        """
        loop = asyncio.get_running_loop()
        deadline, left = loop.time() + within_s, set(codes)
        unknown = [name for name, code in codes.items() if code == protocol.NOT_CHECKPOINTED]
        problems = dict.fromkeys(unknown, "its manager could not report its state")
        while left := left - problems.keys():
            state = self._registry.state
            for name in sorted(left):
                if name not in state.resources:  # it was deleted meanwhile
                    left.discard(name)
                    continue
                row = views.resource_row(state, name)
                if rows.is_settled(row):
                    left.discard(name)
                elif rows.is_given_up(row) or loop.time() > deadline:
                    problems[name] = f"it is {row.state}: {row.reason}"
            await asyncio.sleep(HEALTH_LOOK_S + len(left) * HEALTH_LOOK_EACH_S)
        return problems

    # Records

    def _headers(self) -> list[rollout.Rollout]:
        records = self._registry.log.scan(ROLLOUTS)
        return [msgspec.json.decode(record.value, type=rollout.Rollout) for record in records]

    def _load(self, id: str) -> rollout.Rollout:
        record = self._registry.log.get(ROLLOUTS, id)
        if record is None:
            raise errors.NotFound(f"no rollout {id!r}")
        loaded = msgspec.json.decode(record.value, type=rollout.Rollout)
        prefix = f"{id}/"
        loaded.steps = {
            record.key.removeprefix(prefix): msgspec.json.decode(record.value, type=rollout.RolloutStep)
            for record in self._registry.log.scan(STEPS, prefix=prefix)
        }
        return loaded

    def _expired_keys(self) -> list[str]:
        """Keys of the oldest finished rollouts and their steps."""
        finished = [header for header in self._headers() if header.state in (rollout.DONE, rollout.STOPPED)]
        finished.sort(key=lambda header: header.at_ms, reverse=True)
        keys: list[str] = []
        steps = 0
        for number, header in enumerate(finished, start=2):  # with the one that begins
            steps += sum(header.counts.values())
            if number > KEPT or steps > STEPS_KEPT:
                keys += (record.key for record in self._registry.log.scan(STEPS, prefix=f"{header.id}/"))
                keys.append(header.id)
        return keys

    async def _save(self, changed: rollout.Rollout, names: Iterable[str]) -> None:
        """Retry until it can be stored: a batch must be recorded before it starts."""
        while True:
            try:
                await self._write(changed, names, ())
                return
            except errors.Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _write(self, changed: rollout.Rollout, names: Iterable[str], old: Iterable[str]) -> None:
        async with self._writing:
            expired = [(STEPS if "/" in key else ROLLOUTS, key, None) for key in old]
            steps = {name: changed.steps[name] for name in names}
            await self._registry.write([*expired, *_records(changed.header(), steps)])


def _key(header: rollout.Rollout) -> str:
    """The sort key of a list: time, then id."""
    return f"{header.at_ms:015}-{header.id}"


def _records(
    header: rollout.Rollout, steps: dict[str, rollout.RolloutStep]
) -> Iterator[registry_log.RecordChange]:
    yield ROLLOUTS, header.id, msgspec.json.encode(header)
    for name, step in steps.items():
        yield STEPS, f"{header.id}/{name}", msgspec.json.encode(step)
