"""Resources, managers, agents, brokers: what is managed, by whom, and over what."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from muster.bus.rpc import client as rpc
from muster.core import errors, subjects
from muster.manage import client
from muster.web import problems, request_state
from muster.web.auth import sessions
from muster.web.rest import base

router = base.router("management")

_RESOURCE = base.row(
    name="string",
    type="string",
    group="string",
    agent="string",
    wanted="string",
    state="string",
    reason="string",
    since_ms="integer",
    drift="string",
    restarts="integer",
    manager="string?",
    epoch="integer",
    applied="boolean",
)


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ManifestBody(StrictBody):
    manifest: str = Field(min_length=1, max_length=4 << 20, description="YAML or JSON.")


class DesiredStateBody(StrictBody):
    """One entry of a manifest, without its name."""

    type: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    agent: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    where: str | None = Field(None, max_length=4096)
    group: str = Field("default", pattern=r"^[A-Za-z0-9_-]{1,128}$")
    labels: dict[str, str] = Field(default_factory=dict)
    depends_on: list[str] = Field(default_factory=list, max_length=1000)
    wanted: str = Field("up", pattern="^(up|down|drained)$")
    restart: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class ExecuteBody(StrictBody):
    operation: str = Field(min_length=1, max_length=256)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(30.0, gt=0, le=600)
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$", description="The same again does nothing.")


@router.get(
    "/resources",
    summary="Resources by name; those a predicate selects",
    **base.answers(base.items(_RESOURCE)),
)
async def resources(
    known: request_state.Known,
    person: request_state.Person,
    where: base.Where = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    found = await known.source.resources(where=where, after=cursor, limit=limit)
    return base.page(found.items, found.next)


@router.get(
    "/resources/{name}",
    summary="All there is to tell of a resource",
    **base.answers(_RESOURCE, headers=True),
)
async def resource(
    known: request_state.Known, person: request_state.Person, name: base.ResourceName
) -> Response:
    found = await known.source.resource(name)
    return base.reply(found, version=found["generation"])


@router.put(
    "/resources/{name}",
    summary="Make a resource be so",
    **base.answers({"type": "object"}, headers=True),
)
async def put_resource(
    known: request_state.Known,
    person: request_state.Person,
    name: base.ResourceName,
    wanted: DesiredStateBody,
    if_match: base.IfMatch = None,
) -> Response:
    changes = wanted.model_dump(exclude_defaults=True)
    version = base.if_match(if_match)

    async def act(bus: Any) -> dict[str, Any]:
        manage = client.ManageClient(bus)
        try:
            generation = version if isinstance(version, int) else None
            return await manage.put(name, generation=generation, **{"type": wanted.type, **changes})
        except errors.NotFound:
            if version is not None:
                raise
            return await manage.create({"name": name, "type": wanted.type, **changes})

    done = await _conditional(known.desk.do(person, "apply", name, act, touches="manage"), if_match)
    return base.reply(done, version=done["generation"])


@router.delete(
    "/resources/{name}", summary="Take a resource down and forget it", **base.answers({"type": "object"})
)
async def delete_resource(
    known: request_state.Known,
    person: request_state.Person,
    name: base.ResourceName,
    if_match: base.IfMatch = None,
) -> Response:
    version = base.if_match(if_match)

    async def act(bus: Any) -> dict[str, Any]:
        generation = version if isinstance(version, int) else None
        return await client.ManageClient(bus).delete(name, generation=generation)

    return base.reply(
        await _conditional(known.desk.do(person, "delete", name, act, touches="manage"), if_match)
    )


async def _conditional(work: Any, if_match: str | None) -> Any:
    """A conflict is a failed precondition, where there was a precondition."""
    try:
        return await work
    except errors.Conflict as error:
        if if_match is None or type(error) is not errors.Conflict:
            raise
        raise problems.PreconditionFailed(error.message, actual=error.actual) from error
    except errors.NotFound as error:
        if if_match is None:
            raise
        raise problems.PreconditionFailed(error.message) from error


@router.post(
    "/resources/{name}/executions",
    summary="Have an operation carried out",
    **base.answers({"type": "object"}),
)
async def execute(
    known: request_state.Known, person: request_state.Person, name: base.ResourceName, wanted: ExecuteBody
) -> Response:
    async def act(bus: Any) -> dict[str, Any]:
        found = await client.ManageClient(bus).exec(
            wanted.operation, name, arguments=wanted.arguments, timeout_s=wanted.timeout_s, id=wanted.id
        )
        return found[0]

    target = f"{name}: {wanted.operation}"
    return base.reply(await known.desk.do(person, "exec", target, act, touches="manage"))


@router.post(
    "/resources/{name}/drain",
    summary="Let it finish what it has, and stop",
    **base.answers({"type": "object"}),
)
async def drain(
    known: request_state.Known, person: request_state.Person, name: base.ResourceName
) -> Response:
    return base.reply(
        await known.desk.do(
            person, "drain", name, lambda bus: client.ManageClient(bus).drain(name), touches="manage"
        )
    )


@router.post("/resources/{name}/undrain", summary="Let it work again", **base.answers({"type": "object"}))
async def undrain(
    known: request_state.Known, person: request_state.Person, name: base.ResourceName
) -> Response:
    return base.reply(
        await known.desk.do(
            person, "undrain", name, lambda bus: client.ManageClient(bus).undrain(name), touches="manage"
        )
    )


@router.post("/plans", summary="What a manifest would change", **base.answers(base.items()))
async def plan(known: request_state.Known, person: request_state.Person, wanted: ManifestBody) -> Response:
    return base.page(await client.ManageClient(known.source.link.bus).plan(wanted.manifest))


@router.post("/manifests", summary="Apply a manifest", **base.answers({"type": "object"}))
async def apply(known: request_state.Known, person: request_state.Person, wanted: ManifestBody) -> Response:
    return base.reply(
        await known.desk.do(
            person,
            "apply",
            "a manifest",
            lambda bus: client.ManageClient(bus).apply(wanted.manifest),
            touches="manage",
        )
    )


@router.get("/summary", summary="How many resources in each state", **base.answers({"type": "object"}))
async def summary(known: request_state.Known, person: request_state.Person) -> Response:
    return base.reply(await known.source.summary())


@router.get("/managers", summary="Managers, and how much each manages", **base.answers(base.items()))
async def managers(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.managers(), cursor, limit, lambda row: (row["name"],))


@router.get("/agents", summary="Agents: machines that host resources", **base.answers(base.items()))
async def agents(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.agents(), cursor, limit, lambda row: (row["name"],))


@router.get("/rollouts", summary="Rollouts, and how far they are", **base.answers(base.items()))
async def rollouts(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.rollouts(), cursor, limit, lambda row: (row["id"],))


# Brokers


class BrokerBody(StrictBody):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    below: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    storage: bool = True


class LinkBody(StrictBody):
    near: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    far: str = Field(min_length=1, max_length=500, description="A broker, or the URL of a leaf listener.")


@router.get("/brokers", summary="The domain's brokers", **base.answers(base.items()))
async def brokers(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows = [_without_paths(one) for one in await known.source.brokers()]
    return base.paginate(rows, cursor, limit, lambda row: (row["name"],))


def _without_paths(one: dict[str, Any]) -> dict[str, Any]:
    """Where files lie on the machine is nobody's business here."""
    return {key: value for key, value in one.items() if key not in ("storage", "log_file")}


