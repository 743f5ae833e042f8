"""The meaning of the language, written as plainly as it can be: an interpreter with three truth values.

It shares no code with the back ends that it judges, only the tree; LIKE is decided by trying every split.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

from muster.predicates import ast


def truth(node: ast.Condition, row: dict[str, Any]) -> bool | None:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Not):
        inside = truth(node.operand, row)
        return None if inside is None else not inside
    if isinstance(node, ast.And):
        parts = [truth(part, row) for part in node.operands]
        return False if False in parts else None if None in parts else True
    if isinstance(node, ast.Or):
        parts = [truth(part, row) for part in node.operands]
        return True if True in parts else None if None in parts else False
    if isinstance(node, ast.Comparison):
        return _compare(node.operator, _value(node.left, row), _value(node.right, row))
    value = _clean(row.get(node.name.key))
    if isinstance(node, ast.IsNull):
        return value is None
    if value is None:
        return None
    if isinstance(node, ast.In):
        return isinstance(value, str) and any(value == word for word in node.words)
    if isinstance(node, ast.Like):
        return isinstance(value, str) and _like(value, node.pattern, node.escape)
    return isinstance(value, frozenset) and node.word in value


def _clean(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exact(value: Any) -> Any:
    return value if isinstance(value, float) and math.isinf(value) else Fraction(value)


def _compare(operator: str, left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    a: Any
    b: Any
    if _is_number(left) and _is_number(right):
        a, b = (left, right) if type(left) is type(right) else (_exact(left), _exact(right))
    elif type(left) is type(right) and isinstance(left, str | bool) and operator in ("=", "<>"):
        a, b = left, right
    else:
        return False
    if operator in ("=", "<>"):
        return bool(a == b) is (operator == "=")
    if operator in ("<", "<="):
        return bool(a < b) or (operator == "<=" and bool(a == b))
    return bool(b < a) or (operator == ">=" and bool(a == b))


def _value(node: ast.Expression, row: dict[str, Any]) -> Any:
    if isinstance(node, ast.Literal):
        return node.value
    if isinstance(node, ast.Name):
        return _clean(row.get(node.key))
    if isinstance(node, ast.Unary):
        operand = _value(node.operand, row)
        if not _is_number(operand):
            return None
        return _fit(-operand if node.operator == "-" else operand)
    left, right = _value(node.left, row), _value(node.right, row)
    if not _is_number(left) or not _is_number(right):
        return None
    complete = isinstance(left, int) and isinstance(right, int)
    if not complete:
        left, right = float(left), float(right)
    if node.operator == "+":
        return _fit(left + right)
    if node.operator == "-":
        return _fit(left - right)
    if node.operator == "*":
        return _fit(left * right)
    if right == 0:
        return None
    return _fit(math.trunc(Fraction(left, right)) if complete else left / right)


def _fit(number: Any) -> Any:
    if isinstance(number, int):
        return number if -(2**63) <= number < 2**63 else None
    return _clean(number)


@functools.lru_cache(100_000)
def _like(value: str, pattern: str, escape: str) -> bool:
    if not pattern:
        return not value
    first, rest = pattern[0], pattern[1:]
    if first == escape:
        return bool(value) and value[0] == rest[0] and _like(value[1:], rest[1:], escape)
    if first == "%":
        return any(_like(value[start:], rest, escape) for start in range(len(value) + 1))
    return bool(value) and first in ("_", value[0]) and _like(value[1:], rest, escape)
