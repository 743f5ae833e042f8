"""The schema of UDDI v3: one table of elements, from which input validation and the WSDL
(`muster.gateways.uddi.model.wsdl`) are made.

A line is ``element = content ; attributes``.  Content is written as in a DTD (``,`` for a sequence, ``|`` for
a choice, ``? * +`` for the number) or is one simple type, marked with ``#``; an attribute with ``!`` is
required. Signatures are allowed where the standard allows them; they are stored unchanged and not verified.

`validate` returns an element in canonical form: white space collapsed where the standard requires it, keys in
lower case.  So equal values have equal texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import xsd_types

UDDI = xml.XmlNamespace("urn:uddi-org:api_v3")
SIGNATURE = xml.XmlNamespace("http://www.w3.org/2000/09/xmldsig#")
PREFIXES = {str(UDDI): "uddi"}


class InvalidUddi(errors.InvalidInput):
    """Invalid by the schema of UDDI."""

    code = "uddi-invalid"


@dataclass(frozen=True, slots=True)
class _Text:
    base: str
    shortest: int = 0
    longest: int = 1 << 20
    collapses: bool = True
    folds: bool = False


TEXTS = {
    "key": _Text("anyURI", 0, 255, folds=True),
    "uri": _Text("anyURI", 1, 4096),
    "string50": _Text("string", 1, 50),
    "string80": _Text("string", 1, 80),
    "string255": _Text("string", 1, 255),
    "string4096": _Text("string", 1, 4096),
    "string8192": _Text("string", 1, 8192, collapses=False),
    "word10": _Text("string", 0, 10),
    "word255": _Text("string", 0, 255),
    "author": _Text("string", 0, 255, collapses=False),
    "text": _Text("string", collapses=False),
}

ENUMERATIONS = {
    "completionStatus": (
        "status:complete",
        "status:fromKey_incomplete",
        "status:toKey_incomplete",
        "status:both_incomplete",
    ),
    "direction": ("fromKey", "toKey"),
    "infoSelection": ("all", "hidden", "visible"),
    "keyType": ("businessKey", "tModelKey", "serviceKey", "bindingKey", "subscriptionKey"),
}

ATTRIBUTES = {
    "bindingKey": "key",
    "businessKey": "key",
    "completionStatus": "completionStatus",
    "cred": "text",
    "deleted": "boolean",
    "direction": "direction",
    "entityKey": "key",
    "errCode": "text",
    "errno": "int",
    "infoSelection": "infoSelection",
    "keyName": "word255",
    "keyType": "keyType",
    "keyValue": "word255",
    "listHead": "int",
    "maxRows": "int",
    "serviceKey": "key",
    "sortCode": "word10",
    "tModelKey": "key",
    "truncated": "boolean",
    "useType": "word255",
    "userID": "text",
}

_ELEMENTS = """
accessPoint = #string4096 ; useType
actualCount = #int
address = addressLine+ ; lang useType sortCode tModelKey
addressLine = #string80 ; keyName keyValue
assertionStatusItem = fromKey, toKey, keyedReference, keysOwned ; completionStatus!
assertionStatusReport = assertionStatusItem*
authInfo = #text
authToken = authInfo
authorizedName = #author
bindingDetail = listDescription?, bindingTemplate* ; truncated
bindingKey = #key
bindingTemplate = description*, (accessPoint | hostingRedirector), tModelInstanceDetails?, categoryBag?, \
Signature* ; bindingKey serviceKey
bindingTemplates = bindingTemplate+
businessDetail = businessEntity* ; truncated
businessEntity = discoveryURLs?, name+, description*, contacts?, businessServices?, identifierBag?, \
categoryBag?, Signature* ; businessKey
businessInfo = name+, description*, serviceInfos? ; businessKey!
businessInfos = businessInfo+
businessKey = #key
businessList = listDescription?, businessInfos? ; truncated
businessService = name*, description*, bindingTemplates?, categoryBag?, Signature* ; serviceKey businessKey
businessServices = businessService+
categoryBag = (keyedReference+, keyedReferenceGroup*) | keyedReferenceGroup+
completionStatus = #completionStatus
contact = description*, personName+, phone*, email*, address* ; useType
contacts = contact+
created = #dateTime
description = #string255 ; lang
discoveryURL = #uri ; useType
discoveryURLs = discoveryURL+
dispositionReport = result+ ; truncated
email = #string255 ; useType
entityKey = #key
errInfo = #text ; errCode!
findQualifier = #string255
findQualifiers = findQualifier+
fromKey = #key
hostingRedirector = ; bindingKey!
identifierBag = keyedReference+
includeCount = #int
instanceDetails = description*, ((overviewDoc+, instanceParms?) | instanceParms)
instanceParms = #string8192
keyedReference = ; tModelKey! keyName keyValue!
keyedReferenceGroup = keyedReference* ; tModelKey!
keysOwned = (fromKey, toKey?) | toKey
listDescription = includeCount, actualCount, listHead
listHead = #int
modified = #dateTime
modifiedIncludingChildren = #dateTime
name = #string255 ; lang
nodeID = #key
operationalInfo = created?, modified?, modifiedIncludingChildren?, nodeID?, authorizedName? ; entityKey!
operationalInfos = operationalInfo* ; truncated
overviewDoc = (description+, overviewURL?) | overviewURL
overviewURL = #uri ; useType
personName = #string255 ; lang
phone = #string50 ; useType
publisherAssertion = fromKey, toKey, keyedReference, Signature*
publisherAssertions = publisherAssertion*
publisherAssertionsResponse = publisherAssertion*
registeredInfo = businessInfos?, tModelInfos? ; truncated
relatedBusinessInfo = businessKey, name+, description*, sharedRelationships, sharedRelationships?
relatedBusinessInfos = relatedBusinessInfo+
relatedBusinessesList = listDescription?, businessKey, relatedBusinessInfos? ; truncated
result = errInfo? ; keyType errno!
serviceDetail = businessService* ; truncated
serviceInfo = name* ; serviceKey! businessKey!
serviceInfos = serviceInfo+
serviceKey = #key
serviceList = listDescription?, serviceInfos? ; truncated
sharedRelationships = keyedReference+, publisherAssertion* ; direction!
tModel = name, description*, overviewDoc*, identifierBag?, categoryBag?, Signature* ; tModelKey deleted
tModelBag = tModelKey+
tModelDetail = tModel* ; truncated
tModelInfo = name, description* ; tModelKey!
tModelInfos = tModelInfo+
tModelInstanceDetails = tModelInstanceInfo+
tModelInstanceInfo = description*, instanceDetails? ; tModelKey!
tModelKey = #key
tModelList = listDescription?, tModelInfos? ; truncated
toKey = #key
add_publisherAssertions = authInfo?, publisherAssertion+
delete_binding = authInfo?, bindingKey+
delete_business = authInfo?, businessKey+
delete_publisherAssertions = authInfo?, publisherAssertion+
delete_service = authInfo?, serviceKey+
delete_tModel = authInfo?, tModelKey+
discard_authToken = authInfo
find_binding = authInfo?, findQualifiers?, tModelBag?, find_tModel?, categoryBag? ; \
maxRows serviceKey listHead
find_business = authInfo?, findQualifiers?, name*, identifierBag?, categoryBag?, tModelBag?, find_tModel?, \
discoveryURLs?, find_relatedBusinesses? ; maxRows listHead
find_relatedBusinesses = authInfo?, findQualifiers?, (businessKey | fromKey | toKey), keyedReference? ; \
maxRows listHead
find_service = authInfo?, findQualifiers?, name*, categoryBag?, tModelBag?, find_tModel? ; \
maxRows businessKey listHead
find_tModel = authInfo?, findQualifiers?, name?, identifierBag?, categoryBag? ; maxRows listHead
get_assertionStatusReport = authInfo?, completionStatus?
get_authToken = ; userID! cred!
get_bindingDetail = authInfo?, bindingKey+
get_businessDetail = authInfo?, businessKey+
get_operationalInfo = authInfo?, entityKey+
get_publisherAssertions = authInfo?
get_registeredInfo = authInfo? ; infoSelection!
get_serviceDetail = authInfo?, serviceKey+
get_tModelDetail = authInfo?, tModelKey+
save_binding = authInfo?, bindingTemplate+
save_business = authInfo?, businessEntity+
save_service = authInfo?, businessService+
save_tModel = authInfo?, tModel+
set_publisherAssertions = authInfo?, publisherAssertion*
"""

#: The operations of each API: request and response element ("": an empty body).
PORTS: dict[str, dict[str, str]] = {
    "Inquiry": {
        "find_binding": "bindingDetail",
        "find_business": "businessList",
        "find_relatedBusinesses": "relatedBusinessesList",
        "find_service": "serviceList",
        "find_tModel": "tModelList",
        "get_bindingDetail": "bindingDetail",
        "get_businessDetail": "businessDetail",
        "get_operationalInfo": "operationalInfos",
        "get_serviceDetail": "serviceDetail",
        "get_tModelDetail": "tModelDetail",
    },
    "Publication": {
        "add_publisherAssertions": "",
        "delete_binding": "",
        "delete_business": "",
        "delete_publisherAssertions": "",
        "delete_service": "",
        "delete_tModel": "",
        "get_assertionStatusReport": "assertionStatusReport",
        "get_publisherAssertions": "publisherAssertionsResponse",
        "get_registeredInfo": "registeredInfo",
        "save_binding": "bindingDetail",
        "save_business": "businessDetail",
        "save_service": "serviceDetail",
        "save_tModel": "tModelDetail",
        "set_publisherAssertions": "publisherAssertions",
    },
    "Security": {"discard_authToken": "", "get_authToken": "authToken"},
}

_LANGUAGE = re.compile(r"([A-Za-z]{1,8}(-[A-Za-z0-9]{1,8})*)?\Z")
_TOKEN = re.compile(r"\s*([A-Za-z_]+|[(),|?*+])")


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A node of a content model."""

    kind: str  # element, sequence, choice
    name: str = ""
    parts: tuple[SchemaPart, ...] = ()
    often: str = ""

    def pattern(self) -> str:
        """A regular expression over the names of children, each followed by a space."""
        if self.kind == "element":
            return f"(?:{self.name} ){self.often}"
        inner = ("|" if self.kind == "choice" else "").join(part.pattern() for part in self.parts)
        return f"(?:{inner}){self.often}"


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        self._place = 0

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def choice(self) -> SchemaPart:
        parts = [self._sequence()]
        while self._next() == "|":
            self._place += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else SchemaPart("choice", parts=tuple(parts))

    def _sequence(self) -> SchemaPart:
        parts = [self._item()]
        while self._next() == ",":
            self._place += 1
            parts.append(self._item())
        return parts[0] if len(parts) == 1 else SchemaPart("sequence", parts=tuple(parts))

    def _item(self) -> SchemaPart:
        token = self._next()
        self._place += 1
        if token == "(":
            inner = self.choice()
            self._place += 1  # the closing parenthesis
        else:
            inner = SchemaPart("element", token)
        often = self._next()
        if often and often in "?*+":
            self._place += 1
            return SchemaPart(inner.kind, inner.name, inner.parts, often)
        return inner


