"""WS-Enumeration: lists of resources in pages, as many as fit into a response."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import xsd_types
from muster.gateways.wsman import enumeration_contexts, event_delivery
from muster.gateways.wsman import request as wsman_request
from muster.gateways.wsman.wire import faults, filters, namespaces, representations
from muster.manage import client
from muster.manage import rows as manage_rows
from muster.predicates.backends import python
from muster.predicates.syntax import parser

ELEMENTS_MAX = 200  # in one response
FRAME_BYTES = 4096  # reserve for the response without its items


class EnumerationHandler:
    def __init__(self, connect_as: event_delivery.ConnectAs, now_s: Callable[[], float]) -> None:
        self._connect_as = connect_as
        self._now_s = now_s
        self.contexts = enumeration_contexts.EnumerationContexts()

    async def enumerate(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        body, now_s = request.element(namespaces.WSEN("Enumerate")), self._now_s()
        kind, mode = request.kind, enumeration_contexts.mode_of(body)
        if request.selectors:
            raise faults.selectors("an enumeration is narrowed by a filter", "UnexpectedSelectors")
        where = filters.of_enumeration(body, kind)
        ends_at_s = enumeration_contexts.ends_at_s(
            body,
            namespaces.WSEN,
            now_s,
            default_s=enumeration_contexts.LIFETIME_S,
            max_s=enumeration_contexts.LIFETIME_S_MAX,
        )
        made = self.contexts.begin(request.caller.name, kind, where, mode, ends_at_s, now_s)
        items: list[xml.XmlElement] = []
        done, more = False, []
        try:
            async with self._connect_as(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, made)]
                if body.find(namespaces.WSMAN("OptimizeEnumeration")) is not None:
                    count = enumeration_contexts.count_of(body, namespaces.WSMAN("MaxElements"), ELEMENTS_MAX)
                    items, done = await self._items(fleet, request, made, count)
                else:
                    count = 0
        except BaseException:
            self.contexts.end(made)
            raise
        if done:
            self.contexts.end(made)
        response = xml.XmlElement(
            namespaces.WSEN("EnumerateResponse"),
            xml.XmlElement(
                namespaces.WSEN("Expires"),
                wsman_request.granted_expiry(body.find(namespaces.WSEN("Expires")), ends_at_s, now_s),
            ),
            xml.XmlElement(namespaces.WSEN("EnumerationContext"), None if done else made.id),
            xml.XmlElement(namespaces.WSMAN("Items"), *items) if count else None,
            xml.XmlElement(namespaces.WSMAN("EndOfSequence")) if done else None,
        )
        return wsman_request.build_response(response, more=more)

    async def pull(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        body = request.element(namespaces.WSEN("Pull"))
        context = self._context(request, body)
        count = enumeration_contexts.count_of(body, namespaces.WSEN("MaxElements"), ELEMENTS_MAX)
        characters = _limit_of_pull(body)
        more = []
        context.pulling = True
        try:
            async with self._connect_as(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, context)]
                items, done = await self._items(fleet, request, context, count, characters)
        finally:
            context.pulling = False
        if done:
            self.contexts.end(context)
        response = xml.XmlElement(
            namespaces.WSEN("PullResponse"),
            None if done else xml.XmlElement(namespaces.WSEN("EnumerationContext"), context.id),
            xml.XmlElement(namespaces.WSEN("Items"), *items),
            xml.XmlElement(namespaces.WSEN("EndOfSequence")) if done else None,
        )
        return wsman_request.build_response(response, more=more)

    async def release(self, request: wsman_request.WsManRequest) -> wsman_request.ResponseParts:
        self.contexts.end(self._context(request, request.element(namespaces.WSEN("Release"))))
        return wsman_request.build_response()

    def _context(
        self, request: wsman_request.WsManRequest, body: xml.XmlElement
    ) -> enumeration_contexts.EnumerationContext:
        identifier = body.find(namespaces.WSEN("EnumerationContext"))
        if identifier is None:
            raise faults.schema("the EnumerationContext is missing")
        return self.contexts.find(identifier.text, request.caller.name, request.kind, self._now_s())

    async def _items(
        self,
        fleet: client.ManageClient,
        request: wsman_request.WsManRequest,
        context: enumeration_contexts.EnumerationContext,
        count: int,
        characters: int = sys.maxsize,
    ) -> tuple[list[xml.XmlElement], bool]:
        """The next items, as many as requested and as fit, and whether they are the last."""
        names, resources, last = await self._next(fleet, context, count)
        room = request.headers.bytes_max - FRAME_BYTES
        items: list[xml.XmlElement] = []
        for name, resource in zip(names, resources, strict=True):
            if resource is not None:
                made = enumeration_contexts.item(
                    context.mode, resource, request.reference(name, namespaces.WSA("EndpointReference"))
                )
                written = xml.write(made, namespaces.PREFIXES)
                size, length = len(written), len(written.decode())
                if size > room or length > characters:
                    if not items:
                        raise faults.encoding(
                            f"{name} has {length} characters in {size} bytes and does not fit",
                            "MaxEnvelopeSize",
                        )
                    return items, False
                room, characters = room - size, characters - length
                items.append(made)
            context.after = name
        return items, last

    async def _next(
        self, fleet: client.ManageClient, context: enumeration_contexts.EnumerationContext, count: int
    ) -> tuple[list[str], list[xml.XmlElement | None], bool]:
        if context.kind == namespaces.RESOURCE:
            page = await fleet.enumerate(where=context.where, after=context.after, limit=count)
            names = [row.name for row in page.items]
            if context.mode == enumeration_contexts.EPR:
                return names, [xml.XmlElement("epr") for _ in names], page.next is None
            return (
                names,
                await asyncio.gather(*(_described(fleet, name) for name in names)),
                page.next is None,
            )
        rows = sorted(await _rows(fleet, context), key=lambda row: row.name)
        rows = [row for row in rows if row.name > context.after]
        chosen = rows[:count]
        elements: list[xml.XmlElement | None] = [representations.simple(context.kind, row) for row in chosen]
        return [row.name for row in chosen], elements, len(rows) <= count

    async def _count(
        self, fleet: client.ManageClient, context: enumeration_contexts.EnumerationContext
    ) -> xml.XmlElement:
        rows = await (
            fleet.names(where=context.where) if context.kind == namespaces.RESOURCE else _rows(fleet, context)
        )
        return xml.XmlElement(namespaces.WSMAN("TotalItemsCountEstimate"), str(len(rows)))


def _limit_of_pull(body: xml.XmlElement) -> int:
    """The number of characters of all items, and a check of the time that a client would wait for them."""
    characters, time = body.find(namespaces.WSEN("MaxCharacters")), body.find(namespaces.WSEN("MaxTime"))
    try:
        if time is not None and xsd_types.parse_duration_s(time.text) <= 0:
            raise errors.InvalidInput(f"the MaxTime {time.text[:60]!r} is not positive")
        return sys.maxsize if characters is None else xsd_types.parse_integer(characters.text, minimum=1)
    except errors.InvalidInput as error:
        raise faults.schema(f"the limits of the Pull: {error.message}") from error


async def _described(fleet: client.ManageClient, name: str) -> xml.XmlElement | None:
    try:
        return representations.resource(await fleet.describe(name))
    except errors.NotFound:  # deleted in the meantime
        return None


async def _rows(
    fleet: client.ManageClient, context: enumeration_contexts.EnumerationContext
) -> Sequence[manage_rows.AgentRow | manage_rows.ManagerRow]:
    rows = await (fleet.agents() if context.kind == namespaces.AGENT else fleet.managers())
    if not context.where:
        return rows
    matches = python.compile(parser.parse(context.where))
    return [row for row in rows if matches(_attributes(row).get)]


def _attributes(row: manage_rows.AgentRow | manage_rows.ManagerRow) -> dict[str, Any]:
    """What a filter can refer to: the fields, and the facts and labels of an agent."""
    extra = {**row.facts, **row.labels} if isinstance(row, manage_rows.AgentRow) else {}
    return {**extra, **msgspec.structs.asdict(row)}
