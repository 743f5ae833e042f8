"""The inquiry API: searches and details. It is read-only."""

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
CRITERIA_MAX = 100  # each is compared with all entities


class InquiryPage(NamedTuple):
    rows: Sequence[records.UddiRecord]
    description: xml.XmlElement
    truncated: dict[str, str]


def paged(request: xml.XmlElement, matches: Sequence[records.UddiRecord]) -> InquiryPage:
    head = max(1, int(request.get("listHead") or 1))
    max_rows = request.get("maxRows")
    rows = min(ROWS_MAX, int(max_rows)) if max_rows is not None and int(max_rows) > 0 else ROWS_MAX
    shown = matcher.slice_results(matches, head, rows)
    description = xml.XmlElement(
        U("listDescription"),
        xml.XmlElement(U("includeCount"), str(len(shown))),
        xml.XmlElement(U("actualCount"), str(len(matches))),
        xml.XmlElement(U("listHead"), str(head)),
    )
    cut = head - 1 + len(shown) < len(matches)
    return InquiryPage(shown, description, {"truncated": "true"} if cut else {})


def ordered(
    matches: Sequence[records.UddiRecord], how: find_qualifiers.FindQualifiers
) -> list[records.UddiRecord]:
    """Sort by name, then by date; qualifiers reverse either or sort by date first."""
    by_date = [qualifier for qualifier in ("sortByDateAsc", "sortByDateDesc") if qualifier in how]
    by_name = any(qualifier in how for qualifier in ("sortByNameAsc", "sortByNameDesc"))
    result = sorted(
        matches, key=lambda record: (record.modified_at_s, record.key), reverse="sortByDateDesc" in how
    )
    if by_name or not by_date:
        result.sort(key=lambda record: how.sort_key(record.first_name), reverse="sortByNameDesc" in how)
    return result


def names_only(element: xml.XmlElement, *tags: str) -> list[xml.XmlElement]:
    return [child for tag in tags for child in element.all(U(tag))]


def service_info(record: records.UddiRecord) -> xml.XmlElement:
    return xml.XmlElement(
        U("serviceInfo"),
        *names_only(record.element, "name"),
        attributes={"serviceKey": record.key, "businessKey": record.business},
    )


def listed(tag: str, inside: Sequence[xml.XmlElement]) -> xml.XmlElement | None:
    """None if there are no elements: empty lists are left out."""
    return xml.XmlElement(U(tag), *inside) if inside else None


def keys_of(request: xml.XmlElement, name: str) -> list[str]:
    keys = registry.without_repeats(entities.texts(request, name), name)
    if len(keys) > KEYS_MAX:
        raise faults.fault(
            faults.UddiErrorCode.TOO_MANY_OPTIONS,
            f"{len(keys)} keys in one request: the maximum is {KEYS_MAX}",
        )
    return keys


