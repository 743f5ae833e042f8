"""What can be read from an element of UDDI: its names, its bags, its bindings.

Pure.  The elements are canonical (`schema.checked`), so texts and keys compare as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from muster.core.formats import xml
from muster.gateways.uddi.model import schema

U = schema.UDDI


class Name(NamedTuple):
    text: str
    language: str = ""


class Reference(NamedTuple):
    """A keyed reference: in the value set ``model``, the value ``value``."""

    model: str
    value: str
    name: str = ""


class Bag(NamedTuple):
    references: tuple[Reference, ...] = ()
    groups: tuple[tuple[str, tuple[Reference, ...]], ...] = ()  # a tModel's key, and what stands under it

    def __bool__(self) -> bool:
        return bool(self.references or self.groups)


def names(element: xml.Element) -> list[Name]:
    return [Name(one.text, one.get(xml.LANG) or "") for one in element.all(U("name"))]


def reference(element: xml.Element) -> Reference:
    return Reference(
        element.get("tModelKey") or "", element.get("keyValue") or "", element.get("keyName") or ""
    )


def bag(element: xml.Element, name: str = "categoryBag") -> Bag:
    """The bag of that name in ``element``; an empty one where there is none."""
    found = element.find(U(name))
    if found is None:
        return Bag()
    groups = tuple(
        (group.get("tModelKey") or "", tuple(map(reference, group.all(U("keyedReference")))))
        for group in found.all(U("keyedReferenceGroup"))
    )
    return Bag(tuple(map(reference, found.all(U("keyedReference")))), groups)


def together(bags: Iterable[Bag]) -> Bag:
    bags = list(bags)
    return Bag(
        tuple(one for each in bags for one in each.references),
        tuple(one for each in bags for one in each.groups),
    )


def inside(element: xml.Element, holder: str, name: str) -> list[xml.Element]:
    """The elements ``name`` in the list ``holder`` of ``element``."""
    found = element.find(U(holder))
    return found.all(U(name)) if found is not None else []


def services(business: xml.Element) -> list[xml.Element]:
    return inside(business, "businessServices", "businessService")


def bindings(service: xml.Element) -> list[xml.Element]:
    return inside(service, "bindingTemplates", "bindingTemplate")


def models(binding: xml.Element) -> set[str]:
    """The tModels a binding says it follows: its technical fingerprint."""
    infos = inside(binding, "tModelInstanceDetails", "tModelInstanceInfo")
    return {info.get("tModelKey") or "" for info in infos}


def urls(business: xml.Element) -> set[tuple[str, str]]:
    return {(one.get("useType") or "", one.text) for one in inside(business, "discoveryURLs", "discoveryURL")}


def texts(element: xml.Element, name: str) -> list[str]:
    return [one.text for one in element.all(U(name))]


def with_attributes(element: xml.Element, **attributes: str) -> xml.Element:
    """The same with these attributes besides its own; an empty one is taken away."""
    merged = {**element.attributes, **attributes}
    kept = {name: value for name, value in merged.items() if value}
    return xml.Element(element.name, *element.content, attributes=kept, namespaces=element.namespaces)


def with_part(element: xml.Element, order: str, part: xml.Element | None) -> xml.Element:
    """The same with ``part`` in the place of what stands under its name.

    ``order``: the names of the children as the schema has them, and of which one is put anew the last word.
    """
    *before, name = order.split()
    known = {U(one) for one in before}
    first = [one for one in element.children if one.name in known]
    rest = [one for one in element.children if one.name not in known and one.name != U(name)]
    return xml.Element(
        element.name, *first, part, *rest, attributes=element.attributes, namespaces=element.namespaces
    )


def walk_references(element: xml.Element) -> Iterator[Reference]:
    for one in element.walk():
        if one.name == U("keyedReference"):
            yield reference(one)
