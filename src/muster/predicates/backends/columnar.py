"""Evaluates a condition over the columns of a table: the result is a mask of the rows where it is true.

Since only TRUE selects (see `normal_forms`), most clauses are a single comparison of a column with a
constant: a NULL is not equal to any code, and a NaN not above or below any bound. Tests of strings (``=``,
IN, LIKE) are made once for each word of the dictionary, not for each row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from muster.predicates import ast, like_patterns, types, values
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import columns, numeric
from muster.predicates.backends.columns import Column, Mask, Table
from muster.predicates.types import ValueKind

_COMPARE: Final[dict[ast.ComparisonOperator, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Up to this number of words, comparing the codes with each is faster than a table look-up for each row.
_FEW_WORDS: Final = 6

# A mask that is a bool applies to every row; an array is always a new one, and may be reused.
Answer = Mask | bool

# A value is a column, or a plain one that holds for every row; None is NULL.
Value = Column | str | int | float | bool | None


def evaluate(condition: ast.Condition, table: Table) -> Mask:
    """The rows where the condition is true."""
    with np.errstate(all="ignore"):
        answer = _condition(normal_forms.negation_normal(condition), table)
    return np.full(table.rows, answer) if isinstance(answer, bool) else answer


def _condition(condition: ast.Condition, table: Table) -> Answer:
    match condition:
        case ast.And():
            return _joined(condition.operands, table, np.logical_and, decisive=False)
        case ast.Or():
            return _joined(condition.operands, table, np.logical_or, decisive=True)
        case ast.Not():
            assert not isinstance(condition.operand, ast.Not | ast.And | ast.Or)
            return _clause(condition.operand, table, when=False)
        case _:
            return _clause(condition, table, when=True)


def _joined(operands: tuple[ast.Condition, ...], table: Table, join: np.ufunc, *, decisive: bool) -> Answer:
    total: Answer = not decisive
    for operand in operands:
        part = _condition(operand, table)
        if isinstance(part, bool):
            if part is decisive:
                return decisive
        elif isinstance(total, bool):
            total = part
        else:
            join(total, part, out=total)
    return total


def _clause(clause: ast.Clause, table: Table, *, when: bool) -> Answer:
    """The rows where the clause has the truth ``when``."""
    if isinstance(clause, ast.Constant):
        return clause.value is when
    if isinstance(clause, ast.Comparison):
        left, right = _value(clause.left, table), _value(clause.right, table)
        return _comparison(clause.operator, left, right, when=when)
    column = table.columns.get(clause.name.key)
    if isinstance(clause, ast.IsNull):
        present = False if column is None else column.present()
        if when:
            return not present if isinstance(present, bool) else np.logical_not(present, out=present)
        return present
    if column is None:
        return False
    if column.kind is not (ValueKind.SET if isinstance(clause, ast.Contains) else ValueKind.STRING):
        return False if when else column.present()
    if isinstance(clause, ast.Contains):
        return _has_bit(column, clause.word, when=when)
    if isinstance(clause, ast.In):
        codes = [code for word in set(clause.words) if (code := column.codes.get(word))]
    else:
        fits = like_patterns.matcher(clause.pattern, clause.escape)
        codes = [code for word, code in column.codes.items() if fits(word)]
    return _has_code(column, codes, when=when)


def _has_bit(column: Column, word: str, *, when: bool) -> Answer:
    place = column.codes.get(word)
    if place is None:
        return False if when else column.present()
    width = column.values.dtype.type
    if when:
        mask: Mask = np.not_equal(column.values & width(1 << place), 0)
    else:
        mask = np.equal(column.values & width(1 << place | columns.SET_PRESENT), columns.SET_PRESENT)
    return mask


def _has_code(column: Column, codes: list[int], *, when: bool) -> Answer:
    """The rows whose string is one of these words (``when``), or is another one."""
    if len(codes) > _FEW_WORDS:
        chosen = np.full(len(column.words) + 1, not when)
        chosen[codes] = when
        chosen[0] = False
        return chosen[column.values]
    if not when:
        others = np.not_equal(column.values, 0)
        for code in codes:
            np.logical_and(others, column.values != code, out=others)
        return others
    if not codes:
        return False
    these = np.equal(column.values, codes[0])
    for code in codes[1:]:
        np.logical_or(these, column.values == code, out=these)
    return these


def _value(expression: ast.Expression, table: Table) -> Value:
    match expression:
        case ast.Literal():
            return expression.value
        case ast.Name():
            return table.columns.get(expression.key)
        case ast.Unary():
            inside = _value(expression.operand, table)
            if not isinstance(inside, Column):
                return values.negative(inside) if expression.operator == "-" else values.positive(inside)
            if not inside.kind.is_number:
                return None
            return _arithmetic("-", 0, inside) if expression.operator == "-" else inside
        case ast.Arithmetic():
            left, right = _value(expression.left, table), _value(expression.right, table)
            return _arithmetic(expression.operator, left, right)


def _kind(value: Value) -> ValueKind | None:
    return value.kind if isinstance(value, Column) else types.kind_of(value)


def _comparison(sign: ast.ComparisonOperator, left: Value, right: Value, *, when: bool) -> Answer:
    if not isinstance(left, Column):
        if not isinstance(right, Column):
            return values.compare(sign, left, right) is when
        sign, left, right = ast.MIRRORED[sign], right, left
    if right is None:
        return False
    numbers = left.kind.is_number and _kind(right) in (ValueKind.INT, ValueKind.FLOAT)
    if not numbers and (
        left.kind is not _kind(right) or left.kind is ValueKind.SET or sign not in ("=", "<>")
    ):
        return False if when else _both_present(left, right)
    if not when:
        sign = ast.OPPOSITE[sign]
    if numbers:
        return _compare_numbers(sign, left, right)
    if isinstance(right, Column):
        return _compare_codes(left, right, equal=sign == "=")
    if left.kind is ValueKind.BOOL:
        return np.equal(left.values, columns.TRUE_CODE if right is (sign == "=") else columns.FALSE_CODE)
    assert isinstance(right, str)
    code = left.codes.get(right)
    return _has_code(left, [] if code is None else [code], when=sign == "=")


def _compare_codes(left: Column, right: Column, *, equal: bool) -> Mask:
    ours, theirs = left.values, right.values
    if left.kind is ValueKind.STRING:
        translation = np.array([0, *(left.codes.get(word, -1) for word in right.words)], np.int64)
        theirs = translation[theirs]
    mask: Mask = np.equal(ours, theirs) if equal else np.not_equal(ours, theirs) & (theirs != 0)
    np.logical_and(mask, ours != 0, out=mask)
    return mask


def _compare_numbers(sign: ast.ComparisonOperator, left: Column, right: Any) -> Answer:
    if not isinstance(right, Column):
        exact: tuple[ast.ComparisonOperator, int | float] | bool = (sign, right)
        if left.kind is ValueKind.INT and isinstance(right, float):
            exact = values.integer_bound(sign, right)
        elif left.kind is ValueKind.FLOAT and isinstance(right, int):
            exact = values.float_bound(sign, right)
        if isinstance(exact, bool):
            return left.present() if exact else False
        sign, bound = exact
        mask: Mask = _COMPARE[sign](left.values, bound)
    elif left.kind is right.kind:
        mask = _COMPARE[sign](left.values, right.values)
        _leave_out_null(mask, right, sign)
    elif left.kind is ValueKind.FLOAT:
        return _compare_numbers(ast.MIRRORED[sign], right, left)
    else:
        mask = numeric.compare_exactly(sign, left.values, right.values)
    _leave_out_null(mask, left, sign)
    return mask


def _leave_out_null(mask: Mask, column: Column, sign: ast.ComparisonOperator) -> None:
    if column.null is not None:
        np.logical_and(mask, ~column.null, out=mask)
    elif column.kind is ValueKind.FLOAT and sign == "<>":  # to IEEE, NaN is unequal to everything
        np.logical_and(mask, column.values == column.values, out=mask)


def _both_present(left: Column, right: Value) -> Answer:
    here = left.present()
    there = right.present() if isinstance(right, Column) else True
    return there if here is True else here if there is True else np.logical_and(here, there)


def _arithmetic(sign: ast.ArithmeticOperator, left: Value, right: Value) -> Value:
    if not isinstance(left, Column) and not isinstance(right, Column):
        return values.arithmetic(sign, left, right)
    kinds = {_kind(left), _kind(right)}
    if not kinds <= {ValueKind.INT, ValueKind.FLOAT}:
        return None
    if ValueKind.FLOAT in kinds:
        return Column(ValueKind.FLOAT, numeric.calculate_real(sign, _as_real(left), _as_real(right)))
    numbers, none = numeric.calculate_integer(sign, _as_integer(left), _as_integer(right))
    for side in (left, right):
        if isinstance(side, Column) and side.null is not None:
            np.logical_or(none, side.null, out=none)
    return Column(ValueKind.INT, numbers, null=none if none.any() else None)


def _as_real(value: Any) -> Any:
    if not isinstance(value, Column):
        return np.float64(value)
    if value.null is None:
        return value.values.astype(np.float64, copy=False)
    real = value.values.astype(np.float64)
    real[value.null] = np.nan
    return real


def _as_integer(value: Any) -> Any:
    return value.values if isinstance(value, Column) else np.int64(value)
