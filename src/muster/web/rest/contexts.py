"""Contexts and service entries: where they are, what they were, and writing what is still the same."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path
from pydantic import Field
from starlette.responses import Response

from muster.core import errors
from muster.inform import client, protocol, service_entries
from muster.web import problems, request_state
from muster.web.auth import sessions
from muster.web.data import rows
from muster.web.rest import base
from muster.web.rest.resources import StrictBody

router = base.router("contexts")

Key = Annotated[str, Path(min_length=1, max_length=512, description="The context's key; it may hold `/`.")]
MaxStaleness = Annotated[
    float | None,
    base.Query(
        ge=0, le=1e9, description="No older than so many seconds; 0: as new as this moment. Else any copy."
    ),
]
_CONTEXT = base.row(
    key="string",
    value="string",
    value_base64="string",
    attributes="object",
    version="integer",
    stamp="string",
    writer="string",
    source="string",
    copy="string",
    age_s="number",
    expires_at_ms="integer?",
)


def _searched(of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of one page of a search: whatever may be missing from it is said."""
    made = base.items(of)
    names = {"type": "array", "items": {"type": "string"}}
    made["properties"] |= {
        "next": {
            "type": ["string", "null"],
            "description": "The cursor of the following page; null: there is none. A page may hold fewer "
            "than were asked for, even none: going through very many takes several.",
        },
        "silent": {**names, "description": "Information nodes that did not answer."},
        "failed": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Mounted registries that could not be searched, and why.",
        },
        "cut": {**names, "description": "Mounted registries that have more entries than are searched."},
    }
    return made


