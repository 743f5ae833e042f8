"""What can be read from an element of UDDI: its names, its bags, its bindings.

Pure.  The elements are canonical (`schema.checked`), so texts and keys compare as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from muster.core.formats import xml
from muster.gateways.uddi.model import schema

U = schema.UDDI


class UddiName(NamedTuple):
    text: str
    language: str = ""


class KeyedReference(NamedTuple):
    """A keyed reference: in the value set ``model``, the value ``value``."""

    model: str
    value: str
    name: str = ""


class CategoryBag(NamedTuple):
    references: tuple[KeyedReference, ...] = ()
    groups: tuple[
        tuple[str, tuple[KeyedReference, ...]], ...
    ] = ()  # a tModel's key, and what stands under it

    def __bool__(self) -> bool:
        return bool(self.references or self.groups)


def names(element: xml.XmlElement) -> list[UddiName]:
    return [UddiName(name.text, name.get(xml.LANG) or "") for name in element.all(U("name"))]


def reference(element: xml.XmlElement) -> KeyedReference:
    return KeyedReference(
        element.get("tModelKey") or "", element.get("keyValue") or "", element.get("keyName") or ""
    )


def bag(element: xml.XmlElement, name: str = "categoryBag") -> CategoryBag:
    """The bag of that name in ``element``; an empty one where there is none."""
    bag_element = element.find(U(name))
    if bag_element is None:
        return CategoryBag()
    groups = tuple(
        (group.get("tModelKey") or "", tuple(map(reference, group.all(U("keyedReference")))))
        for group in bag_element.all(U("keyedReferenceGroup"))
    )
    return CategoryBag(tuple(map(reference, bag_element.all(U("keyedReference")))), groups)


def merge_bags(bags: Iterable[CategoryBag]) -> CategoryBag:
    bags = list(bags)
    return CategoryBag(
        tuple(item for each in bags for item in each.references),
        tuple(group for each in bags for group in each.groups),
    )


def inside(element: xml.XmlElement, holder: str, name: str) -> list[xml.XmlElement]:
    """The elements ``name`` in the list ``holder`` of ``element``."""
    parent = element.find(U(holder))
    return parent.all(U(name)) if parent is not None else []


def services(business: xml.XmlElement) -> list[xml.XmlElement]:
    return inside(business, "businessServices", "businessService")


def bindings(service: xml.XmlElement) -> list[xml.XmlElement]:
    return inside(service, "bindingTemplates", "bindingTemplate")


def models(binding: xml.XmlElement) -> set[str]:
    """The tModels a binding says it follows: its technical fingerprint."""
    infos = inside(binding, "tModelInstanceDetails", "tModelInstanceInfo")
    return {info.get("tModelKey") or "" for info in infos}


def urls(business: xml.XmlElement) -> set[tuple[str, str]]:
    return {(url.get("useType") or "", url.text) for url in inside(business, "discoveryURLs", "discoveryURL")}


def texts(element: xml.XmlElement, name: str) -> list[str]:
    return [child.text for child in element.all(U(name))]


def with_attributes(element: xml.XmlElement, **attributes: str) -> xml.XmlElement:
    """The same with these attributes besides its own; an empty one is taken away."""
    merged = {**element.attributes, **attributes}
    kept = {name: value for name, value in merged.items() if value}
    return xml.XmlElement(element.name, *element.content, attributes=kept, namespaces=element.namespaces)


def with_part(element: xml.XmlElement, order: str, part: xml.XmlElement | None) -> xml.XmlElement:
    """The same with ``part`` in the place of what stands under its name.

    ``order``: the names of the children as the schema has them, and of which one is put anew the last word.
    """
    *before, name = order.split()
    known = {U(child) for child in before}
    first = [child for child in element.children if child.name in known]
    rest = [child for child in element.children if child.name not in known and child.name != U(name)]
    return xml.XmlElement(
        element.name, *first, part, *rest, attributes=element.attributes, namespaces=element.namespaces
    )


def walk_references(element: xml.XmlElement) -> Iterator[KeyedReference]:
    for child in element.walk():
        if child.name == U("keyedReference"):
            yield reference(child)
