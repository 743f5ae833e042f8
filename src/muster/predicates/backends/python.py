"""Evaluates one message at a time: a condition becomes a Python function.

The function is generated source, compiled once. It has one argument, ``get``: a function from the key of an
attribute to its value or None, such as ``message.get`` of a dict, and returns True exactly if the condition
is true. Text of the condition is inserted into the source only through ``ascii()``, so no name and no string
can inject code.

Where a clause compares an attribute with a constant, the generated test is the shortest one that follows the
rules of `values`: a value of the right class is never NULL, NaN is neither below nor above anything, and only
0 and 1 can be confused with a bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from muster.predicates import ast, like_patterns, values
from muster.predicates.analysis import normal_forms

Get = Callable[[str], object]
Matches = Callable[[Get], bool]

_NUMBERS: Final = frozenset((int, float))
_SETS: Final = frozenset((set, frozenset))
_PYTHON: Final = {"=": "==", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


def compile(condition: ast.Condition) -> Matches:
    """Reuse the result: compiling takes some hundred times as long as calling it."""
    writer = _Writer()
    body = writer.condition(normal_forms.negation_normal(condition))
    scope: dict[str, Any] = writer.environment
    exec(f"def matches(get):\n return {body}", scope)
    matches: Matches = scope["matches"]
    return matches


class _Writer:
    def __init__(self) -> None:
        self.environment: dict[str, Any] = {
            "__builtins__": {},
            "numbers": _NUMBERS,
            "sets": _SETS,
            "str": str,
            "compare": values.compare,
            "arithmetic": values.arithmetic,
            "negative": values.negative,
            "positive": values.positive,
        }

    def condition(self, condition: ast.Condition) -> str:
        match condition:
            case ast.And():
                return "(" + " and ".join(map(self.condition, condition.operands)) + ")"
            case ast.Or():
                return "(" + " or ".join(map(self.condition, condition.operands)) + ")"
            case ast.Not():
                assert not isinstance(condition.operand, ast.Not | ast.And | ast.Or)
                return self._clause(condition.operand, when=False)
            case _:
                return self._clause(condition, when=True)

    def _clause(self, clause: ast.Clause, *, when: bool) -> str:
        """An expression that is true exactly when the clause has the truth ``when``, false otherwise."""
        match clause:
            case ast.Constant():
                return str(clause.value is when)
            case ast.Comparison(left=ast.Name() as name, right=ast.Literal() as literal):
                return self._against_constant(clause.operator, _read(name), literal, when=when)
            case ast.Comparison():
                sides = f"{self._value(clause.left)}, {self._value(clause.right)}"
                return f"(compare({clause.operator!a}, {sides}) is {when})"
            case ast.IsNull():
                # NaN is NULL
                if when:
                    return f"((v := {_read(clause.name)}) is None or v != v)"
                return f"((v := {_read(clause.name)}) is not None and v == v)"
            case ast.In():
                member = f"v in {self._constant(frozenset(clause.words))}"
                return self._typed(clause.name, "is str", member, when=when)
            case ast.Like():
                member = f"{self._constant(like_patterns.matcher(clause.pattern, clause.escape))}(v)"
                return self._typed(clause.name, "is str", member, when=when)
            case ast.Contains():
                member = f"{clause.word!a} in v"
                return self._typed(clause.name, "in sets", member, when=when)

    def _typed(self, name: ast.Name, fits: str, test: str, *, when: bool) -> str:
        """A test for values of one class; a value of any other makes it false, and NULL unknown."""
        read = f"(v := {_read(name)})"
        if when:
            return f"({read}.__class__ {fits} and {test})"
        return f"({read} is not None and v == v and not (v.__class__ {fits} and {test}))"

    def _against_constant(
        self, operator: ast.ComparisonOperator, read: str, literal: ast.Literal, *, when: bool
    ) -> str:
        constant, bound = literal.value, ascii(literal.value)
        if isinstance(constant, bool):
            opposite = "False" if constant else "True"
            match operator, when:
                case "=", True:
                    return f"({read} is {constant})"
                case "<>", True:
                    return f"({read} is {opposite})"
                case "=", False:
                    return f"((v := {read}) is not None and v is not {constant} and v == v)"
                case "<>", False:
                    return f"((v := {read}) is not None and v is not {opposite} and v == v)"
                case _:
                    return self._always_false(read, when=when)
        if isinstance(constant, str):
            match operator, when:
                case "=", True:
                    return f"({read} == {bound})"
                case "<>", True:
                    return f"((v := {read}).__class__ is str and v != {bound})"
                case "=", False:
                    return f"((v := {read}) is not None and v != {bound} and v == v)"
                case "<>", False:
                    return (
                        f"((v := {read}) is not None and (v == {bound} or v.__class__ is not str and v == v))"
                    )
                case _:
                    return self._always_false(read, when=when)
        if not when:
            negated = f"not (v.__class__ in numbers and v {_PYTHON[operator]} {bound})"
            return f"((v := {read}) is not None and v == v and {negated})"
        if operator == "=" and constant not in (0, 1):
            return f"({read} == {bound})"
        exact = f"v {_PYTHON[operator]} {bound}" if operator != "<>" else f"v != {bound} and v == v"
        return f"((v := {read}).__class__ in numbers and {exact})"

    def _always_false(self, read: str, *, when: bool) -> str:
        return "False" if when else f"((v := {read}) is not None and v == v)"

    def _value(self, expression: ast.Expression) -> str:
        match expression:
            case ast.Literal():
                return ascii(expression.value)
            case ast.Name():
                return _read(expression)
            case ast.Unary():
                apply = "negative" if expression.operator == "-" else "positive"
                return f"{apply}({self._value(expression.operand)})"
            case ast.Arithmetic():
                sides = f"{self._value(expression.left)}, {self._value(expression.right)}"
                return f"arithmetic({expression.operator!a}, {sides})"

    def _constant(self, constant: object) -> str:
        name = f"c{len(self.environment)}"
        self.environment[name] = constant
        return name


def _read(name: ast.Name) -> str:
    return f"get({name.key!a})"
