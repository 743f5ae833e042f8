"""The client of management, for users, web, wsman, cli and simulate.

    fleet = client.ManageClient(bus)
    await fleet.apply(open("fleet.yaml").read())
    await fleet.wait("web-1", "up")

The operations on one resource are `describe` (its complete representation; `observe` queries the adapter
first), `create`, `put`, `delete`, `rename`, `enumerate` (in pages), `subscribe` and `execute`.  All of them
go through the registry, so that desired and actual state do not diverge; errors are those of `core.errors`.

A gateway that acts for users it has authenticated names them: ``ManageClient(bus, on_behalf_of="alice")`` is
recorded in the audit.  Authorization uses the gateway's own identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages, subjects
from muster.core.settings import loader
from muster.manage import (
    change_feed,
    command_session,
    log_stream,
    manifest,
    operation_results,
    protocol,
    rows,
)
from muster.manage import secrets as manage_secrets
from muster.manage.adapters import plugins
from muster.trust import sealed_box

TIMEOUT_S = 30.0
READ_TRY_S = 2.0
SHELL_TRY_S = 5.0
EXEC_TRY_S = 3.0  # the same id is executed once: a request lost by a broker is repeated
LOOK_S = 1.0  # poll interval: a resource that stays up changes no state, and a change may be missed
NAMES_MAX = 500  # in one request: replies must fit into a message
LOG_TRY_S = 6.0  # longer than the registry waits for a machine
LOG_LINES = 1_000
LOGS_MAX = 500  # resources whose logs are read together
OUTPUTS_MAX, OUTPUT_LINES = 3, 10  # in the notes of an error: logs, and lines of each
EXEC_FEWER = (20, 1)  # batch sizes for repeating truncated results

T = TypeVar("T")


class ManageClient:
    def __init__(self, bus: api.Bus, *, timeout_s: float = TIMEOUT_S, on_behalf_of: str = "") -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._on_behalf_of = on_behalf_of
        self.dropped = 0  # changes and events that a slow subscriber did not receive

    # Manifests

    async def apply(
        self,
        text: str,
        *,
        wait_s: float | None = None,
        progress: Callable[[str, float], None] = lambda name, part: None,
    ) -> rows.ApplyResult:
        """Apply the text of a manifest, all of it or nothing; `manifest.ManifestError` has line and field.

        With ``wait_s``, waits until the update is done (each resource was healthy for the
        ``min_healthy_time_s`` of its policy) and all resources are in their desired state and stay there.
        Raises `errors.Refused` as soon as the update fails or a resource is given up, `errors.TimedOut`
        after the time.
        """
        entries = await _entries(text)
        packed = await asyncio.to_thread(manifest.pack_entries, entries)
        result = await self._request(rows.ApplyResult, "apply", entries=packed)
        if wait_s is not None:
            deadline, names = time.monotonic() + wait_s, manifest.resource_names(entries)
            try:
                if result.rollout:
                    row = await self.wait_rollout(result.rollout, timeout_s=wait_s, progress=progress)
                    _require_done(row)
                left_s = max(0.1, deadline - time.monotonic())
                await self.wait_settled(*names, timeout_s=left_s, progress=progress)
            except errors.MusterError as error:
                error.hint = error.hint or "; ".join(result.notes) or None
                await self._note_outputs(error, names, result.rollout)
                raise
            left_s = max(0.1, deadline - time.monotonic())
            await self.wait_gone(*result.deleting, timeout_s=left_s)
        return result

    async def _note_outputs(self, error: errors.MusterError, names: Sequence[str], rollout: str) -> None:
        """Add the last lines of the logs of what failed to the error."""
        outputs: dict[str, str] = {}
        with contextlib.suppress(errors.MusterError):
            for step in await self.rollout_steps(rollout) if rollout else ():
                if step.state == "failed":
                    outputs[step.name] = str(step.result or "")
            there = await self._read(list[str], "existing", names=list(names[:NAMES_MAX]))
            is_late = isinstance(error, errors.TimedOut)  # otherwise, what is being changed has not failed
            for row in await self.get(*there) if there else ():
                has_failed = rows.is_given_up(row) or (is_late and not rows.is_settled(row))
                if has_failed and row.name not in outputs and len(outputs) < OUTPUTS_MAX:
                    outputs[row.name] = await self.logs(row.name)
        for name, output in list(outputs.items())[:OUTPUTS_MAX]:
            for line in output.splitlines()[-OUTPUT_LINES:]:
                error.add_note(f"{name}: {line}")

    async def plan(self, text: str) -> list[rows.PlanStep]:
        """The steps of an apply, in the order of execution."""
        entries = await asyncio.to_thread(manifest.pack_entries, await _entries(text))
        return [step async for step in self._pages(rows.PlanStep, "plan", entries=entries)]

    async def delete_manifest(self, text: str, *, force: bool = False) -> rows.DeleteResult:
        """Delete the resources of a manifest, as far as they exist."""
        names = manifest.resource_names(await _entries(text))
        there = [
            name
            for part in _parts(names, NAMES_MAX)
            for name in await self._read(list[str], "existing", names=part)
        ]
        return await self.delete(*(there or names), force=force)

    # One resource

    async def create(self, entry: Mapping[str, Any]) -> rows.ResourceDescription:
        """Create a resource from an ``entry`` as in a manifest: name, type, agent or where, config, …

        Raises `errors.AlreadyExists`. Returns its description at once; `wait` waits until it is up.
        """
        await _check(entry)
        return await self._request(rows.ResourceDescription, "create", entry=dict(entry))

    async def put(
        self, name: str, *, generation: int | None = None, **changes: Any
    ) -> rows.ResourceDescription:
        """Change fields of its entry: ``put("web-1", config={…}, desired="down")``.

        ``generation`` is the one that was read before: `errors.Conflict` if it has changed since.
        """
        if "config" in changes:
            known = await self.describe(name)
            await _check({"name": name, "type": known.type, "agent": "any", "config": changes["config"]})
        return await self._request(
            rows.ResourceDescription, "put", name=name, changes=changes, generation=generation
        )

    async def rename(self, name: str, to: str) -> rows.ResourceDescription:
        """Rename a resource without interrupting it; its dependants refer to the new name."""
        return await self._request(rows.ResourceDescription, "rename", name=name, to=to)

    async def delete(
        self, *names: str, generation: int | None = None, force: bool = False
    ) -> rows.DeleteResult:
        """Returns when the deletion is recorded; `wait_gone` waits for it. ``generation``: as in `put`.

        ``force`` removes the resources from the registry at once, without their agents: for machines that are
        lost. A machine that returns deletes what still runs there.
        """
        return await self._request(
            rows.DeleteResult, "delete", names=list(names), generation=generation, force=force
        )

    async def describe(self, name: str) -> rows.ResourceDescription:
        """All details of a resource: its row, ``spec``, ``status``, who applied it, what it waits for."""
        return await self._read(rows.ResourceDescription, "describe", name=name)

    async def observe(self, name: str) -> protocol.ObservedState:
        """The current observation of its adapter."""
        return _convert(await self.execute(name, protocol.Verb.GET.value), protocol.ObservedState)

    async def operations(self, name: str) -> list[str]:
        """The operations that `execute` accepts for this resource."""
        operations: list[str] = (await self.execute(name, protocol.Verb.ENUMERATE.value))["operations"]
        return operations

    async def execute(
        self,
        name: str,
        operation: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> Any:
        """The result of the operation; raises if it was refused, failed, or is in doubt
        (`errors.TimedOut`).
        """
        (row,) = await self.exec(operation, name, arguments=arguments, timeout_s=timeout_s, id=id)
        outcome = messages.DecisionOutcome(row.outcome)
        if outcome is messages.DecisionOutcome.DONE:
            return row.result
        raise operation_results.to_error(name, operation, outcome, row.code, row.reason)

    async def logs(self, name: str, *, lines: int = LOG_LINES, since_s: float | None = None) -> str:
        """The last lines of its log, or of what was written within ``since_s``."""
        problems: list[str] = []
        stream = self.log_lines(name, lines=lines, since_s=since_s, note=problems.append)
        text = "".join([f"{item.line}\n" async for item in stream])
        if problems and not text:
            raise errors.Unavailable(problems[0])
        return text

    def log_lines(
        self,
        *names: str,
        where: str = "",
        lines: int | None = LOG_LINES,
        since_s: float | None = None,
        follow: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> AsyncGenerator[rows.LogLine]:
        """The last ``lines`` of each log, or of what was written within ``since_s``; None: all that is kept.

        ``follow``: then what is written later, also by resources that match ``where`` later, until the
        iterator is closed. ``note`` is called with what prevents that some lines are read.
        """
        if bool(names) == bool(where):
            raise errors.InvalidInput("either names or an expression is required")

        is_first = True

        async def find() -> dict[str, str]:
            nonlocal is_first
            chosen = list(names)
            if chosen and not is_first:  # some may have been deleted meanwhile
                chosen = await self._read(list[str], "existing", names=chosen)
                if not chosen:
                    return {}
            is_first = False
            matching = await self.get(*chosen, where=where)
            if len(matching) > LOGS_MAX:
                raise errors.LimitExceeded(
                    f"{len(matching)} resources are selected; logs of at most {LOGS_MAX} can be read together"
                )
            return {row.name: row.agent for row in matching}

        first = protocol.LogQuery(lines=lines, since_s=since_s)
        stream = log_stream.LogStream(
            find, self.log_parts, first, follows=follow, joins=bool(where), note=note
        )
        return stream.lines()

    async def log_parts(self, queries: Mapping[str, protocol.LogQuery]) -> list[rows.LogRow]:
        """A part of the log of each resource; the next one follows its cursor."""
        return await self._read(list[rows.LogRow], protocol.LOGS, try_s=LOG_TRY_S, queries=dict(queries))

    # Many resources

    async def get(self, *names: str, where: str = "") -> list[rows.ResourceRow]:
        """Rows of the named resources, of those that match ``where``, or of all."""
        if not names:
            return [row async for row in self._pages(rows.ResourceRow, "enumerate", where=where)]
        parts = _parts(names, NAMES_MAX)
        pages = await asyncio.gather(*(self._read_all(rows.ResourceRow, "get", part) for part in parts))
        return [row for page in pages for row in page]

    async def _read_all(self, kind: type[T], verb: str, names: Sequence[str], **arguments: Any) -> list[T]:
        """An item for each name, as many at a time as fit into a message."""
        items: list[T] = []
        while len(items) < len(names):
            items += await self._read(list[kind], verb, names=names[len(items) :], **arguments)  # type: ignore[valid-type]
        return items

    async def enumerate(self, *, where: str = "", after: str = "", limit: int = 100) -> rows.ResourcePage:
        """Rows in the order of their names, after ``after``; at most ``limit``, and as many as fit."""
        return await self._read(rows.ResourcePage, "enumerate", where=where, after=after, limit=limit)

    async def names(self, *, where: str = "") -> list[str]:
        pages = self._pages(str, "enumerate", where=where, limit=5_000, names_only=True)
        return [name async for name in pages]

    async def exec(
        self,
        operation: str,
        *names: str,
        where: str = "",
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[rows.ExecutionRow]:
        """Execute an operation on all of them concurrently; a row with the outcome of each.

        A repeated ``id`` is not executed again. In rows with ``truncated``, the result is incomplete.
        """
        if not names and not where:
            raise errors.InvalidInput("names or an expression is required")
        chosen = list(names) or await self.names(where=where)
        id = id or secrets.token_hex(8)

        async def ask(part: list[str]) -> list[rows.ExecutionRow]:
            return await self._request(
                list[rows.ExecutionRow],
                "exec",
                extra_s=timeout_s,
                try_s=EXEC_TRY_S,
                operation=operation,
                names=part,
                arguments=dict(arguments or {}),
                timeout_s=timeout_s,
                id=id,
            )

        pages = await asyncio.gather(*map(ask, _parts(chosen, NAMES_MAX)))
        results = [row for page in pages for row in page]
        # Repeat truncated results in smaller batches, which leave more room for each.
        for many in EXEC_FEWER:
            cut = [number for number, row in enumerate(results) if row.truncated]
            for numbers in _parts(cut, many) if len(results) > many else ():
                again = await ask([results[number].resource for number in numbers])
                for number, row in zip(numbers, again, strict=True):
                    if row.result is not None:  # the agent may have dropped it meanwhile
                        results[number] = row
        return results

    def run_inside(
        self, resource: str, *command: str, terminal: str = "", rows: int = 24, columns: int = 80
    ) -> command_session.CommandSession:
        """Run a command inside a resource: as its user, in its directory, with its environment and limits.

        ``terminal``: the type of the user's terminal, such as ``xterm``; empty: the command has none. A size
        of 0 is not known.
        """
        size = {"rows": rows or 24, "columns": columns or 80}
        shell = protocol.ShellCommand(command=command, terminal=terminal, **size)
        request = functools.partial(self._request, try_s=SHELL_TRY_S)
        return command_session.CommandSession(request, resource, shell)

    async def drain(self, name: str, kind: protocol.DrainKind | None = None) -> rows.DrainResult:
        """Drain a resource or all resources of an agent, which then accepts no more. ``kind`` is required if
        both have this name.
        """
        return await self._request(rows.DrainResult, "drain", name=name, target=kind)

    async def undrain(self, name: str, kind: protocol.DrainKind | None = None) -> rows.DrainResult:
        return await self._request(rows.DrainResult, "undrain", name=name, target=kind)

    async def forget(self, agent: str, *, force: bool = False, is_revoked: bool = False) -> rows.ForgetResult:
        """Remove the resources of an agent that will not return, without contacting it.

        `errors.Conflict` if it is live, unless ``force``: then it deletes them. One that returns deletes what
        it still hosts, and its credentials end. ``is_revoked``: they have ended.
        """
        return await self._request(
            rows.ForgetResult, "forget", agent=agent, force=force, is_revoked=is_revoked
        )

    async def forgotten(self) -> list[rows.ForgottenAgent]:
        """Forgotten agents whose credentials have not ended."""
        return await self._read(list[rows.ForgottenAgent], "forgotten")

    async def orphans(self) -> list[rows.OrphanRow]:
        """Resources on machines where they do not belong."""
        return [row async for row in self._pages(rows.OrphanRow, "orphans")]

    async def summary(self) -> rows.FleetSummary:
        """Number of resources in each state, group, type and manager."""
        return await self._read(rows.FleetSummary, "summary")

    async def agents(self) -> list[rows.AgentRow]:
        return [row async for row in self._pages(rows.AgentRow, "agents")]

    async def managers(self) -> list[rows.ManagerRow]:
        return [row async for row in self._pages(rows.ManagerRow, "managers")]

    # Changes and events

    async def subscribe(self, *names: str, where: str = "") -> AsyncIterator[change_feed.ChangeOrEvent]:
        """Changes of health, as managers publish them, and events of the resources.

        Only of the named resources, if any are given, and only those that match ``where``: a predicate on the
        fields ``resource``, ``state``, ``was``, ``reason``, ``manager`` of a change, on ``resource``,
        ``what`` and the details of an event, and on the attributes that `get` knows.
        """
        async with self.listening(*names, where=where) as events:
            async for event in events:
                yield event

    @contextlib.asynccontextmanager
    async def listening(
        self, *names: str, where: str = ""
    ) -> AsyncIterator[AsyncIterator[change_feed.ChangeOrEvent]]:
        """As `subscribe`; nothing that happens after entering is missed."""
        feed = change_feed.ChangeFeed(names, where, self._attributes)
        try:
            async with feed.listening(self._bus) as events:
                yield events
        finally:
            self.dropped += feed.dropped

    async def _attributes(self, names: Sequence[str], keys: Sequence[str]) -> list[dict[str, Any]]:
        """Those attributes of each resource; empty for one that does not exist."""
        return await self._read_all(dict[str, Any], "attributes", names, keys=keys)

    async def watch(self, *names: str, where: str = "") -> AsyncIterator[protocol.ResourceStateChange]:
        """Changes of health only; ``names`` and ``where`` as in `subscribe`."""
        if where and not rows.check_change_condition(where):
            await self._read(dict[str, Any], "check-condition", where=where, fields=[*rows.CHANGE_FIELDS])
        async for event in self.subscribe(*names, where=where):
            if isinstance(event, protocol.ResourceStateChange):
                yield event

    async def wait(self, name: str, state: str | None = None, *, timeout_s: float = 30.0) -> rows.ResourceRow:
        """Wait until the registry reports this state, or without one the desired state."""
        row: rows.ResourceRow | None = None

        async def look() -> bool:
            nonlocal row
            (row,) = await self.get(name)
            return rows.is_in(row, state)

        await self._poll(look, timeout_s, lambda: rows.condition(row) or f"no reply about {name}")
        assert row is not None
        return row

    async def wait_settled(
        self,
        *names: str,
        timeout_s: float = 30.0,
        progress: Callable[[str, float], None] = lambda name, part: None,
    ) -> None:
        """Wait until each has reached its desired state and stays there. Raises `errors.Refused` if one is
        given up.
        """
        left = list(names)
        row: rows.ResourceRow | None = None

        async def look() -> bool:
            nonlocal left, row
            while left:
                waiting = [item for item in await self.get(*left[:NAMES_MAX]) if not rows.is_settled(item)]
                left = [item.name for item in waiting] + left[NAMES_MAX:]
                for item in filter(rows.is_given_up, waiting):
                    raise errors.Refused(rows.condition(item), hint=rows.given_up_hint(item.name))
                if waiting:
                    row = waiting[0]
                    progress(row.name, 1 - len(left) / len(names))
                    return False
            return True

        await self._poll(look, timeout_s, lambda: rows.condition(row) or "no reply")

    async def wait_gone(self, *names: str, timeout_s: float = 30.0) -> None:
        """Wait until none of the resources exists, in batches."""
        left = list(names)
        row: rows.ResourceRow | None = None

        async def look() -> bool:
            nonlocal left, row
            while left:
                waiting = await self._read(list[str], "existing", names=left[:NAMES_MAX])
                left = waiting + left[NAMES_MAX:]
                if waiting:
                    with contextlib.suppress(errors.NotFound):
                        row = (await self.get(waiting[0]))[0]
                    return False
            return True

        def problem() -> str:
            first = f"; {row.name} on {row.agent} is {row.state} ({row.reason})" if row else ""
            return (
                f"{len(left)} not gone yet: {', '.join(left[:5])}{first}. "
                "If its machine is lost, delete with force"
            )

        await self._poll(look, timeout_s, problem)

    async def _poll(
        self, reached: Callable[[], Awaitable[bool]], timeout_s: float | None, problem: Callable[[], str]
    ) -> None:
        """Call ``reached`` at each change of any state, and periodically, until it returns true."""
        try:
            async with asyncio.timeout(timeout_s), await self._bus.subscribe(protocol.STATES) as changes:
                wait_s = 0.05
                while not await reached():
                    try:
                        await changes.next(timeout_s=wait_s)
                    except errors.TimedOut:
                        wait_s = min(LOOK_S, wait_s * 1.5)
        except TimeoutError:
            raise errors.TimedOut(f"after {round(timeout_s or 0, 1):g} s {problem()}") from None

    # Rollouts

    async def rollout(self, plan: rows.RolloutPlan, *names: str, where: str = "") -> rows.RolloutRow:
        """Start a rollout."""
        return await self._request(rows.RolloutRow, "rollout", plan=plan, names=list(names), where=where)

    async def rollouts(self, id: str | None = None) -> list[rows.RolloutRow]:
        """Oldest first, or only the one with this id."""
        return [row async for row in self._pages(rows.RolloutRow, "rollouts", id=id)]

    async def wait_rollout(
        self,
        id: str,
        *,
        timeout_s: float | None = None,
        progress: Callable[[str, float], None] = lambda text, part: None,
    ) -> rows.RolloutRow:
        """The rollout when it has ended, whichever way."""
        row: rows.RolloutRow | None = None

        async def look() -> bool:
            nonlocal row
            (row,) = await self.rollouts(id)
            progress(rows.rollout_progress(row), rows.rollout_share(row))
            return row.state not in rows.ACTIVE_ROLLOUT

        try:
            await self._poll(look, timeout_s, lambda: "")
        except errors.TimedOut:
            steps = [step for step in await self.rollout_steps(id) if step.state == "running"][:5]
            resources = await self.get(*(step.name for step in steps)) if steps else []
            why = "; ".join(map(rows.condition, resources))
            raise errors.TimedOut(
                f"the rollout {id} still runs after {round(timeout_s or 0, 1):g} s"
                + (f": {why}" if why else ""),
                hint=f"`muster rollout status {id}` shows its steps",
            ) from None
        assert row is not None
        return row

    async def rollout_steps(self, id: str) -> list[rows.RolloutStepRow]:
        """State, reason and result of each of its resources."""
        return [row async for row in self._pages(rows.RolloutStepRow, "rollout-steps", id=id)]

    async def pause(self, id: str) -> rows.RolloutRow:
        return await self._request(rows.RolloutRow, "pause", id=id)

    async def resume(self, id: str) -> rows.RolloutRow:
        return await self._request(rows.RolloutRow, "resume", id=id)

    async def abort(self, id: str) -> rows.RolloutRow:
        """End a rollout; what an update with ``auto_revert`` has changed is reverted."""
        return await self._request(rows.RolloutRow, "abort", id=id)

    async def undo(self, group: str, *, to: int | None = None) -> rows.RolloutRow:
        """Return the resources of a group to what they were after the revision ``to``, or before the last
        one that was not reverted."""
        return await self._request(rows.RolloutRow, "undo", group=group, to=to)

    async def rebalance_plan(self, where: str = "") -> list[rows.MoveRow]:
        """What `rebalance` would move: resources with ``reschedule`` that fit better on other agents."""
        return [row async for row in self._pages(rows.MoveRow, "rebalance-plan", where=where)]

    async def rebalance(self, where: str = "") -> rows.RolloutRow:
        """Move them, as an update does. Raises `errors.Conflict` if there are none."""
        return await self._request(rows.RolloutRow, "rebalance", where=where)

    async def revisions(self, group: str) -> list[rows.RevisionRow]:
        """What each update has changed in the resources of a group, oldest first."""
        return [row async for row in self._pages(rows.RevisionRow, "revisions", group=group)]

    # Jobs

    async def jobs(self) -> list[rows.JobRow]:
        return [row async for row in self._pages(rows.JobRow, "jobs")]

    async def job_runs(self, name: str = "") -> list[rows.JobRunRow]:
        """The ended runs of a job, or of all jobs, oldest first."""
        return [row async for row in self._pages(rows.JobRunRow, protocol.JOB_RUNS, name=name)]

    async def run_job(self, name: str) -> rows.JobStart:
        """Start a run now. `wait_run` waits for its end."""
        return await self._request(rows.JobStart, "job-run", name=name)

    async def wait_run(self, run: rows.JobStart, *, timeout_s: float | None = None) -> rows.JobRunRow:
        """The run when it has ended, whichever way."""
        own: list[rows.JobRunRow] = []

        async def look() -> bool:
            nonlocal own
            ended = await self.job_runs(run.job)
            own = [row for row in ended if (row.resource, row.generation) == (run.resource, run.generation)]
            return bool(own)

        await self._poll(look, timeout_s, lambda: f"{run.resource} has not ended")
        return own[0]

    # Secrets

    async def set_secret(self, name: str, value: str) -> rows.SecretRow:
        """Store a secret; it leaves this process sealed. Returns the resources that use it."""
        if not value or len(value.encode()) > loader.MAX_SECRET_BYTES:
            raise errors.InvalidInput(f"a secret has 1 to {loader.MAX_SECRET_BYTES} bytes")
        public = await self._read(str, "secret-key")
        box = sealed_box.seal(public, value.encode(), manage_secrets.storage_context(subjects.token(name)))
        return await self._request(rows.SecretRow, "secret-set", name=name, box=box)

    async def secrets(self) -> list[rows.SecretRow]:
        """Names, who set them and when, and which resources use them; never values."""
        return [row async for row in self._pages(rows.SecretRow, "secrets")]

    async def delete_secret(self, name: str) -> rows.SecretDeleted:
        return await self._request(rows.SecretDeleted, "secret-delete", name=name)

    # Enrolment tokens, for the domain's own process

    async def enrolments(self) -> list[rows.EnrolmentRow]:
        return [row async for row in self._pages(rows.EnrolmentRow, "enrolments")]

    async def enrolment(self, token: str) -> rows.EnrolmentRow | None:
        try:
            return await self._read(rows.EnrolmentRow, "enrolment", token=token)
        except errors.NotFound:
            return None

    async def set_enrolment(
        self, token: str, enrolment: rows.Enrolment, *, version: int
    ) -> rows.EnrolmentRow:
        """``version``: of the row that was read, 0 for a new one: `errors.Conflict` if it has changed."""
        return await self._request(
            rows.EnrolmentRow, protocol.ENROLMENT_SET, token=token, enrolment=enrolment, version=version
        )

    # The audit

    async def decisions(self, *, last: int = 100) -> list[messages.Decision]:
        """The last entries of the audit; for operators, who may read streams."""
        stream = await self._bus.open_stream(messages.DECISIONS_STREAM)
        state = await stream.state()
        first = max(state.first_sequence, state.last_sequence - last + 1)
        if not state.messages:
            return []
        return [
            messages.decode(message.data, messages.Decision)
            async for message in stream.read(first, state.last_sequence, gaps=True)
        ]

    async def _request(
        self, kind: type[T], verb: str, *, extra_s: float = 0.0, try_s: float | None = None, **arguments: Any
    ) -> T:
        subject = protocol.request(self._bus.identity, verb)
        try:
            result = await call(
                self._bus,
                subject,
                arguments,
                timeout_s=self._timeout_s + extra_s,
                try_s=try_s,
                on_behalf_of=self._on_behalf_of,
            )
        except errors.LimitExceeded as error:
            error.hint = (
                error.hint or "use fewer resources at a time: a request is one message and one commit"
            )
            raise
        return _convert(result, kind)

    async def _read(self, kind: type[T], verb: str, *, try_s: float = READ_TRY_S, **arguments: Any) -> T:
        subject = protocol.read(self._bus.identity, verb)
        result = await call(self._bus, subject, arguments, timeout_s=self._timeout_s, try_s=try_s)
        return _convert(result, kind)

    async def _pages(self, kind: type[T], verb: str, **arguments: Any) -> AsyncIterator[T]:
        subject = protocol.read(self._bus.identity, verb)
        items = client.pages(
            self._bus, subject, arguments, timeout_s=self._timeout_s, try_s=READ_TRY_S, absent=_absent()
        )
        async for item in items:
            yield _convert(item, kind)


async def call(bus: api.Bus, subject: str, arguments: Mapping[str, Any], **options: Any) -> Any:
    """A request to the active registry; waits while none is active (a take-over). See `rpc.client.call`."""
    return await client.call(bus, subject, arguments, absent=_absent(), **options)


def _require_done(row: rows.RolloutRow) -> None:
    if row.state != "done":
        reverted = f"; {row.reverted_by} reverts it" if row.reverted_by else ""
        raise errors.Refused(
            f"the rollout {row.id} is {row.state}: {row.reason}{reverted}",
            hint=f"`muster rollout status {row.id}` shows its steps",
        )


def _absent() -> errors.Unavailable:
    return errors.Unavailable(
        "no registry is active on this bus", hint="is management enabled in the domain's settings?"
    )


def _parts(items: Sequence[T], many: int) -> list[list[T]]:
    return [list(items[first : first + many]) for first in range(0, len(items), many)]


def _convert(result: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(result, kind)
    except msgspec.ValidationError as error:
        raise errors.MusterError(f"the registry's reply is malformed: {error}") from error


async def _entries(text: str) -> list[Any]:
    """The entries of a manifest. A thousand of them take a second to read, hence in a thread."""
    entries = await asyncio.to_thread(
        manifest.read, text, plugins.config_validators(), plugins.can_move, plugins.has_hooks
    )
    result: list[Any] = msgspec.to_builtins(entries)
    return result


async def _check(entry: Mapping[str, Any]) -> None:
    """Check an entry as a manifest does: fields, type, configuration, plain text secrets."""
    try:
        text = msgspec.json.encode({"resources": [entry]}).decode()
    except (UnicodeEncodeError, TypeError) as error:
        raise errors.InvalidInput(f"the entry cannot be written as JSON: {error}") from error
    await _entries(text)
