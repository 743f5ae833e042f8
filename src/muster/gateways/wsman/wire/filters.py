"""Filters of enumerations and subscriptions in several dialects, as a predicate.

- Muster's own: the predicate itself;
- WQL and CQL: ``SELECT * FROM`` the class that is listed, ``WHERE`` and a condition, which is a predicate
  except for the names of properties, where these languages ignore the case;
- SelectorFilter: equality with each selector.

Pure.
"""

from __future__ import annotations

import re

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.wsman.wire import faults, headers, namespaces
from muster.predicates.syntax import lexer, parser

DIALECTS = (namespaces.PREDICATE, namespaces.SELECTOR_FILTER, *namespaces.QUERIES)
_QUERY = re.compile(r"\s*select\s+\*\s+from\s+(\w+)(?:\s+where\s+(.+))?\s*\Z", re.IGNORECASE | re.DOTALL)
_NAMES = {word: word for word in ("name", "type", "group", "agent", "state", "manager", "zone")}


def of_enumeration(body: xml.XmlElement, kind: xml.XmlNamespace) -> str:
    return _read(body, namespaces.WSEN("Filter"), namespaces.WSEN, kind)


def of_subscription(body: xml.XmlElement) -> str:
    return _read(body, namespaces.WSE("Filter"), namespaces.WSE, namespaces.RESOURCE)


def _read(body: xml.XmlElement, standard: str, space: xml.XmlNamespace, kind: xml.XmlNamespace) -> str:
    """Return the predicate; empty if there is no filter."""
    elements = [*body.all(standard), *body.all(namespaces.WSMAN("Filter"))]
    if not elements:
        return ""
    if len(elements) > 1:
        raise _unusable(space, "there is more than one filter")
    element = elements[0]
    dialect = element.get("Dialect") or namespaces.XPATH
    if dialect not in DIALECTS:
        subcode = (
            "FilterDialectRequestedUnavailable"
            if space == namespaces.WSEN
            else "FilteringRequestedUnavailable"
        )
        raise faults.fault(
            space(subcode),
            f"unsupported filter dialect {dialect[:120]!r}",
            more=[xml.XmlElement(space("SupportedDialect"), supported) for supported in DIALECTS],
        )
    try:
        where = (
            _selectors(element) if dialect == namespaces.SELECTOR_FILTER else _text(element, dialect, kind)
        )
        if where:
            parser.parse(where)
    except errors.InvalidInput as error:
        raise _unusable(space, error.message) from error
    return where


def _unusable(space: xml.XmlNamespace, reason: str) -> faults.Fault:
    # WS-Eventing has no fault for a filter of a known dialect: WS-Management adds one.
    space = space if space == namespaces.WSEN else namespaces.WSMAN
    return faults.fault(space("CannotProcessFilter"), reason)


def _selectors(element: xml.XmlElement) -> str:
    (chosen,) = element.children if len(element.children) == 1 else (None,)
    if chosen is None or chosen.name != namespaces.WSMAN("SelectorSet"):
        raise errors.InvalidInput("a filter of this dialect must have one SelectorSet")
    clauses = []
    for name, text in headers.read_selectors(chosen).items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise errors.InvalidInput(f"{name[:60]!r} is not the name of a property")
        quoted = text.replace("'", "''")
        clauses.append(f"{_NAMES.get(name.lower(), name)} = '{quoted}'")
    return " AND ".join(clauses)


def _text(element: xml.XmlElement, dialect: str, kind: xml.XmlNamespace) -> str:
    if element.children:
        raise errors.InvalidInput("a filter of this dialect must be a text")
    if dialect == namespaces.PREDICATE:
        return element.text
    query = _QUERY.match(element.text)
    if query is None:
        raise errors.InvalidInput(f"expected SELECT * FROM {namespaces.KINDS[kind]} WHERE …")
    if query[1].lower() != namespaces.KINDS[kind].lower():
        raise errors.InvalidInput(f"unknown class {query[1][:60]!r}: expected {namespaces.KINDS[kind]}")
    condition = query[2] or ""
    pieces, position = [], 0
    for token in lexer.tokens(condition, strict=False):
        if token.kind == "word":
            known = _NAMES.get(str(token.value).lower())
            if known is not None:
                pieces += [condition[position : token.start], known]
                position = token.end
    return "".join(pieces) + condition[position:]
