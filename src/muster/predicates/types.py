"""The types of attributes, and the models that name them.

Notification, messaging, management and metadata all describe attributes with these five types, so that a
predicate has the same meaning everywhere. A value is a plain Python value: ``str``, ``int``, ``float``,
``bool``, a set of ``str``, or None for NULL. A NaN is a NULL as well.

The exact class decides, never ``isinstance``: a ``bool`` is not a number here, unlike in Python.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from muster.core import errors

Value = str | int | float | bool | AbstractSet[str] | None

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1


class ValueKind(enum.Enum):
    STRING = "string"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    SET = "set"

    @property
    def is_number(self) -> bool:
        return self is ValueKind.INT or self is ValueKind.FLOAT


_KIND_OF_CLASS: Final = {
    str: ValueKind.STRING,
    int: ValueKind.INT,
    float: ValueKind.FLOAT,
    bool: ValueKind.BOOL,
    set: ValueKind.SET,
    frozenset: ValueKind.SET,
}


def is_null(value: object) -> bool:
    return value is None or (value.__class__ is float and value != value)


def kind_of(value: object) -> ValueKind | None:
    """The kind of a value that is not NULL; None for something the language has no kind for."""
    return _KIND_OF_CLASS.get(value.__class__)


@dataclass(frozen=True, slots=True)
class AttributeType:
    """``domain`` lists the words that a set may contain; only sets have one."""

    kind: ValueKind
    domain: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"set{{{', '.join(self.domain)}}}" if self.kind is ValueKind.SET else self.kind.value

    def accepts(self, value: object) -> bool:
        """Whether an attribute of this type may have ``value``. NULL is always valid; an int widens to a
        float."""
        if is_null(value):
            return True
        kind = kind_of(value)
        if kind is ValueKind.SET:
            return self.kind is ValueKind.SET and value <= frozenset(self.domain)  # type: ignore[operator]
        if kind is ValueKind.INT:
            return self.kind is ValueKind.FLOAT or (
                self.kind is ValueKind.INT and INT_MIN <= value <= INT_MAX  # type: ignore[operator]
            )
        return kind is self.kind


STRING: Final = AttributeType(ValueKind.STRING)
INT: Final = AttributeType(ValueKind.INT)
FLOAT: Final = AttributeType(ValueKind.FLOAT)
BOOL: Final = AttributeType(ValueKind.BOOL)

# The names of attributes as predicates write them (`x`, `sender.x`), and their types.
Model = Mapping[str, AttributeType]

_SIMPLE: Final = {
    "string": STRING,
    "int": INT,
    "integer": INT,
    "long": INT,
    "float": FLOAT,
    "double": FLOAT,
    "bool": BOOL,
    "boolean": BOOL,
}
_WORD: Final = re.compile(r"(?!\s)[^,{}]+(?<!\s)")
_SET: Final = re.compile(r"(?:domained)?set\s*\{([^{}]*)\}", re.IGNORECASE)


def set_of(*domain: str) -> AttributeType:
    if not domain or len(set(domain)) != len(domain) or not all(map(_WORD.fullmatch, domain)):
        raise errors.InvalidInput(
            f"a set needs a domain of distinct words without commas or braces, not {domain!r}",
            hint="for example set{docs, cgi}",
        )
    return AttributeType(ValueKind.SET, domain)


def parse_type(text: str) -> AttributeType:
    """``string``, ``int``, ``float``, ``bool``, ``set{docs, cgi}``; also ``String``, ``DomainedSet{…}``."""
    word = text.strip()
    if simple := _SIMPLE.get(word.lower()):
        return simple
    if match := _SET.fullmatch(word):
        return set_of(*(part.strip() for part in match[1].split(",")))
    raise errors.InvalidInput(f"{text[:80]!r} is not a type: use string, int, float, bool or set{{word, …}}")
