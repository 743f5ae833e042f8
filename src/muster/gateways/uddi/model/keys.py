"""UDDI keys: their form, and which publisher may propose them.

A key is ``uddi:`` and a domain or a UUID, optionally with more parts.  An entity that is saved without a key
gets a new one.  To propose a key such as ``uddi:example.org:printers``, a publisher must own the key
generator of the key space, the tModel ``uddi:example.org:keygenerator``.  The first publisher that saves the
generator of a domain owns it; the generator of a space inside another space needs the generator of the outer
one.  The spaces of the standard and of this registry are reserved.

Pure.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from muster.gateways.uddi.model import faults

GENERATOR = "keygenerator"
RESERVED = frozenset({"uddi.org", "muster"})  # spaces of the standard and of this registry
LENGTH_MAX = 255
_LABEL = r"[a-z0-9]([a-z0-9\-]*[a-z0-9])?"
_KEY = re.compile(rf"uddi:{_LABEL}(\.{_LABEL})*(:[a-z0-9_.,;!~*'()+\-$@=%/]+)*\Z")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")


def new_key() -> str:
    return f"uddi:{uuid.uuid4()}"


def check(key: str, kind: str) -> str:
    if len(key) > LENGTH_MAX or not _KEY.match(key):
        raise faults.fault(
            faults.UddiErrorCode.INVALID_KEY_PASSED,
            f"{key[:80]!r} is not a valid key: expected a form like uddi:example.org:printers",
            key_type=kind,
        )
    if is_generator(key) and kind != "tModelKey":
        raise faults.fault(
            faults.UddiErrorCode.INVALID_KEY_PASSED, f"{key} is the key of a key generator", key_type=kind
        )
    return key


def is_reserved(key: str) -> bool:
    return key.split(":")[1:2] != [] and key.split(":")[1] in RESERVED


def is_generator(key: str) -> bool:
    return key.endswith(f":{GENERATOR}")


def generator_of(key: str) -> str | None:
    """The generator whose owner may propose ``key``; None if there is none.

    For ``uddi:example.org:a:b`` it is ``uddi:example.org:a:keygenerator`` or an outer one: the nearest
    existing generator decides, so `may_propose` tries all of them.
    """
    parts = key.split(":")
    if is_generator(key):
        parts = parts[:-1]
    return ":".join((*parts[:-1], GENERATOR)) if len(parts) > 2 else None


def may_propose(key: str, publisher: str, owner_of: Callable[[str], str | None]) -> bool:
    """``owner_of`` returns the owner of a generator; None if it does not exist."""
    if is_reserved(key):
        return False
    if is_generator(key) and key.count(":") == 2:
        return not _UUID.match(key.split(":")[1])  # the generator of a domain: the first publisher owns it
    generator = generator_of(key)
    while generator is not None:
        owner = owner_of(generator)
        if owner is not None:
            return owner == publisher
        generator = generator_of(generator.rpartition(":")[0])
    return False
