"""Documents of models, states and policies in XML; the schema is ``docs/schemas/notify.xsd``.

They are read with `muster.core.formats.xml`, which accepts no document type and limits depth and size.
"""

from __future__ import annotations

import re
from typing import Final
from xml.sax import saxutils

from muster.core import errors
from muster.core.formats import xml
from muster.notify import documents, models
from muster.predicates import types

NAMESPACE: Final = "urn:muster:notify:1"
LIMITS: Final = xml.XmlLimits(bytes=16 << 20, depth=8, elements=500_000)
_NOT_IN_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _attribute(element: xml.XmlElement, name: str) -> str:
    value = element.get(name)
    if value is None:
        raise errors.InvalidInput(f"<{element.local}> needs the attribute {name}")
    return value


def _children(element: xml.XmlElement, name: str) -> list[xml.XmlElement]:
    """The children, which all must have this name."""
    for child in element.children:
        if child.local != name:
            raise errors.InvalidInput(f"<{child.local}> is not allowed in <{element.local}>")
    return element.children


def read(text: str) -> documents.NotifyDocument:
    root = _tree(text)
    if root.local != "notify":
        raise errors.InvalidInput(f'expected <notify xmlns="{NAMESPACE}">, not <{root.local}>')
    declared_models: list[models.Model] = []
    states: list[documents.StateDocument] = []
    policies: dict[str, str] = {}
    for child in root.children:
        match child.local:
            case "model":
                declared = {
                    _attribute(entry, "name"): _type(entry) for entry in _children(child, "attribute")
                }
                of = child.attributes.get("of", "receiver")
                if of not in ("receiver", "event"):
                    raise errors.InvalidInput(f"a model describes a receiver or an event, not {of[:80]!r}")
                declared_models.append(
                    models.Model(_attribute(child, "name"), declared, models.ModelKind(of))
                )
            case "state":
                pairs = ((_attribute(entry, "name"), _value(entry)) for entry in _children(child, "value"))
                values = {name: held for name, held in pairs if not types.is_null(held)}
                states.append(
                    documents.StateDocument(child.get("receiver") or "", _attribute(child, "model"), values)
                )
            case "policy":
                policies[child.get("name") or ""] = child.text
            case _:
                raise errors.InvalidInput(f"<{child.local}> is not allowed here")
    return documents.NotifyDocument(tuple(declared_models), tuple(states), policies)


def _words(element: xml.XmlElement) -> list[str]:
    return [word.exact_text for word in _children(element, "word")]


def _type(element: xml.XmlElement) -> types.AttributeType:
    kind = _attribute(element, "type")
    return types.set_of(*_words(element)) if kind == "set" else types.parse_type(kind)


def _value(element: xml.XmlElement) -> types.Value:
    text, kind = element.exact_text, _attribute(element, "type")
    try:
        match kind:
            case "string":
                return text
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return {"true": True, "false": False}[text.strip()]
            case "set":
                return frozenset(_words(element))
    except (ValueError, KeyError):
        pass
    raise errors.InvalidInput(f"{text[:80]!r} is not a value of type {kind[:20]}")


def _tree(text: str) -> xml.XmlElement:
    try:
        root = xml.parse(text.encode(), LIMITS)
    except xml.MalformedXml as error:
        raise errors.ParseError(f"invalid XML: {error.message}", text=text[:4096], position=0) from error
    for element in root.walk():
        if element.namespace != NAMESPACE:
            raise errors.InvalidInput(f"<{element.local}> is not in the namespace {NAMESPACE}")
    return root


def write(document: documents.NotifyDocument) -> str:
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f'<notify xmlns="{NAMESPACE}">']
    for model in document.models:
        lines.append(f"  <model name={_quoted(model.name)} of={_quoted(model.kind.value)}>")
        for name, declared in model.attributes.items():
            lines.append(_element("attribute", name, declared.kind.value, declared.domain))
        lines.append("  </model>")
    for state in document.states:
        receiver = f" receiver={_quoted(state.receiver)}" if state.receiver else ""
        lines.append(f"  <state{receiver} model={_quoted(state.model)}>")
        for name, held in state.values.items():
            kind = types.kind_of(held)
            if kind is None or types.is_null(held):
                continue  # NULL is not written
            if isinstance(held, frozenset):
                lines.append(_element("value", name, "set", tuple(sorted(held))))
            else:
                text = str(held).lower() if isinstance(held, bool) else str(held)
                lines.append(_element("value", name, kind.value, (), text))
        lines.append("  </state>")
    lines += [
        f"  <policy{f' name={_quoted(name)}' if name else ''}>{_escaped(text)}</policy>"
        for name, text in document.policies.items()
    ]
    return "\n".join([*lines, "</notify>"]) + "\n"


def _element(kind: str, name: str, of: str, words: tuple[str, ...], text: str = "") -> str:
    inside = "".join(f"<word>{_escaped(word)}</word>" for word in words) + _escaped(text)
    return f"    <{kind} name={_quoted(name)} type={_quoted(of)}>{inside}</{kind}>"


def _escaped(text: str) -> str:
    if _NOT_IN_XML.search(text):
        raise errors.InvalidInput(
            f"{text[:80]!r} has a character that XML cannot represent", hint="use another format"
        )
    return saxutils.escape(text, {"\r": "&#13;"})  # otherwise it would be read as a line feed


def _quoted(text: str) -> str:
    return saxutils.quoteattr(text)
