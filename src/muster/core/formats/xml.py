"""XML: a small tree type, read with limits and written with fixed prefixes.

Input is UTF-8 without a document type or processing instructions (SOAP allows neither), and therefore without
custom or external entities. Depth and the numbers of elements and attributes are limited during parsing, not
afterwards. The parser is Python's expat and receives the complete document at once, so its time grows with
the size only, and the size is limited too.

Names are in Clark notation, ``{namespace}local``. A text that is a qualified name (the subcode of a fault)
depends on the prefixes around it: it is written from a `QName` and read with `XmlElement.qname`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from xml.parsers import expat

from muster.core import errors

XML = "http://www.w3.org/XML/1998/namespace"
XSI = "http://www.w3.org/2001/XMLSchema-instance"
LANG = f"{{{XML}}}lang"
NIL = f"{{{XSI}}}nil"

_SPACE = " \t\r\n"
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_TEXT = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"}
_ATTRIBUTE = {**_TEXT, '"': "&quot;", "\t": "&#9;", "\n": "&#10;"}
_IN_TEXT = re.compile("[&<>\r]")
_IN_ATTRIBUTE = re.compile('[&<>"\t\n\r]')
_ELEMENT_BYTES_MIN = len("<a/>")
NCNAME = re.compile(r"[^\W\d][\w.\-]*\Z")


class MalformedXml(errors.InvalidInput):
    """Not XML, or with a document type or processing instructions. ``reason`` is a label for a counter."""

    code = "malformed-xml"

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class XmlLimits:
    bytes: int = 1 << 20
    depth: int = 64
    elements: int = 50_000
    attributes: int = 64  # per element
    prefixes: int = 256  # in scope at one place


class XmlNamespace(str):
    """``WSA = Namespace("…/addressing")``, then ``WSA("To")`` is the name of an element."""

    __slots__ = ()

    def __call__(self, local: str) -> str:
        return f"{{{self}}}{local}"


@dataclass(frozen=True, slots=True)
class QName:
    """A qualified name as content."""

    name: str


class Declared(Mapping[str, str]):
    """The prefixes in scope at an element: those that it declares, and those of the elements around it.

    A link to the outer ones and not a copy: a message may declare a prefix at each of its elements.
    """

    __slots__ = ("outer", "own", "size")

    def __init__(self, own: Mapping[str, str], outer: Declared | None = None) -> None:
        self.own = own
        self.outer = outer
        self.size: int = len(own) + (outer.size if outer is not None else 0)

    def __getitem__(self, prefix: str) -> str:
        scope: Declared | None = self
        while scope is not None:
            if prefix in scope.own:
                return scope.own[prefix]
            scope = scope.outer
        raise KeyError(prefix)

    def __iter__(self) -> Iterator[str]:
        seen: dict[str, None] = {}
        scope: Declared | None = self
        while scope is not None:
            seen |= dict.fromkeys(scope.own)
            scope = scope.outer
        return iter(seen)

    def __len__(self) -> int:
        return sum(1 for _ in self)


Content: TypeAlias = "str | QName | XmlElement"


class XmlElement:
    """``content`` is texts and elements in their order; ``namespaces`` those in scope where it was read."""

    __slots__ = ("attributes", "content", "name", "namespaces")

    def __init__(
        self,
        name: str,
        *content: Content | None,
        attributes: Mapping[str, str] | None = None,
        namespaces: Mapping[str, str] | None = None,
    ) -> None:
        """A None among the ``content`` is left out."""
        self.name = name
        self.content: Sequence[Content] = [item for item in content if item is not None]
        self.attributes: Mapping[str, str] = attributes or {}
        self.namespaces = namespaces

    @property
    def local(self) -> str:
        return self.name.rpartition("}")[2]

    @property
    def namespace(self) -> str:
        return self.name.rpartition("}")[0][1:]

    @property
    def exact_text(self) -> str:
        return "".join(item for item in self.content if isinstance(item, str))

    @property
    def text(self) -> str:
        """Without the white space around it: writers put URIs and numbers on lines of their own."""
        return self.exact_text.strip(_SPACE)

    @property
    def children(self) -> list[XmlElement]:
        return [item for item in self.content if isinstance(item, XmlElement)]

    def get(self, attribute: str, default: str | None = None) -> str | None:
        return self.attributes.get(attribute, default)

    def find(self, name: str) -> XmlElement | None:
        return next((child for child in self.children if child.name == name), None)

    def all(self, name: str) -> list[XmlElement]:
        return [child for child in self.children if child.name == name]

    def text_of(self, name: str, default: str = "") -> str:
        """The text of the first child with that name."""
        child = self.find(name)
        return default if child is None else child.text

    def walk(self) -> Iterator[XmlElement]:
        """This one and all in it, in the order of the document."""
        yield self
        for child in self.children:
            yield from child.walk()

    def qname(self) -> str | None:
        """The qualified name in the text of the element, in Clark notation; None if its prefix is not
        declared."""
        prefix, colon, local = self.text.rpartition(":")
        scope = self.namespaces or {}
        if not colon:
            return f"{{{scope['']}}}{local}" if scope.get("") else local
        return f"{{{scope[prefix]}}}{local}" if prefix in scope else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, XmlElement):
            return NotImplemented
        return (self.name, dict(self.attributes), list(self.content)) == (
            other.name,
            dict(other.attributes),
            list(other.content),
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return write(self).decode()


def parse(data: bytes, limits: XmlLimits | None = None) -> XmlElement:
    """The root. `errors.LimitExceeded` where a bound is passed, else `MalformedXml`."""
    limits = limits or XmlLimits()
    if len(data) > limits.bytes:
        raise errors.LimitExceeded(f"{len(data)} bytes of XML are over {limits.bytes}")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise MalformedXml("the XML is not UTF-8", reason="charset") from error
    builder = _Builder(limits)
    try:
        builder.parser.Parse(data, True)
    except expat.ExpatError as error:
        raise MalformedXml(f"not XML: {error}") from error
    assert builder.root is not None
    return builder.root


def text_at_start(data: bytes, name: str, *, depth: int = 8, elements: int = 64) -> str | None:
    """The text of the first element with that name, if ``data``, the start of a document, contains all of it.

    It reads a limited number of elements: for values that are needed before the rest is read.
    """
    builder = _Builder(XmlLimits(bytes=len(data), depth=depth, elements=elements))
    ended: list[str] = []

    def end(tag: str) -> None:
        element = builder.close(tag)
        if element.name == name:
            ended.append(element.text)
            raise _Found

    builder.parser.EndElementHandler = end
    with contextlib.suppress(_Found, expat.ExpatError, errors.MusterError):
        builder.parser.Parse(data, False)
    return ended[0] if ended else None


class _Found(Exception):
    pass


class _Builder:
    def __init__(self, limits: XmlLimits) -> None:
        # This encoding overrides the declaration of the document.
        self.parser = expat.ParserCreate("utf-8", "}")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self.close
        self.parser.CharacterDataHandler = self._text
        self.parser.StartNamespaceDeclHandler = self._declare
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.ProcessingInstructionHandler = self._instruction
        self.root: XmlElement | None = None
        self._limits = limits
        self._open: list[tuple[XmlElement, list[Content]]] = []
        self._scopes: list[Declared | None] = [None]
        self._elements = 0
        self._declared: dict[str, str] = {}

    def _declare(self, prefix: str | None, uri: str | None) -> None:
        self._declared[prefix or ""] = uri or ""

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > self._limits.elements:
            raise errors.LimitExceeded(f"more than {self._limits.elements} elements")
        if len(self._open) >= self._limits.depth:
            raise errors.LimitExceeded(f"elements nested deeper than {self._limits.depth}")
        if len(attributes) + len(self._declared) > self._limits.attributes:
            raise errors.LimitExceeded(f"an element with more than {self._limits.attributes} attributes")
        scope = self._scopes[-1]
        if self._declared:
            scope, self._declared = Declared(self._declared, scope), {}
            if scope.size > self._limits.prefixes:
                raise errors.LimitExceeded(f"more than {self._limits.prefixes} prefixes in scope")
        self._scopes.append(scope)
        content: list[Content] = []
        element = XmlElement(
            _clark(tag),
            attributes={_clark(name): value for name, value in attributes.items()},
            namespaces=scope,
        )
        element.content = content
        if self._open:
            self._open[-1][1].append(element)
        else:
            self.root = element
        self._open.append((element, content))

    def close(self, _: str) -> XmlElement:
        self._scopes.pop()
        return self._open.pop()[0]

    def _text(self, text: str) -> None:
        content = self._open[-1][1]
        if content and isinstance(content[-1], str):  # a comment separated them
            content[-1] += text
        else:
            content.append(text)

    def _doctype(self, *_: Any) -> None:
        raise MalformedXml("a document type, which is not accepted", reason="doctype")

    def _instruction(self, target: str, _: str) -> None:
        raise MalformedXml(
            f"a processing instruction ({target[:40]!r}), which is not accepted",
            reason="processing-instruction",
        )


def can_hold(text: str) -> bool:
    """Whether ``text`` can be written and read back unchanged."""
    return _NO_XML.search(text) is None


def _clark(name: str) -> str:
    return f"{{{name}" if "}" in name else name


class _Output:
    """The pieces of a document, and a bound on their length."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._pieces: list[str] = []
        self._size = 0

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        self._check(self._size)

    def bytes(self) -> bytes:
        data = "".join(self._pieces).encode()
        self._check(len(data))
        return data

    def _check(self, size: int) -> None:
        if self._bytes_max is not None and size > self._bytes_max:
            raise errors.LimitExceeded(f"the XML is longer than {self._bytes_max} bytes")


