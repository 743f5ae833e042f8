"""The tModels that every UDDI v3 registry has, and those of Muster. They exist from the first start.

They are not stored, so no publisher can own, change or hide them, and a start writes nothing.  Keys of their
spaces (`keys.RESERVED`) are not given to publishers.

Pure.
"""

from __future__ import annotations

from muster.core.formats import xml
from muster.gateways.uddi.model import find_qualifiers, keys, matcher, schema

U = schema.UDDI
TYPES = "uddi:uddi.org:categorization:types"

#: By key: name, description, and the types in its category bag.
_MODELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "uddi:uddi.org:keygenerator": ("uddi-org:keyGenerator", "Root key generator", ("keyGenerator",)),
    TYPES: ("uddi-org:types", "UDDI type category system", ("categorization", "checked")),
    matcher.KEYWORDS: (
        "uddi-org:general_keywords",
        "Category system of name and value pairs",
        ("categorization", "unchecked"),
    ),
    "uddi:uddi.org:categorization:nodes": (
        "uddi-org:nodes",
        "Category system of UDDI nodes",
        ("categorization", "checked"),
    ),
    "uddi:uddi.org:categorization:entitykeyvalues": (
        "uddi-org:entityKeyValues",
        "Category system of keys as values",
        ("categorization", "checked"),
    ),
    "uddi:uddi.org:categorization:owningbusiness": (
        "uddi-org:owningBusiness",
        "The business that owns a tModel",
        ("categorization", "checked"),
    ),
    "uddi:uddi.org:identifier:isreplacedby": (
        "uddi-org:isReplacedBy",
        "The entity that replaces this one",
        ("identifier", "checked"),
    ),
    "uddi:uddi.org:relationships": (
        "uddi-org:relationships",
        "How businesses are related",
        ("relationship", "checked"),
    ),
    "uddi:uddi.org:transport:http": ("uddi-org:http", "HTTP", ("transport",)),
    "uddi:uddi.org:transport:smtp": ("uddi-org:smtp", "Electronic mail", ("transport",)),
    "uddi:uddi.org:transport:ftp": ("uddi-org:ftp", "File transfer", ("transport",)),
    "uddi:uddi.org:transport:fax": ("uddi-org:fax", "Fax", ("transport",)),
    "uddi:uddi.org:transport:telephone": ("uddi-org:telephone", "Telephone", ("transport",)),
    "uddi:uddi.org:protocol:soap": ("uddi-org:soap", "SOAP", ("protocol",)),
    "uddi:uddi.org:v3_inquiry": ("uddi-org:inquiry_v3", "UDDI v3 Inquiry API", ("specification", "soapSpec")),
    "uddi:uddi.org:v3_publication": (
        "uddi-org:publication_v3",
        "UDDI v3 Publication API",
        ("specification", "soapSpec"),
    ),
    "uddi:uddi.org:v3_security": (
        "uddi-org:security_v3",
        "UDDI v3 Security API",
        ("specification", "soapSpec"),
    ),
    "uddi:muster:keygenerator": ("muster:keyGenerator", "Key generator of Muster", ("keyGenerator",)),
    matcher.BOX: ("muster:boundingBox", "A bounding box in degrees", ("categorizationGroup",)),
    matcher.LEASE: ("muster:lease", "The lease of an entry", ("categorization", "unchecked")),
}


def _element(key: str, name: str, description: str, types: tuple[str, ...]) -> xml.XmlElement:
    references = [
        xml.XmlElement(
            U("keyedReference"), attributes={"tModelKey": TYPES, "keyName": type_name, "keyValue": type_name}
        )
        for type_name in types
    ]
    return xml.XmlElement(
        U("tModel"),
        xml.XmlElement(U("name"), name),
        xml.XmlElement(U("description"), description, attributes={xml.LANG: "en"}),
        xml.XmlElement(U("categoryBag"), *references),
        attributes={"tModelKey": key},
    )


MODELS = {key: _element(key, *stated) for key, stated in _MODELS.items()} | {
    key: _element(key, f"uddi-org:{name}", f"Find qualifier {name}", ("findQualifier",))
    for key, name in find_qualifiers.by_key().items()
}
assert all(keys.is_reserved(key) for key in MODELS)
