"""Numbers in columns, by the rules of `values`: exact comparison, and arithmetic with range checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from muster.predicates import ast, types
from muster.predicates.backends.columns import Array, Mask


def compare_exactly(sign: ast.ComparisonOperator, integer: Array, real: Array) -> Mask:
    """Compare without rounding the integers to floats, as plain comparison would. NaN is never true."""
    above, below = real >= 2.0**63, real < -(2.0**63)
    inside = ~(above | below | np.isnan(real))
    bounded = np.where(inside, real, 0.0)
    floor, ceiling = np.floor(bounded).astype(np.int64), np.ceil(bounded).astype(np.int64)
    mask: Mask
    match sign:
        case "=":
            mask = inside & (floor == ceiling) & (integer == floor)
        case "<>":
            mask = above | below | (inside & ((floor != ceiling) | (integer != floor)))
        case "<":
            mask = above | (inside & (integer < ceiling))
        case "<=":
            mask = above | (inside & (integer <= floor))
        case ">":
            mask = below | (inside & (integer > floor))
        case ">=":
            mask = below | (inside & (integer >= ceiling))
    return mask


def calculate_real(sign: ast.ArithmeticOperator, left: Any, right: Any) -> Array:
    """NaN, which is NULL, where there is no result."""
    result: Array
    match sign:
        case "+":
            result = left + right
        case "-":
            result = left - right
        case "*":
            result = left * right
        case "/":
            result = np.where(right == 0, np.nan, left / right)
    return result


def calculate_integer(sign: ast.ArithmeticOperator, left: Any, right: Any) -> tuple[Array, Mask]:
    """The results, and where there is none: beyond 64 bits, or divided by zero."""
    match sign:
        case "+":
            total = left + right
            return total, ((left ^ total) & (right ^ total)) < 0
        case "-":
            total = left - right
            return total, ((left ^ right) & (left ^ total)) < 0
        case "*":
            return _multiply(left, right)
        case "/":
            none = (right == 0) | ((right == -1) & (left == types.INT_MIN))
            divisor = np.where(none, 1, right)
            floor = left // divisor
            inexact_below_zero = (floor < 0) & (floor * divisor != left)
            return floor + inexact_below_zero, none


def _multiply(left: Any, right: Any) -> tuple[Array, Mask]:
    # The floating-point product is right to 15 digits, which leaves a thin margin around the bound: there,
    # and it is almost never met, Python's own integers decide.
    size = np.abs(np.float64(left) * np.float64(right))
    overflow = size > 9.3e18
    doubtful = np.flatnonzero((size > 9.2e18) & ~overflow)
    if doubtful.size:
        lefts, rights = np.broadcast_arrays(left, right)
        for row in doubtful:
            exact = int(lefts[row]) * int(rights[row])
            overflow[row] = not types.INT_MIN <= exact <= types.INT_MAX
    return left * right, overflow