def write(
    element: XmlElement, prefixes: Mapping[str, str] | None = None, *, bytes_max: int | None = None
) -> bytes:
    """``prefixes`` are those to use, by namespace; the ones that are needed are declared at the root.

    Characters that XML cannot represent become U+FFFD: an error reason with such characters must not make a
    response unreadable. Parsed elements retain all prefixes of their document. `errors.LimitExceeded` as soon
    as there are more than ``bytes_max``.
    """
    preferred = dict(prefixes or {})
    used: set[str] = set()
    for count, descendant in enumerate(element.walk(), 1):  # one may be in several places
        if bytes_max is not None and count * _ELEMENT_BYTES_MIN > bytes_max:
            raise errors.LimitExceeded(f"the XML is longer than {bytes_max} bytes")
        used.update(_namespaces(descendant))
    root = {preferred[uri]: uri for uri in preferred if uri in used}
    out = _Output(bytes_max)
    _write(element, _Scope({"xml": XML}), root, preferred, None, out)
    return out.bytes()


def _namespaces(element: XmlElement) -> Iterator[str]:
    yield element.namespace
    for name in element.attributes:
        yield name.rpartition("}")[0][1:]
    for item in element.content:
        if isinstance(item, QName):
            yield item.name.rpartition("}")[0][1:]


