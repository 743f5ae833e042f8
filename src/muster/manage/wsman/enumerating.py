"""WS-Enumeration: lists of resources, page by page, as much as fits into an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from muster.core import errors
from muster.manage import client
from muster.manage.wsman import asking, enumeration, eventing, faults, filters, names, representations
from muster.predicates import closure, parser
from muster.soap import datatypes, xml

ELEMENTS_MAX = 200  # in one answer
FRAME_BYTES = 4096  # what an answer holds besides its items


class Enumerating:
    def __init__(self, visit: eventing.Visit, now_s: Callable[[], float]) -> None:
        self._visit = visit
        self._now_s = now_s
        self.open = enumeration.Enumerations()

    async def enumerate(self, request: asking.Request) -> asking.Told:
        asked, now_s = request.element(names.WSEN("Enumerate")), self._now_s()
        mode = enumeration.mode_of(asked)
        where = filters.of_enumeration(asked)
        ends_at_s = enumeration.ends_at_s(
            asked,
            names.WSEN,
            now_s,
            default_s=enumeration.LIFETIME_S,
            max_s=enumeration.LIFETIME_S_MAX,
        )
        made = self.open.begin(request.caller.name, request.kind, where, mode, ends_at_s, now_s)
        items: list[xml.Element] = []
        done, more = False, []
        try:
            async with self._visit(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, made)]
                if asked.find(names.WSMAN("OptimizeEnumeration")) is not None:
                    count = enumeration.count_of(asked, names.WSMAN("MaxElements"), ELEMENTS_MAX)
                    items, done = await self._items(fleet, request, made, count)
                else:
                    count = 0
        except BaseException:
            self.open.end(made)
            raise
        if done:
            self.open.end(made)
        answer = xml.Element(
            names.WSEN("EnumerateResponse"),
            xml.Element(
                names.WSEN("Expires"), asking.granted(asked.find(names.WSEN("Expires")), ends_at_s, now_s)
            ),
            xml.Element(names.WSEN("EnumerationContext"), None if done else made.id),
            xml.Element(names.WSMAN("Items"), *items) if count else None,
            xml.Element(names.WSMAN("EndOfSequence")) if done else None,
        )
        return asking.told(answer, more=more)

    async def pull(self, request: asking.Request) -> asking.Told:
        asked = request.element(names.WSEN("Pull"))
        one = self._context(request, asked)
        count = enumeration.count_of(asked, names.WSEN("MaxElements"), ELEMENTS_MAX)
        characters = asked.find(names.WSEN("MaxCharacters"))
        bytes_max = request.headers.bytes_max
        if characters is not None:
            try:
                bytes_max = min(bytes_max, FRAME_BYTES + datatypes.parse_integer(characters.text, minimum=1))
            except errors.InvalidInput as error:
                raise faults.schema(f"MaxCharacters: {error.message}") from error
        more = []
        one.pulling = True
        try:
            async with self._visit(request.caller) as fleet:
                if request.headers.wants_count:
                    more = [await self._count(fleet, one)]
                items, done = await self._items(fleet, request, one, count, bytes_max)
        finally:
            one.pulling = False
        if done:
            self.open.end(one)
        answer = xml.Element(
            names.WSEN("PullResponse"),
            None if done else xml.Element(names.WSEN("EnumerationContext"), one.id),
            xml.Element(names.WSEN("Items"), *items),
            xml.Element(names.WSEN("EndOfSequence")) if done else None,
        )
        return asking.told(answer, more=more)

    async def release(self, request: asking.Request) -> asking.Told:
        self.open.end(self._context(request, request.element(names.WSEN("Release"))))
        return asking.told()

    def _context(self, request: asking.Request, asked: xml.Element) -> enumeration.Enumeration:
        given = asked.find(names.WSEN("EnumerationContext"))
        if given is None:
            raise faults.schema("the EnumerationContext is missing")
        return self.open.find(given.text, request.caller.name, request.kind, self._now_s())

    async def _items(
        self,
        fleet: client.Client,
        request: asking.Request,
        one: enumeration.Enumeration,
        count: int,
        bytes_max: int | None = None,
    ) -> tuple[list[xml.Element], bool]:
        """The next items, as many as were asked for and fit, and whether they are the last."""
        names_, whole, last = await self._next(fleet, one, count)
        room = (bytes_max or request.headers.bytes_max) - FRAME_BYTES
        items: list[xml.Element] = []
        for name, resource in zip(names_, whole, strict=True):
            if resource is not None:
                made = enumeration.item(
                    one.mode, resource, request.reference(name, names.WSA("EndpointReference"))
                )
                size = len(xml.write(made, names.PREFIXES))
                if size > room:
                    if not items:
                        raise faults.encoding(f"{name} alone has {size} bytes", "MaxEnvelopeSize")
                    return items, False
                room -= size
                items.append(made)
            one.after = name
        return items, last

    async def _next(
        self, fleet: client.Client, one: enumeration.Enumeration, count: int
    ) -> tuple[list[str], list[xml.Element | None], bool]:
        if one.kind == names.RESOURCE:
            page = await fleet.enumerate(where=one.where, after=one.after, limit=count)
            found = [row["name"] for row in page.items]
            if one.mode == enumeration.EPR:
                return found, [xml.Element("epr") for _ in found], page.next is None
            return (
                found,
                await asyncio.gather(*(_described(fleet, name) for name in found)),
                page.next is None,
            )
        rows = sorted(await _rows(fleet, one), key=lambda row: str(row["name"]))
        rows = [row for row in rows if row["name"] > one.after]
        chosen = rows[:count]
        whole: list[xml.Element | None] = [representations.simple(one.kind, row) for row in chosen]
        return [row["name"] for row in chosen], whole, len(rows) <= count

    async def _count(self, fleet: client.Client, one: enumeration.Enumeration) -> xml.Element:
        rows = await (fleet.names(where=one.where) if one.kind == names.RESOURCE else _rows(fleet, one))
        return xml.Element(names.WSMAN("TotalItemsCountEstimate"), str(len(rows)))


async def _described(fleet: client.Client, name: str) -> xml.Element | None:
    try:
        return representations.resource(await fleet.describe(name))
    except errors.NotFound:  # deleted meanwhile
        return None


async def _rows(fleet: client.Client, one: enumeration.Enumeration) -> list[dict[str, Any]]:
    rows = await (fleet.agents() if one.kind == names.AGENT else fleet.managers())
    if not one.where:
        return rows
    matches = closure.compile(parser.parse(one.where))
    return [row for row in rows if matches({**row.get("facts", {}), **row.get("labels", {}), **row}.get)]
