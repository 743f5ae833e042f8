"""The rules for single values, in one place: comparison, arithmetic, and exactness of numbers.

* NULL (and NaN) makes a comparison unknown and arithmetic NULL.
* Values of different types compare FALSE with every operator, so ``NOT`` of it is TRUE.  Integers and
  floating-point numbers are of the same type, and compare exactly, also above 2^53.
* Strings and booleans support only ``=`` and ``<>``; another comparison of two of them is FALSE, and so is
  any comparison of sets.
* Integers have 64 bits.  A result beyond them is NULL, not a wrapped number; so is a division by zero of
  either kind, a result that is not a number, and arithmetic on anything but numbers.
* Integer division truncates towards zero, as in Java.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Final

from muster.predicates import ast, types

_NUMBERS: Final = frozenset((int, float))

_COMPARE: Final[dict[ast.ComparisonOperator, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(sign: ast.ComparisonOperator, left: object, right: object) -> bool | None:
    if types.is_null(left) or types.is_null(right):
        return None
    if left.__class__ in _NUMBERS and right.__class__ in _NUMBERS:
        return _COMPARE[sign](left, right)
    if left.__class__ is right.__class__ and (left.__class__ is str or left.__class__ is bool):
        return (left == right) is (sign == "=") if sign in ("=", "<>") else False
    return False


def arithmetic(sign: ast.ArithmeticOperator, left: object, right: object) -> int | float | None:
    if left.__class__ not in _NUMBERS or right.__class__ not in _NUMBERS:
        return None
    try:
        result = _calculate(sign, left, right)
    except OverflowError:  # an integer beyond the range of floats, compared with a float
        return None
    return _representable(result)


def negative(value: object) -> int | float | None:
    return _representable(-value) if value.__class__ in _NUMBERS else None  # type: ignore[operator]


def positive(value: object) -> int | float | None:
    return _representable(value) if value.__class__ in _NUMBERS else None


def _calculate(sign: ast.ArithmeticOperator, left: Any, right: Any) -> Any:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            if right == 0:
                return None
            if left.__class__ is int and right.__class__ is int:
                quotient = abs(left) // abs(right)
                return quotient if (left < 0) == (right < 0) else -quotient
            return left / right


def _representable(result: Any) -> int | float | None:
    if result.__class__ is int:
        return result if types.INT_MIN <= result <= types.INT_MAX else None
    return None if types.is_null(result) else result


def evaluate(expression: ast.Expression, get: Callable[[str], object]) -> object:
    match expression:
        case ast.Literal():
            return expression.value
        case ast.Name():
            return get(expression.key)
        case ast.Unary():
            apply = negative if expression.operator == "-" else positive
            return apply(evaluate(expression.operand, get))
        case ast.Arithmetic():
            return arithmetic(
                expression.operator, evaluate(expression.left, get), evaluate(expression.right, get)
            )


# Engines compare an integer with a float by rounding the former. The next two functions replace such a
# comparison with an equivalent one between numbers of one kind: (operator, bound), or a bool if it is
# constant.


def integer_bound(sign: ast.ComparisonOperator, bound: float) -> tuple[ast.ComparisonOperator, int] | bool:
    """``x sign bound`` for a 64-bit integer ``x``, with an integer bound."""
    if bound >= 2.0**63:
        return sign in ("<", "<=", "<>")
    if bound < -(2.0**63):
        return sign in (">", ">=", "<>")
    if bound.is_integer():
        return sign, int(bound)
    match sign:
        case "=" | "<>":
            return sign == "<>"
        case "<" | "<=":
            return "<=", math.floor(bound)
        case _:
            return ">=", math.ceil(bound)


def float_bound(sign: ast.ComparisonOperator, bound: int) -> tuple[ast.ComparisonOperator, float] | bool:
    """``x sign bound`` for floating-point ``x``, with a floating-point bound."""
    nearest = float(bound)
    if nearest == bound:
        return sign, nearest
    below = nearest if nearest < bound else math.nextafter(nearest, -math.inf)
    match sign:
        case "=" | "<>":
            return sign == "<>"
        case "<" | "<=":
            return "<=", below
        case _:
            return ">=", math.nextafter(below, math.inf)
