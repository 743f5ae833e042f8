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

_ENTITY_KEYS = "uddi:uddi.org:categorization:entitykeyvalues"
_API = ("specification", "xmlSpec", "soapSpec", "wsdlSpec")
_CHECKED = ("categorization", "checked")
_OF_KEYS = (*_CHECKED, "uncacheable")

#: By the part of the key after ``uddi:uddi.org:``: name, description, and the types in its category bag. A
#: type with a colon is the kind of entity whose keys are the values.
_STANDARD: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "keygenerator": ("keyGenerator", "Root key generator", ("keyGenerator",)),
    **{
        f"{space}:keygenerator": (f"{space}:keyGenerator", f"Key generator of {space}", ("keyGenerator",))
        for space in ("categorization", "identifier", "findqualifier", "sortorder", "transport", "protocol")
    },
    "categorization:types": ("types", "UDDI type category system", (*_CHECKED, "cacheable")),
    "categorization:general_keywords": (
        "general_keywords",
        "Category system of name and value pairs",
        _CHECKED,
    ),
    "categorization:nodes": ("nodes", "Category system of UDDI nodes", _OF_KEYS),
    "categorization:entitykeyvalues": ("entityKeyValues", "Category system of keys as values", _CHECKED),
    "categorization:owningbusiness": (
        *("owningBusiness_v3", "The business that owns a tModel"),
        (*_OF_KEYS, ":businessKey"),
    ),
    "categorization:validatedby": (
        *("validatedBy", "The Web service that validates a value set"),
        (*_OF_KEYS, ":bindingKey"),
    ),
    "categorization:derivedfrom": (
        *("derivedFrom", "The tModel from which this one is derived"),
        (*_OF_KEYS, ":tModelKey"),
    ),
    "identifier:isreplacedby": (
        *("isReplacedBy", "The entity that replaces this one"),
        ("identifier", "checked", "uncacheable", ":businessKey", ":tModelKey"),
    ),
    "relationships": ("relationships", "How businesses are related", ("relationship", "unchecked")),
    **{
        f"transport:{name}": (name, description, ("transport",))
        for name, description in (
            ("http", "HTTP"),
            ("smtp", "Electronic mail"),
            ("ftp", "File transfer"),
            ("fax", "Fax"),
            ("telephone", "Telephone"),
        )
    },
    "protocol:soap": ("soap", "SOAP", ("protocol",)),
    "protocol:serverauthenticatedssl3": (
        *("serverAuthenticatedSSL3", "SSL 3.0 with authentication of the server"),
        ("protocol",),
    ),
    "protocol:mutualauthenticatedssl3": ("mutualAuthenticatedSSL3", "SSL 3.0 of both sides", ("protocol",)),
    "specification:hostingredirector": (
        *("hostingRedirector", "A binding that names another one"),
        ("specification",),
    ),
    "specification:v3_policy": ("v3_policy", "Policies of a registry", ("specification", "xmlSpec")),
    **{
        f"v3_{key}": (f"{name}_v3", f"UDDI v3 {text} API", _API)
        for key, name, text in (
            ("inquiry", "inquiry", "Inquiry"),
            ("publication", "publication", "Publication"),
            ("security", "security", "Security"),
            ("ownership_transfer", "ownership_transfer", "Custody and Ownership Transfer"),
            ("replication", "replication", "Replication"),
            ("subscription", "subscription", "Subscription"),
            ("subscriptionlistener", "subscriptionListener", "Subscription Listener"),
            ("valuesetcaching", "valueSetCaching", "Value Set Data"),
            ("valuesetvalidation", "valueSetValidation", "Value Set Validation"),
        )
    },
    **{
        key.removeprefix("uddi:uddi.org:"): (
            *(name, f"Find qualifier {name}"),
            ("findQualifier", *(("sortOrder",) if ":sortorder:" in key else ())),
        )
        for key, name in find_qualifiers.BY_KEY.items()
    },
}

#: By key. Not every registry knows them.
_OWN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "uddi:muster:keygenerator": ("muster:keyGenerator", "Key generator of Muster", ("keyGenerator",)),
    matcher.BOX: ("muster:boundingBox", "A bounding box in degrees", ("categorizationGroup",)),
    matcher.LEASE: ("muster:lease", "The lease of an entry", ("categorization", "unchecked")),
}


def _element(key: str, name: str, description: str, types: tuple[str, ...]) -> xml.XmlElement:
    references = [
        xml.XmlElement(
            U("keyedReference"),
            attributes=(
                {"tModelKey": _ENTITY_KEYS, "keyName": "entityKeyValues", "keyValue": type_name[1:]}
                if type_name.startswith(":")
                else {"tModelKey": TYPES, "keyName": f"uddi-org:types:{type_name}", "keyValue": type_name}
            ),
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


MODELS = {
    f"uddi:uddi.org:{key}": _element(f"uddi:uddi.org:{key}", f"uddi-org:{name}", description, types)
    for key, (name, description, types) in _STANDARD.items()
} | {key: _element(key, *stated) for key, stated in _OWN.items()}
assert all(keys.is_reserved(key) for key in MODELS)
