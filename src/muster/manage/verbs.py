"""What users ask of the registry, verb by verb: ``get`` and its like change nothing; anyone may ask them.

Every verb that changes something is audited: who asked, what for, when, and what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors, log, messages
from muster.manage import manifest, ordering, plans, processor, protocol, rollout
from muster.predicates import closure, parser

if TYPE_CHECKING:
    from muster.manage import service

events = log.Events("manage")

ROLLOUTS = "manage.rollouts"
READS = ("plan", "get", "describe", "targets", "agents", "managers", "rollouts")
CHANGES = ("apply", "delete", "exec", "rollout", "pause", "resume", "drain", "undrain", "forget")
ORDERS_MAX = 2_000  # in one message to a manager


class Verbs:
    def __init__(self, registry: service.Registry) -> None:
        self._registry = registry
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, rollout.Rollout] = {}

    async def obey(self, sender: str, verb: str, kind: str, arguments: dict[str, Any]) -> Any:
        known = READS if kind == "read" else CHANGES
        if verb not in known:
            raise errors.NotFound(f"no verb {verb[:40]!r} to {kind}", hint=f"there are: {', '.join(known)}")
        function = getattr(self, f"_{verb}")
        try:
            if kind == "read":
                return await function(**arguments)
            return await self._audited(sender, verb, function, arguments)
        except TypeError as error:
            raise errors.InvalidInput(f"{verb}: {error}") from error

    async def _audited(self, sender: str, verb: str, function: Any, arguments: dict[str, Any]) -> Any:
        id = secrets.token_hex(8)
        why = f"{sender} asked"
        targets = _targets(arguments)
        try:
            result = await function(sender, **arguments)
        except errors.MusterError as error:
            refused = isinstance(error, errors.Refused | errors.InvalidInput | errors.NotFound)
            outcome = messages.Outcome.REFUSED if refused else messages.Outcome.FAILED
            await self._registry.record(
                verb, targets, why, who=sender, id=id, outcome=outcome, error=error.message[:1000]
            )
            raise
        await self._registry.record(verb, targets, why, who=sender, id=id, **_outcome(result))
        return result

    # Desired state

    async def _apply(self, by: str, entries: list[Any], force: bool = False) -> dict[str, Any]:
        async with self._registry.writing() as state:
            specs = self._specifications(state, entries)
            lines = plans.plan(state.resources, specs)
            changes = state.apply(specs, by)
            if changes:
                await self._registry.commit(changes)
        return {"plan": lines, "changed": sorted(changes.resources)}

    async def _plan(self, entries: list[Any]) -> list[dict[str, Any]]:
        state = self._registry.state
        return plans.plan(state.resources, self._specifications(state, entries))

    def _specifications(self, state: processor.Processor, raw: list[Any]) -> list[protocol.Spec]:
        try:
            entries = msgspec.convert(raw, list[manifest.Entry])
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(f"the entries are malformed: {error}") from error
        groups: dict[str, set[str]] = {}
        for name, resource in state.resources.items():
            groups.setdefault(resource.spec.group, set()).add(name)
        for entry in entries:
            groups.setdefault(entry.group, set()).add(entry.name)
        load: dict[str, int] = {}
        for resource in state.resources.values():
            load[resource.spec.agent] = load.get(resource.spec.agent, 0) + 1
        specs = [
            manifest.specification(entry, self._agent_for(state, entry, load), lambda g: groups.get(g, ()))
            for entry in entries
        ]
        known = {*state.resources, *(spec.name for spec in specs)}
        for spec in specs:
            missing = [one for one in spec.depends_on if one not in known]
            if missing:
                raise errors.InvalidInput(f"{spec.name!r} depends on {missing[0]!r}, which is not there")
        needs = {name: one.spec.depends_on for name, one in state.resources.items()}
        needs |= {spec.name: spec.depends_on for spec in specs}
        circle = ordering.circle(needs)
        if circle is not None:
            raise errors.InvalidInput(f"dependencies in a circle: {' -> '.join(circle)}")
        return specs

    @staticmethod
    def _agent_for(state: processor.Processor, entry: manifest.Entry, load: dict[str, int]) -> str:
        """The named one; or, of those the expression selects, the one that has least. What runs stays."""
        known = state.resources.get(entry.name)
        if entry.agent is not None:
            agent = state.agents.get(entry.agent)
            if agent is not None and agent.types and entry.type not in agent.types:
                raise errors.InvalidInput(f"{entry.agent!r} has no adapter of type {entry.type!r}")
            return entry.agent
        assert entry.where is not None
        matches = closure.compile(parser.parse(entry.where))
        fitting = [
            name
            for name, agent in state.agents.items()
            if not agent.cordoned and entry.type in agent.types and matches(agent_attributes(name, agent).get)
        ]
        if known is not None and known.spec.agent in fitting:
            return known.spec.agent
        if not fitting:
            raise errors.Unavailable(f"{entry.name!r}: no agent that is there fits {entry.where!r}")
        chosen = min(fitting, key=lambda name: (load.get(name, 0), name))
        load[chosen] = load.get(chosen, 0) + 1
        return chosen

    async def _delete(self, by: str, names: list[str]) -> dict[str, Any]:
        async with self._registry.writing() as state:
            changes = state.delete(names, by)
            await self._registry.commit(changes)
        return {"deleting": sorted(changes.resources)}

    async def _drain(self, by: str, name: str) -> dict[str, Any]:
        """A resource, all of an agent's (which then takes no more), or a manager's (which go elsewhere)."""
        return await self._set_wanted(by, name, protocol.Wanted.DRAINED)

    async def _undrain(self, by: str, name: str) -> dict[str, Any]:
        return await self._set_wanted(by, name, protocol.Wanted.UP)

    async def _set_wanted(self, by: str, name: str, wanted: protocol.Wanted) -> dict[str, Any]:
        async with self._registry.writing() as state:
            changes = processor.Changes(epoch=state.epoch)
            names = [name] if name in state.resources else []
            if not names and name in state.agents:
                changes.agents[name] = msgspec.structs.replace(
                    state.agents[name], cordoned=wanted is protocol.Wanted.DRAINED
                )
                names = [one for one, resource in state.resources.items() if resource.spec.agent == name]
            elif not names:
                raise errors.NotFound(f"no resource and no agent {name!r}")
            for one in names:
                resource = state.resources[one]
                spec = msgspec.structs.replace(resource.spec, wanted=wanted)
                if spec != resource.spec and not resource.deleting:
                    changes.resources[one] = msgspec.structs.replace(
                        resource, spec=spec, generation=resource.generation + 1, by=by
                    )
            if changes:
                await self._registry.commit(changes)
        return {"changed": sorted(changes.resources)}

    async def _forget(self, by: str, agent: str) -> dict[str, Any]:
        """An agent that will not come back: it and its resources are removed without a word to it."""
        async with self._registry.writing() as state:
            if agent not in state.agents:
                raise errors.NotFound(f"no agent {agent!r}")
            changes = processor.Changes(epoch=state.epoch, agents={agent: None})
            for name, resource in state.resources.items():
                if resource.spec.agent == agent:
                    changes.resources[name] = changes.owners[name] = changes.statuses[name] = None
            await self._registry.commit(changes)
        return {"forgotten": agent, "resources": sorted(changes.resources)}

    # What there is

    async def _get(self, names: list[str] | None = None, where: str = "") -> list[dict[str, Any]]:
        state = self._registry.state
        return [_row(state, name) for name in self._select(names, where)]

    async def _describe(self, name: str) -> dict[str, Any]:
        state = self._registry.state
        resource = state.resources.get(name)
        if resource is None:
            raise errors.NotFound(f"no resource {name!r}")
        status = state.statuses.get(name)
        return {
            **_row(state, name),
            "spec": msgspec.to_builtins(resource.spec),
            "generation": resource.generation,
            "applied_by": resource.by,
            "waits_for": list(state.waits_for(name)),
            "status": msgspec.to_builtins(status) if status else None,
        }

    async def _targets(self, where: str) -> list[dict[str, Any]]:
        return await self._get(where=where)

    async def _agents(self) -> list[dict[str, Any]]:
        state = self._registry.state
        load: dict[str, int] = {}
        for resource in state.resources.values():
            load[resource.spec.agent] = load.get(resource.spec.agent, 0) + 1
        return [
            {"name": name, "resources": load.get(name, 0), **msgspec.to_builtins(agent)}
            for name, agent in sorted(state.agents.items())
        ]

    async def _managers(self) -> list[dict[str, Any]]:
        state = self._registry.state
        now = asyncio.get_running_loop().time()
        counts: dict[str, int] = {}
        for owner in state.owners.values():
            counts[owner.manager] = counts.get(owner.manager, 0) + 1
        return [
            {
                "name": name,
                "resources": counts.get(name, 0),
                "expires_in_s": round(member.expires_at - now, 1),
                "leaving": member.leaving,
            }
            for name, member in sorted(state.managers.items())
        ]

    def _select(self, names: Iterable[str] | None, where: str) -> list[str]:
        state = self._registry.state
        if names:
            missing = [name for name in names if name not in state.resources]
            if missing:
                raise errors.NotFound(f"no resource {missing[0]!r}")
            return list(names)
        if not where:
            return sorted(state.resources)
        matches = closure.compile(parser.parse(where))
        return [name for name in sorted(state.resources) if matches(attributes(state, name).get)]

    # Acts

    async def _exec(
        self,
        by: str,
        operation: str,
        names: list[str] | None = None,
        where: str = "",
        arguments: dict[str, Any] | None = None,
        timeout_s: float = protocol.OPERATION_TIMEOUT_S,
        id: str | None = None,
    ) -> list[dict[str, Any]]:
        """On each of them at once. The same ``id`` again does nothing again."""
        if not names and not where:
            raise errors.InvalidInput("say which resources: names, or an expression")
        id = id or secrets.token_hex(8)
        orders = [
            protocol.Order(
                id=f"{id}-{name}",
                resource=name,
                operation=operation,
                arguments=arguments or {},
                timeout_s=timeout_s,
            )
            for name in self._select(names, where)
        ]
        answers = await self.order(orders, by)
        return [
            {
                "resource": order.resource,
                "outcome": answer.outcome.value,
                "result": answer.result,
                "reason": answer.reason,
                "code": answer.code,
            }
            for order, answer in zip(orders, answers, strict=True)
        ]

    async def order(self, orders: list[protocol.Order], by: str) -> list[protocol.Answer]:
        """Through each resource's manager; an answer for each order, whatever happens."""
        state = self._registry.state
        by_manager: dict[str, list[protocol.Order]] = {}
        for order in orders:
            owner = state.owners.get(order.resource)
            by_manager.setdefault(owner.manager if owner else "", []).append(order)
        found: dict[str, protocol.Answer] = {}

        async def send(manager: str, page: list[protocol.Order]) -> None:
            for answer in await self._send(manager, page, by):
                found[answer.id] = answer

        await asyncio.gather(
            *(
                send(manager, page[first : first + ORDERS_MAX])
                for manager, page in by_manager.items()
                for first in range(0, len(page), ORDERS_MAX)
            )
        )
        return [found.get(order.id) or _lost(order) for order in orders]

    async def _send(self, manager: str, page: list[protocol.Order], by: str) -> Iterable[protocol.Answer]:
        def all_of(outcome: messages.Outcome, code: str, reason: str) -> list[protocol.Answer]:
            return [protocol.Answer(id=one.id, outcome=outcome, code=code, reason=reason) for one in page]

        if not manager:
            return all_of(messages.Outcome.FAILED, "unavailable", "no manager has it now")
        data = messages.encode(protocol.Orders(orders=tuple(page), by=by))
        timeout_s = max(one.timeout_s for one in page) + 5
        try:
            message = await self._registry.bus.request(
                protocol.to_manager(manager, "execute"), data, timeout_s=timeout_s
            )
            return messages.decode(message.data, protocol.Results, max_bytes=64 << 20).results
        except errors.TimedOut as error:
            return all_of(messages.Outcome.IN_DOUBT, error.code, f"{manager} did not answer")
        except errors.MusterError as error:
            return all_of(messages.Outcome.FAILED, error.code, error.message)

    # Rollouts

    async def _rollout(
        self, by: str, plan: dict[str, Any], names: list[str] | None = None, where: str = ""
    ) -> dict[str, Any]:
        """Begins it; `rollouts` tells how it goes."""
        if not names and not where:
            raise errors.InvalidInput("say which resources: names, or an expression")
        try:
            wanted = msgspec.convert(plan, rollout.Plan)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(str(error)) from error
        steps = {name: rollout.Step() for name in self._select(names, where)}
        begun = rollout.Rollout(id=secrets.token_hex(4), by=by, plan=wanted, steps=steps)
        begun.batch_size()
        begun.judge()
        await self._save(begun)
        self._carry_on(begun)
        return begun.summary()

    async def _rollouts(self, id: str | None = None) -> list[dict[str, Any]]:
        records = await self._registry.store.scan(ROLLOUTS)
        found = [msgspec.json.decode(record.value, type=rollout.Rollout) for record in records]
        found = [self._live.get(one.id, one) for one in found if id is None or one.id == id]
        if id is not None and not found:
            raise errors.NotFound(f"no rollout {id!r}")
        return [one.summary() for one in found]

    async def _pause(self, by: str, id: str) -> dict[str, Any]:
        return await self._turn(id, "paused", f"paused by {by}")

    async def _resume(self, by: str, id: str) -> dict[str, Any]:
        return await self._turn(id, rollout.RUNNING, "")

    async def _turn(self, id: str, state: str, reason: str) -> dict[str, Any]:
        record = await self._registry.store.get(ROLLOUTS, id)
        if record is None:
            raise errors.NotFound(f"no rollout {id!r}")
        one = self._live.get(id) or msgspec.json.decode(record.value, type=rollout.Rollout)
        if one.state not in (rollout.RUNNING, "paused", "stopped"):
            raise errors.Conflict(f"rollout {id} is {one.state}")
        if one.state == "stopped" and state == rollout.RUNNING:
            one.plan = msgspec.structs.replace(one.plan, errors_max=len(one.steps))
        one.state, one.reason = state, reason
        await self._save(one)
        self._carry_on(one)
        return one.summary()

    async def resume_rollouts(self) -> None:
        """Those that an earlier registry left running."""
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
            orders = [
                protocol.Order(
                    id=rollout.order_id(one.id, name),
                    resource=name,
                    operation=one.plan.operation,
                    arguments=one.plan.arguments,
                    timeout_s=one.plan.timeout_s,
                )
                for name in batch
            ]
            for name, answer in zip(batch, await self.order(orders, one.by), strict=True):
                one.end(name, answer)
            one.judge()
            await self._save(one)
            if one.state == rollout.RUNNING and one.next_batch():
                await asyncio.sleep(one.plan.pause_s)
        summary = one.summary()
        await self._registry.record(
            "rollout",
            one.id,
            one.reason or f"{one.plan.operation} on {len(one.steps)} resources",
            who=self._registry.name,
            on_behalf_of=one.by,
            outcome=messages.Outcome.DONE if one.state == "done" else messages.Outcome.FAILED,
            **{state: str(count) for state, count in summary["counts"].items()},
        )

    async def _save(self, one: rollout.Rollout) -> None:
        async with self._registry.store.transaction() as tx:
            tx.fence(protocol.LEASE, self._registry.term)
            tx.put(ROLLOUTS, one.id, msgspec.json.encode(one))


