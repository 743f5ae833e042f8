"""Starts the runs of periodic jobs and keeps the history of what has ended.

A run is created in the same commit that records that its time was considered (`schedules`), under a name that
follows from its time: no registry starts it twice. When a run of a job has ended, its outcome and the end of
its output are stored; in the same commit, the run of a periodic job is deleted. What reads the output is
repeated by the next registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, health
from muster.core.telemetry import log
from muster.manage import protocol, rows
from muster.manage.registry import (
    agent_selection,
    assignments,
    moves,
    operations,
    records,
    registry_log,
    views,
)
from muster.manage.registry.jobs import schedules

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

events = log.EventLog("manage")

SCHEDULES, RUNS = "manage.schedules", "manage.runs"
LOOK_S, LOOK_S_MAX = 1.0, 30.0  # while a job runs or waits; otherwise the clock may be set meanwhile
ENDED_MAX = 50  # runs whose output is read together
OUTPUT_LINES, OUTPUT_BYTES = 50, 4_096
CLOCKS_S = 1.0  # by which those of manager and registry may differ
COMPLETED, FAILED, DOWN = health.HealthState.COMPLETED, health.HealthState.FAILED, health.HealthState.DOWN
UP = protocol.DesiredState.UP


class JobExecutor:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry
        self._clock = registry.clock
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Start what is due and record what has ended, until cancelled."""
        while True:
            self.changed.clear()
            wait_s = LOOK_S
            try:
                ended = await self._read_outputs()
                async with self._registry.writing() as state:
                    await self._tick(state, ended)
                wait_s = self._wait_s(state)
            except errors.MusterError as error:
                events.warning("jobs-interrupted", error=error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.changed.wait()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _wait_s(self, state: assignments.AssignmentProcessor) -> float:
        due = [LOOK_S_MAX]
        for name in state.index.jobs:
            if state.resources[name].spec.schedule is None:
                due.append(LOOK_S_MAX if self._run_of(state, name) else LOOK_S)
            elif (stored := self._schedule(name)) is not None:
                at_ms = schedules.next_ms(stored)
                due.append(LOOK_S if stored.queue else (at_ms or 0) / 1000 - self._clock())
        return max(0.05, min(due))

    # What has ended

    async def _read_outputs(self) -> dict[str, rows.JobRunRow]:
        """The ends that are not in the history yet, by the names of the resources."""
        state, ended = self._registry.state, dict[str, rows.JobRunRow]()
        for name in sorted(state.index.jobs):
            is_new = state.resources[name].spec.schedule is None and self._run_of(state, name) is None
            if is_new and (row := _ended(state, name)) is not None and len(ended) < ENDED_MAX:
                ended[name] = row
        with_output = [name for name, row in ended.items() if row.state != "deleted"]
        outputs = await asyncio.gather(*(self._output(name, ended[name].began_ms) for name in with_output))
        for name, output in zip(with_output, outputs, strict=True):
            ended[name] = msgspec.structs.replace(ended[name], output=output)
        return ended

    async def _output(self, name: str, began_ms: int) -> str:
        """Of this run; the log may begin with that of earlier ones."""
        id = records.order_id(f"job-{self._registry.state.resources[name].generation}-log", name)
        since_s = max(0.0, (self._now_ms() - began_ms) / 1000 + CLOCKS_S) if began_ms else None
        text = await operations.log_end(self._registry, name, id, OUTPUT_LINES, OUTPUT_BYTES, since_s=since_s)
        return text or ""

    async def _tick(self, state: assignments.AssignmentProcessor, ended: dict[str, rows.JobRunRow]) -> None:
        now_ms = self._now_ms()
        changes, more = records.RegistryChanges(epoch=state.epoch), list[registry_log.RecordChange]()
        over = set[str]()  # runs that end with this commit
        for name, row in ended.items():
            if name in state.resources and _ended(state, name) is not None:
                more += self._stored(
                    state, name, msgspec.structs.replace(row, ended_ms=row.ended_ms or now_ms)
                )
                if state.resources[name].spec.is_run:
                    over.add(name)
        changes.resources |= state.delete(over, "").resources
        for name in sorted(state.index.jobs):
            if state.resources[name].spec.schedule is not None:
                more += self._start_due(state, name, over, changes, now_ms)
        if changes or more:
            await self._registry.commit(changes, more)

    def _stored(
        self, state: assignments.AssignmentProcessor, name: str, row: rows.JobRunRow
    ) -> Iterator[registry_log.RecordChange]:
        """The record of what has ended, and the deletions of the oldest ones of its job."""
        policy = state.resources[name].spec.job or protocol.JobPolicy()
        yield RUNS, _run_key(row), msgspec.json.encode(row)
        kept = self._runs(row.job)
        for old in kept[: max(0, len(kept) + 1 - policy.keep)]:
            yield RUNS, _run_key(old), None

    # What is due

    def _start_due(
        self,
        state: assignments.AssignmentProcessor,
        name: str,
        over: Collection[str],
        changes: records.RegistryChanges,
        now_ms: int,
    ) -> Iterator[registry_log.RecordChange]:
        """Adds the runs of a periodic job that begin to ``changes``; its records."""
        record = state.resources[name]
        policy, before = record.spec.schedule, self._schedule(name)
        assert policy is not None
        after, problem = schedules.current(policy, before, now_ms), ""
        if record.spec.desired is not UP:
            after = schedules.suspend(after, now_ms)
        else:
            active = [run for run in state.runs(name) if run not in over and not self._is_over(state, run)]
            due = schedules.decide(policy, after, active, now_ms)
            after = due.state
            if due.stops:
                left = [run for run in active if not state.resources[run].deleting]
                changes.resources |= state.delete(left, record.by).resources
            try:
                for at_ms in due.starts:
                    self._create(state, record, schedules.run_name(name, at_ms), changes)
                    after = schedules.begun(after, (at_ms,))
            except errors.MusterError as error:
                problem = error.message
                after = schedules.without_late(policy, after, now_ms)
        if after != before:
            yield SCHEDULES, name, msgspec.json.encode(after)
        status = _schedule_status(record, after, problem)
        if status != state.statuses.get(name):
            changes.statuses[name] = status

    def _is_over(self, state: assignments.AssignmentProcessor, run: str) -> bool:
        row = self._run_of(state, run)
        return row is not None and row.state != "deleted"

    def _create(
        self,
        state: assignments.AssignmentProcessor,
        job: records.ResourceRecord,
        name: str,
        changes: records.RegistryChanges,
    ) -> None:
        has_run = self._registry.log.get(RUNS, _key(job.spec.name, name, 1))  # before the clock was set back
        if has_run or name in state.resources or name in changes.resources:
            return
        now, presence = asyncio.get_running_loop().time(), self._registry.presence
        others = agent_selection.OtherAgents(
            state, (), lambda agent: moves.is_suitable(state, presence, agent, now)
        )
        spec = schedules.run_spec(job.spec, name)
        agent = others.place(msgspec.structs.replace(spec, where=job.spec.where)).agent
        changes.resources |= state.apply([msgspec.structs.replace(spec, agent=agent)], job.by).resources

    async def start_run(self, by: str, name: str) -> rows.JobStart:
        """Run a job now, for a user."""
        request = registry_log.executing.get()
        async with self._registry.writing() as state:
            record = state.resources.get(name)
            if record is None or record.spec.job is None:
                raise errors.NotFound(f"no job {name!r}", hint="`muster job list` shows them")
            if record.spec.is_run:
                raise errors.Refused(
                    f"{name!r} is a run", hint=f"start another one: muster job run {record.spec.entry}"
                )
            runs = state.runs(name) if record.spec.schedule else (name,)
            active = [run for run in runs if not self._is_over(state, run)]
            if active and (record.spec.schedule is None or record.spec.schedule.concurrency != "allow"):
                raise errors.Conflict(f"{active[0]!r} has not ended", hint="wait for its end, or delete it")
            changes = records.RegistryChanges(epoch=state.epoch)
            begun = rows.JobStart(job=name, resource=name, generation=record.generation + 1)
            if record.spec.schedule is not None:
                begun = rows.JobStart(job=name, resource=_manual(name, request), generation=1)
                self._create(state, record, begun.resource, changes)
            else:
                again = msgspec.structs.replace(record, generation=begun.generation, by=by)
                changes.resources[name] = again
            await self._registry.commit(changes)
            return begun

    def started(self, name: str, request: str) -> rows.JobStart:
        """What the request has started; also if that has ended meanwhile."""
        record = self._registry.state.resources.get(name)
        if record is None:
            raise errors.NotFound(f"no job {name!r}")
        if record.spec.schedule is None:
            return rows.JobStart(job=name, resource=name, generation=record.generation)
        return rows.JobStart(job=name, resource=_manual(name, request), generation=1)

    # What users see

    async def page(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of jobs."""
        state = self._registry.state

        def row(name: str) -> rows.JobRow:
            spec, stored = state.resources[name].spec, self._schedule(name)
            shown, runs = views.resource_row(state, name), self._runs(name)
            last = runs[-1] if runs else None
            active = state.runs(name) if spec.schedule else [name]
            return rows.JobRow(
                name=name,
                cron=spec.schedule.cron if spec.schedule else "",
                time_zone=spec.schedule.time_zone if spec.schedule else "",
                state=shown.state,
                reason=shown.reason,
                next_ms=schedules.next_ms(stored) if stored and spec.desired is UP else None,
                active=sum(not self._is_over(state, run) for run in active),
                waiting=len(stored.queue) if stored else 0,
                skipped=stored.skipped if stored else 0,
                missed=stored.missed if stored else 0,
                last_state=last.state if last else "",
                last_ms=last.ended_ms if last else None,
            )

        names = (name for name in state.index.jobs if name > after and not state.resources[name].spec.is_run)
        return views.page(sorted(names), row, limit)

    async def history(self, name: str = "", after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """A page of the ended runs of a job, or of all, oldest first."""
        if name and name not in self._registry.state.index.jobs:
            raise errors.NotFound(f"no job {name!r}", hint="`muster job list` shows them")
        by_key = {f"{row.ended_ms:015}-{_run_key(row)}": row for row in self._runs(name)}
        return views.page(sorted(key for key in by_key if key > after), by_key.__getitem__, limit)

    # Records

    def _schedule(self, name: str) -> schedules.ScheduleState | None:
        record = self._registry.log.get(SCHEDULES, name)
        return None if record is None else msgspec.json.decode(record.value, type=schedules.ScheduleState)

    def _runs(self, job: str) -> list[rows.JobRunRow]:
        stored = self._registry.log.scan(RUNS, prefix=f"{job}/" if job else "")
        decoded = (msgspec.json.decode(record.value, type=rows.JobRunRow) for record in stored)
        return sorted(decoded, key=lambda row: row.ended_ms)

    def _run_of(self, state: assignments.AssignmentProcessor, name: str) -> rows.JobRunRow | None:
        """The end of the present run of a resource, if it is in the history."""
        resource = state.resources[name]
        is_run = resource.spec.is_run
        key = _key(resource.spec.entry if is_run else name, name, 1 if is_run else resource.generation)
        record = self._registry.log.get(RUNS, key)
        return None if record is None else msgspec.json.decode(record.value, type=rows.JobRunRow)


def removed(
    log_: registry_log.RegistryLog,
    state: assignments.AssignmentProcessor,
    changed: dict[str, records.ResourceRecord | None],
) -> Iterator[registry_log.RecordChange]:
    """With a job, its schedule and its history are deleted."""
    for name, record in changed.items():
        if record is None and name in state.index.jobs and not state.resources[name].spec.is_run:
            yield SCHEDULES, name, None
            yield from ((RUNS, run.key, None) for run in log_.scan(RUNS, prefix=f"{name}/"))


def _ended(state: assignments.AssignmentProcessor, name: str) -> rows.JobRunRow | None:
    """The end of the present run, without its output; None: it has not ended."""
    resource, status = state.resources[name], state.statuses.get(name)
    spec, shown = resource.spec, state.state_of(name)
    if spec.entry not in state.resources if spec.is_run else resource.deleting:
        return None  # with its job, its history is deleted
    is_ended = not resource.deleting and shown in (COMPLETED, FAILED)
    outcome, reason = shown.value, status.reason if status else ""
    if resource.deleting:
        outcome, reason = "deleted", f"deleted by {resource.by}"
    elif not is_ended and spec.is_run and shown is DOWN and state.desired_state(name) is not UP:
        is_ended, outcome, reason = not resource.stop_after_s, FAILED.value, "it was drained"
    if not is_ended and not resource.deleting:
        return None
    exit_code = status.properties.get("exit_code") if status and is_ended else None
    return rows.JobRunRow(
        job=spec.entry if spec.is_run else name,
        resource=name,
        generation=1 if spec.is_run else resource.generation,
        agent=spec.agent,
        state=outcome,
        reason=reason,
        began_ms=status.began_ms if status else 0,
        ended_ms=status.since_ms if status and is_ended else 0,
        exit_code=exit_code if isinstance(exit_code, int) else None,
    )


def _schedule_status(
    record: records.ResourceRecord, state: schedules.ScheduleState, problem: str
) -> protocol.ResourceStatus:
    """As of a resource that is as desired: it waits for its next run."""
    is_up, at_ms = record.spec.desired is UP, schedules.next_ms(state)
    reason = "no run is due any more"
    if not is_up:
        reason = "suspended"
    elif problem:
        reason = f"a run is due and cannot start: {problem}"
    elif at_ms is not None:
        reason = f"next run: {datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    return protocol.ResourceStatus(
        state=health.HealthState.UP if is_up else DOWN,
        reason=reason,
        generation=record.generation,
        desired_generation=record.generation,
        stable=True,
    )


def _manual(job: str, request: str) -> str:
    """The name of a run that a user has requested."""
    return f"{job}-{records.derived_id(request, 8)}"


def _key(job: str, resource: str, generation: int) -> str:
    return f"{job}/{resource}.{generation}"


def _run_key(row: rows.JobRunRow) -> str:
    return _key(row.job, row.resource, row.generation)
