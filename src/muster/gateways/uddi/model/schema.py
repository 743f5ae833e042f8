"""The schema of UDDI v3: the standard's own files, in the folder ``oasis``.

`validate` returns an element in canonical form: white space collapsed where the schema requires it, keys in
lower case.  So equal values have equal texts.  Signatures are allowed where the standard allows them; they
are stored unchanged and not verified.

lxml is imported with the first use: every domain imports this module, and few have a gateway.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from muster.core import errors
from muster.core.formats import xml

if TYPE_CHECKING:
    from lxml import etree

UDDI = xml.XmlNamespace("urn:uddi-org:api_v3")
SIGNATURE = xml.XmlNamespace("http://www.w3.org/2000/09/xmldsig#")
PREFIXES = {str(UDDI): "uddi"}
FOLDER: Final = pathlib.Path(__file__).parents[1] / "oasis"
_XSD: Final = "{http://www.w3.org/2001/XMLSchema}"
_WSDL: Final = "{http://schemas.xmlsoap.org/wsdl/}"
_FOLDS: Final = "{urn:uddi-org:schemaCentricC14N:2002-07-10}caseMapKind"


class InvalidUddi(errors.InvalidInput):
    """Invalid by the schema of UDDI."""

    code = "uddi-invalid"


class _Text(NamedTuple):
    """How a text or an attribute is made canonical."""

    collapses: bool
    folds: bool

    def canonical(self, text: str) -> str:
        text = " ".join(text.split()) if self.collapses else text
        return text.lower() if self.folds else text


class _Schema:
    def __init__(self) -> None:
        from lxml import etree

        tree = etree.parse(FOLDER / "uddi_v3.xsd")
        self._check = etree.XMLSchema(tree)
        self._root = tree.getroot()
        #: By the name of an element that contains text, and of an attribute.
        self.elements: dict[str, _Text] = {}
        self.attributes: dict[str, _Text] = {}
        for element in self._root.iterchildren(f"{_XSD}element"):
            if (text := self._text_of(element)) is not None:
                self.elements[element.get("name", "")] = text
        for attribute in self._root.iter(f"{_XSD}attribute"):
            if attribute.get("name"):
                self.attributes[attribute.get("name", "")] = self._type(attribute.get("type", ""))

    def _text_of(self, element: etree._Element) -> _Text | None:
        """None for an element that contains elements."""
        name = element.get("type", "")
        if not name:  # it states its type itself
            restriction = element.find(f"{_XSD}simpleType/{_XSD}restriction")
            return None if restriction is None else self._type(restriction.get("base", ""))
        complex_types = self._named("complexType", name)
        if not complex_types:
            return self._type(name)
        bases = complex_types[0].findall(f"{_XSD}simpleContent/{_XSD}extension")
        return self._type(bases[0].get("base", "")) if bases else None

    def _named(self, kind: str, name: str) -> list[etree._Element]:
        return self._root.findall(f"{_XSD}{kind}[@name='{name.removeprefix('uddi:')}']")

    def _type(self, name: str) -> _Text:
        if name.startswith("xsd:"):
            return _Text(name != "xsd:string", False)
        (made,) = self._named("simpleType", name)
        restriction = made[0]
        base = self._type(restriction.get("base", ""))
        collapses = restriction.find(f"{_XSD}whiteSpace[@value='collapse']") is not None
        return _Text(base.collapses or collapses, base.folds or made.get(_FOLDS) == "fold")

    def check(self, element: xml.XmlElement) -> None:
        try:
            made = _to_lxml(element)
        except ValueError as error:  # a character that XML does not have
            raise InvalidUddi(f"{element.local} cannot be written as XML: {error}") from error
        if not self._check.validate(made):
            message = str(self._check.error_log[0].message)  # type: ignore[index]
            raise InvalidUddi(re.sub(r"\{[^}]*\}", "", message)[:500])


@functools.cache
def _schema() -> _Schema:
    return _Schema()


def validate(element: xml.XmlElement) -> xml.XmlElement:
    """Return the element in canonical form; `InvalidUddi` if it is not valid."""
    if element.namespace != UDDI:
        raise InvalidUddi(f"UDDI v3 has no element {element.name[:120]!r}")
    made = _canonical(element, _schema())
    _schema().check(made)
    return made


def _canonical(element: xml.XmlElement, known: _Schema) -> xml.XmlElement:
    if element.namespace != UDDI:
        return element
    attributes = {
        name: known.attributes[name].canonical(value) if name in known.attributes else value
        for name, value in element.attributes.items()
        if not name.startswith("{") or name == xml.LANG  # such as hints of schemas, which are ignored
    }
    text = known.elements.get(element.local)
    if text is not None and not element.children:
        made = text.canonical(element.exact_text)
        return xml.XmlElement(element.name, *([made] if made else []), attributes=attributes)
    content = [
        item if isinstance(item, str) else _canonical(item, known)
        for item in element.content
        if isinstance(item, xml.XmlElement) or (isinstance(item, str) and item.strip())
    ]
    return xml.XmlElement(element.name, *content, attributes=attributes)


def _to_lxml(element: xml.XmlElement) -> etree._Element:
    from lxml import etree

    made = etree.Element(element.name, dict(element.attributes))
    for item in element.content:
        if isinstance(item, xml.XmlElement):
            made.append(_to_lxml(item))
        elif len(made):
            made[-1].tail = f"{made[-1].tail or ''}{item}"
        else:
            made.text = f"{made.text or ''}{item}"
    return made


@functools.cache
def ports() -> dict[str, dict[str, str]]:
    """The operations of each API: request and response element ("": an empty body)."""
    from lxml import etree

    root = etree.parse(FOLDER / "uddi_api_v3_portType.wsdl").getroot()
    elements = {
        f"tns:{message.get('name')}": "".join(
            part.get("element", "").removeprefix("uddi:") for part in message.iterchildren(f"{_WSDL}part")
        )
        for message in root.iterchildren(f"{_WSDL}message")
    }
    return {
        port.get("name", "").split("_")[1]: {
            operation.get("name", ""): "".join(
                elements[output.get("message", "")] for output in operation.iterchildren(f"{_WSDL}output")
            )
            for operation in port.iterchildren(f"{_WSDL}operation")
        }
        for port in root.iterchildren(f"{_WSDL}portType")
    }
