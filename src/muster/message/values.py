"""Values with a Java type: the contents of properties, maps and streams, and the conversions between types.

Python has one ``int`` and one ``float``; JMS has six number types and defines which may be read as which
(sections 3.5.4 and 3.11.3). A `TypedValue` is a value with its type. Without an explicit type, an ``int`` is
a Java ``int`` if it fits, because that may also be read as ``long``, and otherwise a ``long``. A ``float`` is
a ``double``.
"""

from __future__ import annotations

import decimal
import enum
import math
import re
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Final, NamedTuple, Self, TypeAlias

from muster.core import errors
from muster.message import errors as message_errors

Value: TypeAlias = bool | int | float | str | bytes | None


class JavaType(enum.StrEnum):
    BOOLEAN = "z"
    BYTE = "b"
    SHORT = "s"
    INT = "i"
    LONG = "l"
    FLOAT = "f"
    DOUBLE = "d"
    STRING = "S"
    CHAR = "c"  # in maps and streams only
    BYTES = "B"  # in maps and streams only


class TypedValue(NamedTuple):
    kind: JavaType
    value: Value


_BITS: Final = {JavaType.BYTE: 8, JavaType.SHORT: 16, JavaType.INT: 32, JavaType.LONG: 64}
_WIDER: Final = {
    JavaType.BOOLEAN: {JavaType.BOOLEAN},
    JavaType.BYTE: {JavaType.BYTE, JavaType.SHORT, JavaType.INT, JavaType.LONG},
    JavaType.SHORT: {JavaType.SHORT, JavaType.INT, JavaType.LONG},
    JavaType.INT: {JavaType.INT, JavaType.LONG},
    JavaType.LONG: {JavaType.LONG},
    JavaType.FLOAT: {JavaType.FLOAT, JavaType.DOUBLE},
    JavaType.DOUBLE: {JavaType.DOUBLE},
    JavaType.STRING: set(JavaType) - {JavaType.CHAR, JavaType.BYTES},
    JavaType.CHAR: {JavaType.CHAR},
    JavaType.BYTES: {JavaType.BYTES},
}
# What `Long.parseLong` and `Double.parseDouble` of Java accept
_INTEGER: Final = re.compile(r"[+-]?(?:(?![\U00010000-\U0010ffff])\d)+")
_FLOATING: Final = re.compile(
    r"([+-]?(?:(?:NaN|Infinity)(?!.)|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))[fFdD]?"
    r"|([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
)
_BLANKS: Final = "".join(map(chr, range(33)))  # which `String.trim` of Java removes
_NAME: Final = re.compile(r"[^\W\d][\w$]*|\$[\w$]*")
_RESERVED: Final = {"null", "true", "false", "not", "and", "or", "between", "like", "in", "is", "escape"}
_SETTABLE_JMSX: Final = {"JMSXGroupID", "JMSXGroupSeq"}


def infer_type(value: Value) -> JavaType:
    """The type of a value without an explicit type. None is a null string."""
    match value:
        case bool():
            return JavaType.BOOLEAN
        case int():
            return JavaType.INT if -(2**31) <= value < 2**31 else JavaType.LONG
        case float():
            return JavaType.DOUBLE
        case bytes():
            return JavaType.BYTES
        case str() | None:
            return JavaType.STRING
        case _:
            raise message_errors.FormatError(f"a {type(value).__name__} is not a valid value in a message")


def typed(value: Value, kind: JavaType | None = None) -> TypedValue:
    """Convert ``value`` to ``kind``. Raises `FormatError` if it is not a valid value of that type."""
    if kind is None or value is None:
        kind = kind or JavaType.STRING if value is None else infer_type(value)
    if kind in _BITS:
        bits = _BITS[kind]
        if type(value) is not int or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise message_errors.FormatError(f"{value!r} is not a {kind.name.lower()} of {bits} bits")
    elif kind in (JavaType.FLOAT, JavaType.DOUBLE):
        if type(value) not in (int, float):
            raise message_errors.FormatError(f"{value!r} is not a {kind.name.lower()}")
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise message_errors.FormatError(f"an integer is too large for a {kind.name.lower()}") from None
        return TypedValue(kind, _single(number) if kind is JavaType.FLOAT else number)
    else:
        python_type = {JavaType.BOOLEAN: bool, JavaType.BYTES: bytes}.get(kind, str)
        if value is not None and type(value) is not python_type:
            raise message_errors.FormatError(f"{value!r} is not a {kind.name.lower()}")
        if kind is JavaType.CHAR and (value is None or len(value) != 1):  # type: ignore[arg-type]
            raise message_errors.FormatError(f"{value!r} is not one character")
    return TypedValue(kind, value)