@dataclass(frozen=True, slots=True)
class ElementDeclaration:
    name: str
    simple: str = ""  # its type, if it contains no elements
    content: SchemaPart | None = None
    pattern: re.Pattern[str] = re.compile("")
    attributes: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()


def _declared() -> Iterator[ElementDeclaration]:
    for line in _ELEMENTS.strip().splitlines():
        name, _, rest = line.partition(" =")
        inside, _, after = rest.partition(";")
        inside = inside.strip()
        words = after.split()
        attributes = tuple(word.rstrip("!") for word in words)
        required = frozenset(word[:-1] for word in words if word.endswith("!"))
        if inside.startswith("#"):
            yield ElementDeclaration(name, simple=inside[1:], attributes=attributes, required=required)
        elif inside:
            part = _Reader(inside).choice()
            yield ElementDeclaration(name, "", part, re.compile(part.pattern()), attributes, required)
        else:
            yield ElementDeclaration(name, attributes=attributes, required=required)


BY_NAME = {declaration.name: declaration for declaration in _declared()}


def validate(element: xml.XmlElement) -> xml.XmlElement:
    """Return the element in canonical form; `InvalidUddi` if it is not valid."""
    declared = BY_NAME.get(element.local) if element.namespace == UDDI else None
    if declared is None:
        raise InvalidUddi(f"UDDI v3 has no element {element.name[:120]!r}")
    attributes = {name: value for name, value in element.attributes.items() if not _foreign(name)}
    _check_attributes(declared, attributes)
    made = {
        name: value if name == xml.LANG else _value(ATTRIBUTES[name], value, f"{name} of {element.local}")
        for name, value in attributes.items()
    }
    if declared.simple:
        if element.children:
            raise InvalidUddi(f"{element.local} must contain text, not elements")
        text = _value(declared.simple, element.exact_text, element.local)
        return xml.XmlElement(element.name, *([text] if text else []), attributes=made)
    if element.text:
        raise InvalidUddi(f"{element.local} must contain elements, not text: {element.text[:60]!r}")
    children = element.children
    names = "".join(f"{'Signature' if child.namespace == SIGNATURE else child.local} " for child in children)
    if not declared.pattern.fullmatch(names):
        raise InvalidUddi(
            f"{element.local} cannot contain {names.strip()[:200] or 'nothing'!r} in this order or number"
        )
    inner = [child if child.namespace == SIGNATURE else validate(child) for child in children]
    return xml.XmlElement(element.name, *inner, attributes=made)