def attributes(state: processor.Processor, name: str) -> dict[str, Any]:
    """What predicates select on: labels of the resource, facts and labels of its machine, and what it is."""
    spec = state.resources[name].spec
    agent = state.agents.get(spec.agent)
    status, owner = state.statuses.get(name), state.owners.get(name)
    found = agent_attributes(spec.agent, agent) if agent else {}
    return {
        **found,
        **spec.labels,
        "name": name,
        "type": spec.type,
        "group": spec.group,
        "agent": spec.agent,
        "state": status.state.value if status else "starting",
        "manager": owner.manager if owner else None,
    }


def agent_attributes(name: str, agent: processor.Agent) -> dict[str, Any]:
    return {**agent.facts, **agent.labels, "agent": name, "zone": agent.zone}


def _row(state: processor.Processor, name: str) -> dict[str, Any]:
    resource, status, owner = state.resources[name], state.statuses.get(name), state.owners.get(name)
    return {
        "name": name,
        "type": resource.spec.type,
        "group": resource.spec.group,
        "agent": resource.spec.agent,
        "wanted": "absent" if resource.deleting else resource.spec.wanted.value,
        "state": status.state.value if status else "starting",
        "reason": status.reason if status else "not managed yet",
        "since_ms": status.since_ms if status else 0,
        "drift": status.drift if status else "",
        "restarts": status.restarts if status else 0,
        "manager": owner.manager if owner else None,
        "epoch": owner.epoch if owner else 0,
        "applied": bool(status and status.generation == resource.generation),
    }


def _targets(arguments: dict[str, Any]) -> str:
    if "entries" in arguments and isinstance(arguments["entries"], list):
        names = [str(one.get("name", "?")) for one in arguments["entries"] if isinstance(one, dict)]
    else:
        names = [str(one) for one in arguments.get("names") or ()]
    text = ", ".join(names) or str(
        arguments.get("where") or arguments.get("name") or arguments.get("id") or "-"
    )
    return text[:256]


def _outcome(result: Any) -> dict[str, Any]:
    """Of an exec: the worst of the outcomes, with counts."""
    if not isinstance(result, list):
        return {}
    counts: dict[str, int] = {}
    for one in result:
        counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
    order = (messages.Outcome.IN_DOUBT, messages.Outcome.FAILED, messages.Outcome.REFUSED)
    worst = next((one for one in order if counts.get(one.value)), messages.Outcome.DONE)
    return {"outcome": worst, **{name: str(count) for name, count in counts.items()}}


def _lost(order: protocol.Order) -> protocol.Answer:
    return protocol.Answer(
        id=order.id, outcome=messages.Outcome.IN_DOUBT, code="timed-out", reason="its manager did not answer"
    )
