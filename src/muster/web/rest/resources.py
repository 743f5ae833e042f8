"""REST: resources, managers, agents, rollouts and brokers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from muster.bus.brokers import control
from muster.core import errors
from muster.manage import client, rows
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.rest import base, lists

T = TypeVar("T")
router = base.router("management")


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


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


class ExecuteBody(StrictBody):
    operation: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(30.0, gt=0, le=600)
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Idempotency key: a repeated request has no effect.",
    )


@router.get(
    "/resources",
    summary="List resources by name",
    **base.answers(base.items(base.kind(rows.ResourceRow))),
)
async def resources(
    web: request_state.Web,
    person: request_state.Person,
    where: base.Where = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    result = await web.source.resources(where=where, after=cursor, limit=limit)
    return base.page(result.items, result.next)


@router.get(
    "/resources/{name}",
    summary="Details of a resource",
    **base.answers(base.kind(rows.ResourceDescription), headers=True),
)
async def resource(web: request_state.Web, person: request_state.Person, name: base.ResourceName) -> Response:
    current = await web.source.resource(name)
    return base.reply(current, version=current.generation)


@router.put(
    "/resources/{name}",
    summary="Create or change a resource",
    **base.answers(base.kind(rows.ResourceDescription), headers=True),
)
async def put_resource(
    web: request_state.Web,
    person: request_state.Person,
    name: base.ResourceName,
    body: DesiredStateBody,
    if_match: base.IfMatch = None,
) -> Response:
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

    done = await base.conditional(web.actions.run(person, "apply", name, act, touches="manage"), if_match)
    return base.reply(done, version=done.generation)


@router.delete(
    "/resources/{name}",
    summary="Stop and delete a resource",
    **base.answers(base.kind(rows.DeleteResult)),
)
async def delete_resource(
    web: request_state.Web,
    person: request_state.Person,
    name: base.ResourceName,
    if_match: base.IfMatch = None,
) -> Response:
    version = base.if_match(if_match)

    async def act(bus: Any) -> rows.DeleteResult:
        generation = version if isinstance(version, int) else None
        return await client.ManageClient(bus).delete(name, generation=generation)

    return base.reply(
        await base.conditional(web.actions.run(person, "delete", name, act, touches="manage"), if_match)
    )


@router.post(
    "/resources/{name}/executions",
    summary="Run an operation of a resource",
    **base.answers(base.kind(rows.ExecutionRow)),
)
async def execute(
    web: request_state.Web, person: request_state.Person, name: base.ResourceName, body: ExecuteBody
) -> Response:
    async def act(manage: client.ManageClient) -> rows.ExecutionRow:
        results = await manage.exec(
            body.operation, name, arguments=body.arguments, timeout_s=body.timeout_s, id=body.id
        )
        return results[0]

    return base.reply(await _run(web, person, "exec", f"{name}: {body.operation}", act))


async def _run(
    web: request_state.WebState,
    person: sessions.LoginSession,
    what: str,
    target: str,
    act: Callable[[client.ManageClient], Awaitable[T]],
) -> T:
    return await web.actions.run(
        person, what, target, lambda bus: act(client.ManageClient(bus)), touches="manage"
    )


@router.post(
    "/resources/{name}/drain",
    summary="Drain a resource",
    **base.answers(base.kind(rows.DrainResult)),
)
async def drain(web: request_state.Web, person: request_state.Person, name: base.ResourceName) -> Response:
    return base.reply(await _run(web, person, "drain", name, lambda manage: manage.drain(name, "resource")))


@router.post(
    "/resources/{name}/undrain",
    summary="Return a drained resource to service",
    **base.answers(base.kind(rows.DrainResult)),
)
async def undrain(web: request_state.Web, person: request_state.Person, name: base.ResourceName) -> Response:
    return base.reply(
        await _run(web, person, "undrain", name, lambda manage: manage.undrain(name, "resource"))
    )


@router.post(
    "/plans",
    summary="Show what a manifest would change",
    **base.answers(base.items(base.kind(rows.PlanStep))),
)
async def plan(web: request_state.Web, person: request_state.Person, body: ManifestBody) -> Response:
    return base.page(await web.source.plan(body.manifest))


@router.post("/manifests", summary="Apply a manifest", **base.answers(base.kind(rows.ApplyResult)))
async def apply(web: request_state.Web, person: request_state.Person, body: ManifestBody) -> Response:
    return base.reply(
        await _run(web, person, "apply", "a manifest", lambda manage: manage.apply(body.manifest))
    )


@router.get("/summary", summary="Number of resources by state", **base.answers(base.kind(rows.FleetSummary)))
async def summary(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(await web.source.summary())


@lists.listing(
    router, "/managers", "List managers and their resources", rows.ManagerRow, lambda row: (row.name,)
)
async def managers(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[rows.ManagerRow]:
    return await web.source.managers()


@lists.listing(router, "/agents", "List agents", rows.AgentRow, lambda row: (row.name,))
async def agents(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[rows.AgentRow]:
    return await web.source.agents()


@lists.listing(
    router, "/rollouts", "List rollouts and their progress", rows.RolloutRow, lambda row: (row.id,)
)
async def rollouts(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[rows.RolloutRow]:
    return await web.source.rollouts()


# Brokers


class BrokerBody(StrictBody):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    below: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    storage: bool = True


class LinkBody(StrictBody):
    near: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    far: str = Field(min_length=1, max_length=500, description="A broker, or the URL of a leaf listener.")


@lists.listing(
    router, "/brokers", "List the brokers of the domain", control.BrokerRow, lambda row: (row.name,)
)
async def brokers(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[control.BrokerRow]:
    return [_without_paths(broker) for broker in await web.source.brokers()]


def _without_paths(broker: control.BrokerDescription) -> control.BrokerRow:
    """Remove paths of files on the machine."""
    return msgspec.convert(broker, control.BrokerRow, from_attributes=True)


@router.post(
    "/brokers",
    summary="Start another broker",
    **base.answers(base.kind(control.BrokerRow), status=201),
)
async def start_broker(web: request_state.Web, person: request_state.Person, body: BrokerBody) -> Response:
    made = await _control(web, person, "start", body.name, lambda domain: domain.start(**body.model_dump()))
    return base.reply(_without_paths(made), status=201)


@router.delete(
    "/brokers/{name}",
    summary="Stop a broker that was started at run time",
    **base.answers(base.kind(control.BrokerRow)),
)
async def stop_broker(
    web: request_state.Web, person: request_state.Person, name: base.ResourceName
) -> Response:
    stopped = await _control(web, person, "stop", name, lambda domain: domain.stop(name))
    return base.reply(_without_paths(stopped))


@lists.listing(router, "/links", "List the links between brokers", control.LinkRow, lambda row: (row.id,))
async def links(web: request_state.WebState, _: sessions.LoginSession) -> Sequence[control.LinkRow]:
    return await web.source.links()


@router.post(
    "/links",
    summary="Connect a broker to another with a leaf link",
    **base.answers(base.kind(control.LinkRow), status=201),
)
async def link(web: request_state.Web, person: request_state.Person, body: LinkBody) -> Response:
    target = f"{body.near}>{body.far}"
    made = await _control(web, person, "link", target, lambda domain: domain.link(body.near, body.far))
    return base.reply(made, status=201)


@router.delete("/links", summary="Remove a leaf link", **base.answers(base.kind(control.RemovedLink)))
async def unlink(
    web: request_state.Web,
    person: request_state.Person,
    id: Annotated[str, Query(min_length=1, max_length=700)],
) -> Response:
    return base.reply(await _control(web, person, "unlink", id, lambda domain: domain.unlink(id)))


async def _control(
    web: request_state.WebState,
    person: sessions.LoginSession,
    verb: str,
    target: str,
    act: Callable[[control.BrokerControl], Awaitable[T]],
) -> T:
    return await web.actions.run(
        person,
        f"broker-{verb}",
        target,
        lambda bus: act(control.BrokerControl(bus)),
        touches="brokers",
        needs=sessions.WebRole.ADMIN,
    )
