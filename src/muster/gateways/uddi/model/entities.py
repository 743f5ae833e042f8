"""Reads names, bags and bindings from UDDI elements.

Pure.  The elements are canonical (`schema.validate`), so texts and keys can be compared directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from muster.core.formats import xml
from muster.gateways.uddi.model import schema

U = schema.UDDI


class UddiName(NamedTuple):
    text: str
    language: str = ""


class KeyedReference(NamedTuple):
    """A keyed reference: the value ``value`` of the value set ``model``."""

    model: str
    value: str
    name: str = ""


class CategoryBag(NamedTuple):
    references: tuple[KeyedReference, ...] = ()
    groups: tuple[tuple[str, tuple[KeyedReference, ...]], ...] = ()  # the key of a tModel, and its references

    def __bool__(self) -> bool:
        return bool(self.references or self.groups)


def names(element: xml.XmlElement) -> list[UddiName]:
    return [UddiName(name.text, name.get(xml.LANG) or "") for name in element.all(U("name"))]


def reference(element: xml.XmlElement) -> KeyedReference:
    return KeyedReference(
        element.get("tModelKey") or "", element.get("keyValue") or "", element.get("keyName") or ""
    )


def bag(element: xml.XmlElement, name: str = "categoryBag") -> CategoryBag:
    """The bag ``name`` of ``element``; empty if there is none."""
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


def is_signed(element: xml.XmlElement) -> bool:
    return any(child.namespace == schema.SIGNATURE for child in element.children)


def projections(business: xml.XmlElement) -> dict[str, str]:
    """The services of other businesses that a stored business shows, and their businesses."""
    return {
        service.get("serviceKey") or "": service.get("businessKey") or "" for service in services(business)
    }


def bindings(service: xml.XmlElement) -> list[xml.XmlElement]:
    return inside(service, "bindingTemplates", "bindingTemplate")


def models(binding: xml.XmlElement) -> set[str]:
    """The tModels of a binding: its technical fingerprint."""
    infos = inside(binding, "tModelInstanceDetails", "tModelInstanceInfo")
    return {info.get("tModelKey") or "" for info in infos}


def urls(business: xml.XmlElement) -> set[tuple[str, str]]:
    return {(url.get("useType") or "", url.text) for url in inside(business, "discoveryURLs", "discoveryURL")}


def texts(element: xml.XmlElement, name: str) -> list[str]:
    return [child.text for child in element.all(U(name))]


def with_attributes(element: xml.XmlElement, **attributes: str) -> xml.XmlElement:
    """A copy with these attributes added; empty values remove an attribute."""
    merged = {**element.attributes, **attributes}
    kept = {name: value for name, value in merged.items() if value}
    return xml.XmlElement(element.name, *element.content, attributes=kept, namespaces=element.namespaces)


def with_part(element: xml.XmlElement, order: str, part: xml.XmlElement | None) -> xml.XmlElement:
    """A copy in which ``part`` replaces the child of the same name.

    ``order``: the names of the preceding children in the schema, and last the name of ``part``.
    """
    *before, name = order.split()
    known = {U(child) for child in before}
    first = [child for child in element.children if child.name in known]
    rest = [child for child in element.children if child.name not in known and child.name != U(name)]
    return xml.XmlElement(
        element.name, *first, part, *rest, attributes=element.attributes, namespaces=element.namespaces
    )
