"""Service entries: UDDI-style descriptions of services, stored as contexts and found by predicates.

An entry is a context ``service/<id>``.  Its name, access points, categories (UDDI's keyed references) and the
user's name/value metadata are attributes, so one search covers entries and all other contexts.  Its value is
the description.  An entry with a lease expires if its service does not renew it.  An entry may have a
location (``lon``, ``lat``), and a search may be limited to a box.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from muster.core import errors
from muster.inform import client, protocol

PREFIX = "service/"
KIND = "service"
RESERVED = frozenset({"kind", "name", "access", "categories", "key", "version", "writer"})


class ServiceEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str = ""  # empty: assigned
    name: str
    access: tuple[str, ...] = ()  # addresses
    categories: tuple[str, ...] = ()  # "<tModel key>=<value>"
    metadata: Mapping[str, protocol.Attribute] = {}
    description: bytes = b""
    version: int = 0
    owner: str = ""


class GeoBox(NamedTuple):
    """A box in degrees. If it crosses the date line, west is greater than east."""

    west: float
    south: float
    east: float
    north: float


def to_attributes(entry: ServiceEntry) -> protocol.Attributes:
    taken = RESERVED.intersection(entry.metadata)
    if taken:
        raise errors.InvalidInput(
            f"{', '.join(sorted(taken))} cannot be metadata: the entry has a field of that name"
        )
    if not entry.name:
        raise errors.InvalidInput("a service entry needs a name")
    own: protocol.Attributes = {
        "kind": KIND,
        "name": entry.name,
        "access": list(entry.access),
        "categories": list(entry.categories),
    }
    return {**entry.metadata, **own}


def from_context(context: protocol.Context) -> ServiceEntry:
    attributes = dict(context.attributes)
    return ServiceEntry(
        id=context.key.removeprefix(PREFIX),
        name=str(attributes.get("name", "")),
        access=_words(attributes.get("access")),
        categories=_words(attributes.get("categories")),
        metadata={name: value for name, value in attributes.items() if name not in RESERVED},
        description=context.value,
        version=context.version,
        owner=context.writer,
    )


def predicate(where: str = "", box: GeoBox | None = None) -> str:
    """The predicate of a search for entries: the user's condition and the box."""
    clauses = [f"kind = '{KIND}'"]
    if box is not None:
        if not (
            -90 <= box.south <= box.north <= 90
            and all(-180 <= longitude <= 180 for longitude in (box.west, box.east))
        ):
            raise errors.InvalidInput(f"{tuple(box)} is not a valid box: west, south, east, north in degrees")
        clauses.append(f"lat BETWEEN {box.south!r} AND {box.north!r}")
        if box.west <= box.east:
            clauses.append(f"lon BETWEEN {box.west!r} AND {box.east!r}")
        else:
            clauses.append(f"(lon >= {box.west!r} OR lon <= {box.east!r})")
    if where:
        clauses.append(f"({where})")
    return " AND ".join(clauses)


class ServiceEntries:
    def __init__(self, contexts: client.InformClient) -> None:
        self._contexts = contexts

    async def save(
        self, entry: ServiceEntry, *, lease_s: float = 0.0, expected_version: int | None = None
    ) -> ServiceEntry:
        made = entry if entry.id else msgspec.structs.replace(entry, id=str(uuid.uuid4()))
        written = await self._contexts.put(
            PREFIX + made.id,
            made.description,
            attributes=to_attributes(made),
            lease_s=lease_s,
            expected_version=expected_version,
        )
        return msgspec.structs.replace(made, version=written.version)

    async def get(self, id: str) -> ServiceEntry:
        return from_context(await self._contexts.get(PREFIX + id))

    async def find(
        self, where: str = "", *, box: GeoBox | None = None, limit: int = 100
    ) -> Sequence[ServiceEntry]:
        result = await self.search(where, box=box, limit=limit)
        return [from_context(context) for context in result.contexts]

    async def search(
        self,
        where: str = "",
        *,
        box: GeoBox | None = None,
        limit: int = 100,
        after: str = "",
        within_s: float = float("inf"),
    ) -> protocol.FindResult:
        """Like `find`, with the state of the search; `from_context` converts each context."""
        return await self._contexts.find(predicate(where, box), limit=limit, after=after, within_s=within_s)

    async def delete(self, id: str) -> None:
        await self._contexts.delete(PREFIX + id)


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
