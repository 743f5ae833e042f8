"""Explains why a condition was true or not: the deciding clauses, their values, and their positions in the
text.

If the condition is not true, these are the clauses that prevented it: every clause of an AND that is false or
unknown, and all clauses of an OR. If it is true, they are the clauses that made it true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.predicates import ast, like_patterns, types, values
from muster.predicates.analysis import normal_forms
from muster.predicates.syntax import printer

_SAID = {True: "true", False: "false", None: "unknown"}


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """``clause`` is its canonical text, ``span`` its place in the text that was parsed."""

    clause: str
    span: ast.Span
    truth: bool | None
    values: tuple[tuple[str, object], ...]  # attributes and their values, in the order of the clause

    def __str__(self) -> str:
        seen = ", ".join(f"{key} is {_shown(value)}" for key, value in self.values)
        return f"{_SAID[self.truth]}: {self.clause}" + (f" ({seen})" if seen else "")


@dataclass(frozen=True, slots=True)
class Explanation:
    truth: bool | None
    because: tuple[ClauseResult, ...]

    def __str__(self) -> str:
        return "\n  ".join([_SAID[self.truth], *map(str, self.because)])


def explain(condition: ast.Condition, attributes: Mapping[str, object]) -> Explanation:
    truth, because = _explain(normal_forms.located(condition), attributes.get)
    return Explanation(truth, tuple(because))


def _explain(
    condition: ast.Condition, get: Callable[[str], object]
) -> tuple[bool | None, list[ClauseResult]]:
    if not isinstance(condition, ast.And | ast.Or):
        truth = truth_of(condition, get)
        keys = dict.fromkeys(node.key for node in ast.walk(condition) if isinstance(node, ast.Name))
        attributes = tuple((key, get(key)) for key in keys)
        return truth, [ClauseResult(printer.write(condition), condition.span, truth, attributes)]
    parts = [_explain(part, get) for part in condition.operands]
    truths = [truth for truth, _ in parts]
    decisive = isinstance(condition, ast.Or)  # one operand with this value decides
    if decisive in truths:
        result: bool | None = decisive
    else:
        result = None if None in truths else not decisive
    relevant = [because for truth, because in parts if (truth is True) is (result is True)]
    return result, [finding for because in relevant for finding in because]


def near_misses(condition: ast.Condition, attributes: Mapping[str, object]) -> tuple[ClauseResult, ...]:
    """The smallest set of clauses that prevents a condition from being true; empty if it is true.

    For an OR these are the clauses of the operand with the fewest, so they show what to change.
    """
    return tuple(_nearest(normal_forms.located(condition), attributes.get))


def _nearest(condition: ast.Condition, get: Callable[[str], object]) -> list[ClauseResult]:
    match condition:
        case ast.And():
            return [finding for part in condition.operands for finding in _nearest(part, get)]
        case ast.Or():
            return min((_nearest(part, get) for part in condition.operands), key=len)
    truth, because = _explain(condition, get)
    return [] if truth is True else because


def truth_of(literal: normal_forms.Literal, get: Callable[[str], object]) -> bool | None:
    """The three-valued truth of one clause with its polarity."""
    if isinstance(literal, ast.Not):
        assert not isinstance(literal.operand, ast.Not | ast.And | ast.Or)
        truth = truth_of(literal.operand, get)
        return None if truth is None else not truth
    match literal:
        case ast.Constant():
            return literal.value
        case ast.Comparison():
            left, right = values.evaluate(literal.left, get), values.evaluate(literal.right, get)
            return values.compare(literal.operator, left, right)
        case ast.IsNull():
            return types.is_null(get(literal.name.key))
    value = get(literal.name.key)
    if types.is_null(value):
        return None
    kind = types.kind_of(value)
    match literal:
        case ast.In():
            return kind is types.ValueKind.STRING and value in literal.words
        case ast.Like():
            matches = like_patterns.matcher(literal.pattern, literal.escape)
            return kind is types.ValueKind.STRING and matches(value)  # type: ignore[arg-type]
        case ast.Contains():
            return kind is types.ValueKind.SET and literal.word in value  # type: ignore[operator]


def _shown(value: object) -> str:
    if types.is_null(value):
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, set | frozenset):
        shown = "{" + ", ".join(sorted(map(str, value))) + "}"
    else:
        shown = printer.quoted(value) if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"
