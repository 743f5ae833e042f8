"""Changes through UDDI to service entries that were saved without UDDI.

Such an entry has a description of any bytes, typed metadata and a lease; a businessService shows only a part
of it (`records.from_entry`).  A change updates what UDDI shows and keeps the rest.  Changes that a service
entry cannot represent are rejected.  The bindings are numbered, so a deletion changes the numbers of later
ones.

Pure.
"""

from __future__ import annotations

import msgspec

from muster.core.formats import xml
from muster.gateways.uddi import records
from muster.gateways.uddi.model import entities, matcher, schema
from muster.inform import protocol, service_entries

U = schema.UDDI
_HINT = "delete the entry, and save it as a UDDI service with its own key"
_PLACE = ("lon", "lat")


def edited(before: service_entries.ServiceEntry, element: xml.XmlElement) -> service_entries.ServiceEntry:
    """Return ``before`` with the changes of ``element``; `schema.InvalidUddi` if an entry cannot represent
    them.
    """
    parts = {child.local for child in element.children}
    names = entities.names(element)
    if parts - {"name", "bindingTemplates", "categoryBag"} or len(names) != 1 or names[0].language:
        raise schema.InvalidUddi(
            "an entry saved without UDDI has one name, bindings and categories", hint=_HINT
        )
    if element.get("businessKey") not in (None, "", records.DOMAIN_KEY):
        raise schema.InvalidUddi("an entry saved without UDDI has no business", hint=_HINT)
    shown = records.from_entry(before)
    bag = entities.bag(element)
    return msgspec.structs.replace(
        before,
        name=before.name if names == entities.names(shown) else names[0].text,
        access=_access(before, shown, element),
        categories=_categories(before, bag),
        metadata=_metadata(before, entities.bag(shown), bag),
    )


def _access(
    before: service_entries.ServiceEntry, shown: xml.XmlElement, element: xml.XmlElement
) -> tuple[str, ...]:
    kept = {
        entities.texts(binding, "accessPoint")[0]: access
        for binding, access in zip(entities.bindings(shown), before.access, strict=True)
    }
    addresses = []
    for binding in entities.bindings(element):
        points = binding.all(U("accessPoint"))
        if len(points) != 1 or points[0].get("useType", "endPoint") not in ("", "endPoint"):
            raise schema.InvalidUddi(
                "a binding of an entry saved without UDDI must be an endPoint", hint=_HINT
            )
        if any(child.local != "accessPoint" for child in binding.children):
            raise schema.InvalidUddi(
                "a binding of an entry saved without UDDI has only an address", hint=_HINT
            )
        addresses.append(kept.get(points[0].text, points[0].text))
    return tuple(addresses)


def _categories(before: service_entries.ServiceEntry, bag: entities.CategoryBag) -> tuple[str, ...]:
    kept = {}
    for category in before.categories:
        model, _, value = category.partition("=")
        kept[records.category(entities.reference(records.keyed(model, value)))] = category
    stated = [
        records.category(reference)
        for reference in bag.references
        if reference.model not in (matcher.KEYWORDS, matcher.LEASE)
    ]
    return tuple(kept.get(category, category) for category in stated)


def _metadata(
    before: service_entries.ServiceEntry, shown: entities.CategoryBag, bag: entities.CategoryBag
) -> dict[str, protocol.Attribute]:
    old = {
        reference.name: reference.value
        for reference in shown.references
        if reference.model == matcher.KEYWORDS
    }
    metadata: dict[str, protocol.Attribute] = {}
    for reference in bag.references:
        if reference.model != matcher.KEYWORDS:
            continue
        if not reference.name or reference.name in service_entries.RESERVED:
            raise schema.InvalidUddi(f"{reference.name!r} cannot be metadata of an entry saved without UDDI")
        same = reference.name in before.metadata and old.get(reference.name) == reference.value
        metadata[reference.name] = (
            before.metadata[reference.name] if same else records.number(reference.value)
        )
    if bag.groups == shown.groups:
        return metadata | {name: before.metadata[name] for name in _PLACE if name in before.metadata}
    if len(bag.groups) > 1 or any(model != matcher.BOX for model, _ in bag.groups):
        raise schema.InvalidUddi("an entry saved without UDDI has one location", hint=_HINT)
    return metadata | records.middle(bag)
