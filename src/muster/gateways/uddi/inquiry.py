"""The inquiry port: searches and details. Nothing here changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from muster.core.formats import xml
from muster.gateways.soap import xsd_types
from muster.gateways.uddi import records, registry
from muster.gateways.uddi.model import entities, faults, find_qualifiers, matcher, schema

U = schema.UDDI
ROWS_MAX = 1_000
KEYS_MAX = 500


class InquiryPage(NamedTuple):
    rows: Sequence[records.UddiRecord]
    description: xml.XmlElement
    truncated: dict[str, str]


def paged(asked: xml.XmlElement, found: Sequence[records.UddiRecord]) -> InquiryPage:
    head = max(1, int(asked.get("listHead") or 1))
    given = asked.get("maxRows")
    rows = min(ROWS_MAX, int(given)) if given is not None and int(given) > 0 else ROWS_MAX
    shown = matcher.slice_results(found, head, rows)
    description = xml.XmlElement(
        U("listDescription"),
        xml.XmlElement(U("includeCount"), str(len(shown))),
        xml.XmlElement(U("actualCount"), str(len(found))),
        xml.XmlElement(U("listHead"), str(head)),
    )
    cut = head - 1 + len(shown) < len(found)
    return InquiryPage(shown, description, {"truncated": "true"} if cut else {})


def ordered(
    found: Sequence[records.UddiRecord], how: find_qualifiers.FindQualifiers
) -> list[records.UddiRecord]:
    """By name, then by date; a qualifier may turn either round, or put the date first."""
    by_date = [one for one in ("sortByDateAsc", "sortByDateDesc") if one in how]
    by_name = any(one in how for one in ("sortByNameAsc", "sortByNameDesc"))
    result = sorted(found, key=lambda one: (one.modified_at_s, one.key), reverse="sortByDateDesc" in how)
    if by_name or not by_date:
        result.sort(key=lambda one: how.sort_key(one.first_name), reverse="sortByNameDesc" in how)
    return result


def names_only(element: xml.XmlElement, *tags: str) -> list[xml.XmlElement]:
    return [one for tag in tags for one in element.all(U(tag))]


def service_info(held: records.UddiRecord) -> xml.XmlElement:
    return xml.XmlElement(
        U("serviceInfo"),
        *names_only(held.element, "name"),
        attributes={"serviceKey": held.key, "businessKey": held.business},
    )


def listed(tag: str, inside: Sequence[xml.XmlElement]) -> xml.XmlElement | None:
    """None where there is nothing: an empty list is left out."""
    return xml.XmlElement(U(tag), *inside) if inside else None


def keys_of(asked: xml.XmlElement, name: str) -> list[str]:
    keys = registry.without_repeats(entities.texts(asked, name), name)
    if len(keys) > KEYS_MAX:
        raise faults.fault(
            faults.UddiErrorCode.TOO_MANY_OPTIONS, f"{len(keys)} keys at once: the most is {KEYS_MAX}"
        )
    return keys


class InquiryHandler:
    def __init__(self, held: registry.UddiRegistry) -> None:
        self._registry = held

    # Searches.

    async def find_business(self, asked: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(asked)
        wanted = _Wanted(asked, how)
        models = await self._models(asked)
        related = await self._related_keys(asked)
        urls = {
            (one.get("useType") or "", one.text)
            for one in entities.inside(asked, "discoveryURLs", "discoveryURL")
        }
        if not (wanted or models.given or urls or related is not None):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for businesses needs something to look for"
            )
        services = await self._services_by_business()
        found = []
        for one in await self._registry.find("business"):
            inside = services.get(one.key, [])
            bags = _bags(one.element, [each.element for each in inside], how)
            bindings = [binding for each in inside for binding in entities.bindings(each.element)]
            if (
                wanted.match(one.element, bags)
                and (related is None or one.key in related)
                and (not urls or urls & entities.urls(one.element))
                and models.match(bindings, how)
            ):
                found.append(one)
        page = paged(asked, ordered(found, how))
        infos = [self._business_info(one, services.get(one.key, []), how) for one in page.rows]
        return xml.XmlElement(
            U("businessList"), page.description, listed("businessInfos", infos), attributes=page.truncated
        )

    def _business_info(
        self,
        held: records.UddiRecord,
        services: Sequence[records.UddiRecord],
        how: find_qualifiers.FindQualifiers,
    ) -> xml.XmlElement:
        shown = ordered(services, how)
        return xml.XmlElement(
            U("businessInfo"),
            *names_only(held.element, "name", "description"),
            listed("serviceInfos", [service_info(one) for one in shown]),
            attributes={"businessKey": held.key},
        )

    async def business_infos(self, held: Sequence[records.UddiRecord]) -> list[xml.XmlElement]:
        services = await self._services_by_business()
        how = find_qualifiers.FindQualifiers()
        return [self._business_info(one, services.get(one.key, []), how) for one in held]

    async def _services_by_business(self) -> dict[str, list[records.UddiRecord]]:
        found: dict[str, list[records.UddiRecord]] = {}
        for one in await self._registry.find("service"):
            found.setdefault(one.business, []).append(one)
        return found

    async def find_service(self, asked: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(asked)
        wanted = _Wanted(asked, how)
        models = await self._models(asked)
        business = asked.get("businessKey") or ""
        if business and await self._registry.get("business", business) is None:
            raise registry.unknown_key_fault(business, "businessKey")
        if not (wanted or models.given or business):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for services needs something to look for"
            )
        services = await (
            self._registry.services_of(business) if business else self._registry.find("service")
        )
        found = [
            one
            for one in services
            if wanted.match(one.element, _bags(one.element, [], how))
            and models.match(entities.bindings(one.element), how)
        ]
        page = paged(asked, ordered(found, how))
        return xml.XmlElement(
            U("serviceList"),
            page.description,
            listed("serviceInfos", [service_info(one) for one in page.rows]),
            attributes=page.truncated,
        )

    async def find_binding(self, asked: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(asked)
        wanted = _Wanted(asked, how)
        models = await self._models(asked)
        service = asked.get("serviceKey") or ""
        if service:
            held = await self._registry.get("service", service)
            if held is None:
                raise registry.unknown_key_fault(service, "serviceKey")
            services = [held]
        elif not (wanted or models.given):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for bindings needs something to look for"
            )
        else:
            services = await self._registry.find("service")
        found = [
            records.UddiRecord(
                "binding", binding.get("bindingKey") or "", binding, one.owner, 0.0, one.modified_at_s
            )
            for one in services
            for binding in entities.bindings(one.element)
            if wanted.match(binding, entities.bag(binding)) and models.match([binding], how)
        ]
        page = paged(asked, ordered(found, how))
        return xml.XmlElement(
            U("bindingDetail"),
            page.description,
            *(one.element for one in page.rows),
            attributes=page.truncated,
        )

    async def find_tModel(self, asked: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(asked)
        wanted = _Wanted(asked, how)
        if not wanted:
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for tModels needs something to look for"
            )
        found = await self._found_models(wanted)
        page = paged(asked, ordered(found, how))
        return xml.XmlElement(
            U("tModelList"),
            page.description,
            listed("tModelInfos", [model_info(one) for one in page.rows]),
            attributes=page.truncated,
        )

    async def _found_models(self, wanted: _Wanted) -> list[records.UddiRecord]:
        return [
            one
            for one in await self._registry.find("tmodel")
            if not one.deleted and wanted.match(one.element, entities.bag(one.element))
        ]

    async def _models(self, asked: xml.XmlElement) -> _Models:
        bag = asked.find(U("tModelBag"))
        wanted = entities.texts(bag, "tModelKey") if bag is not None else []
        inner = asked.find(U("find_tModel"))
        if inner is None:
            return _Models(wanted, None)
        found = await self._found_models(_Wanted(inner, _qualifiers(inner)))
        return _Models(wanted, {one.key for one in found})

    # Relations.

    async def find_relatedBusinesses(self, asked: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(asked)
        key, related = await self._related(asked)
        rows = [
            (one, relations)
            for other, relations in related.items()
            if (one := await self._registry.get("business", other)) is not None
        ]
        by_key = {one.key: relations for one, relations in rows}
        page = paged(asked, ordered([one for one, _ in rows], how))
        infos = [
            xml.XmlElement(
                U("relatedBusinessInfo"),
                xml.XmlElement(U("businessKey"), one.key),
                *names_only(one.element, "name", "description"),
                *(
                    xml.XmlElement(
                        U("sharedRelationships"),
                        *(said.keyed for said in said_of),
                        *(said.element for said in said_of),
                        attributes={"direction": direction},
                    )
                    for direction, said_of in by_key[one.key].items()
                ),
            )
            for one in page.rows
        ]
        return xml.XmlElement(
            U("relatedBusinessesList"),
            page.description,
            xml.XmlElement(U("businessKey"), key),
            listed("relatedBusinessInfos", infos),
            attributes=page.truncated,
        )

    async def _related_keys(self, asked: xml.XmlElement) -> set[str] | None:
        inner = asked.find(U("find_relatedBusinesses"))
        return None if inner is None else set((await self._related(inner))[1])

    async def _related(
        self, asked: xml.XmlElement
    ) -> tuple[str, dict[str, dict[str, list[registry.PublisherAssertion]]]]:
        """The businesses that stand in a complete relation to one, by the direction of it."""
        sides = {"businessKey": ("fromKey", "toKey"), "fromKey": ("fromKey",), "toKey": ("toKey",)}
        name = next(one for one in sides if asked.find(U(one)) is not None)
        key = asked.text_of(U(name))
        if await self._registry.get("business", key) is None:
            raise registry.unknown_key_fault(key, "businessKey")
        keyed = asked.find(U("keyedReference"))
        wanted = entities.reference(keyed) if keyed is not None else None
        quoted = registry.quoted(key)
        said = await self._registry.assertions(f"from_business = {quoted} OR to_business = {quoted}")
        found: dict[str, dict[str, list[registry.PublisherAssertion]]] = {}
        for one in await complete(self._registry, said):
            if wanted is not None and one.reference[:2] != wanted[:2]:
                continue
            if one.source == key and "fromKey" in sides[name]:
                found.setdefault(one.target, {}).setdefault("fromKey", []).append(one)
            elif one.target == key and "toKey" in sides[name]:
                found.setdefault(one.source, {}).setdefault("toKey", []).append(one)
        return key, found

    # Details.

    async def get_businessDetail(self, asked: xml.XmlElement) -> xml.XmlElement:
        found = await self._registry.each("business", keys_of(asked, "businessKey"))
        whole = await asyncio.gather(*(self.whole_business(one) for one in found))
        return xml.XmlElement(U("businessDetail"), *whole)

    async def whole_business(self, held: records.UddiRecord) -> xml.XmlElement:
        """With its services in it."""
        services = await self._registry.services_of(held.key)
        inside = [one.element for one in ordered(services, find_qualifiers.FindQualifiers())]
        return entities.with_part(
            held.element,
            "discoveryURLs name description contacts businessServices",
            listed("businessServices", inside),
        )

    async def get_serviceDetail(self, asked: xml.XmlElement) -> xml.XmlElement:
        found = await self._registry.each("service", keys_of(asked, "serviceKey"))
        return xml.XmlElement(U("serviceDetail"), *(one.element for one in found))

    async def get_bindingDetail(self, asked: xml.XmlElement) -> xml.XmlElement:
        found = [await self._binding(key) for key in keys_of(asked, "bindingKey")]
        return xml.XmlElement(U("bindingDetail"), *(binding for binding, _ in found))

    async def _binding(self, key: str) -> tuple[xml.XmlElement, records.UddiRecord]:
        held = await self._registry.service_with(key)
        if held is None:
            raise registry.unknown_key_fault(key, "bindingKey")
        return next(one for one in entities.bindings(held.element) if one.get("bindingKey") == key), held

    async def get_tModelDetail(self, asked: xml.XmlElement) -> xml.XmlElement:
        found = await self._registry.each("tmodel", keys_of(asked, "tModelKey"))
        return xml.XmlElement(
            U("tModelDetail"),
            *(entities.with_attributes(one.element, deleted="true" if one.deleted else "") for one in found),
        )

    async def get_operationalInfo(self, asked: xml.XmlElement) -> xml.XmlElement:
        infos = [await self._operational(key) for key in keys_of(asked, "entityKey")]
        return xml.XmlElement(U("operationalInfos"), *infos)

    async def _operational(self, key: str) -> xml.XmlElement:
        for kind in ("business", "service", "tmodel"):
            held = await self._registry.get(kind, key)
            if held is not None:
                break
        else:
            held = await self._registry.service_with(key)
        if held is None:
            raise registry.unknown_key_fault(key, "")
        latest = held.modified_at_s
        if held.kind == "business":
            latest = max([latest, *(one.modified_at_s for one in await self._registry.services_of(key))])
        said: list[tuple[str, str]] = [
            ("created", xsd_types.format_datetime(held.created_at_s)),
            ("modified", xsd_types.format_datetime(held.modified_at_s)),
            ("modifiedIncludingChildren", xsd_types.format_datetime(latest)),
            ("nodeID", self._registry.node),
            ("authorizedName", held.owner),
        ]
        return xml.XmlElement(
            U("operationalInfo"),
            *(xml.XmlElement(U(name), text) for name, text in said),
            attributes={"entityKey": key},
        )


def model_info(held: records.UddiRecord) -> xml.XmlElement:
    return xml.XmlElement(
        U("tModelInfo"), *names_only(held.element, "name", "description"), attributes={"tModelKey": held.key}
    )


async def owners(held: registry.UddiRegistry, keys: Sequence[str]) -> dict[str, str]:
    found = {key: await held.get("business", key) for key in dict.fromkeys(keys)}
    return {key: one.owner for key, one in found.items() if one is not None}


async def complete(
    held: registry.UddiRegistry, said: Sequence[registry.PublisherAssertion]
) -> list[registry.PublisherAssertion]:
    """Those that the owners of both businesses have made, each once."""
    owner = await owners(held, [key for one in said for key in (one.source, one.target)])
    makers: dict[tuple[str, str, entities.KeyedReference], set[str]] = {}
    for one in said:
        makers.setdefault(one.identity, set()).add(one.publisher)
    first: dict[tuple[str, str, entities.KeyedReference], registry.PublisherAssertion] = {}
    for one in said:
        both = {owner.get(one.source), owner.get(one.target)}
        if both <= makers[one.identity]:
            first.setdefault(one.identity, one)
    return list(first.values())


class _Models:
    """The technical fingerprint that is looked for."""

    def __init__(self, wanted: Sequence[str], found: set[str] | None) -> None:
        self._wanted = wanted
        self._found = found  # by an inner search: one of them will do
        self.given = bool(wanted) or found is not None

    def match(self, bindings: Sequence[xml.XmlElement], how: find_qualifiers.FindQualifiers) -> bool:
        if not self.given:
            return True
        return any(
            matcher.models_match(self._wanted, there, how)
            and (self._found is None or bool(self._found & there))
            for there in map(entities.models, bindings)
        )


class _Wanted:
    """Names, categories and identifiers that are looked for."""

    def __init__(self, asked: xml.XmlElement, how: find_qualifiers.FindQualifiers) -> None:
        self._names = entities.names(asked)
        self._categories = entities.bag(asked)
        self._identifiers = entities.bag(asked, "identifierBag")
        self._how = how
        for model, references in self._categories.groups:
            if model == matcher.BOX:
                matcher.box(references)  # its faults are told before anything is looked up

    def __bool__(self) -> bool:
        return bool(self._names or self._categories or self._identifiers or "signaturePresent" in self._how)

    def match(self, element: xml.XmlElement, categories: entities.CategoryBag) -> bool:
        how = self._how
        identifiers = entities.bag(element, "identifierBag")
        return (
            matcher.names_match(self._names, entities.names(element), how)
            and matcher.bag_matches(self._categories, categories, how, default="andAllKeys")
            and matcher.bag_matches(self._identifiers, identifiers, how, default="orAllKeys")
            and (
                "signaturePresent" not in how
                or any(one.namespace == schema.SIGNATURE for one in element.children)
            )
        )


def _bags(
    element: xml.XmlElement, services: Sequence[xml.XmlElement], how: find_qualifiers.FindQualifiers
) -> entities.CategoryBag:
    """The categories in which a business or a service is looked for."""
    holders: Callable[[], list[xml.XmlElement]] = lambda: [  # noqa: E731
        one for each in (*services, element) for one in entities.bindings(each)
    ]
    if "serviceSubset" in how:
        return entities.merge_bags(map(entities.bag, services))
    if "bindingSubset" in how:
        return entities.merge_bags(map(entities.bag, holders()))
    if "combineCategoryBags" in how:
        return entities.merge_bags(map(entities.bag, (element, *services, *holders())))
    return entities.bag(element)


def _qualifiers(asked: xml.XmlElement) -> find_qualifiers.FindQualifiers:
    found = asked.find(U("findQualifiers"))
    return find_qualifiers.read(entities.texts(found, "findQualifier") if found is not None else ())
