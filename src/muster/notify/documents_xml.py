"""Documents of models, states and policies in XML; the schema is ``docs/schemas/notify.xsd``.

Read with expat: a document type or an entity is rejected where it begins, so nothing is ever fetched or
expanded, and depth and size are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final
from xml.parsers import expat
from xml.sax import saxutils

from muster.core import errors
from muster.notify import documents, models
from muster.predicates import types

NAMESPACE: Final = "urn:muster:notify:1"
DEPTH_MAX: Final = 8
_NOT_IN_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(slots=True)
class _Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    children: list[_Element] = field(default_factory=list)

    def get(self, name: str) -> str:
        if name not in self.attributes:
            raise errors.InvalidInput(f"<{self.name}> needs the attribute {name}")
        return self.attributes[name]

    def named(self, name: str) -> list[_Element]:
        """Return the children, which all must have this name."""
        for child in self.children:
            if child.name != name:
                raise errors.InvalidInput(f"<{child.name}> is not allowed in <{self.name}>")
        return self.children


def read(text: str) -> documents.NotifyDocument:
    root = _tree(text)
    if root.name != "notify":
        raise errors.InvalidInput(f'expected <notify xmlns="{NAMESPACE}">, not <{root.name}>')
    declared_models: list[models.Model] = []
    states: list[documents.StateDocument] = []
    policies: dict[str, str] = {}
    for child in root.children:
        match child.name:
            case "model":
                declared = {attribute.get("name"): _type(attribute) for attribute in child.named("attribute")}
                of = child.attributes.get("of", "receiver")
                if of not in ("receiver", "event"):
                    raise errors.InvalidInput(f"a model describes a receiver or an event, not {of[:80]!r}")
                declared_models.append(models.Model(child.get("name"), declared, models.ModelKind(of)))
            case "state":
                pairs = ((element.get("name"), _value(element)) for element in child.named("value"))
                values = {name: held for name, held in pairs if not types.is_null(held)}
                states.append(documents.StateDocument(child.get("receiver"), child.get("model"), values))
            case "policy":
                policies[child.get("name")] = child.text.strip()
            case _:
                raise errors.InvalidInput(f"<{child.name}> is not allowed here")
    return documents.NotifyDocument(tuple(declared_models), tuple(states), policies)


def _words(element: _Element) -> list[str]:
    return [word.text for word in element.named("word")]


def _type(element: _Element) -> types.AttributeType:
    kind = element.get("type")
    return types.set_of(*_words(element)) if kind == "set" else types.parse_type(kind)


def _value(element: _Element) -> types.Value:
    text = element.text
    try:
        match element.get("type"):
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
    raise errors.InvalidInput(f"{text[:80]!r} is not a value of type {element.get('type')[:20]}")


def _tree(text: str) -> _Element:
    parser = expat.ParserCreate("utf-8", " ")  # whatever it declares: the text was decoded as UTF-8
    root = _Element("", {})
    stack = [root]

    def start(name: str, attributes: dict[str, str]) -> None:
        namespace, _, local = name.rpartition(" ")
        if namespace != NAMESPACE:
            raise errors.InvalidInput(f"<{local}> is not in the namespace {NAMESPACE}")
        if len(stack) > DEPTH_MAX:
            raise errors.LimitExceeded(f"elements are nested more than {DEPTH_MAX} deep")
        element = _Element(local, attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def characters(data: str) -> None:
        stack[-1].text += data

    def refuse(*_: Any) -> None:
        raise errors.InvalidInput("document types and entities are not supported")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise errors.ParseError(
            f"invalid XML: {error}", text=text[:4096], position=min(parser.ErrorByteIndex, 4096)
        ) from None
    return root.children[0]


def write(document: documents.NotifyDocument) -> str:
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f'<notify xmlns="{NAMESPACE}">']
    for model in document.models:
        lines.append(f"  <model name={_quoted(model.name)} of={_quoted(model.kind.value)}>")
        for name, declared in model.attributes.items():
            lines.append(_element("attribute", name, declared.kind.value, declared.domain))
        lines.append("  </model>")
    for state in document.states:
        lines.append(f"  <state receiver={_quoted(state.receiver)} model={_quoted(state.model)}>")
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
        f"  <policy name={_quoted(name)}>{_escaped(text)}</policy>"
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
