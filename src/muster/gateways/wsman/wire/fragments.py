"""Parts of a resource by path: the lowest level of XPath that the standard allows for.

``Wanted``, ``p:Wanted/text()``, ``Config/Item[2]``, ``/p:Resource/p:State``: steps of element names from the
resource down, each perhaps with a number, and ``text()`` at the end.  Prefixes are those of the request; a
name without one stands for the resource's own namespace, since clients in the field write it so.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from muster.core.formats import xml
from muster.gateways.wsman.wire import faults, namespaces

_STEP = re.compile(r"(?:([\w.\-]+):)?([\w.\-]+)(?:\[(\d{1,6})\])?\Z")
STEPS_MAX = 16

Path = Sequence[tuple[str, int | None]]  # names and numbers, from 1; None: all of the name


def read(header: xml.Element, kind: xml.Namespace) -> tuple[Path, bool]:
    """The path, and whether the text alone is meant."""
    dialect = header.get("Dialect") or namespaces.XPATH
    if dialect not in (namespaces.XPATH, namespaces.XPATH_1):
        raise faults.fault(
            namespaces.WSMAN("FragmentDialectNotSupported"),
            f"no fragments of the dialect {dialect[:120]!r}: use {namespaces.XPATH}",
        )
    steps = header.text.lstrip("/").split("/")
    absolute = header.text.startswith("/")
    text = steps[-1] == "text()"
    if text:
        steps = steps[:-1]
    path: list[tuple[str, int | None]] = []
    for step in steps:
        found = _STEP.match(step)
        namespace = (header.namespaces or {}).get(found[1]) if found and found[1] else str(kind)
        if found is None or namespace is None or len(steps) > STEPS_MAX:
            raise faults.fault(
                namespaces.WSEN("CannotProcessFilter"),
                f"{header.text[:120]!r} is no path of element names such as Wanted or Config/Item[2]",
            )
        path.append((f"{{{namespace}}}{found[2]}", int(found[3]) if found[3] else None))
    root = kind(namespaces.KINDS[kind])
    if path and path[0][0] == root and (absolute or len(path) > 1):
        path = path[1:]
    return path, text


def select(resource: xml.Element, path: Path) -> list[xml.Element]:
    found = [resource]
    for name, number in path:
        inner = [child for one in found for child in one.all(name)]
        if number is not None:  # there is no element 0
            inner = inner[number - 1 : number] if number else []
        found = inner
    return found


def get(resource: xml.Element, path: Path, *, text: bool) -> xml.Element:
    found = select(resource, path)
    if not found:
        return xml.Element(namespaces.WSMAN("XmlFragment"), attributes={xml.NIL: "true"})
    if text:
        return xml.Element(namespaces.WSMAN("XmlFragment"), "".join(one.exact_text for one in found))
    return xml.Element(namespaces.WSMAN("XmlFragment"), *found)


def put(resource: xml.Element, path: Path, fragment: xml.Element | None, *, text: bool) -> xml.Element:
    """The resource with the part replaced."""
    if fragment is None or fragment.name != namespaces.WSMAN("XmlFragment"):
        raise faults.representation("expected a wsman:XmlFragment", "InvalidFragment")
    old = select(resource, path)
    if not path or not old:
        raise faults.representation("there is nothing at this path to replace", "InvalidFragment")
    if text:
        new = [xml.Element(old[0].name, fragment.exact_text, attributes=old[0].attributes)]
    else:
        wanted = path[-1][0].rpartition("}")[2]
        if not fragment.children or any(one.local != wanted for one in fragment.children):
            raise faults.representation(f"expected <{wanted}> in the fragment", "InvalidFragment")
        new = [_renamed(one, resource.namespace) for one in fragment.children]
    return _replaced(resource, old, new)


def _renamed(element: xml.Element, namespace: str) -> xml.Element:
    """Elements that were written without a namespace are of the resource's."""
    content = [_renamed(one, namespace) if isinstance(one, xml.Element) else one for one in element.content]
    name = element.name if element.namespace else f"{{{namespace}}}{element.local}"
    return xml.Element(name, *content, attributes=element.attributes)


def _replaced(element: xml.Element, old: Sequence[xml.Element], new: Sequence[xml.Element]) -> xml.Element:
    content: list[xml.Content] = []
    for one in element.content:
        if one is old[0]:
            content += new
        elif isinstance(one, xml.Element):
            if not any(one is other for other in old):
                content.append(_replaced(one, old, new))
        else:
            content.append(one)
    return xml.Element(element.name, *content, attributes=element.attributes)
