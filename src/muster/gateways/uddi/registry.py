"""The registry behind the endpoints: reads entities from contexts and writes them with the publisher's
identity.

A publisher's operations use a bus connection with the publisher's identity, so the primary of a context
checks ownership, with the rules of `muster.inform.access_rules`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple

from muster.bus import api
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import faults as soap_faults
from muster.gateways.uddi import records
from muster.gateways.uddi.model import entities, faults, schema, standard_tmodels
from muster.inform import client, protocol, service_entries

U = schema.UDDI
RESULTS_MAX = 10_000
CONCURRENT_MAX = 16
BUSINESSES_AT_ONCE = 100  # in one search
SEARCHES_MAX = 2  # at once
_ASSERTIONS = "uddi/assertion/"

# Any client may write a context with such a key directly.  If it is not an entity, it is ignored and must not
# fail the search.
_NO_ENTITY = (errors.InvalidInput, errors.LimitExceeded)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


#: Opens a bus connection with the identity of a caller: name, role.
ConnectAs = Callable[[str, str], contextlib.AbstractAsyncContextManager[api.Bus]]


class UddiPublisher(NamedTuple):
    name: str
    role: str


READER = UddiPublisher("uddi", "viewer")  # inquiries need no login


class UddiRegistry:
    def __init__(
        self,
        connect_as: ConnectAs,
        *,
        reader: UddiPublisher = READER,
        now_s: Callable[[], float] = time.time,
        node: str = "uddi:muster",
    ) -> None:
        """``connect_as``: opens a connection for a publisher, or for ``reader``."""
        self._reader = reader
        self._connect_as = connect_as
        self._searching = asyncio.Semaphore(SEARCHES_MAX)
        self.now_s = now_s
        self.node = node

    @contextlib.asynccontextmanager
    async def _client(self, publisher: UddiPublisher) -> AsyncIterator[client.InformClient]:
        async with self._connect_as(*publisher) as bus:
            yield client.InformClient(bus)

    # Entities.

    async def get(self, kind: str, key: str) -> records.UddiRecord | None:
        if (kind, key) == ("business", records.DOMAIN_KEY):
            return records.UddiRecord("business", key, records.domain_business())
        if kind == "tmodel" and key in standard_tmodels.MODELS:
            return records.UddiRecord("tmodel", key, standard_tmodels.MODELS[key])
        try:
            async with self._client(self._reader) as contexts:
                context = await contexts.get(records.context_key(kind, key), max_staleness_s=0.0)
            record = records.read_record(context)
        except (errors.NotFound, *_NO_ENTITY):
            return None
        if record.key != key:
            return None
        if record.business not in ("", records.DOMAIN_KEY):
            parent = await self.get("business", record.business)
            if parent is not None and parent.owner != record.owner:
                return None
        return record

    async def get_all(self, kind: str, keys: Sequence[str]) -> list[records.UddiRecord]:
        """Return all entities in the order of the keys; the fault names a key that does not exist."""
        gate = asyncio.Semaphore(CONCURRENT_MAX)

        async def load(key: str) -> records.UddiRecord:
            async with gate:
                record = await self.get(kind, key)
            if record is None:
                raise unknown_key_fault(key, records.key_name(kind))
            return record

        return list(await asyncio.gather(*map(load, keys)))

    async def find(self, kind: str, condition: str = "") -> list[records.UddiRecord]:
        async with self._searching:  # a search may read all of them, and needs no login
            contexts = await self._search(kind, records.context_key(kind, ""), condition)
            matches = await asyncio.to_thread(_records, contexts)
        if kind == "business" and not condition:
            matches.append(records.UddiRecord("business", records.DOMAIN_KEY, records.domain_business()))
        if kind == "tmodel" and not condition:
            matches += [
                records.UddiRecord("tmodel", key, element) for key, element in standard_tmodels.MODELS.items()
            ]
        if any(record.business not in ("", records.DOMAIN_KEY) for record in matches):
            # Ignore services that another client wrote directly into a business it does not own.
            owner = {business.key: business.owner for business in await self.find("business")} | {
                records.DOMAIN_KEY: None
            }
            matches = [record for record in matches if owner.get(record.business) in (None, record.owner)]
        return matches

    async def _search(self, kind: str, prefix: str, condition: str) -> list[protocol.Context]:
        """Return all contexts of this registry; entries of mounts are not included."""
        predicate = f"key LIKE '{prefix}%' AND kind = '{kind}'" + (f" AND ({condition})" if condition else "")
        async with self._client(self._reader) as contexts:
            result = await contexts.find(predicate, limit=RESULTS_MAX)
        if result.silent:
            raise faults.fault(
                faults.UddiErrorCode.BUSY,
                f"no reply from {result.silent_text}: the result would be incomplete",
            )
        if result.more:
            raise faults.fault(
                faults.UddiErrorCode.RESULT_SET_TOO_LARGE,
                f"the search covers more than {len(result.contexts):,} entities: add criteria",
            )
        return result.contexts

    async def services_of(self, business: str) -> list[records.UddiRecord]:
        return (await self.services_of_all([business]))[business]

    async def services_of_all(self, businesses: Sequence[str]) -> dict[str, list[records.UddiRecord]]:
        """The services of each business, with one search for many of them."""
        services: dict[str, list[records.UddiRecord]] = {business: [] for business in businesses}
        keys = list(map(quoted, services))
        conditions = [
            f"business IN ({', '.join(keys[start : start + BUSINESSES_AT_ONCE])})"
            for start in range(0, len(keys), BUSINESSES_AT_ONCE)
        ]
        # Services of the domain's own business may have been saved without one.
        for condition in [""] if records.DOMAIN_KEY in services else conditions:
            for service in await self.find("service", condition):
                if service.business in services:
                    services[service.business].append(service)
        return services

    async def service_with_binding(self, binding: str) -> records.UddiRecord | None:
        """The service that has the binding with this key."""
        candidates = await self.find("service", f"bindings CONTAINS {quoted(binding)}")
        if not candidates and ":" in binding:  # of a plain entry with numbered bindings
            record = await self.get("service", binding.rpartition(":")[0])
            candidates = [record] if record is not None else []
        for record in candidates:
            if any(template.get("bindingKey") == binding for template in entities.bindings(record.element)):
                return record
        return None

    async def put(
        self,
        publisher: UddiPublisher,
        kind: str,
        element: xml.XmlElement,
        before: records.UddiRecord | None,
        *,
        deleted: bool = False,
        entry: service_entries.ServiceEntry | None = None,
    ) -> None:
        """``entry``: the service entry to write instead of ``element``."""
        key = element.get(records.key_name(kind)) or ""
        created_at_s = before.created_at_s if before is not None else self.now_s()
        if entry is not None:
            value, attributes = entry.description, service_entries.to_attributes(entry)
        else:
            value = xml.write(element, schema.PREFIXES)
            attributes = records.attributes(kind, element, created_at_s, deleted=deleted)
        async with self._client(publisher) as contexts:
            await contexts.put(
                records.context_key(kind, key),
                value,
                attributes=attributes,
                lease_s=self._lease_s(element, before) if kind == "service" else 0.0,
                expected_version=before.version if before is not None else 0,
            )

    def _lease_s(self, element: xml.XmlElement, before: records.UddiRecord | None) -> float:
        """The lease of the element; a lease that was set without UDDI is kept."""
        stated_s = records.lease_s(element)
        if stated_s or before is None or records.lease_s(before.element):
            return stated_s
        return before.lease_left_s

    async def delete(self, publisher: UddiPublisher, record: records.UddiRecord) -> None:
        # Another client was faster, or its lease has ended.
        with contextlib.suppress(errors.NotFound):
            async with self._client(publisher) as contexts:
                await contexts.delete(records.context_key(record.kind, record.key))

    # Assertions: one context for each assertion and publisher.

    async def assertions(self, condition: str = "") -> list[PublisherAssertion]:
        assertions = []
        for context in await self._search("assertion", _ASSERTIONS, condition):
            with contextlib.suppress(*_NO_ENTITY):
                assertions.append(PublisherAssertion.from_context(context))
        return assertions

    async def put_assertion(self, publisher: UddiPublisher, assertion: PublisherAssertion) -> None:
        async with self._client(publisher) as contexts:
            await contexts.put(
                assertion.context_key,
                xml.write(assertion.element, schema.PREFIXES),
                attributes={
                    "kind": "assertion",
                    "from_business": assertion.source,
                    "to_business": assertion.target,
                },
            )

    async def delete_assertion(self, publisher: UddiPublisher, assertion: PublisherAssertion) -> None:
        with contextlib.suppress(errors.NotFound):
            async with self._client(publisher) as contexts:
                await contexts.delete(assertion.context_key)


def _records(contexts: Iterable[protocol.Context]) -> list[records.UddiRecord]:
    """The entities among the contexts. Thousands take long to parse: call it in a thread."""
    matches = []
    for context in contexts:
        with contextlib.suppress(*_NO_ENTITY):
            matches.append(records.read_record(context))
    return matches


class PublisherAssertion:
    """An assertion of a publisher about two businesses. It is complete when both owners have made it."""

    def __init__(self, publisher: str, element: xml.XmlElement) -> None:
        self.publisher = publisher
        self.element = element
        self.source = element.text_of(U("fromKey"))
        self.target = element.text_of(U("toKey"))
        keyed = element.find(U("keyedReference"))
        assert keyed is not None  # the schema requires it
        self.keyed = keyed
        self.reference = entities.reference(keyed)

    @classmethod
    def from_context(cls, context: protocol.Context) -> PublisherAssertion:
        """The writer of the context is the publisher. `errors.InvalidInput` if it is not an assertion."""
        element = schema.validate(xml.parse(context.value))
        if element.name != U("publisherAssertion"):
            raise errors.InvalidInput(f"{context.key!r} is not an assertion")
        return cls(context.writer, element)

    @property
    def identity(self) -> tuple[str, str, entities.KeyedReference]:
        return self.source, self.target, self.reference

    @property
    def context_key(self) -> str:
        text = "\0".join((self.source, self.target, *self.reference))
        return f"{_ASSERTIONS}{hashlib.sha256(text.encode()).hexdigest()[:40]}/{self.publisher}"


def unknown_key_fault(key: str, key_type: str) -> soap_faults.SoapFault:
    return faults.fault(
        faults.UddiErrorCode.INVALID_KEY_PASSED, f"no entity has the key {key[:80]!r}", key_type=key_type
    )


def without_repeats(keys: Iterable[str], key_type: str) -> list[str]:
    unique = list(keys)
    if len(set(unique)) != len(unique):
        raise faults.fault(faults.UddiErrorCode.INVALID_KEY_PASSED, "a key occurs twice", key_type=key_type)
    return unique
