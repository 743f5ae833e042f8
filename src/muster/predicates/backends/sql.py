"""SQL text for Spark: the condition as something to put after WHERE.

The text is true for exactly the rows where the condition is; for others it is false or NULL, which WHERE
treats alike. Types come from a model, so type differences are resolved here, without the conversions of an
engine. An attribute that the model does not have is NULL.

Required column types: integers of at most 64 bits, strings as text, sets as arrays of strings. ANSI mode may
be on or off: integer arithmetic is NULL where the result exceeds 64 bits or the divisor is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from muster.core import errors
from muster.predicates import ast, like_patterns, types, values
from muster.predicates.analysis import normal_forms
from muster.predicates.types import ValueKind

_INFINITY: Final = "CAST('Infinity' AS DOUBLE)"
_NOT_A_NUMBER: Final = "CAST('NaN' AS DOUBLE)"

_INTEGER_SIGNS: Final = {
    "+": "try_add({a}, {b})",
    "-": "try_subtract({a}, {b})",
    "*": "try_multiply({a}, {b})",
    "/": "CASE WHEN {b} = -1L THEN try_subtract(0L, {a}) ELSE {a} div nullif({b}, 0L) END",
}

LENGTH_MAX: Final = 1_000_000  # characters: a quotient of quotients contains each divisor twice

_REAL_SIGNS: Final = {
    "+": "({a} + {b})",
    "-": "({a} - {b})",
    "*": "({a} * {b})",
    "/": "({a} / NULLIF({b}, {zero}))",
}


def write(condition: ast.Condition, model: types.Model, *, column: Callable[[str], str] | None = None) -> str:
    """``column`` gives the SQL of an attribute by its key; without it, columns are called as the keys are.

    The text is complete: run it without parameters, so that the driver does not interpret ``%`` or ``?`` in
    it.
    """
    return _Writer(model, column or identifier).condition(normal_forms.negation_normal(condition))


def identifier(name: str) -> str:
    if "\0" in name:
        raise errors.InvalidInput(f"{name!r} cannot name a column")
    return f"`{name.replace('`', '``')}`"


def string(word: str) -> str:
    """A literal.

    Settings of Spark change the meaning of a backslash and a doubled quote, and ${…} is replaced even in a
    literal: a word with any of them is written as bytes, which are the same under all settings.
    """
    if word.isascii() and word.isprintable() and not set("'\\$") & set(word):
        return f"'{word}'"
    return f"CAST(X'{word.encode().hex()}' AS STRING)"


def _matches(column: str, form: like_patterns.PatternShape) -> str:
    match [like_patterns.plain(segment) for segment in form.segments]:
        case [str(start), ""]:
            return f"startswith({column}, {string(start)})"
        case ["", str(end)]:
            return f"endswith({column}, {string(end)})"
        case ["", str(inside), ""]:
            return f"contains({column}, {string(inside)})"
    # Not Spark's LIKE: it becomes a regular expression that backtracks at every %.
    return f"{column} RLIKE {string(like_patterns.regular_expression(form))}"


@dataclass(frozen=True, slots=True)
class _Value:
    """``constant`` where it is known already; ``kind`` None for one that is always NULL."""

    kind: ValueKind | None
    sql: str = ""
    constant: str | int | float | bool | None = None
    is_column: bool = False


_NULL: Final = _Value(None)


class _Writer:
    def __init__(self, model: types.Model, column: Callable[[str], str]) -> None:
        self._model = model
        self._column = column

    def condition(self, condition: ast.Condition) -> str:
        match condition:
            case ast.And():
                return self._bounded("(" + " AND ".join(map(self.condition, condition.operands)) + ")")
            case ast.Or():
                return self._bounded("(" + " OR ".join(map(self.condition, condition.operands)) + ")")
            case ast.Not():
                assert not isinstance(condition.operand, ast.Not | ast.And | ast.Or)
                return self._clause(condition.operand, when=False)
            case _:
                return self._clause(condition, when=True)

    def _bounded(self, condition: str) -> str:
        if len(condition) > LENGTH_MAX:
            raise errors.LimitExceeded(f"the SQL of this expression passes {LENGTH_MAX:,} characters")
        return condition

    def _clause(self, clause: ast.Clause, *, when: bool) -> str:
        """SQL that is true exactly where the clause has the truth ``when``."""
        if isinstance(clause, ast.Constant):
            return _truth(clause.value is when)
        if isinstance(clause, ast.Comparison):
            left, right = self._value(clause.left), self._value(clause.right)
            return self._bounded(self._comparison(clause.operator, left, right, when=when))
        value = self._value(clause.name)
        if isinstance(clause, ast.IsNull):
            if value.kind is None:
                return _truth(when)
            return f"{self._number_or_null(value)} IS {'' if when else 'NOT '}NULL"
        if value.kind is None:
            return "FALSE"
        if value.kind is not (ValueKind.SET if isinstance(clause, ast.Contains) else ValueKind.STRING):
            return "FALSE" if when else self._present(value)
        negation = "" if when else "NOT "
        match clause:
            case ast.Contains():
                condition = f"array_contains({value.sql}, {string(clause.word)})"
                return condition if when else f"({value.sql} IS NOT NULL AND NOT {condition})"
            case ast.In():
                words = ", ".join(string(word) for word in dict.fromkeys(clause.words))
                return f"{value.sql} {negation}IN ({words})"
            case ast.Like():
                condition = _matches(value.sql, like_patterns.shape(clause.pattern, clause.escape))
                return f"({negation}{condition})"

    # Comparisons

    def _comparison(self, sign: ast.ComparisonOperator, left: _Value, right: _Value, *, when: bool) -> str:
        if left.constant is not None and right.constant is not None:
            return _truth(values.compare(sign, left.constant, right.constant) is when)
        if left.kind is None or right.kind is None:
            return "FALSE"
        numbers = left.kind.is_number and right.kind.is_number
        if not numbers and (
            left.kind is not right.kind or left.kind is ValueKind.SET or sign not in ("=", "<>")
        ):
            return "FALSE" if when else f"({self._present(left)} AND {self._present(right)})"
        if not when:
            sign = ast.OPPOSITE[sign]
        if not numbers:
            return f"{left.sql} {sign} {right.sql}"
        if left.constant is not None:
            sign, left, right = ast.MIRRORED[sign], right, left
        return self._compare_numbers(sign, left, right)

    def _compare_numbers(self, sign: ast.ComparisonOperator, left: _Value, right: _Value) -> str:
        if right.constant is not None and left.kind is not right.kind:
            bound: Any = right.constant
            exact = (
                values.integer_bound(sign, bound)
                if left.kind is ValueKind.INT
                else values.float_bound(sign, bound)
            )
            if isinstance(exact, bool):
                return self._present(left) if exact else "FALSE"
            sign, right = exact[0], self._constant(exact[1])
        if left.kind is right.kind:
            return self._compare_alike(sign, left, right)
        if left.kind is ValueKind.FLOAT:
            sign, left, right = ast.MIRRORED[sign], right, left
        return self._compare_exactly(sign, left.sql, self._number_or_null(right))

    def _compare_alike(self, sign: ast.ComparisonOperator, left: _Value, right: _Value) -> str:
        # To SQL engines NaN is equal to itself and above all numbers. A column below a bound needs no care,
        # and an index or a pushed-down filter can still use it.
        if right.constant is not None and left.is_column and left.kind is ValueKind.FLOAT:
            condition = f"{left.sql} {sign} {right.sql}"
            if sign in ("<", "<=", "="):
                return condition
            return f"({condition} AND {left.sql} <> {_NOT_A_NUMBER})"
        return f"{self._number_or_null(left)} {sign} {self._number_or_null(right)}"

    def _compare_exactly(self, sign: ast.ComparisonOperator, integer: str, real: str) -> str:
        """Engines would round the integer to floating point first."""
        above, below = self._real(2.0**63), self._real(-(2.0**63))
        floor = f"CAST(floor({real}) AS BIGINT)"
        ceiling = f"CAST(ceil({real}) AS BIGINT)"
        inside: dict[ast.ComparisonOperator, str] = {
            "=": f"{integer} = {floor} AND {integer} = {ceiling}",
            "<>": f"{integer} <> {floor} OR {integer} <> {ceiling}",
            "<": f"{integer} < {ceiling}",
            "<=": f"{integer} <= {floor}",
            ">": f"{integer} > {floor}",
            ">=": f"{integer} >= {ceiling}",
        }
        return (
            f"({integer} IS NOT NULL AND CASE"
            f" WHEN {real} >= {above} THEN {_truth(sign in ('<', '<=', '<>'))}"
            f" WHEN {real} < {below} THEN {_truth(sign in ('>', '>=', '<>'))}"
            f" ELSE {inside[sign]} END)"
        )

    def _present(self, value: _Value) -> str:
        return "TRUE" if value.constant is not None else f"{self._number_or_null(value)} IS NOT NULL"

    def _number_or_null(self, value: _Value) -> str:
        if value.kind is not ValueKind.FLOAT or value.constant is not None:
            return value.sql
        return f"NULLIF({value.sql}, {_NOT_A_NUMBER})"

    # Values

    def _value(self, expression: ast.Expression) -> _Value:
        match expression:
            case ast.Literal():
                return self._constant(expression.value)
            case ast.Name():
                declared = self._model.get(expression.key)
                if declared is None:
                    return _NULL
                return _Value(declared.kind, self._column(expression.key), is_column=True)
            case ast.Unary():
                inside = self._value(expression.operand)
                if inside.constant is not None:
                    apply = values.negative if expression.operator == "-" else values.positive
                    return self._constant(apply(inside.constant))
                if inside.kind is None or not inside.kind.is_number:
                    return _NULL
                return (
                    self._arithmetic("-", self._constant(0), inside) if expression.operator == "-" else inside
                )
            case ast.Arithmetic():
                return self._arithmetic(
                    expression.operator, self._value(expression.left), self._value(expression.right)
                )

    def _arithmetic(self, sign: ast.ArithmeticOperator, left: _Value, right: _Value) -> _Value:
        if left.constant is not None and right.constant is not None:
            return self._constant(values.arithmetic(sign, left.constant, right.constant))
        if not {left.kind, right.kind} <= {ValueKind.INT, ValueKind.FLOAT}:
            return _NULL
        if left.kind is right.kind is ValueKind.INT:
            expression = _INTEGER_SIGNS[sign].format(a=self._as_integer(left), b=self._as_integer(right))
            return _Value(ValueKind.INT, self._bounded(expression))
        zero = self._real(0.0)
        expression = _REAL_SIGNS[sign].format(a=self._as_real(left), b=self._as_real(right), zero=zero)
        return _Value(ValueKind.FLOAT, self._bounded(expression))

    def _as_integer(self, value: _Value) -> str:
        # A narrower column would make the engine calculate with fewer bits.
        return f"CAST({value.sql} AS BIGINT)" if value.is_column else value.sql

    def _as_real(self, value: _Value) -> str:
        if value.constant is not None:
            return self._real(float(value.constant))
        if value.kind is ValueKind.INT or value.is_column:
            return f"CAST({value.sql} AS DOUBLE)"
        return value.sql

    def _constant(self, constant: str | int | float | bool | None) -> _Value:
        match constant:
            case None:
                return _NULL
            case bool():
                return _Value(ValueKind.BOOL, _truth(constant), constant)
            case str():
                return _Value(ValueKind.STRING, string(constant), constant)
            case int():
                return _Value(ValueKind.INT, f"{constant}L", constant)
            case float():
                return _Value(ValueKind.FLOAT, self._real(constant), constant)

    def _real(self, number: float) -> str:
        if math.isinf(number):
            return _INFINITY if number > 0 else f"(-{_INFINITY})"
        return f"{number!r}D"


def _truth(truth: bool) -> str:
    return "TRUE" if truth else "FALSE"