class InquiryHandler:
    def __init__(self, uddi_registry: registry.UddiRegistry) -> None:
        self._registry = uddi_registry
        self._selecting = asyncio.Semaphore(registry.SEARCHES_MAX)

    # Searches.

    async def find_business(self, request: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(request)
        criteria = _Criteria(request, how)
        models = await self._models(request)
        related = await self._related_keys(request)
        urls = {
            (url.get("useType") or "", url.text)
            for url in entities.inside(request, "discoveryURLs", "discoveryURL")
        }
        if not (criteria or models.is_set or urls or related is not None):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for businesses needs at least one criterion"
            )
        businesses = await self._registry.find("business")
        services = await self._services_by_business(businesses, how)

        def matches(business: records.UddiRecord) -> bool:
            inside = services[business.key]
            bags = _bags(business.element, [each.element for each in inside], how)
            bindings = [binding for each in inside for binding in entities.bindings(each.element)]
            return (
                criteria.match(business.element, bags, models, bindings)
                and (related is None or business.key in related)
                and (not urls or bool(urls & entities.urls(business.element)))
            )

        page = await self._page(request, how, lambda: list(filter(matches, businesses)))
        subset = "serviceSubset" in how or "bindingSubset" in how
        infos = [
            self._business_info(
                business,
                [
                    service
                    for service in services[business.key]
                    if (not subset or criteria.match_categories(_subset(service.element, how)))
                    and (not models.is_set or models.match(entities.bindings(service.element), how))
                ],
                how,
            )
            for business in page.rows
        ]
        return xml.XmlElement(
            U("businessList"), page.description, listed("businessInfos", infos), attributes=page.truncated
        )

    def _business_info(
        self,
        record: records.UddiRecord,
        services: Sequence[records.UddiRecord],
        how: find_qualifiers.FindQualifiers,
    ) -> xml.XmlElement:
        shown = ordered(services, how)
        return xml.XmlElement(
            U("businessInfo"),
            *names_only(record.element, "name", "description"),
            listed("serviceInfos", [service_info(service) for service in shown]),
            attributes={"businessKey": record.key},
        )

    async def business_infos(self, businesses: Sequence[records.UddiRecord]) -> list[xml.XmlElement]:
        how = find_qualifiers.FindQualifiers()
        services = await self._services_by_business(businesses, how)
        return [self._business_info(business, services[business.key], how) for business in businesses]

    async def _services_by_business(
        self, businesses: Sequence[records.UddiRecord], how: find_qualifiers.FindQualifiers
    ) -> dict[str, list[records.UddiRecord]]:
        """The services of each business, and those of others that it shows."""
        services: dict[str, list[records.UddiRecord]] = {business.key: [] for business in businesses}
        listed = await self._registry.find("service")
        for service in listed:
            if service.business in services:
                services[service.business].append(service)
        if "suppressProjectedServices" not in how:
            there = {(service.key, service.business): service for service in listed}
            for business in businesses:
                shown = entities.projections(business.element).items()
                services[business.key] += [there[each] for each in shown if each in there]
        return services

    async def find_service(self, request: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(request)
        criteria = _Criteria(request, how)
        models = await self._models(request)
        business = request.get("businessKey") or ""
        if not (criteria or models.is_set or business):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for services needs at least one criterion"
            )
        if business:
            holder = await self._registry.get("business", business)
            if holder is None:
                raise registry.unknown_key_fault(business, "businessKey")
            services = (await self._services_by_business([holder], how))[business]
        else:
            services = await self._registry.find("service")
        signed = await self._signed_businesses(how)

        def matches(service: records.UddiRecord) -> bool:
            return criteria.match(
                service.element,
                _bags(service.element, [], how),
                models,
                entities.bindings(service.element),
                signed=service.business in signed,
            )

        page = await self._page(request, how, lambda: list(filter(matches, services)))
        return xml.XmlElement(
            U("serviceList"),
            page.description,
            listed("serviceInfos", [service_info(service) for service in page.rows]),
            attributes=page.truncated,
        )

    async def find_binding(self, request: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(request)
        criteria = _Criteria(request, how)
        models = await self._models(request)
        service = request.get("serviceKey") or ""
        if service:
            record = await self._registry.get("service", service)
            if record is None:
                raise registry.unknown_key_fault(service, "serviceKey")
            services = [record]
        elif not (criteria or models.is_set):
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for bindings needs at least one criterion"
            )
        else:
            services = await self._registry.find("service")
        signed = await self._signed_businesses(how)

        def matches() -> list[records.UddiRecord]:
            return [
                records.UddiRecord(
                    "binding",
                    binding.get("bindingKey") or "",
                    binding,
                    parent.owner,
                    0.0,
                    parent.modified_at_s,
                )
                for parent in services
                for binding in entities.bindings(parent.element)
                if criteria.match(
                    binding,
                    entities.bag(binding),
                    models,
                    [binding],
                    signed=parent.business in signed or entities.is_signed(parent.element),
                )
            ]

        page = await self._page(request, how, matches)
        return xml.XmlElement(
            U("bindingDetail"),
            page.description,
            *(record.element for record in page.rows),
            attributes=page.truncated,
        )

    async def find_tModel(self, request: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(request)
        criteria = _Criteria(request, how)
        if not criteria:
            raise faults.fault(
                faults.UddiErrorCode.FATAL_ERROR, "a search for tModels needs at least one criterion"
            )
        models = await self._registry.find("tmodel")
        page = await self._page(request, how, lambda: _matching_models(criteria, models))
        return xml.XmlElement(
            U("tModelList"),
            page.description,
            listed("tModelInfos", [model_info(model) for model in page.rows]),
            attributes=page.truncated,
        )

    async def _signed_businesses(self, how: find_qualifiers.FindQualifiers) -> set[str]:
        """What they contain counts as signed."""
        if "signaturePresent" not in how:
            return set()
        businesses = await self._registry.find("business")
        return {business.key for business in businesses if entities.is_signed(business.element)}

    async def _page(
        self,
        request: xml.XmlElement,
        how: find_qualifiers.FindQualifiers,
        select: Callable[[], list[records.UddiRecord]],
    ) -> InquiryPage:
        """A page of what ``select`` returns. It may compare thousands of entities, so it runs in a thread."""
        async with self._selecting:
            return await asyncio.to_thread(lambda: paged(request, ordered(select(), how)))

    async def _models(self, request: xml.XmlElement) -> _Fingerprint:
        """Keys of an inner search are added to those of the bag. If there are none, nothing matches."""
        bag = request.find(U("tModelBag"))
        keys = entities.texts(bag, "tModelKey") if bag is not None else []
        inner = request.find(U("find_tModel"))
        if inner is not None:
            criteria, there = _Criteria(inner, _qualifiers(inner)), await self._registry.find("tmodel")
            async with self._selecting:
                keys += [model.key for model in await asyncio.to_thread(_matching_models, criteria, there)]
        return _Fingerprint(keys, is_set=bag is not None or inner is not None)

    # Relations.

    async def find_relatedBusinesses(self, request: xml.XmlElement) -> xml.XmlElement:
        how = _qualifiers(request)
        key, related = await self._related(request)
        rows = [
            (business, relations)
            for other, relations in related.items()
            if (business := await self._registry.get("business", other)) is not None
        ]
        by_key = {business.key: relations for business, relations in rows}
        page = paged(request, ordered([business for business, _ in rows], how))
        infos = [
            xml.XmlElement(
                U("relatedBusinessInfo"),
                xml.XmlElement(U("businessKey"), business.key),
                *names_only(business.element, "name", "description"),
                *(
                    xml.XmlElement(
                        U("sharedRelationships"),
                        *(assertion.keyed for assertion in assertions),
                        *(assertion.element for assertion in assertions),
                        attributes={"direction": direction},
                    )
                    for direction, assertions in by_key[business.key].items()
                ),
            )
            for business in page.rows
        ]
        return xml.XmlElement(
            U("relatedBusinessesList"),
            page.description,
            xml.XmlElement(U("businessKey"), key),
            listed("relatedBusinessInfos", infos),
            attributes=page.truncated,
        )

    async def _related_keys(self, request: xml.XmlElement) -> set[str] | None:
        inner = request.find(U("find_relatedBusinesses"))
        return None if inner is None else set((await self._related(inner))[1])

    async def _related(
        self, request: xml.XmlElement
    ) -> tuple[str, dict[str, dict[str, list[registry.PublisherAssertion]]]]:
        """The businesses with a complete relation to a business, by direction."""
        sides = {"businessKey": ("fromKey", "toKey"), "fromKey": ("fromKey",), "toKey": ("toKey",)}
        name = next(side for side in sides if request.find(U(side)) is not None)
        key = request.text_of(U(name))
        if await self._registry.get("business", key) is None:
            raise registry.unknown_key_fault(key, "businessKey")
        keyed = request.find(U("keyedReference"))
        relation = entities.reference(keyed) if keyed is not None else None
        quoted = registry.quoted(key)
        assertions = await self._registry.assertions(f"from_business = {quoted} OR to_business = {quoted}")
        related: dict[str, dict[str, list[registry.PublisherAssertion]]] = {}
        for assertion in await complete(self._registry, assertions):
            if relation is not None and assertion.reference[:2] != relation[:2]:
                continue
            if assertion.source == key and "fromKey" in sides[name]:
                related.setdefault(assertion.target, {}).setdefault("fromKey", []).append(assertion)
            elif assertion.target == key and "toKey" in sides[name]:
                related.setdefault(assertion.source, {}).setdefault("toKey", []).append(assertion)
        return key, related

    # Details.

    async def get_businessDetail(self, request: xml.XmlElement) -> xml.XmlElement:
        return await self.business_detail(keys_of(request, "businessKey"))

    async def business_detail(self, keys: Sequence[str]) -> xml.XmlElement:
        """Businesses with their services, and those of others that they show. Of one that does not exist any
        more, only its keys are shown.
        """
        businesses = await self._registry.get_all("business", keys)
        services, how = await self._registry.services_of_all(keys), find_qualifiers.FindQualifiers()
        projections = [entities.projections(business.element) for business in businesses]
        candidates = await self._registry.find("service") if any(projections) else []
        there = {(service.key, service.business): service.element for service in candidates}
        elements = []
        for business, shown in zip(businesses, projections, strict=True):
            inside = [service.element for service in ordered(services[business.key], how)]
            for each in shown.items():
                stub = dict(zip(("serviceKey", "businessKey"), each, strict=True))
                inside.append(there.get(each) or xml.XmlElement(U("businessService"), attributes=stub))
            elements.append(
                entities.with_part(
                    business.element,
                    "discoveryURLs name description contacts businessServices",
                    listed("businessServices", inside),
                )
            )
        return xml.XmlElement(U("businessDetail"), *elements)

    async def get_serviceDetail(self, request: xml.XmlElement) -> xml.XmlElement:
        services = await self._registry.get_all("service", keys_of(request, "serviceKey"))
        return xml.XmlElement(U("serviceDetail"), *(service.element for service in services))

    async def get_bindingDetail(self, request: xml.XmlElement) -> xml.XmlElement:
        bindings = [await self._binding(key) for key in keys_of(request, "bindingKey")]
        return xml.XmlElement(U("bindingDetail"), *(binding for binding, _ in bindings))

    async def _binding(self, key: str) -> tuple[xml.XmlElement, records.UddiRecord]:
        record = await self._registry.service_with_binding(key)
        if record is None:
            raise registry.unknown_key_fault(key, "bindingKey")
        return next(
            binding for binding in entities.bindings(record.element) if binding.get("bindingKey") == key
        ), record

    async def get_tModelDetail(self, request: xml.XmlElement) -> xml.XmlElement:
        models = await self._registry.get_all("tmodel", keys_of(request, "tModelKey"))
        return xml.XmlElement(
            U("tModelDetail"),
            *(
                entities.with_attributes(model.element, deleted="true" if model.deleted else "")
                for model in models
            ),
        )

    async def get_operationalInfo(self, request: xml.XmlElement) -> xml.XmlElement:
        infos = [await self._operational(key) for key in keys_of(request, "entityKey")]
        return xml.XmlElement(U("operationalInfos"), *infos)

    async def _operational(self, key: str) -> xml.XmlElement:
        for kind in ("business", "service", "tmodel"):
            record = await self._registry.get(kind, key)
            if record is not None:
                break
        else:
            record = await self._registry.service_with_binding(key)
        if record is None:
            raise registry.unknown_key_fault(key, "")
        latest = record.modified_at_s
        if record.kind == "business":
            latest = max(
                [latest, *(service.modified_at_s for service in await self._registry.services_of(key))]
            )
        fields: list[tuple[str, str]] = [
            ("created", xsd_types.format_datetime(record.created_at_s)),
            ("modified", xsd_types.format_datetime(record.modified_at_s)),
            ("modifiedIncludingChildren", xsd_types.format_datetime(latest)),
            ("nodeID", self._registry.node),
            ("authorizedName", record.owner),
        ]
        return xml.XmlElement(
            U("operationalInfo"),
            *(xml.XmlElement(U(name), text) for name, text in fields),
            attributes={"entityKey": key},
        )


def model_info(record: records.UddiRecord) -> xml.XmlElement:
    return xml.XmlElement(
        U("tModelInfo"),
        *names_only(record.element, "name", "description"),
        attributes={"tModelKey": record.key},
    )


async def owners(uddi_registry: registry.UddiRegistry, keys: Sequence[str]) -> dict[str, str]:
    businesses = {key: await uddi_registry.get("business", key) for key in dict.fromkeys(keys)}
    return {key: business.owner for key, business in businesses.items() if business is not None}


async def complete(
    uddi_registry: registry.UddiRegistry, assertions: Sequence[registry.PublisherAssertion]
) -> list[registry.PublisherAssertion]:
    """The assertions that the owners of both businesses have made, each once."""
    owner = await owners(
        uddi_registry, [key for assertion in assertions for key in (assertion.source, assertion.target)]
    )
    makers: dict[tuple[str, str, entities.KeyedReference], set[str]] = {}
    for assertion in assertions:
        makers.setdefault(assertion.identity, set()).add(assertion.publisher)
    first: dict[tuple[str, str, entities.KeyedReference], registry.PublisherAssertion] = {}
    for assertion in assertions:
        both = {owner.get(assertion.source), owner.get(assertion.target)}
        if both <= makers[assertion.identity]:
            first.setdefault(assertion.identity, assertion)
    return list(first.values())


class _Fingerprint:
    """The technical fingerprint of a search."""

    def __init__(self, required: Sequence[str], *, is_set: bool) -> None:
        self._required = required
        self.is_set = is_set

    def match(self, bindings: Sequence[xml.XmlElement], how: find_qualifiers.FindQualifiers) -> bool:
        return bool(self._required) and any(
            matcher.models_match(self._required, there, how) for there in map(entities.models, bindings)
        )


class _Criteria:
    """Names, categories and identifiers of a search."""

    def __init__(self, request: xml.XmlElement, how: find_qualifiers.FindQualifiers) -> None:
        self._names = entities.names(request)
        self._categories = entities.bag(request)
        self._identifiers = entities.bag(request, "identifierBag")
        self._how = how
        in_groups = [each for _, references in self._categories.groups for each in references]
        number = len((*self._names, *self._categories.references, *self._identifiers.references, *in_groups))
        if number > CRITERIA_MAX:
            raise faults.fault(
                faults.UddiErrorCode.TOO_MANY_OPTIONS, f"{number} criteria: the maximum is {CRITERIA_MAX}"
            )
        for model, references in self._categories.groups:
            if model == matcher.BOX:
                matcher.box(references)  # raise errors before the search

    def __bool__(self) -> bool:
        return bool(self._names or self._categories or self._identifiers or "signaturePresent" in self._how)

    def match_categories(self, there: entities.CategoryBag) -> bool:
        return matcher.bag_matches(self._categories, there, self._how, default="andAllKeys")

    def match(
        self,
        element: xml.XmlElement,
        categories: entities.CategoryBag,
        models: _Fingerprint | None = None,
        bindings: Sequence[xml.XmlElement] = (),
        *,
        signed: bool = False,
    ) -> bool:
        """``signed``: what contains the element is signed."""
        how = self._how
        identifiers = entities.bag(element, "identifierBag")
        if not (
            matcher.names_match(self._names, entities.names(element), how)
            and matcher.bag_matches(self._identifiers, identifiers, how, default="orAllKeys")
            and ("signaturePresent" not in how or signed or entities.is_signed(element))
        ):
            return False
        if models is None or not models.is_set:
            return self.match_categories(categories)
        if "orAllKeys" in how and self._categories:  # of both bags together
            return self.match_categories(categories) or models.match(bindings, how)
        return self.match_categories(categories) and models.match(bindings, how)


def _matching_models(criteria: _Criteria, models: Sequence[records.UddiRecord]) -> list[records.UddiRecord]:
    return [
        model
        for model in models
        if not model.deleted and criteria.match(model.element, entities.bag(model.element))
    ]


def _subset(service: xml.XmlElement, how: find_qualifiers.FindQualifiers) -> entities.CategoryBag:
    """The categories of a service by which it is shown in a business that was found."""
    if "serviceSubset" in how:
        return entities.bag(service)
    return entities.merge_bags(map(entities.bag, entities.bindings(service)))


def _bags(
    element: xml.XmlElement, services: Sequence[xml.XmlElement], how: find_qualifiers.FindQualifiers
) -> entities.CategoryBag:
    """The categories that a search compares for a business or a service."""
    holders: Callable[[], list[xml.XmlElement]] = lambda: [  # noqa: E731
        binding for each in (*services, element) for binding in entities.bindings(each)
    ]
    if "serviceSubset" in how:
        return entities.merge_bags(map(entities.bag, services))
    if "bindingSubset" in how:
        return entities.merge_bags(map(entities.bag, holders()))
    if "combineCategoryBags" in how:
        return entities.merge_bags(map(entities.bag, (element, *services, *holders())))
    return entities.bag(element)


def _qualifiers(request: xml.XmlElement) -> find_qualifiers.FindQualifiers:
    element = request.find(U("findQualifiers"))
    words = entities.texts(element, "findQualifier") if element is not None else ()
    return find_qualifiers.read(words, request.local)
