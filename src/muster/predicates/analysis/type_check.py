"""Is a condition about this model?  Names that it does not have, and comparisons that can only be false.

The language accepts both: a missing attribute is NULL, different types compare FALSE. They are reported to
the author of a policy, because they are almost always mistakes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from muster.core import errors
from muster.predicates import ast, types


@dataclass(frozen=True, slots=True)
class TypeProblem:
    message: str
    span: ast.Span
    hint: str | None = None


def check(condition: ast.Condition, model: types.Model) -> tuple[TypeProblem, ...]:
    """In the order of the text; empty if there is nothing to complain of."""
    checker = _Checker(model)
    for node in ast.walk(condition):
        checker.look_at(node)
    return tuple(sorted(dict.fromkeys(checker.problems), key=lambda problem: problem.span))


def require(condition: ast.Condition, model: types.Model, text: str) -> None:
    """`errors.ParseError` at the first problem; ``text`` is the parsed text."""
    for problem in check(condition, model):
        raise errors.ParseError(problem.message, text=text, position=problem.span[0], hint=problem.hint)


def closest_name(word: str, choices: Iterable[str]) -> str | None:
    """A suggestion, if a choice has a similar spelling."""
    matches = difflib.get_close_matches(word, choices, 1)
    return f"did you mean {matches[0]}?" if matches else None


class _Checker:
    def __init__(self, model: types.Model) -> None:
        self._model = model
        self.problems: list[TypeProblem] = []

    def look_at(self, node: ast.Node) -> None:
        match node:
            case ast.Literal():
                pass
            case ast.Name():
                if node.key not in self._model:
                    hint = (
                        closest_name(node.key, self._model)
                        or f"the attributes are {', '.join(sorted(self._model)[:20])}"
                    )
                    self._say(f"there is no attribute {node.key}", node, hint if self._model else None)
            case ast.Comparison():
                self._comparison(node)
            case ast.Unary():
                self._needs_number(node.operand)
            case ast.Arithmetic():
                self._needs_number(node.left)
                self._needs_number(node.right)
            case ast.In() | ast.Like():
                word = "IN" if isinstance(node, ast.In) else "LIKE"
                if self._kind(node.name) not in (None, types.ValueKind.STRING):
                    self._say(f"{word} is for strings, and {self._named(node.name)}: always false", node)
            case ast.Contains():
                self._contains(node)

    def _comparison(self, node: ast.Comparison) -> None:
        left, right = self._kind(node.left), self._kind(node.right)
        if left is None or right is None:
            return
        if left is not right and not (left.is_number and right.is_number):
            self._say(
                f"{left.value} and {right.value} are unlike: {node.operator} between them is always false",
                node,
            )
        elif left is types.ValueKind.SET:
            self._say("sets do not compare: always false", node, "write name CONTAINS 'word'")
        elif not left.is_number and node.operator not in ("=", "<>"):
            self._say(f"{left.value}s compare only with = and <>: {node.operator} is always false", node)

    def _contains(self, node: ast.Contains) -> None:
        declared = self._model.get(node.name.key)
        if declared is None:
            return
        if declared.kind is not types.ValueKind.SET:
            self._say(f"CONTAINS is for sets, and {self._named(node.name)}: always false", node)
        elif node.word not in declared.domain:
            hint = closest_name(node.word, declared.domain) or f"there are {', '.join(declared.domain)}"
            self._say(f"{node.name.key} never contains {node.word!r}", node, hint)

    def _needs_number(self, node: ast.Expression) -> None:
        kind = self._kind(node)
        if kind is not None and not kind.is_number:
            what = self._named(node) if isinstance(node, ast.Name) else f"this is a {kind.value}"
            self._say(f"arithmetic is for numbers, and {what}: always NULL", node)

    def _named(self, name: ast.Name) -> str:
        return f"{name.key} is a {self._model[name.key].kind.value}"

    def _kind(self, node: ast.Expression) -> types.ValueKind | None:
        match node:
            case ast.Literal():
                return node.kind
            case ast.Name():
                declared = self._model.get(node.key)
                return declared.kind if declared else None
            case ast.Unary():
                kind = self._kind(node.operand)
                return kind if kind and kind.is_number else None
            case ast.Arithmetic():
                sides = {self._kind(node.left), self._kind(node.right)}
                if not sides <= {types.ValueKind.INT, types.ValueKind.FLOAT}:
                    return None
                return types.ValueKind.FLOAT if types.ValueKind.FLOAT in sides else types.ValueKind.INT

    def _say(self, message: str, node: ast.Node, hint: str | None = None) -> None:
        self.problems.append(TypeProblem(message, node.span, hint))