def _foreign(name: str) -> bool:
    """Whether an attribute belongs to another namespace (such as schema hints) and is ignored."""
    return name.startswith("{") and name != xml.LANG


def _check_attributes(declared: ElementDeclaration, attributes: dict[str, str]) -> None:
    for name, value in attributes.items():
        if (name if name != xml.LANG else "lang") not in declared.attributes:
            raise InvalidUddi(f"{declared.name} has no attribute {name[:60]!r}")
        if name == xml.LANG and not _LANGUAGE.match(value):
            raise InvalidUddi(f"xml:lang is {value[:60]!r}: expected a tag such as en or de-CH")
    for name in sorted(declared.required - set(attributes)):
        raise InvalidUddi(f"{declared.name} needs the attribute {name}")


def _value(kind: str, value: str, where: str) -> str:
    if kind in ENUMERATIONS:
        word = value.strip()
        if word not in ENUMERATIONS[kind]:
            raise InvalidUddi(f"{where} is {word[:60]!r}: expected one of {', '.join(ENUMERATIONS[kind])}")
        return word
    if kind in ("int", "boolean"):
        word = value.strip()
        try:
            if kind == "int":
                return str(xsd_types.parse_integer(word, minimum=-(2**31), maximum=2**31 - 1))
            return "true" if xsd_types.parse_boolean(word) else "false"
        except errors.InvalidInput as error:
            raise InvalidUddi(f"{where}: {error.message}") from error
    text = TEXTS.get(kind, TEXTS["text"])
    made = " ".join(value.split()) if text.collapses else value
    if not text.shortest <= len(made) <= text.longest:
        raise InvalidUddi(f"{where} has {len(made)} characters: expected {text.shortest} to {text.longest}")
    return made.lower() if text.folds else made
