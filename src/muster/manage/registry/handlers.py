"""Request handlers of the registry. `RegistryHandlers.operations` lists them by their verbs.

Every verb that changes something is audited: the caller, the target, the time and the outcome, including
rejected requests. Lists are returned in pages, because those of a fleet exceed the size of a message. Work
that visits every resource runs in a thread, so that managers can renew meanwhile: changes under the write
lock, reads on a snapshot.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus.rpc import server
from muster.core import errors, health, messages, units
from muster.manage import manifest, operation_results, protocol, rows
from muster.manage.adapters import plugins
from muster.manage.registry import (
    agent_selection,
    assignments,
    enrolment_store,
    moves,
    records,
    registry_log,
    secret_store,
    views,
)
from muster.manage.registry import operations as registry_operations
from muster.manage.registry.jobs import executor
from muster.manage.registry.rollouts import plan as update_plan
from muster.manage.registry.rollouts import rollout, rollout_executor
from muster.predicates.analysis import type_check

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

NAMES_MAX = 1_000  # names in a reply; all are counted
NAMES_PAGE = 5_000
_READS = (protocol.Verb.GET.value, protocol.Verb.ENUMERATE.value)  # an exec of these changes nothing
NOTES_MAX = 5  # of one kind, about an apply
EXEC_MAX = 500  # resources of one exec: each result has a share of the message
LOGS_MAX = 100  # of one request, for the same reason
LOG_TIMEOUT_S = 5.0


class RegistryHandlers:
    def __init__(
        self, registry: endpoint.RegistryEndpoint, open_key: secret_store.OpenKey | None = None
    ) -> None:
        self._registry = registry
        self.rollouts = rollout_executor.RolloutExecutor(registry)
        self.jobs = executor.JobExecutor(registry)
        self._secret_store = secret_store.SecretStore(registry, open_key)
        self._enrolment_store = enrolment_store.EnrolmentStore(registry)
        self._shells = registry_operations.ShellHandlers(registry)

    def operations(self) -> list[server.RpcOperation]:
        """An RPC operation for each verb; the parameters of its function are its arguments."""
        reads: dict[str, server.Handler] = {
            "plan": self._plan,
            "get": self._get,
            "existing": self._existing,
            "describe": self._describe,
            "enumerate": self._enumerate,
            "summary": self._summary,
            "agents": self._agents,
            "managers": self._managers,
            "attributes": self._attributes,
            "check-condition": self._check_condition,
            "rollouts": self.rollouts.page,
            "rollout-steps": self.rollouts.steps,
            "revisions": self.rollouts.revisions,
            "secrets": self._secret_store.page,
            "secret-key": self._secret_store.public_key,
            "orphans": self._orphans,
            "forgotten": self._forgotten,
            "jobs": self.jobs.page,
            protocol.JOB_RUNS: self.jobs.history,
            protocol.LOGS: self._logs,
            "rebalance-plan": self._rebalance_plan,
            "enrolments": self._enrolment_store.page,
            "enrolment": self._enrolment_store.row,
        }
        # The first parameter is the user on whose behalf it runs.
        changes: dict[str, server.Handler] = {
            "apply": self._apply,
            "create": self._create,
            "put": self._put,
            "rename": self._rename,
            "delete": self._delete,
            "drain": self._drain,
            "undrain": self._undrain,
            "forget": self._forget,
            "exec": self._exec,
            "rollout": self._rollout,
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "undo": self._undo,
            "rebalance": self._rebalance,
            "job-run": self.jobs.start_run,
            "secret-set": self._secret_store.put,
            "secret-delete": self._secret_store.delete,
            protocol.SECRET: self._secret_store.deliver,
            protocol.ENROLMENT_SET: self._enrolment_store.put,
        }
        return [
            *(server.RpcOperation.plain(f"read.{verb}", reads[verb], target=_targets) for verb in reads),
            *(self._change(verb, changes[verb]) for verb in changes),
            *self._shells.operations(),
        ]

    def _change(self, verb: str, function: server.Handler) -> server.RpcOperation:
        async def run(call: server.RpcCall, **arguments: Any) -> Any:
            if operation := arguments.get("operation"):
                call.why = f"{call.actor} requested {operation[:100]}"
            request = f"{call.identity}/{call.request_id}" if call.request_id else ""
            if self._registry.has_executed(request):
                return await self._repeated(verb, request, arguments)
            registry_log.executing.set(request)  # in the context of this task
            if verb == "apply":
                unpacked = await asyncio.to_thread(manifest.unpack_entries, arguments["entries"])
                arguments["entries"], call.target = unpacked, _targets({"entries": unpacked})
            result = await function(call.actor, **arguments)
            if verb == "exec":
                call.outcome, call.details = _outcome(result)
                if id := arguments.get("id"):  # of the event that it is for, if a reaction requests it
                    call.details = {**call.details, "id": str(id)}
                call.audited = operation not in _READS
            if verb == protocol.ENROLMENT_SET:  # its sender records the request of the user or machine
                call.audited = False
            return result

        return server.RpcOperation(
            f"request.{verb}", run, target=_targets, arguments=server.arguments_of(function)
        )

    async def _repeated(self, verb: str, request: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a request that this registry or a previous one has executed, as of now."""
        state = self._registry.state
        match verb:
            case "apply":
                count = len(manifest.unpack_entries(arguments["entries"]))
                begun = self.rollouts.begun_by(request)
                return rows.ApplyResult(counts={"keep": count}, changed_count=0, rollout=begun)
            case "create":
                return views.resource_description(state, str(arguments["entry"].get("name")))
            case "put":
                return views.resource_description(state, arguments["name"])
            case "rename":
                return views.resource_description(state, arguments["to"])
            case "delete":
                return rows.DeleteResult(deleting=sorted(set(arguments["names"])))
            case "drain" | "undrain":
                return rows.DrainResult(count=0)
            case "forget":
                return rows.ForgetResult(forgotten=arguments["agent"], count=0)
            case "secret-set":
                return await self._secret_store.row(arguments["name"])
            case "secret-delete":
                return rows.SecretDeleted(deleted=arguments["name"])
            case protocol.ENROLMENT_SET:
                return await self._enrolment_store.row(arguments["token"])
            case "rollout" | "undo" | "rebalance":
                return await self.rollouts.row(rollout.rollout_id(request))
            case "job-run":
                return self.jobs.started(arguments["name"], request)
            case _:  # pause, resume, abort
                return await self.rollouts.row(arguments["id"])

    async def authorize(
        self, call: server.RpcCall, verb: str, arguments: Mapping[str, Any], may: Any
    ) -> None:
        """``may``: see `endpoint.Authorize`."""
        verb = protocol.SHELL if verb in (protocol.SHELL_EXCHANGE, protocol.SHELL_END) else verb
        if await may(call.identity, verb, True):
            self._require_own(call.identity, arguments)
        elif verb != protocol.SECRET:  # only a caller that may act itself can act on behalf of a user
            call.on_behalf_of = call.claims_for

    def _require_own(self, agent: str, arguments: Mapping[str, Any]) -> None:
        """An agent may only request operations on the resources it hosts."""
        resources = self._registry.state.resources
        for name in arguments.get("names") or ():
            known = resources.get(name)
            if known is not None and known.spec.agent != agent:
                raise errors.Forbidden(f"{agent} is an agent and does not host {name!r}")

    # Desired state

    async def _apply(self, by: str, entries: manifest.Entries) -> rows.ApplyResult:
        async with self._registry.writing() as state:
            specs = await self._place(state, entries)
            targets = self.rollouts.targets()
            counted = await asyncio.to_thread(agent_selection.counted_entries, entries)
            if joined := _same_update(state, specs, targets, counted):
                return rows.ApplyResult(counts={"keep": len(specs)}, changed_count=0, rollout=joined)
            steps, changes = await asyncio.to_thread(_decide, state, specs, by, counted)
            notes = _notes(state, specs, changes)
            update = _update_steps(state, changes, {spec.name: spec for spec in specs})
            id = await self._begin_update(state, by, update) if update else ""
            if changes and not update:
                await self._registry.commit(changes)
        return rows.ApplyResult(
            notes=notes,
            counts=collections.Counter(step.act for step in steps),
            changed_count=len(changes.resources),
            changed=heapq.nsmallest(NAMES_MAX, changes.resources),
            deleting=[step.name for step in steps if step.act == "delete"][:NAMES_MAX],
            rollout=id,
        )

    async def _begin_update(
        self, state: assignments.AssignmentProcessor, by: str, steps: dict[str, rollout.RolloutStep]
    ) -> str:
        engine, changes, written = self.rollouts.prepare(state, by, steps)
        await self._registry.commit(changes, written)
        self.rollouts.start(engine)
        return engine.rollout.id

    async def _plan(self, entries: manifest.Entries, after: str = "") -> dict[str, Any]:
        """A page of the plan; ``after`` is the number of the last step of the previous page."""
        state = self._registry.state.snapshot()
        specs = await self._place(state, entries)
        return await asyncio.to_thread(_page_of_plan, state, specs, entries, after)

    async def _place(
        self, state: assignments.AssignmentProcessor, entries: manifest.Entries
    ) -> list[protocol.ResourceSpec]:
        """Specifications that can be applied."""
        presence, now = self._registry.presence, asyncio.get_running_loop().time()
        specs = await asyncio.to_thread(
            agent_selection.place_entries,
            state,
            entries,
            lambda agent: moves.is_silent(state, presence, agent, now),
        )
        self._secret_store.check(specs)
        return specs

    async def _create(self, by: str, entry: dict[str, Any]) -> rows.ResourceDescription:
        """Create a resource that must not exist yet."""
        async with self._registry.writing() as state:
            if entry.get("count") is not None:
                raise errors.InvalidInput("an entry with a `count` is several resources: apply it")
            (spec,) = await self._place(state, [entry])
            if spec.name in state.resources:
                raise errors.AlreadyExists(f"the resource {spec.name!r} already exists")
            await self._registry.commit(state.apply([spec], by))
            return views.resource_description(state, spec.name)

    async def _put(
        self, by: str, name: str, changes: dict[str, Any], generation: int | None = None
    ) -> rows.ResourceDescription:
        """Change fields of an existing entry. ``generation``: only if it is still the current one."""
        async with self._registry.writing() as state:
            known = state.resources.get(name)
            if known is None:
                raise errors.NotFound(f"no resource {name!r}")
            if generation is not None and generation != known.generation:
                raise errors.Conflict(
                    f"{name!r} changed meanwhile: its generation is {known.generation}",
                    actual=known.generation,
                )
            before = msgspec.to_builtins(known.spec)
            for derived in ("digest", "entry", "index", "template"):
                before.pop(derived, None)
            if known.spec.schedule is not None:
                before.pop("agent")
            entry = before | changes | {"name": name}
            if entry.get("count") is not None:
                raise errors.InvalidInput("the `count` of an entry changes with its manifest: apply that")
            (spec,) = await self._place(state, [entry])
            template = {} if changes.keys() & {"config", "labels"} else known.spec.template
            spec = msgspec.structs.replace(
                spec, entry=known.spec.entry, index=known.spec.index, template=template
            )
            update = state.apply([spec], by)
            if update:
                await self._registry.commit(update)
            return views.resource_description(state, name)

    async def _rename(self, by: str, name: str, to: str) -> rows.ResourceDescription:
        async with self._registry.writing() as state:
            changes = state.rename(name, to, by)
            await asyncio.to_thread(_require_renamable, name, state.resources[name].spec.type)
            await self._registry.commit(changes)
            return views.resource_description(state, to)

    async def _delete(
        self, by: str, names: list[str], generation: int | None = None, force: bool = False
    ) -> rows.DeleteResult:
        """``generation``: only if it is still the current one of each. ``force``: at once, without their
        agents.
        """
        async with self._registry.writing() as state:
            for known in filter(None, map(state.resources.get, names)):
                if generation is not None and generation != known.generation:
                    raise errors.Conflict(
                        f"{known.spec.name!r} changed meanwhile: its generation is {known.generation}",
                        actual=known.generation,
                    )
            changes = state.delete(names, by, force=force)
            if changes:
                await self._registry.commit(changes)
        return rows.DeleteResult(deleting=sorted({*names, *changes.resources}))

    async def _drain(self, by: str, name: str, target: protocol.DrainKind | None = None) -> rows.DrainResult:
        """Drain a resource, or all resources of an agent, which then accepts no more."""
        return await self._set_desired(protocol.DesiredState.DRAINED, by, name, target)

    async def _undrain(
        self, by: str, name: str, target: protocol.DrainKind | None = None
    ) -> rows.DrainResult:
        return await self._set_desired(protocol.DesiredState.UP, by, name, target)

    async def _set_desired(
        self, desired: protocol.DesiredState, by: str, name: str, target: protocol.DrainKind | None
    ) -> rows.DrainResult:
        async with self._registry.writing() as state:
            changes = state.set_desired(name, desired, by, target)
            changed = set(changes.resources)
            for agent in changes.agents:
                changed = {
                    resource
                    for resource in state.hosted(agent)
                    if state.resources[resource].spec.desired is protocol.DesiredState.UP
                }
            if changes:
                await self._registry.commit(changes)
        return rows.DrainResult(count=len(changed), changed=heapq.nsmallest(NAMES_MAX, changed))

    async def _forget(
        self, by: str, agent: str, force: bool = False, is_revoked: bool = False
    ) -> rows.ForgetResult:
        """Remove the resources of an agent that will not return, without contacting it. If it returns, it
        deletes them. ``force``: also if it is live; then they are deleted as usual. ``is_revoked``: its
        credentials have ended, so that its record is removed too."""
        presence = self._registry.presence
        async with self._registry.writing() as state:
            if is_revoked:
                changes = state.remove_agent(agent)
            else:
                now = asyncio.get_running_loop().time()
                is_live = agent in state.agents and (
                    views.agent_state(state, presence, agent, state.hosted(agent), now) == "up"
                )
                if is_live and not force:
                    raise errors.Conflict(
                        f"the agent {agent!r} is live: what it runs would continue, unmanaged",
                        hint="delete its resources, or stop it and wait until it is down; "
                        f"`muster agent forget {agent} --force` deletes them",
                    )
                changes = state.forget(agent, by, is_live=is_live)
            if changes:
                await self._registry.commit(changes)
        if is_revoked:
            presence.forget(agent)
        else:
            presence.inventories.expect_report(agent)
        names = heapq.nsmallest(NAMES_MAX, changes.resources)
        return rows.ForgetResult(forgotten=agent, count=len(changes.resources), resources=names)

    # Current state

    async def _existing(self, names: list[str]) -> list[str]:
        """Those of the names that exist."""
        resources = self._registry.state.resources
        return [name for name in names if name in resources]

    async def _get(self, names: list[str]) -> list[rows.ResourceRow]:
        """Rows of the first names: as many as fit into a message."""
        state = self._registry.state
        selected = views.select(state, names, "", "")
        items: list[rows.ResourceRow] = views.page(selected, lambda name: views.resource_row(state, name))[
            "items"
        ]
        return items

    async def _enumerate(
        self, where: str = "", after: str = "", limit: int = views.PAGE, names_only: bool = False
    ) -> dict[str, Any]:
        """A page of resources in the order of their names; ``next`` continues ``after``, None at the end."""
        if not where:  # then only the page is visited
            return _page_of_resources(self._registry.state, where, after, limit, names_only)
        state = self._registry.state.snapshot()
        return await asyncio.to_thread(_page_of_resources, state, where, after, limit, names_only)

    async def _attributes(self, names: list[str], keys: list[str]) -> list[dict[str, Any]]:
        """Those attributes of the first names, as many as fit; empty for a resource that does not exist."""
        state = self._registry.state
        items: list[dict[str, Any]] = views.page(
            names, lambda name: views.selected_attributes(state, name, keys)
        )["items"]
        return items

    async def _check_condition(self, where: str, fields: list[str]) -> dict[str, Any]:
        """Raises `errors.ParseError` if it names an attribute that no resource has, except ``fields``."""
        await asyncio.to_thread(views.condition, self._registry.state.snapshot(), where, fields)
        return {}

    async def _describe(self, name: str) -> rows.ResourceDescription:
        return views.resource_description(self._registry.state, name)

    async def _summary(self) -> rows.FleetSummary:
        return await asyncio.to_thread(views.summary, self._registry.state.snapshot())

    async def _agents(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        state = self._registry.state.snapshot()
        presence, now = self._registry.presence, asyncio.get_running_loop().time()
        return await asyncio.to_thread(views.agents, state, presence, now, after, limit)

    async def _orphans(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        """Resources on machines where they do not belong."""
        orphans = {f"{row.agent}/{row.name}": row for row in self._registry.presence.inventories.rows()}
        keys = sorted(key for key in orphans if key > after)
        return views.page(keys, orphans.__getitem__, limit)

    async def _forgotten(self) -> list[rows.ForgottenAgent]:
        """Agents that were forgotten and whose credentials have not ended yet."""
        agents, inventories = self._registry.state.agents, self._registry.presence.inventories
        names = heapq.nsmallest(NAMES_MAX, (name for name, agent in agents.items() if agent.forgotten))
        hosted = self._registry.state.hosted
        return [
            rows.ForgottenAgent(name=name, is_empty=inventories.is_empty(name) and not hosted(name))
            for name in names
        ]

    async def _managers(self, after: str = "", limit: int = views.PAGE) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        return views.managers(self._registry.state, now, after, limit)

    # Operations

    async def _exec(
        self,
        by: str,
        operation: str,
        names: list[str],
        arguments: dict[str, Any] | None = None,
        timeout_s: protocol.OperationTimeout = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[rows.ExecutionRow]:
        """Execute an operation on each resource concurrently. A repeated ``id`` is not executed again.

        An ``id`` that is missing is derived from that of the request, which repetitions keep. Results that do
        not fit into one message are ``truncated``: repeat the request with the same ``id`` and fewer names.
        """
        if len(names) > EXEC_MAX:
            raise errors.LimitExceeded(f"exec accepts at most {EXEC_MAX} resources at a time")
        id = id or records.derived_id(registry_log.executing.get(), 16)
        selected = await self._named(names)
        orders = [
            protocol.OperationOrder(
                id=records.order_id(id, name),
                resource=name,
                operation=operation,
                arguments=arguments or {},
                timeout_s=timeout_s,
            )
            for name in selected
        ]
        answers = operation_results.fit_message(
            await registry_operations.submit_operation(self._registry, orders, by)
        )
        return [
            rows.ExecutionRow(
                resource=order.resource,
                outcome=answer.outcome.value,
                result=answer.result,
                reason=answer.reason,
                code=answer.code,
                truncated=answer.truncated,
            )
            for order, answer in zip(orders, answers, strict=True)
        ]

    async def _logs(self, queries: dict[str, protocol.LogQuery]) -> list[rows.LogRow]:
        """A part of the log of each resource. The parts share one message."""
        if len(queries) > LOGS_MAX:
            raise errors.LimitExceeded(f"logs of at most {LOGS_MAX} resources can be requested at a time")
        resources = self._registry.state.resources
        selected = [name for name in queries if name in resources and not resources[name].spec.schedule]
        share = operation_results.RESULTS_BYTES_MAX // (2 * max(1, len(selected)))
        id = secrets.token_hex(8)
        orders = [
            protocol.OperationOrder(
                id=records.order_id(id, name),
                resource=name,
                operation=protocol.LOG_PAGE,
                arguments=msgspec.to_builtins(
                    msgspec.structs.replace(
                        queries[name], bytes_max=min(share, queries[name].bytes_max, protocol.LOG_BYTES_MAX)
                    )
                ),
                timeout_s=LOG_TIMEOUT_S,
            )
            for name in selected
        ]
        answers = await registry_operations.submit_operation(self._registry, orders, "")
        matching = [
            rows.LogRow.of(order.resource, answer) for order, answer in zip(orders, answers, strict=True)
        ]
        return matching + [
            rows.LogRow(
                resource=name,
                reason=f"`muster job history {name}` shows what its runs have written"
                if name in resources
                else "it does not exist",
                code=errors.NotFound.code,
            )
            for name in queries
            if name not in selected
        ]

    async def _named(self, names: list[str], where: str = "") -> list[str]:
        if not names and not where:
            raise errors.InvalidInput("names or an expression is required")
        resources = self._registry.state.resources
        if names:
            if periodic := [name for name in names if name in resources and resources[name].spec.schedule]:
                raise errors.Refused(
                    f"{periodic[0]!r} is a periodic job",
                    hint=f"its runs are resources: `muster job run {periodic[0]}` starts one",
                )
            return list(views.select(self._registry.state, names, "", ""))
        state = self._registry.state.snapshot()
        selected = await asyncio.to_thread(lambda: list(views.select(state, None, where, "")))
        return [name for name in selected if state.resources[name].spec.schedule is None]

    async def _rollout(
        self, by: str, plan: dict[str, Any], names: list[str] | None = None, where: str = ""
    ) -> rows.RolloutRow:
        """Start a rollout; `rollouts` shows its progress."""
        return await self.rollouts.begin(by, plan, await self._named(names or [], where))

    async def _pause(self, by: str, id: str) -> rows.RolloutRow:
        return await self.rollouts.set_state(id, rollout.PAUSED, f"paused by {by}")

    async def _resume(self, by: str, id: str) -> rows.RolloutRow:
        return await self.rollouts.set_state(id, rollout.RUNNING, "")

    async def _abort(self, by: str, id: str) -> rows.RolloutRow:
        return await self.rollouts.set_state(id, rollout.STOPPED, f"aborted by {by}")

    async def _undo(self, by: str, group: str, to: int | None = None) -> rows.RolloutRow:
        """Return a group to what it was after the revision ``to``, or before its last one."""
        async with self._registry.writing() as state:
            steps = self.rollouts.undo_steps(state, group, to)
            if not steps:
                raise errors.Conflict(f"the group {group!r} is already as it was then")
            id = await self._begin_update(state, by, steps)
        return await self.rollouts.row(id)

    async def _rebalance_plan(
        self, where: str = "", after: str = "", limit: int = views.PAGE
    ) -> dict[str, Any]:
        """What `rebalance` would move."""
        async with self._registry.writing() as state:  # it visits what would change meanwhile
            planned = await self._find_moves(state, where)
        return views.page((name for name in planned if name > after), planned.__getitem__, limit)

    async def _rebalance(self, by: str, where: str = "") -> rows.RolloutRow:
        """Move what fits better on other agents, by the update policies of the resources."""
        async with self._registry.writing() as state:
            steps = {}
            for name, move in (await self._find_moves(state, where)).items():
                before = state.resources[name].spec
                after = manifest.placed(before, move.to, state.zone_of(move.to))
                steps[name] = rollout.RolloutStep(before=before, after=after)
            if not steps:
                raise errors.Conflict(
                    "nothing has to be moved", hint="`muster rebalance` shows what would be"
                )
            id = await self._begin_update(state, by, steps)
        return await self.rollouts.row(id)

    async def _find_moves(
        self, state: assignments.AssignmentProcessor, where: str
    ) -> dict[str, rows.MoveRow]:
        presence, now = self._registry.presence, asyncio.get_running_loop().time()
        return await asyncio.to_thread(moves.rebalance, state, presence, now, where)

    async def secret(self, agent: str, resource: str, name: str, key: str) -> dict[str, str]:
        """For an agent whose request a manager forwards."""
        return await self._secret_store.deliver(agent, resource, name, key)


def _decide(
    state: assignments.AssignmentProcessor,
    specs: list[protocol.ResourceSpec],
    by: str,
    counted: Collection[str],
) -> tuple[list[rows.PlanStep], records.RegistryChanges]:
    """The steps of the plan and the changes to store, computed together."""
    steps = update_plan.plan(state.resources, specs, state.zone_of, state.deviating, counted)
    changes = state.apply(specs, by)
    leftover = [step.name for step in steps if step.act == "delete"]
    changes.resources |= state.delete(leftover, by, after=changes.resources).resources
    return steps, changes


def _same_update(
    state: assignments.AssignmentProcessor,
    specs: list[protocol.ResourceSpec],
    targets: Mapping[str, tuple[protocol.ResourceSpec, str]],
    counted: Collection[str],
) -> str:
    """The id of the active update that already leads to these specifications."""
    ids = {targets[spec.name][1] for spec in specs if spec.name in targets}
    if not ids or update_plan.superfluous(state.resources, specs, counted):
        return ""
    for spec in specs:
        known = state.resources.get(spec.name)
        if spec != (targets[spec.name][0] if spec.name in targets else known and known.spec):
            return ""
    return max(ids)


def _update_steps(
    state: assignments.AssignmentProcessor,
    changes: records.RegistryChanges,
    specs: Mapping[str, protocol.ResourceSpec],
) -> dict[str, rollout.RolloutStep]:
    """The steps of an update: if something exists that changes, or has a policy. Otherwise there are none."""
    steps = {
        name: rollout.RolloutStep(
            before=state.resources[name].spec if name in state.resources else None,
            after=None if record.deleting else specs[name],
        )
        for name, record in changes.resources.items()
        if record is not None
    }
    is_update = any(step.before is not None or step.policy is not None for step in steps.values())
    return steps if is_update else {}


def _notes(
    state: assignments.AssignmentProcessor,
    specs: list[protocol.ResourceSpec],
    changes: records.RegistryChanges,
) -> list[str]:
    """What a user should know, because an apply alone does not put it right."""
    unknown = collections.Counter(
        spec.agent for spec in specs if spec.schedule is None and spec.agent not in state.agents
    )
    notes = []
    for agent, count in unknown.most_common(NOTES_MAX):
        near = type_check.closest_name(agent, state.agents)
        waits = f"{units.format_count(count, 'resource')} cannot start before it joins"
        notes.append(f"no agent {agent!r} has joined: {waits}" + (f"; {near}" if near else ""))
    unchanged = (spec.name for spec in specs if spec.name not in changes.resources)
    failed = [name for name in unchanged if state.state_of(name) is health.HealthState.FAILED]
    notes += [f"{name} is unchanged and failed: {rows.given_up_hint(name)}" for name in failed[:NOTES_MAX]]
    return notes


def _page_of_plan(
    state: assignments.AssignmentProcessor,
    specs: list[protocol.ResourceSpec],
    entries: manifest.Entries,
    after: str,
) -> dict[str, Any]:
    counted = agent_selection.counted_entries(entries)
    steps = update_plan.plan(state.resources, specs, state.zone_of, state.deviating, counted)
    start = int(after) + 1 if after.isdecimal() else 0
    numbers = map(str, range(start, len(steps)))
    return views.page(numbers, lambda number: steps[int(number)])


def _page_of_resources(
    state: assignments.AssignmentProcessor, where: str, after: str, limit: int, names_only: bool
) -> dict[str, Any]:
    selected = views.select(state, None, where, after)
    if names_only:
        return views.page(selected, str, limit, limit_max=NAMES_PAGE)
    return views.page(selected, lambda name: views.resource_row(state, name), limit)


def _require_renamable(name: str, type_: str) -> None:
    try:
        adapter = plugins.load_adapter(type_)
    except errors.NotFound:
        return  # only the agent has this adapter, and refuses if necessary
    if not adapter.can_be_renamed:
        raise errors.Refused(f"{name!r} has the type {type_}, which cannot be renamed")


def _targets(arguments: Mapping[str, Any]) -> str:
    if isinstance(arguments.get("entries"), list):
        names = [str(entry.get("name", "?")) for entry in arguments["entries"] if isinstance(entry, dict)]
    elif isinstance(arguments.get("entry"), dict):
        names = [str(arguments["entry"].get("name", "?"))]
    else:
        names = [str(name) for name in arguments.get("names") or ()]
    text = ", ".join(names) or str(
        next((arguments[field] for field in ("where", "name", "agent", "id") if arguments.get(field)), "-")
    )
    return text[:256]


def _outcome(result: list[rows.ExecutionRow]) -> tuple[messages.DecisionOutcome, dict[str, str]]:
    """The worst outcome of an exec, and the counts."""
    counts: dict[str, int] = {}
    for row in result:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    order = (
        messages.DecisionOutcome.IN_DOUBT,
        messages.DecisionOutcome.FAILED,
        messages.DecisionOutcome.REFUSED,
    )
    worst = next((outcome for outcome in order if counts.get(outcome.value)), messages.DecisionOutcome.DONE)
    return worst, {name: str(count) for name, count in counts.items()}