class _Scope:
    """The prefixes that are declared at a position, and how names are written there."""

    __slots__ = ("bound", "spelt")

    def __init__(self, bound: Mapping[str, str]) -> None:
        self.bound = dict(bound)
        self.spelt: dict[tuple[str, bool], str] = {}

    def spell(self, name: str, *, bare: bool) -> str | None:
        """None where a declaration is missing. ``bare``: whether the default namespace may serve."""
        known = self.spelt.get((name, bare))
        if known is None:
            uri, _, local = name.rpartition("}")
            uri = uri[1:]
            if not uri:
                known = None if bare and self.bound.get("") else local
            else:
                fitting = (prefix for prefix, held in self.bound.items() if held == uri and (prefix or bare))
                prefix = next(fitting, None)
                if prefix is not None:
                    known = f"{prefix}:{local}" if prefix else local
            if known is not None:
                self.spelt[name, bare] = known
        return known


def _newly_declared(element: XmlElement, around: Mapping[str, str] | None) -> Mapping[str, str]:
    """The prefixes of ``element`` that are not those of the element ``around`` it, which are written."""
    there = element.namespaces
    if not there or there is around:
        return {}
    return there.own if isinstance(there, Declared) and there.outer is around else there


def _write(
    element: XmlElement,
    scope: _Scope,
    declare: Mapping[str, str],
    preferred: Mapping[str, str],
    around: Mapping[str, str] | None,
    out: _Output,
) -> None:
    new: dict[str, str] = {}
    read = _newly_declared(element, around)
    if declare or read:
        known = {"": "", **scope.bound}
        new = {prefix: uri for prefix, uri in {**declare, **read}.items() if known.get(prefix) != uri}
        if new:
            scope = _Scope({**scope.bound, **new})

    def spell(name: str, bare: bool) -> str:
        nonlocal scope
        known = scope.spell(name, bare=bare)
        if known is None:
            prefix, uri = _declaration(name, scope.bound, preferred)
            new[prefix] = uri
            scope = _Scope({**scope.bound, prefix: uri})
            known = scope.spell(name, bare=bare)
            assert known is not None
        return known

    tag = spell(element.name, True)
    attributes = [(spell(name, False), value) for name, value in element.attributes.items()]
    content = [spell(item.name, True) if isinstance(item, QName) else item for item in element.content]
    attributes += [(f"xmlns:{prefix}" if prefix else "xmlns", uri) for prefix, uri in new.items()]
    out.add(f"<{tag}")
    for name, value in attributes:
        out.add(f' {name}="{_escape(value, _IN_ATTRIBUTE, _ATTRIBUTE)}"')
    if not content:
        out.add("/>")
        return
    out.add(">")
    for item in content:
        if isinstance(item, XmlElement):
            _write(item, scope, {}, preferred, element.namespaces, out)
        else:
            out.add(_escape(item, _IN_TEXT, _TEXT))
    out.add(f"</{tag}>")


def _declaration(name: str, bound: Mapping[str, str], preferred: Mapping[str, str]) -> tuple[str, str]:
    """A prefix and its namespace, so that ``name`` can be spelt."""
    uri = name.rpartition("}")[0][1:]
    if not uri:
        return "", ""  # the default namespace ends here
    prefix, number = preferred.get(uri, ""), 0
    while not prefix or prefix in bound:
        number += 1
        prefix = f"ns{number}"
    return prefix, uri


def _escape(text: str, special: re.Pattern[str], escapes: Mapping[str, str]) -> str:
    return special.sub(lambda match: escapes[match[0]], _NO_XML.sub("\ufffd", text))