@router.post("/brokers", summary="Start one more broker", **base.answers({"type": "object"}, status=201))
async def start_broker(
    known: request_state.Known, person: request_state.Person, wanted: BrokerBody
) -> Response:
    made = await _control(known, person, "start", wanted.name, **wanted.model_dump())
    return base.reply(_without_paths(made), status=201)


@router.delete(
    "/brokers/{name}", summary="Stop a broker that was started later", **base.answers({"type": "object"})
)
async def stop_broker(
    known: request_state.Known, person: request_state.Person, name: base.ResourceName
) -> Response:
    return base.reply(_without_paths(await _control(known, person, "stop", name, name=name)))


@router.get("/links", summary="What joins the brokers", **base.answers(base.items()))
async def links(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.links(), cursor, limit, lambda row: (row["id"],))


@router.post("/links", summary="Hang a broker on another", **base.answers({"type": "object"}, status=201))
async def link(known: request_state.Known, person: request_state.Person, wanted: LinkBody) -> Response:
    target = f"{wanted.near}>{wanted.far}"
    return base.reply(await _control(known, person, "link", target, **wanted.model_dump()), status=201)


@router.delete("/links", summary="Take a leaf link away", **base.answers({"type": "object"}))
async def unlink(
    known: request_state.Known,
    person: request_state.Person,
    id: Annotated[str, Query(min_length=1, max_length=700)],
) -> Response:
    return base.reply(await _control(known, person, "unlink", id, id=id))


async def _control(
    known: request_state.WebState, person: sessions.LoginSession, verb: str, target: str, **arguments: Any
) -> dict[str, Any]:
    async def act(bus: Any) -> dict[str, Any]:
        subject = subjects.from_identity("bus", bus.identity, "brokers", verb)
        found: dict[str, Any] = await rpc.call(
            bus, subject, arguments, timeout_s=60.0, try_s=3.0, waits=False
        )
        return found

    return await known.desk.do(
        person, f"broker-{verb}", target, act, touches="brokers", needs=sessions.WebRole.ADMIN
    )