class ContextBody(StrictBody):
    value: str | None = Field(None, max_length=1 << 20, description="Text; or instead:")
    value_base64: str | None = Field(None, max_length=3 << 19)
    attributes: dict[str, str | bool | int | float | list[str]] = Field(default_factory=dict)
    lease_s: float = Field(0.0, ge=0, le=366 * 86400, description="0: it stays until it is deleted.")
    ack: Literal["logged", "replicated"] = "logged"

    def data(self) -> bytes:
        if (self.value is None) == (self.value_base64 is None):
            raise errors.InvalidInput("give either `value` or `value_base64`")
        if self.value_base64 is None:
            try:
                return (self.value or "").encode()
            except UnicodeEncodeError as error:
                raise errors.InvalidInput("`value` holds half a character") from error
        try:
            return base64.b64decode(self.value_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise errors.InvalidInput("`value_base64` is not base 64") from error


class ServiceEntryBody(StrictBody):
    name: str = Field(min_length=1, max_length=1000)
    access: list[str] = Field(default_factory=list, max_length=100)
    categories: list[str] = Field(default_factory=list, max_length=100)
    metadata: dict[str, str | bool | int | float | list[str]] = Field(default_factory=dict)
    description: str = Field("", max_length=1 << 19)
    lease_s: float = Field(0.0, ge=0, le=366 * 86400)


def _version(if_match: str | None) -> int | None:
    """`*` asks only that it is there, which the log cannot be asked for: see `_any`."""
    wanted = base.if_match(if_match)
    return wanted if isinstance(wanted, int) else None


async def _any(inform: client.InformClient, key: str, if_match: str | None) -> int | None:
    if base.if_match(if_match) != "*":
        return _version(if_match)
    return (await inform.get(key, max_staleness_s=0.0)).version


async def _write(
    known: request_state.WebState,
    person: sessions.LoginSession,
    what: str,
    key: str,
    if_match: str | None,
    act: Any,
) -> Any:
    async def conditionally(bus: Any) -> Any:
        inform = client.InformClient(bus)
        return await act(inform, await _any(inform, key, if_match))

    try:
        return await known.desk.do(person, what, key, conditionally, touches="inform", service_audits=False)
    except errors.Conflict as error:
        if if_match is None:
            raise
        raise problems.PreconditionFailed(error.message, actual=error.actual) from error
    except errors.NotFound as error:
        if if_match is None:
            raise
        raise problems.PreconditionFailed(error.message) from error


@router.get("/contexts", summary="Contexts that a predicate selects", **base.answers(_searched(_CONTEXT)))
async def contexts(
    known: request_state.Known,
    person: request_state.Person,
    where: base.Where = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.reply(await known.source.contexts(person, where, limit=limit, after=cursor))


@router.get("/contexts/{key:text}", summary="A context", **base.answers(_CONTEXT, headers=True))
async def context(
    known: request_state.Known, person: request_state.Person, key: Key, max_staleness_s: MaxStaleness = None
) -> Response:
    found = await known.source.context(person, key, max_staleness_s=max_staleness_s)
    return base.reply(rows.context_row(found), version=found.version)


async def _put(
    known: request_state.Known,
    person: request_state.Person,
    key: str,
    wanted: ContextBody,
    if_match: str | None,
) -> protocol.WriteResult:
    data = wanted.data()

    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.put(
            key or None,
            data,
            attributes=wanted.attributes,
            lease_s=wanted.lease_s,
            expected_version=version,
            ack=wanted.ack,
        )

    written: protocol.WriteResult = await _write(known, person, "put-context", key, if_match, act)
    return written


@router.post(
    "/contexts",
    summary="Write a context under a key that is assigned",
    **base.answers({"type": "object"}, status=201, headers=True),
)
async def new_context(
    known: request_state.Known, person: request_state.Person, wanted: ContextBody
) -> Response:
    written = await _put(known, person, "", wanted, None)
    return base.reply(msgspec.structs.asdict(written), status=201, version=written.version)


@router.put(
    "/contexts/{key:text}",
    summary="Write a context; with If-Match, only if it is still that version",
    **base.answers({"type": "object"}, headers=True),
)
async def put_context(
    known: request_state.Known,
    person: request_state.Person,
    key: Key,
    wanted: ContextBody,
    if_match: base.IfMatch = None,
) -> Response:
    written = await _put(known, person, key, wanted, if_match)
    return base.reply(msgspec.structs.asdict(written), version=written.version)


@router.delete("/contexts/{key:text}", summary="Delete a context", **base.answers(None, status=204))
async def delete_context(
    known: request_state.Known, person: request_state.Person, key: Key, if_match: base.IfMatch = None
) -> Response:
    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.delete(key, expected_version=version)

    await _write(known, person, "delete-context", key, if_match, act)
    return Response(status_code=204)


@router.get(
    "/context-history/{key:text}", summary="What a context was, oldest first", **base.answers(base.items())
)
async def history(
    known: request_state.Known,
    person: request_state.Person,
    key: Key,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    found = await known.source.context_history(person, key, after=base.number(cursor), limit=limit)
    return base.reply({**found, "next": None if found["next"] is None else str(found["next"])})


@router.get(
    "/context-copies/{key:text}",
    summary="Where a context's copies live, the primary first",
    **base.answers(base.items()),
)
async def copies(known: request_state.Known, person: request_state.Person, key: Key) -> Response:
    return base.page(await known.source.copies(key))


@router.get("/information-nodes", summary="Information nodes, and their load", **base.answers(base.items()))
async def nodes(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.information_nodes(), cursor, limit, lambda row: (row["node"],))


# Service entries


@router.get("/services", summary="Service entries that a predicate selects", **base.answers(_searched()))
async def entries(
    known: request_state.Known,
    person: request_state.Person,
    where: base.Where = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.reply(await known.source.entries(person, where, limit=limit, after=cursor))


EntryId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.:-]{1,200}$")]


@router.get("/services/{id}", summary="A service entry", **base.answers({"type": "object"}, headers=True))
async def entry(known: request_state.Known, person: request_state.Person, id: EntryId) -> Response:
    found = await known.source.entry(person, id)
    return base.reply(found, version=found["version"])


@router.put(
    "/services/{id}", summary="Save a service entry", **base.answers({"type": "object"}, headers=True)
)
async def put_entry(
    known: request_state.Known,
    person: request_state.Person,
    id: EntryId,
    wanted: ServiceEntryBody,
    if_match: base.IfMatch = None,
) -> Response:
    made = service_entries.ServiceEntry(
        id=id,
        name=wanted.name,
        access=tuple(wanted.access),
        categories=tuple(wanted.categories),
        metadata=wanted.metadata,
        description=wanted.description.encode("utf-8", "surrogatepass"),
    )

    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await service_entries.ServiceEntries(inform).save(
            made, lease_s=wanted.lease_s, expected_version=version
        )

    saved = await _write(known, person, "save-service", service_entries.PREFIX + id, if_match, act)
    return base.reply(rows.entry_row(saved), version=saved.version)


@router.delete("/services/{id}", summary="Delete a service entry", **base.answers(None, status=204))
async def delete_entry(
    known: request_state.Known, person: request_state.Person, id: EntryId, if_match: base.IfMatch = None
) -> Response:
    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.delete(service_entries.PREFIX + id, expected_version=version)

    await _write(known, person, "delete-service", service_entries.PREFIX + id, if_match, act)
    return Response(status_code=204)
