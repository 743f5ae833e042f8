"""The one tree of the language: immutable, hashable nodes.

Two sorts: an *expression* has a value (`Literal`, `Name`, `Unary`, `Arithmetic`), a *condition* has a truth
(everything else).  The leaves of conditions are called **clauses**; `Not`, `And` and `Or` join them.

The tree is smaller than the grammar, because the parser writes some forms as others.  Each is exact under
three-valued logic, unlike types included:

    x BETWEEN a AND b       x >= a AND x <= b
    x NOT BETWEEN a AND b   x < a OR x > b
    x NOT IN (…)            NOT x IN (…)        likewise NOT LIKE, IS NOT NULL, NOT CONTAINS
    alert                   alert = TRUE

``span`` is the position of a node in the parsed text. It is not part of equality.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.core import errors
from muster.predicates import types

Span = tuple[int, int]
NOWHERE: Span = (0, 0)

ComparisonOperator = typing.Literal["=", "<>", "<", "<=", ">", ">="]
ArithmeticOperator = typing.Literal["+", "-", "*", "/"]

# x op y is the same as y MIRRORED[op] x; where x op y is false, and neither is NULL nor are the types
# unlike, x OPPOSITE[op] y is true.
MIRRORED: dict[ComparisonOperator, ComparisonOperator] = {
    "=": "=",
    "<>": "<>",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
}
OPPOSITE: dict[ComparisonOperator, ComparisonOperator] = {
    "=": "<>",
    "<>": "=",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
}


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant that can be written: no integer beyond 64 bits, no infinity, no NaN.

    ``kind`` is part of equality because in Python 1, 1.0 and True are equal.
    """

    value: str | int | float | bool
    span: Span = field(default=NOWHERE, compare=False, repr=False)
    kind: types.ValueKind = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind = types.kind_of(self.value)
        if (
            kind is None
            or kind is types.ValueKind.SET
            or (kind is types.ValueKind.FLOAT and not math.isfinite(self.value))  # type: ignore[arg-type]
            or (kind is types.ValueKind.INT and not types.INT.accepts(self.value))
        ):
            raise errors.InvalidInput(f"{self.value!r} cannot be written as a literal")
        object.__setattr__(self, "kind", kind)


@dataclass(frozen=True, slots=True)
class Name:
    """An attribute. ``scope`` is empty for a bare name."""

    name: str
    scope: str = ""
    span: Span = field(default=NOWHERE, compare=False, repr=False)

    @property
    def key(self) -> str:
        """The key of the attribute in a message, a model or a table: ``x`` or ``sender.x``."""
        return f"{self.scope}.{self.name}" if self.scope else self.name


@dataclass(frozen=True, slots=True)
class Unary:
    operator: typing.Literal["+", "-"]
    operand: Expression
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    operator: ArithmeticOperator
    left: Expression
    right: Expression
    span: Span = field(default=NOWHERE, compare=False, repr=False)


Expression = Literal | Name | Unary | Arithmetic


@dataclass(frozen=True, slots=True)
class Constant:
    """The condition TRUE or FALSE."""

    value: bool
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: ComparisonOperator
    left: Expression
    right: Expression
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class In:
    name: Name
    words: tuple[str, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Like:
    name: Name
    pattern: str
    escape: str = ""
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class IsNull:
    name: Name
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Contains:
    name: Name
    word: str
    span: Span = field(default=NOWHERE, compare=False, repr=False)


Clause = Constant | Comparison | In | Like | IsNull | Contains


@dataclass(frozen=True, slots=True)
class Not:
    operand: Condition
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class And:
    """At least two operands."""

    operands: tuple[Condition, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Or:
    """At least two operands."""

    operands: tuple[Condition, ...]
    span: Span = field(default=NOWHERE, compare=False, repr=False)


Condition = Clause | Not | And | Or
Node = Expression | Condition


def children(node: Node) -> tuple[Node, ...]:
    match node:  # the most frequent first
        case Name() | Literal() | Constant():
            return ()
        case Comparison() | Arithmetic():
            return (node.left, node.right)
        case And() | Or():
            return node.operands
        case Not() | Unary():
            return (node.operand,)
        case _:
            return (node.name,)


def walk(node: Node) -> Iterator[Node]:
    """Every node, parents first, from left to right."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        yield here
        if inside := children(here):
            waiting.extend(reversed(inside))


def names(node: Node) -> frozenset[Name]:
    return frozenset(here for here in walk(node) if isinstance(here, Name))