def read(item: TypedValue | None, kind: JavaType) -> Value:
    """Read a value as another type, by the conversion table of the specification. A missing value is null."""
    if item is None or item.value is None:
        if kind in (JavaType.STRING, JavaType.BYTES):
            return None
        if kind is JavaType.BOOLEAN:
            return False  # like Boolean.valueOf(null)
        raise message_errors.FormatError(f"null cannot be read as {kind.name.lower()}")
    if kind is JavaType.STRING and item.kind is not JavaType.BYTES:
        return _text(item)
    if kind not in _WIDER[item.kind]:
        raise message_errors.FormatError(f"a {item.kind.name.lower()} cannot be read as {kind.name.lower()}")
    if item.kind is JavaType.STRING:
        return _parse(str(item.value), kind)
    return item.value


def _text(item: TypedValue) -> str:
    match item.value:
        case bool():
            return "true" if item.value else "false"
        case float():
            if math.isnan(item.value):
                return "NaN"
            if math.isinf(item.value):
                return "Infinity" if item.value > 0 else "-Infinity"
            return _decimal(item.value, single=item.kind is JavaType.FLOAT)
    return str(item.value)


def _decimal(number: float, *, single: bool) -> str:
    """Format a finite number as Java does: with the fewest digits that identify it."""
    text = repr(number)
    if single:
        rounded = (f"{number:.{digits}g}" for digits in range(1, 10))
        text = next((candidate for candidate in rounded if _single(float(candidate)) == number), text)
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        text = f"{decimal.Decimal(text):f}"
        return text if "." in text else f"{text}.0"
    sign, digits, _ = decimal.Decimal(text).normalize().as_tuple()
    first, *rest = map(str, digits)
    return f"{'-' * sign}{first}.{''.join(rest) or '0'}E{decimal.Decimal(text).adjusted()}"


def _single(number: float) -> float:
    """The nearest value of a Java ``float``."""
    try:
        nearest: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return nearest


def _parse(text: str, kind: JavaType) -> Value:
    if kind is JavaType.BOOLEAN:
        return text.lower() == "true"
    try:
        if kind in _BITS:
            if not _INTEGER.fullmatch(text):
                raise ValueError(text)
            return typed(int(text), kind).value
        match = _FLOATING.fullmatch(text.strip(_BLANKS))
        if match is None:
            raise ValueError(text)
        return typed(float.fromhex(match[2]) if match[2] else float(match[1]), kind).value
    except (ValueError, OverflowError, errors.InvalidInput):
        raise message_errors.FormatError(f"{text[:60]!r} cannot be read as {kind.name.lower()}") from None


class Values(MutableMapping[str, Value]):
    """Typed values by name. The mapping returns plain Python values. A ``frozen`` one is read-only."""

    __slots__ = ("frozen", "typed")

    def __init__(self, initial: Mapping[str, Value] | None = None) -> None:
        self.typed: dict[str, TypedValue] = {}
        self.frozen = False
        for name, value in (initial or {}).items():
            self.set(name, value)

    @classmethod
    def received(cls, typed: dict[str, TypedValue]) -> Self:
        made = cls.__new__(cls)
        made.typed = typed
        made.frozen = True
        return made

    def set(self, name: str, value: Value, kind: JavaType | None = None) -> None:
        self._check_writeable()
        self.check_name(name)
        self.typed[name] = typed(value, kind)

    def _check_writeable(self) -> None:
        if self.frozen:
            raise message_errors.NotWriteable("a received message is read-only: clear it first")

    def check_name(self, name: str) -> None:
        if not name:
            raise errors.InvalidInput("a name may not be empty")

    def get_as(self, name: str, kind: JavaType) -> Value:
        return read(self.typed.get(name), kind)

    def __getitem__(self, name: str) -> Value:
        return self.typed[name].value

    def __setitem__(self, name: str, value: Value) -> None:
        self.set(name, value)

    def __delitem__(self, name: str) -> None:
        self._check_writeable()
        del self.typed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.typed)

    def __len__(self) -> int:
        return len(self.typed)

    def __repr__(self) -> str:
        return repr({name: value for name, (_, value) in self.typed.items()})


class Properties(Values):
    """The properties of a message. Names are Java identifiers; values are not bytes."""

    __slots__ = ()

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.lower() in _RESERVED:
            raise errors.InvalidInput(f"{name[:60]!r} is not a valid property name: use an identifier")
        if name.startswith("JMSX") and name not in _SETTABLE_JMSX:
            raise errors.InvalidInput(f"{name[:60]!r} is set by the provider")

    def set(self, name: str, value: Value, kind: JavaType | None = None) -> None:
        if isinstance(value, bytes) or kind in (JavaType.BYTES, JavaType.CHAR):
            raise message_errors.FormatError("a property holds a boolean, a number or a string")
        super().set(name, value, kind)
