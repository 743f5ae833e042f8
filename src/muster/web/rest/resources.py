"""REST: resources, managers, agents, rollouts and brokers."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query
from pydantic import Field

from muster.bus.brokers import control
from muster.bus.brokers import operations as broker_operations
from muster.core import errors
from muster.manage import client, operations, protocol, rows
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.data import bus_feed
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

router = route.RouteTable("management")
LINES_MAX, MERGED_MAX = 1_000, 10_000  # of one log, and of several together
ADMIN = sessions.WebRole.ADMIN


class ManifestBody(StrictBody):
    manifest: str = Field(min_length=1, max_length=4 << 20, description="YAML or JSON.")


class DesiredStateBody(StrictBody):
    """An entry of a manifest without the name. For an existing resource: fields that are left out stay."""

    type: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    agent: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    where: str | None = Field(None, max_length=4096)
    group: str = Field("default", pattern=r"^[A-Za-z0-9_-]{1,128}$")
    labels: dict[str, str] = Field(default_factory=dict)
    depends_on: list[str] = Field(default_factory=list, max_length=1000)
    desired: str = Field("up", pattern="^(up|down|drained)$")
    restart: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    update: dict[str, Any] | None = None
    placement: dict[str, Any] | None = None
    reschedule: dict[str, Any] | None = None
    hooks: dict[str, Any] | None = None
    job: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None


class ExecuteBody(StrictBody):
    operation: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(30.0, gt=0, le=600)
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Idempotency key: a repeated request has no effect.",
    )


class RolloutBody(StrictBody):
    names: list[str] = Field([], max_length=10_000, description="Names of resources.")
    where: str = Field("", max_length=4096, description="Instead: a predicate that selects resources.")
    operation: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    batch: str = Field("1", pattern=r"^[0-9]{1,9}%?$", description="A number, or a percentage.")
    pause_s: float = Field(0.0, ge=0, le=86400, description="Between batches.")
    errors_max: int = Field(0, ge=0, le=1 << 31, description="More failures stop the rollout.")
    timeout_s: float = Field(protocol.OPERATION_TIMEOUT_S, gt=0, le=3600, description="Of each operation.")
    healthy_s: float = Field(60.0, ge=0, le=86400, description="Time to become healthy; 0: not checked.")


@router.of("GET /resources", "List resources by name")
async def resources(
    call: request_state.Call, where: base.Where = "", limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> route.RowPage[rows.ResourceRow]:
    result = await call.source.feed.query(
        ("resources", where, cursor, limit),
        "manage",
        5.0,
        lambda bus: client.ManageClient(bus, timeout_s=bus_feed.READ_S).enumerate(
            where=where, after=cursor, limit=limit
        ),
    )
    return route.RowPage(result.items, result.next)


@router.of("GET /state-changes", "Changes of the states of resources of the last minutes, newest first")
async def state_changes(
    call: request_state.Call, limit: base.Limit = base.LIMIT
) -> route.RowPage[protocol.ResourceStateChange]:
    return route.RowPage(list(reversed(call.source.feed.changes))[:limit])


@router.of("GET /resources/{name}", "Details of a resource")
async def resource(
    call: request_state.Call, name: base.ResourceName
) -> route.Versioned[rows.ResourceDescription]:
    current = await call.source.read(operations.DESCRIBE, name=name)
    return route.Versioned(current, current.generation)


@router.of("PUT /resources/{name}", "Create or change a resource")
async def put_resource(
    call: request_state.Call, name: base.ResourceName, body: DesiredStateBody, if_match: base.IfMatch = None
) -> route.Versioned[rows.ResourceDescription]:
    changes = body.model_dump(exclude_unset=True)
    version = base.if_match(if_match)

    async def act(bus: Any) -> rows.ResourceDescription:
        manage = client.ManageClient(bus)
        try:
            generation = version if isinstance(version, int) else None
            return await manage.put(name, generation=generation, **{"type": body.type, **changes})
        except errors.NotFound:
            if version is not None:
                raise
            return await manage.create({"name": name, "type": body.type, **changes})

    done = await base.conditional(call.run("apply", name, act, touches="manage"), if_match)
    return route.Versioned(done, done.generation)


@router.of("DELETE /resources/{name}", "Stop and delete a resource")
async def delete_resource(
    call: request_state.Call, name: base.ResourceName, if_match: base.IfMatch = None
) -> rows.DeleteResult:
    version = base.if_match(if_match)

    async def act(bus: Any) -> rows.DeleteResult:
        generation = version if isinstance(version, int) else None
        return await client.ManageClient(bus).delete(name, generation=generation)

    return await base.conditional(call.run("delete", name, act, touches="manage"), if_match)


@router.of("POST /resources/{name}/executions", "Run an operation of a resource")
async def execute(call: request_state.Call, name: base.ResourceName, body: ExecuteBody) -> rows.ExecutionRow:
    async def act(bus: Any) -> rows.ExecutionRow:
        results = await client.ManageClient(bus).exec(
            body.operation, name, arguments=body.arguments, timeout_s=body.timeout_s, id=body.id
        )
        return results[0]

    return await call.run("exec", f"{name}: {body.operation}", act, touches="manage")


@router.of("GET /resources/{name}/logs", "Part of a resource's log; the next one follows its cursor")
async def logs(
    call: request_state.Call,
    name: base.ResourceName,
    lines: Annotated[int | None, Query(ge=0, le=protocol.LOG_LINES_MAX)] = None,
    since_s: Annotated[float | None, Query(ge=0)] = None,
    cursor: Annotated[str, Query(max_length=64)] = "",
) -> rows.LogRow:
    query = protocol.LogQuery(lines=lines, since_s=since_s, cursor=cursor)

    async def act(bus: Any) -> rows.LogRow:
        return (await client.ManageClient(bus).log_parts({name: query}))[0]

    return await call.run("logs", name, act, repeated=bool(cursor))


@router.of("GET /logs", "Last lines of the logs of several resources")
async def merged_logs(
    call: request_state.Call,
    names: base.ResourceNames = [],  # noqa: B006
    where: base.Where = "",
    lines: Annotated[int, Query(ge=0, le=LINES_MAX, description="Of each resource.")] = 100,
    since_s: Annotated[float | None, Query(ge=0)] = None,
) -> rows.MergedLog:
    """Of the named resources, or of those that match `where`; `/watch-logs` follows them."""
    notes: list[str] = []

    async def act(bus: Any) -> rows.MergedLog:
        stream = client.ManageClient(bus).log_lines(
            *names, where=where, lines=lines, since_s=since_s, note=notes.append
        )
        merged: list[rows.LogLine] = []
        async with contextlib.aclosing(stream):
            async for line in stream:
                if len(merged) == MERGED_MAX:
                    notes.append(f"only the first {MERGED_MAX} lines are here: ask for fewer of each")
                    break
                merged.append(line)
        return rows.MergedLog(lines=merged, notes=notes)

    return await call.run("logs", where or ", ".join(names), act)


drain, undrain, drain_agent, undrain_agent = (
    router.operation(
        f"POST /{kind}s/{{name}}/{declared.method}",
        dataclasses.replace(declared, help=declared.help.replace("resource", words)),
        as_=declared.method + ("_agent" if kind == "agent" else ""),
        fixed={"kind": kind},
        name=base.ResourceName,
    )
    for kind, words in (("resource", "resource"), ("agent", "machine"))
    for declared in (operations.DRAIN, operations.UNDRAIN)
)


@router.of("POST /plans", "Show what a manifest would change")
async def plan(call: request_state.Call, body: ManifestBody) -> route.RowPage[rows.PlanStep]:
    async with call.source.long.turn():
        return route.RowPage(await client.ManageClient(call.source.feed.link.bus).plan(body.manifest))


@router.of("POST /manifests", "Apply a manifest")
async def apply(call: request_state.Call, body: ManifestBody) -> rows.ApplyResult:
    async def act(bus: Any) -> rows.ApplyResult:
        return await client.ManageClient(bus).apply(body.manifest)

    return await call.run("apply", "a manifest", act, touches="manage")


router.operation("GET /summary", operations.SUMMARY)
router.operation("GET /managers", operations.MANAGERS, key=("name",))
router.operation("GET /agents", operations.AGENTS, key=("name",))
router.operation("GET /rollouts", operations.ROLLOUTS, key=("id",))


@router.of("POST /rollouts", "Start an operation on many resources, in batches", status=201)
async def start_rollout(call: request_state.Call, body: RolloutBody) -> rows.RolloutRow:
    if bool(body.names) == bool(body.where):
        raise errors.InvalidInput("either names or an expression is required")
    plan = rows.RolloutPlan(**body.model_dump(exclude={"names", "where"}))

    async def act(bus: Any) -> rows.RolloutRow:
        return await client.ManageClient(bus).rollout(plan, *body.names, where=body.where)

    target = (body.where or ", ".join(body.names))[:200]
    return await call.run("rollout", f"{target}: {body.operation}", act, touches="manage")


RolloutId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
router.operation("GET /rollouts/{id}/steps", operations.STEPS, id=RolloutId, key=("name",))
pause, resume, abort = (
    router.operation(f"POST /rollouts/{{id}}/{declared.method}", declared, id=RolloutId)
    for declared in (operations.PAUSE, operations.RESUME, operations.ABORT)
)
undo = router.operation("POST /groups/{group}/undo", operations.UNDO, group=base.ResourceName)
router.operation(
    "GET /groups/{group}/revisions", operations.REVISIONS, group=base.ResourceName, key=("revision", "name")
)
router.operation("GET /moves", operations.REBALANCE_PLAN, key=("name",))
router.operation("POST /moves", operations.REBALANCE)
router.operation("GET /jobs", operations.JOBS, key=("name",))


@router.of("GET /jobs/{name}/runs", operations.JOB_RUNS.help, key=("ended_ms", "resource"))
async def job_runs(call: request_state.Call, name: base.ResourceName) -> list[rows.JobRunRow]:
    async def act(bus: Any) -> list[rows.JobRunRow]:
        return await client.ManageClient(bus).job_runs(name)

    return await call.run("logs", name, act)


router.operation("POST /jobs/{name}/runs", operations.RUN_JOB, name=base.ResourceName)


# Brokers


class BrokerBody(StrictBody):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    below: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    storage: bool = True


class LinkBody(StrictBody):
    near: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    far: str = Field(min_length=1, max_length=500, description="A broker, or the URL of a leaf listener.")


@router.of("GET /brokers", "List the brokers of the domain", key=("name",))
async def brokers(call: request_state.Call) -> list[control.BrokerRow]:
    return [_without_paths(broker) for broker in await call.source.feed.brokers()]


def _without_paths(broker: control.BrokerDescription) -> control.BrokerRow:
    """Remove paths of files on the machine."""
    return msgspec.convert(broker, control.BrokerRow, from_attributes=True)


@router.of("POST /brokers", broker_operations.START.help, status=201)
async def start_broker(call: request_state.Call, body: BrokerBody) -> control.BrokerRow:
    request = body.model_dump()
    return _without_paths(await call.operate(broker_operations.START, request, needs=ADMIN))


@router.of("DELETE /brokers/{name}", broker_operations.STOP.help)
async def stop_broker(call: request_state.Call, name: base.ResourceName) -> control.BrokerRow:
    request = {"name": name}
    return _without_paths(await call.operate(broker_operations.STOP, request, needs=ADMIN))


@router.of("GET /links", "List the links between brokers", key=("id",))
async def links(call: request_state.Call) -> list[control.LinkRow]:
    return await call.source.feed.links()


router.operation("POST /links", broker_operations.LINK, body=LinkBody, status=201, needs=ADMIN)
router.operation(
    "DELETE /links",
    broker_operations.UNLINK,
    needs=ADMIN,
    id=Annotated[str, Query(min_length=1, max_length=700)],
)
