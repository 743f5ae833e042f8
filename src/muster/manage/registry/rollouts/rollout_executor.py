"""Execution of rollouts: wave after wave, each stored before it starts, so that another registry can
continue.

`rollout` contains the decisions; the operations go through the managers of the resources (`operations`), and
the changes of an update are committed together with its steps. `run` periodically looks for running rollouts
without a task: after a take-over, a lost connection, or a start in doubt. A rollout that cannot continue is
stopped with the reason.

A rollout is one record and each of its steps another, so a wave writes only what it changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import manifest, protocol, rows
from muster.manage.registry import (
    assignments,
    operations,
    records,
    registry_log,
    views,
)
from muster.manage.registry.rollouts import plan as update_plan
from muster.manage.registry.rollouts import rollout
from muster.supervision import tasks

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

events = log.EventLog("manage")

ROLLOUTS, STEPS = "manage.rollouts", "manage.rollout-steps"
STEPS_MAX = 200_000
KEPT, STEPS_KEPT = 100, 2 * STEPS_MAX  # rollouts that are kept, and their steps
SIZE_KEPT = 64 << 20  # of the steps of updates, which contain specifications
LOOK_S = 2.0
HEALTH_LOOK_S, HEALTH_LOOK_EACH_S = 0.1, 1e-4  # longer for a large batch, because all of it is visited
WAIT_LOOK_S, WAIT_LOOK_EACH_S = 0.25, 1e-5  # while nothing can begin, for each resource that does not work
LOGS_MAX, LOG_LINES, LOG_BYTES = 3, 20, 2_000
ACTIVE = (rollout.RUNNING, rollout.PAUSED, rollout.STOPPING)


class FleetView:
    """The fleet, as `rollout.RolloutView`."""

    def __init__(self, state: assignments.AssignmentProcessor, running: rollout.Rollout) -> None:
        self._state = state
        self._members: dict[str, set[str]] = {group: set() for group in running.groups}
        for name, resource in state.resources.items() if running.groups else ():
            if resource.spec.group in self._members and resource.spec.update is not None:
                self._members[resource.spec.group].add(name)
        for name, step in running.steps.items() if running.groups else ():
            if step.spec is not None and step.policy is not None:
                self._members.setdefault(step.spec.group, set()).add(name)

    @property
    def unhealthy(self) -> Collection[str]:
        return self._state.deviating

    def members(self, group: str) -> Collection[str]:
        return self._members.get(group, ())

    def health(self, name: str) -> rollout.StepHealth | None:
        if name not in self._state.resources:
            return None
        row = views.resource_row(self._state, name)
        return rollout.StepHealth(
            is_healthy=rows.is_in(row, None),
            is_settled=rows.is_settled(row),
            is_given_up=rows.is_given_up(row),
            run=(row.restarts, row.since_ms, row.agent),
            reason=f"{row.state}: {row.reason}" if row.reason else row.state,
        )


class RolloutExecutor:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry
        self._tasks = tasks.TaskSupervisor(f"rollouts of registry {registry.name}")
        self._live: dict[str, rollout.RolloutEngine] = {}
        self._ended = False

    # Operations on many resources

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
        begun = rollout.Rollout(
            id=rollout.rollout_id(registry_log.executing.get()),
            by=by,
            plan=rollout_plan,
            steps={name: rollout.RolloutStep() for name in names},
            at_ms=int(time.time() * 1000),
        )
        begun.batch_size()
        engine = rollout.RolloutEngine(begun, _now())
        engine.conclude(_now())
        async with self._registry.writing():
            await self._registry.write([*self._expired(), *_records(begun.header(), begun.steps)])
        self.start(engine)
        return begun.header().summary()

    # Updates

    def prepare(
        self,
        state: assignments.AssignmentProcessor,
        by: str,
        steps: dict[str, rollout.RolloutStep],
        *,
        id: str = "",
        reverts: str = "",
    ) -> tuple[rollout.RolloutEngine, records.RegistryChanges, list[registry_log.RecordChange]]:
        """An update whose first steps have begun, their changes, and its records: to be committed together,
        and then to be started. It replaces the steps of other updates of these resources."""
        set_waves(state, steps)
        active = [update for update in self.active_updates() if update.id != reverts]
        for update in active:
            for name in update.steps.keys() & steps.keys():
                proven, before = update.proven(name), steps[name].before
                if proven is not None and before is not None:
                    steps[name].proven = manifest.placed(proven, before.agent, state.zone_of(before.agent))
        begun = rollout.Rollout(
            id=id or rollout.rollout_id(registry_log.executing.get()),
            by=by,
            plan=rows.RolloutPlan(operation=rollout.UPDATE),
            steps=steps,
            at_ms=int(time.time() * 1000),
            revision=1 + max((header.revision for header in self._headers()), default=0),
            groups=tuple(sorted({step.spec.group for step in steps.values() if step.spec is not None})),
            reverts=reverts,
            waves=max((step.wave for step in steps.values()), default=0),
        )
        engine = rollout.RolloutEngine(begun, _now())
        names = engine.tick(_now(), FleetView(state, begun))
        changes = promote(state, engine, names)
        written = list(_records(begun.header(), steps))
        begun.size = sum(len(value) for _, _, value in written if value is not None)
        written[0] = next(_records(begun.header(), {}))
        engine.changed.clear()
        written += [record for other in active for record in _replaced(other, engine)]
        return engine, changes, [*self._expired(), *written]

    def active_updates(self) -> list[rollout.Rollout]:
        """Updates that have not ended, with their steps."""
        headers = [header for header in self._headers() if header.is_update and header.state in ACTIVE]
        return [
            self._live[each.id].rollout if each.id in self._live else self._load(each.id) for each in headers
        ]

    def targets(self) -> dict[str, tuple[protocol.ResourceSpec, str]]:
        """Specifications that resources will have when the active updates are done, and the ids of these."""
        return {
            name: (step.after, update.id)
            for update in self.active_updates()
            if not update.reverts
            for name, step in update.steps.items()
            if step.after is not None and step.state in (rollout.PENDING, rollout.RUNNING, rollout.DONE)
        }

    def undo_steps(
        self, state: assignments.AssignmentProcessor, group: str, to: int | None
    ) -> dict[str, rollout.RolloutStep]:
        """The steps that return a group to what it was after a revision; without one, before its last one
        that was not reverted."""
        headers = sorted(self._updates_of(group), key=lambda header: -header.revision)
        if not headers:
            raise errors.NotFound(f"no revision of the group {group!r}", hint="updates of it are revisions")
        kept = [header.revision for header in reversed(headers)]
        if to is None:
            in_force = [each.revision for each in headers if not each.reverts and not each.reverted_by]
            if not in_force:
                raise errors.NotFound(f"all revisions of the group {group!r} were reverted")
            to = in_force[0] - 1
        elif to not in kept:
            raise errors.NotFound(
                f"the group {group!r} has no revision {to}", hint=f"it has {', '.join(map(str, kept))}"
            )
        targets: dict[str, protocol.ResourceSpec | None] = {}
        removed: set[str] = set()
        placed: set[str] = set()  # their agents are part of what is undone
        for header in (header for header in headers if header.revision > to):
            for name, step in self._load(header.id).steps.items():
                is_begun = step.state not in (rollout.PENDING, rollout.SKIPPED)
                if is_begun and step.spec is not None and step.spec.group == group:
                    targets[name] = step.before
                    removed |= {name} if step.after is None else set()
                    if step.before is not None and step.after and step.before.agent != step.after.agent:
                        placed.add(name)
        steps = {}
        for name, target in targets.items():
            known = state.resources.get(name)
            if known is None and (target is None or name not in removed):
                continue  # it was deleted by a user
            if known is not None and target is not None and name not in placed:
                target = manifest.placed(target, known.spec.agent, state.zone_of(known.spec.agent))
            if known is None or target is None or known.spec != target:
                steps[name] = rollout.RolloutStep(before=known.spec if known else None, after=target)
        members = {name for name, known in state.resources.items() if known.spec.group == group}
        if members and all(name in steps and steps[name].after is None for name in members):
            raise errors.Conflict(
                f"the group {group!r} did not exist before: to undo that would delete all of it",
                hint="`muster delete` does so",
            )
        for name, step in steps.items():
            for dependency in step.after.depends_on if step.after else ():
                if dependency not in state.resources and dependency not in steps:
                    raise errors.Conflict(
                        f"{name!r} depended on {dependency!r}, which does not exist any more"
                    )
        return steps

    async def revisions(self, group: str, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of what each revision has changed in the resources of a group, oldest first."""
        by_key = {
            f"{header.revision:09}/{name}": rows.RevisionRow(
                revision=header.revision,
                at_ms=header.at_ms,
                by=header.by,
                rollout=header.id,
                state=header.state,
                name=name,
                act="create" if step.before is None else "delete" if step.after is None else "change",
                changes=update_plan.bounded(
                    update_plan.differences(step.before, step.after) if step.before and step.after else {}
                ),
            )
            for header in self._updates_of(group)
            for name, step in self._load(header.id).steps.items()
            if step.spec is not None and step.spec.group == group and step.state != rollout.PENDING
        }
        return views.page(sorted(key for key in by_key if key > after), by_key.__getitem__, limit)

    def begun_by(self, request: str) -> str:
        """The id of the rollout that a request has begun; empty: none."""
        id = rollout.rollout_id(request)
        return id if self._registry.log.get(ROLLOUTS, id) is not None else ""

    def _updates_of(self, group: str) -> list[rollout.Rollout]:
        return [header for header in self._headers() if header.is_update and group in header.groups]

    # What users see

    async def page(self, id: str | None = None, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of rollouts, oldest first, or one (`_id_of`)."""
        id = id and self._id_of(id)
        headers = {_key(header): header for header in self._headers() if id is None or header.id == id}

        def row(key: str) -> rows.RolloutRow:
            live = self._live.get(headers[key].id)
            return (live.rollout.header() if live is not None else headers[key]).summary()

        return views.page(sorted(key for key in headers if key > after), row, limit)

    async def row(self, id: str) -> rows.RolloutRow:
        result: rows.RolloutRow = (await self.page(id))["items"][0]
        return result

    async def steps(self, id: str, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of the steps, in the order of their names."""
        prefix = f"{self._id_of(id)}/"
        stored = self._registry.log.scan(
            STEPS, prefix=prefix, after=f"{prefix}{after}" if after else "", limit=limit + 1
        )
        values = {record.key.removeprefix(prefix): record.value for record in stored}

        def row(name: str) -> rows.RolloutStepRow:
            step = msgspec.json.decode(values[name], type=rollout.RolloutStep)
            return rows.RolloutStepRow(
                name=name, state=step.state, reason=step.reason, result=step.result, wave=step.wave
            )

        return views.page(values, row, limit)

    async def set_state(self, id: str, state: str, reason: str) -> rows.RolloutRow:
        """Pause, resume or abort (`rollout.STOPPED`) a rollout."""
        async with self._registry.writing():
            id = self._id_of(id)
            engine = self._live.get(id) or rollout.RolloutEngine(self._load(id), _now())
            current = engine.rollout
            allowed = (
                rollout.RUNNING,
                rollout.PAUSED,
                *((rollout.STOPPED,) if state != rollout.STOPPED else ()),
            )
            if current.state not in allowed:
                raise errors.Conflict(f"rollout {id} is {current.state}")
            if current.reverted_by:
                raise errors.Conflict(f"rollout {id} was reverted by {current.reverted_by}")
            before = current.state, current.reason, current.plan, current.is_reverting
            match state:
                case rollout.PAUSED:
                    current.state, current.reason = state, reason
                case rollout.RUNNING:
                    engine.resume(_now())
                case _:
                    engine.abort(reason)
            try:
                await self._save(engine)
            except errors.MusterError:
                current.state, current.reason, current.plan, current.is_reverting = before
                raise
            self.start(engine)
        return current.header().summary()

    # Running

    async def run(self) -> None:
        """Continue running rollouts, until cancelled."""
        self._ended = False  # it is called again after a failure
        try:
            while True:
                with contextlib.suppress(errors.MusterError):
                    for header in self._headers():
                        # A paused one may have begun a wave, which it has to judge.
                        is_due = header.state in ACTIVE and header.id not in self._live
                        if is_due and (header.state != rollout.PAUSED or header.counts.get(rollout.RUNNING)):
                            async with self._registry.writing():
                                self.start(rollout.RolloutEngine(self._load(header.id), _now()))
                await asyncio.sleep(LOOK_S)
        finally:
            self._ended = True  # another registry continues rollouts that begin from now on
            await self._tasks.close()

    def progress(self) -> dict[tuple[str, ...], float]:
        """Number of resources by rollout and state of their step, of rollouts that run."""
        headers = [engine.rollout.header() for engine in self._live.values()]
        return {(header.id, state): count for header in headers for state, count in header.counts.items()}

    def start(self, engine: rollout.RolloutEngine) -> None:
        """Continue a rollout that is stored. What it replaces ends."""
        running = engine.rollout
        for other in self._live.values():
            other.replace(engine.replaces.pop(other.rollout.id, ()), running.id)
            record = self._registry.log.get(ROLLOUTS, other.rollout.id)
            stored = record and msgspec.json.decode(record.value, type=rollout.Rollout)
            if stored and stored.state == rollout.SUPERSEDED:
                other.rollout.state, other.rollout.reason = stored.state, stored.reason
        if not engine.is_idle and running.id not in self._live and not self._ended:
            self._live[running.id] = engine
            task = self._tasks.spawn(f"rollout {running.id}", self._run(engine))
            task.add_done_callback(lambda _: self._live.pop(running.id, None))

    async def _run(self, engine: rollout.RolloutEngine) -> None:
        registry_log.executing.set("")  # the request that started it has been recorded
        running = engine.rollout
        try:
            await self._advance(engine)
        except errors.Unavailable as error:  # `run` continues from the stored state
            events.warning("rollout-interrupted", rollout=running.id, error=error)
            return
        except Exception as error:  # noqa: BLE001  (it must not stay "running" forever)
            events.error("rollout-failed", rollout=running.id, error=error)
            running.state = rollout.STOPPED
            running.reason = f"it cannot continue: {error}"[: rollout.REASON_MAX]
            async with self._registry.writing():
                await self._save(engine)
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

    async def _advance(self, engine: rollout.RolloutEngine) -> None:
        running, view = engine.rollout, FleetView(self._registry.state, engine.rollout)
        while True:
            async with self._registry.writing() as state:
                before = running.state
                begun = engine.tick(_now(), view)
                changes = promote(state, engine, begun) if running.is_update else None
                if engine.changed or running.state != before:
                    await self._save(engine, changes)
            if engine.operating:
                await self._operate(engine)
            elif running.state == rollout.STOPPING:
                await self._end_failed(engine)
            elif engine.is_idle:
                return
            elif count := running.number(rollout.RUNNING):
                await asyncio.sleep(HEALTH_LOOK_S + count * HEALTH_LOOK_EACH_S)
            else:
                await asyncio.sleep(WAIT_LOOK_S + len(view.unhealthy) * WAIT_LOOK_EACH_S)

    async def _operate(self, engine: rollout.RolloutEngine) -> None:
        """A step that was running when a previous registry ended is repeated under the same id: the agents
        know its outcome."""
        running, names = engine.rollout, sorted(engine.operating)
        orders = [
            protocol.OperationOrder(
                id=rollout.order_id(running.id, name),
                resource=name,
                operation=running.plan.operation,
                arguments=running.plan.arguments,
                timeout_s=running.plan.timeout_s,
            )
            for name in names
        ]
        answers = await operations.submit_operation(self._registry, orders, running.by)
        for name, answer in zip(names, answers, strict=True):
            engine.operated(name, answer, _now())

    async def _end_failed(self, engine: rollout.RolloutEngine) -> None:
        """Read the logs of what failed before they have those of another run; then return to what was
        before."""
        running = engine.rollout

        async def read_log(name: str) -> None:
            id, age_s = f"{rollout.order_id(running.id, name)}-log", engine.age_s(name, _now())
            running.steps[name].result = await operations.log_end(
                self._registry, name, id, LOG_LINES, LOG_BYTES, since_s=age_s
            )
            engine.changed.add(name)

        await asyncio.gather(*map(read_log, running.named(rollout.FAILED)[:LOGS_MAX]))
        async with self._registry.writing() as state:
            if running.state != rollout.STOPPING:
                return
            steps = running.reversal() if running.is_reverting else {}
            running.state = rollout.STOPPED
            if not steps:
                await self._save(engine)
                return
            id = records.derived_id(f"revert {running.id}", 8)
            revert, changes, written = self.prepare(state, running.by, steps, id=id, reverts=running.id)
            running.reverted_by = id
            await self._save(engine, changes, written)
            self.start(revert)

    # Records

    def _headers(self) -> list[rollout.Rollout]:
        stored = self._registry.log.scan(ROLLOUTS)
        return [msgspec.json.decode(record.value, type=rollout.Rollout) for record in stored]

    def _id_of(self, name: str) -> str:
        """Of a rollout by its id, or of the last update of a group."""
        if self._registry.log.get(ROLLOUTS, name) is not None:
            return name
        last = max(self._updates_of(name), key=lambda header: header.revision, default=None)
        if last is None:
            raise errors.NotFound(f"no rollout {name!r}, and no group of that name was updated")
        return last.id

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

    def _expired(self) -> Iterator[registry_log.RecordChange]:
        """Deletions of the oldest finished rollouts and their steps."""
        finished = [header for header in self._headers() if header.state not in ACTIVE]
        finished.sort(key=lambda header: header.at_ms, reverse=True)
        steps = size = 0
        for number, header in enumerate(finished, start=2):  # with the one that begins
            steps += sum(header.counts.values())
            size += header.size
            if number > KEPT or steps > STEPS_KEPT or size > SIZE_KEPT:
                for record in self._registry.log.scan(STEPS, prefix=f"{header.id}/"):
                    yield STEPS, record.key, None
                yield ROLLOUTS, header.id, None

    async def _save(
        self,
        engine: rollout.RolloutEngine,
        changes: records.RegistryChanges | None = None,
        more: Iterable[registry_log.RecordChange] = (),
    ) -> None:
        """Store what has changed, all or none. Within `writing`."""
        running = engine.rollout
        steps = {name: running.steps[name] for name in engine.changed}
        written = [*_records(running.header(), steps), *more]
        if changes:
            await self._registry.commit(changes, written)
        else:
            await self._registry.write(written)
        engine.changed.clear()


def set_waves(state: assignments.AssignmentProcessor, steps: Mapping[str, rollout.RolloutStep]) -> None:
    """What is deleted comes last."""
    kept = {
        name: msgspec.structs.replace(step.after, update=step.policy)
        for name, step in steps.items()
        if step.after is not None
    }
    gated = {name for name in kept if steps[name].is_gated}
    waves = update_plan.update_waves(kept, gated, state.zone_of, state.deviating)
    last = max(waves.values(), default=0) + 1
    for name, step in steps.items():
        step.wave = waves.get(name, last)


def _replaced(other: rollout.Rollout, by: rollout.RolloutEngine) -> Iterator[registry_log.RecordChange]:
    """The records of an update, of whose resources another one changes some. It ends if no others are
    left."""
    names = other.steps.keys() & by.rollout.steps.keys()
    left = {*other.named(rollout.PENDING), *other.named(rollout.RUNNING), *other.named(rollout.FAILED)}
    if left and left <= names:
        reason = f"rollout {by.rollout.id} replaces it"
        yield from _records(
            msgspec.structs.replace(other.header(), state=rollout.SUPERSEDED, reason=reason), {}
        )
    elif names:
        by.replaces[other.id] = names
        replaced = dict[str, rollout.RolloutStep]()
        for name in names:
            state, reason = rollout.replacement(other.steps[name], by.rollout.id)
            replaced[name] = msgspec.structs.replace(other.steps[name], state=state, reason=reason)
        copied = msgspec.structs.replace(other, steps={**other.steps, **replaced})
        yield from _records(copied.header(), replaced)


def promote(
    state: assignments.AssignmentProcessor, engine: rollout.RolloutEngine, names: Iterable[str]
) -> records.RegistryChanges:
    """The changes of steps that begin. A step whose resource was changed by somebody else is skipped."""
    changes = records.RegistryChanges(epoch=state.epoch)
    deleted = []
    for name in names:
        step, known = engine.rollout.steps[name], state.resources.get(name)
        if known is not None and step.before is not None and known.spec.agent != step.before.agent:
            _follow(step, known.spec.agent, state.zone_of(known.spec.agent))
        if known is None if step.before is not None else known is not None and known.spec != step.after:
            engine.skip(name, "it was created or deleted meanwhile")
        elif known is not None and (
            known.deleting or not _is_of(step, known.spec, state.zone_of(known.spec.agent))
        ):
            engine.skip(name, "it was changed or deleted meanwhile")
        elif step.after is None:
            deleted.append(name)
        else:
            try:
                changes.resources |= state.apply([step.after], engine.rollout.by).resources
            except errors.Conflict as error:
                engine.fail(name, error.message)
    try:
        changes.resources |= state.delete(deleted, engine.rollout.by).resources
    except errors.Conflict as error:
        for name in deleted:
            engine.fail(name, error.message)
    return changes


def _follow(step: rollout.RolloutStep, agent: str, zone: str) -> None:
    """Its resource was moved meanwhile."""
    step.before = step.before and manifest.placed(step.before, agent, zone)
    step.after = step.after and manifest.placed(step.after, agent, zone)
    step.proven = step.proven and manifest.placed(step.proven, agent, zone)


def _is_of(step: rollout.RolloutStep, spec: protocol.ResourceSpec, zone: str) -> bool:
    after = step.after
    if after is not None and after.agent != spec.agent:  # it is leaving its agent
        after = manifest.placed(after, spec.agent, zone)
    return spec in (step.before, after)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _key(header: rollout.Rollout) -> str:
    """The sort key of a list: time, then id."""
    return f"{header.at_ms:015}-{header.id}"


def _records(
    header: rollout.Rollout, steps: Mapping[str, rollout.RolloutStep]
) -> Iterator[registry_log.RecordChange]:
    yield ROLLOUTS, header.id, msgspec.json.encode(header)
    for name, step in steps.items():
        yield STEPS, f"{header.id}/{name}", msgspec.json.encode(step)
