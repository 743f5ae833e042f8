"""Fragments of a resource by path: XPath level 1 of the standard.

``Desired``, ``p:Desired/text()``, ``Config/Item[2]``, ``/p:Resource/p:State``: steps of element names from
the resource down, each optionally with a position, and ``text()`` at the end.  Prefixes are those of the
request; a name without a prefix has the namespace of the resource, as existing clients expect.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from muster.core.formats import xml
from muster.gateways.wsman.wire import faults, namespaces

_STEP = re.compile(r"(?:([\w.\-]+):)?([\w.\-]+)(?:\[(\d{1,6})\])?\Z")
STEPS_MAX = 16

Path = Sequence[tuple[str, int | None]]  # names and positions from 1; None: all elements of the name


def read(header: xml.XmlElement, kind: xml.XmlNamespace) -> tuple[Path, bool]:
    """The path, and whether only the text is selected."""
    dialect = header.get("Dialect") or namespaces.XPATH
    if dialect not in (namespaces.XPATH, namespaces.XPATH_1):
        raise faults.fault(
            namespaces.WSMAN("FragmentDialectNotSupported"),
            f"unsupported fragment dialect {dialect[:120]!r}: use {namespaces.XPATH}",
        )
    steps = header.text.lstrip("/").split("/")
    absolute = header.text.startswith("/")
    text = steps[-1] == "text()"
    if text:
        steps = steps[:-1]
    path: list[tuple[str, int | None]] = []
    for step in steps:
        match = _STEP.match(step)
        namespace = (header.namespaces or {}).get(match[1]) if match and match[1] else str(kind)
        if match is None or namespace is None or len(steps) > STEPS_MAX:
            raise faults.fault(
                namespaces.WSEN("CannotProcessFilter"),
                f"{header.text[:120]!r} is not a path of element names such as Desired or Config/Item[2]",
            )
        path.append((f"{{{namespace}}}{match[2]}", int(match[3]) if match[3] else None))
    root = kind(namespaces.KINDS[kind])
    if path and path[0][0] == root and (absolute or len(path) > 1):
        path = path[1:]
    return path, text


def select(resource: xml.XmlElement, path: Path) -> list[xml.XmlElement]:
    selected = [resource]
    for name, number in path:
        inner = [child for element in selected for child in element.all(name)]
        if number is not None:  # positions begin at 1
            inner = inner[number - 1 : number] if number else []
        selected = inner
    return selected


def get(resource: xml.XmlElement, path: Path, *, text: bool) -> xml.XmlElement:
    selected = select(resource, path)
    if not selected:
        return xml.XmlElement(namespaces.WSMAN("XmlFragment"), attributes={xml.NIL: "true"})
    if text:
        return xml.XmlElement(
            namespaces.WSMAN("XmlFragment"), "".join(element.exact_text for element in selected)
        )
    return xml.XmlElement(namespaces.WSMAN("XmlFragment"), *selected)


def put(
    resource: xml.XmlElement, path: Path, fragment: xml.XmlElement | None, *, text: bool
) -> xml.XmlElement:
    """The resource with the fragment replaced."""
    if fragment is None or fragment.name != namespaces.WSMAN("XmlFragment"):
        raise faults.representation("expected a wsman:XmlFragment", "InvalidFragment")
    old = select(resource, path)
    if not path or not old:
        raise faults.representation("there is no element at this path", "InvalidFragment")
    if text:
        new = [xml.XmlElement(old[0].name, fragment.exact_text, attributes=old[0].attributes)]
    else:
        expected = path[-1][0].rpartition("}")[2]
        if not fragment.children or any(child.local != expected for child in fragment.children):
            raise faults.representation(f"expected <{expected}> in the fragment", "InvalidFragment")
        new = [_renamed(child, resource.namespace) for child in fragment.children]
    return _replaced(resource, old, new)


def _renamed(element: xml.XmlElement, namespace: str) -> xml.XmlElement:
    """Elements without a namespace get the namespace of the resource."""
    content = [
        _renamed(child, namespace) if isinstance(child, xml.XmlElement) else child
        for child in element.content
    ]
    name = element.name if element.namespace else f"{{{namespace}}}{element.local}"
    return xml.XmlElement(name, *content, attributes=element.attributes)


def _replaced(
    element: xml.XmlElement, old: Sequence[xml.XmlElement], new: Sequence[xml.XmlElement]
) -> xml.XmlElement:
    content: list[xml.Content] = []
    for child in element.content:
        if child is old[0]:
            content += new
        elif isinstance(child, xml.XmlElement):
            if not any(child is other for other in old):
                content.append(_replaced(child, old, new))
        else:
            content.append(child)
    return xml.XmlElement(element.name, *content, attributes=element.attributes)
