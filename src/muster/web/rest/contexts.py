"""REST: contexts and service entries, with conditional writes."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import Field

from muster.core import errors
from muster.inform import client, protocol, rows, service_entries
from muster.web import request_state
from muster.web.data import bus_feed
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

router = route.RouteTable("contexts")
READ_S = bus_feed.READ_S

Key = Annotated[
    str, Path(min_length=1, max_length=512, description="Key of the context; it may contain `/`.")
]
MaxStaleness = Annotated[
    float | None,
    base.Query(
        ge=0, le=1e9, description="Maximum age in seconds; 0: read the primary. Default: any replica."
    ),
]


class ContextBody(StrictBody):
    value: str | None = Field(None, max_length=1 << 20, description="Text; alternatively:")
    value_base64: str | None = Field(None, max_length=3 << 19)
    attributes: dict[str, str | bool | int | float | list[str]] = Field(default_factory=dict)
    lease_s: float = Field(0.0, ge=0, le=366 * 86400, description="0: no expiry.")
    ack: Literal["logged", "replicated"] = "logged"

    def data(self) -> bytes:
        if (self.value is None) == (self.value_base64 is None):
            raise errors.InvalidInput("give either `value` or `value_base64`")
        if self.value_base64 is None:
            try:
                return (self.value or "").encode()
            except UnicodeEncodeError as error:
                raise errors.InvalidInput("`value` contains an unpaired surrogate") from error
        try:
            return base64.b64decode(self.value_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise errors.InvalidInput("`value_base64` is not valid base64") from error


class ServiceEntryBody(StrictBody):
    name: str = Field(min_length=1, max_length=1000)
    access: list[str] = Field(default_factory=list, max_length=100)
    categories: list[str] = Field(default_factory=list, max_length=100)
    metadata: dict[str, str | bool | int | float | list[str]] = Field(default_factory=dict)
    description: str = Field("", max_length=1 << 19)
    lease_s: float = Field(0.0, ge=0, le=366 * 86400)


def _version(if_match: str | None) -> int | None:
    """`*` requires only that the context exists, a condition that the log does not have: see `_any`."""
    expected = base.if_match(if_match)
    return expected if isinstance(expected, int) else None


async def _any(inform: client.InformClient, key: str, if_match: str | None) -> int | None:
    if base.if_match(if_match) != "*":
        return _version(if_match)
    return (await inform.get(key, max_staleness_s=0.0)).version


async def _write(call: request_state.Call, what: str, key: str, if_match: str | None, act: Any) -> Any:
    async def conditionally(bus: Any) -> Any:
        inform = client.InformClient(bus)
        return await act(inform, await _any(inform, key, if_match))

    work = call.run(what, key, conditionally, touches="inform", service_audits=False)
    return await base.conditional(work, if_match)


@router.of("GET /contexts", "List the contexts that a predicate selects")
async def contexts(
    call: request_state.Call, where: base.Where = "", limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> rows.ContextPage:
    result = await call.source.inform.read(
        call.person,
        lambda inform: inform.find(where or "TRUE", limit=limit, after=cursor, within_s=READ_S),
    )
    return rows.ContextPage(items=list(map(rows.context_row, result.contexts)), **_rest(result))


def _rest(result: protocol.FindResult) -> dict[str, Any]:
    """The end of a page of a search, and the parts that are missing."""
    end = result.reached if result.more else None
    return {"next": end, "silent": result.silent, "failed": result.failed, "cut": result.cut}


@router.of("GET /contexts/{key:text}", "Read a context")
async def context(
    call: request_state.Call, key: Key, max_staleness_s: MaxStaleness = None
) -> route.Versioned[rows.ContextRow]:
    current = await call.source.inform.read(
        call.person, lambda inform: inform.get(key, max_staleness_s=max_staleness_s)
    )
    return route.Versioned(rows.context_row(current), current.version)


async def _put(
    call: request_state.Call, key: str, body: ContextBody, if_match: str | None
) -> protocol.WriteResult:
    data = body.data()

    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.put(
            key or None,
            data,
            attributes=body.attributes,
            lease_s=body.lease_s,
            expected_version=version,
            ack=body.ack,
        )

    written: protocol.WriteResult = await _write(call, "put-context", key, if_match, act)
    return written


@router.of("POST /contexts", "Write a context with a generated key", status=201)
async def new_context(call: request_state.Call, body: ContextBody) -> route.Versioned[protocol.WriteResult]:
    written = await _put(call, "", body, None)
    return route.Versioned(written, written.version)


@router.of("PUT /contexts/{key:text}", "Write a context; with If-Match, only if the version matches")
async def put_context(
    call: request_state.Call, key: Key, body: ContextBody, if_match: base.IfMatch = None
) -> route.Versioned[protocol.WriteResult]:
    written = await _put(call, key, body, if_match)
    return route.Versioned(written, written.version)


@router.of("DELETE /contexts/{key:text}", "Delete a context")
async def delete_context(call: request_state.Call, key: Key, if_match: base.IfMatch = None) -> None:
    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.delete(key, expected_version=version)

    await _write(call, "delete-context", key, if_match, act)


@router.of("GET /context-history/{key:text}", "List the versions of a context, oldest first")
async def history(
    call: request_state.Call, key: Key, limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> rows.ContextHistoryPage:
    return await call.source.inform.context_history(call.person, key, after=base.number(cursor), limit=limit)


@router.of("GET /context-replicas/{key:text}", "List the replicas of a context, the primary first")
async def replicas(call: request_state.Call, key: Key) -> rows.ReplicaPage:
    return await call.source.inform.replicas(key)


@router.of("GET /information-nodes", "List information nodes and their load", key=("node",))
async def nodes(call: request_state.Call) -> list[protocol.NodeInfo]:
    return await call.source.inform.information_nodes()


# Service entries


@router.of("GET /services", "List the service entries that a predicate selects")
async def entries(
    call: request_state.Call, where: base.Where = "", limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> rows.ServiceEntryPage:
    result = await call.source.inform.read(
        call.person,
        lambda inform: service_entries.ServiceEntries(inform).search(
            where, limit=limit, after=cursor, within_s=READ_S
        ),
    )
    listed = [
        rows.entry_row(service_entries.from_context(context), context.source) for context in result.contexts
    ]
    return rows.ServiceEntryPage(items=listed, **_rest(result))


EntryId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.:-]{1,200}$")]


@router.of("GET /services/{id}", "Read a service entry")
async def entry(call: request_state.Call, id: EntryId) -> route.Versioned[rows.ServiceEntryRow]:
    current = await call.source.inform.read(
        call.person, lambda inform: service_entries.ServiceEntries(inform).get(id)
    )
    return route.Versioned(rows.entry_row(current), current.version)


@router.of("PUT /services/{id}", "Save a service entry")
async def put_entry(
    call: request_state.Call, id: EntryId, body: ServiceEntryBody, if_match: base.IfMatch = None
) -> route.Versioned[rows.ServiceEntryRow]:
    made = service_entries.ServiceEntry(
        id=id,
        name=body.name,
        access=tuple(body.access),
        categories=tuple(body.categories),
        metadata=body.metadata,
        description=body.description.encode("utf-8", "surrogatepass"),
    )

    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await service_entries.ServiceEntries(inform).save(
            made, lease_s=body.lease_s, expected_version=version
        )

    saved = await _write(call, "save-service", service_entries.PREFIX + id, if_match, act)
    return route.Versioned(rows.entry_row(saved), saved.version)


@router.of("DELETE /services/{id}", "Delete a service entry")
async def delete_entry(call: request_state.Call, id: EntryId, if_match: base.IfMatch = None) -> None:
    async def act(inform: client.InformClient, version: int | None) -> Any:
        return await inform.delete(service_entries.PREFIX + id, expected_version=version)

    await _write(call, "delete-service", service_entries.PREFIX + id, if_match, act)
