"""The evaluation cost of a condition, estimated from its structure; indexes of conditions sort by it.

A condition is as dear as its dearest clause.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from muster.predicates import ast
from muster.predicates.analysis import normal_forms


class CostClass(enum.IntEnum):
    CONSTANT = 0  # TRUE or FALSE: reads no attribute
    LOOKUP = 1  # one attribute against constants: an index or a dictionary look-up
    PATTERN = 2  # LIKE: once for each distinct value, in time that grows with its length
    COMPUTED = 3  # attributes against each other, or arithmetic: has to be worked out for each row


@dataclass(frozen=True, slots=True)
class Cost:
    clauses: int
    depth: int
    dearest: CostClass


def class_of(clause: normal_forms.Literal) -> CostClass:
    match clause:
        case ast.Not(operand=inside):
            assert not isinstance(inside, ast.And | ast.Or)
            return class_of(inside)
        case ast.Constant():
            return CostClass.CONSTANT
        case ast.Like():
            return CostClass.PATTERN
        case ast.Comparison(left=ast.Name(), right=ast.Literal()):
            return CostClass.LOOKUP
        case ast.Comparison():
            return CostClass.COMPUTED
        case _:
            return CostClass.LOOKUP


def measure(condition: ast.Condition) -> Cost:
    """The cost of its normal form, which the back ends evaluate."""
    return _measure(normal_forms.negation_normal(condition))


def _measure(condition: ast.Condition) -> Cost:
    if not isinstance(condition, ast.And | ast.Or):
        return Cost(1, 1, class_of(condition))
    parts = [_measure(part) for part in condition.operands]
    return Cost(
        sum(part.clauses for part in parts),
        1 + max(part.depth for part in parts),
        max(part.dearest for part in parts),
    )
