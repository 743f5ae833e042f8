"""Normal forms.

Only TRUE selects: a receiver gets an event, or a row is returned, if its predicate is true; false and unknown
have the same effect. So three-valued logic has no extra cost. Every NOT is pushed down to the clauses (De
Morgan's laws hold for unknown as well) and stays there: ``Not`` occurs only on a clause, as its **polarity**.
Then

    true(a AND b) = true(a) and true(b)
    true(a OR b) = true(a) or true(b)
    true(NOT clause) = false(clause)

so a back end computes two-valued truth, and for each clause when it is true and when it is false. The
polarity must not be merged into the operator: values of different types compare FALSE, so with a number x
``NOT (x = 'a')`` is true and ``x <> 'a'`` is not.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Final

from muster.core import errors
from muster.predicates import ast, like_patterns
from muster.predicates.syntax import printer

Literal = ast.Clause | ast.Not  # a clause with its polarity: `Not` here always holds a clause
CACHED_CHARACTERS_MAX: Final = 1024  # of a condition's text: the trees of a hostile one fill the memory


def negation_normal(condition: ast.Condition) -> ast.Condition:
    """Move NOT to the clauses, flatten nested AND and OR, and fold constants.

    Clauses get one form: attribute on the left of its constant, LIKE without wildcards as ``=``.
    """
    start, end = condition.span
    if end - start > CACHED_CHARACTERS_MAX:
        return uncached_negation_normal(condition)
    return cached_negation_normal(condition)


def uncached_negation_normal(condition: ast.Condition) -> ast.Condition:
    """`negation_normal` for a caller that asks once for each condition: saves hashing the tree."""
    return _push(condition, negate=False)


@functools.lru_cache(256)
def cached_negation_normal(condition: ast.Condition) -> ast.Condition:
    return uncached_negation_normal(condition)


def located(condition: ast.Condition) -> ast.Condition:
    """`negation_normal` of this very tree: equal ones, parsed from other texts, have other spans."""
    return _located(_Identity(condition))


class _Identity:
    """Hashes and compares as the very object it holds."""

    __slots__ = ("held",)

    def __init__(self, held: ast.Condition) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held


@functools.lru_cache(256)
def _located(condition: _Identity) -> ast.Condition:
    return _push(condition.held, negate=False)


def _push(condition: ast.Condition, *, negate: bool) -> ast.Condition:
    match condition:
        case ast.Not():
            return _push(condition.operand, negate=not negate)
        case ast.And() | ast.Or():
            parts = [_push(part, negate=negate) for part in condition.operands]
            return _joined(
                parts, conjunction=isinstance(condition, ast.And) is not negate, span=condition.span
            )
        case ast.Constant():
            return ast.Constant(condition.value is not negate, condition.span)
        case _:
            clause = _plain(condition)
            return ast.Not(clause, clause.span) if negate else clause


def _joined(parts: list[ast.Condition], *, conjunction: bool, span: ast.Span) -> ast.Condition:
    kind = ast.And if conjunction else ast.Or
    flat: list[ast.Condition] = []
    for part in parts:
        if isinstance(part, ast.Constant):
            if part.value is not conjunction:
                return part  # FALSE AND …, TRUE OR …: even where the rest is unknown
        elif isinstance(part, kind):
            flat.extend(part.operands)
        else:
            flat.append(part)
    if not flat:
        return ast.Constant(conjunction, span)
    return flat[0] if len(flat) == 1 else kind(tuple(flat), span)


def _plain(clause: ast.Comparison | ast.In | ast.Like | ast.IsNull | ast.Contains) -> ast.Clause:
    match clause:
        case ast.Comparison(left=ast.Literal()) if not isinstance(clause.right, ast.Literal):
            return ast.Comparison(ast.MIRRORED[clause.operator], clause.right, clause.left, clause.span)
        case ast.Like():
            shape = like_patterns.shape(clause.pattern, clause.escape)
            if (only := shape.literal) is not None:
                return ast.Comparison("=", clause.name, ast.Literal(only, clause.span), clause.span)
            return ast.Like(clause.name, *like_patterns.canonical(shape), clause.span)
        case _:
            return clause


def canonical(condition: ast.Condition) -> ast.Condition:
    """One tree for all conditions that differ only in order, repetition, nesting and position of NOT.

    It is its own key for hash-consing: equal policies of a million receivers become one.
    """
    return _sorted(negation_normal(condition))


def _sorted(condition: ast.Condition) -> ast.Condition:
    match condition:
        case ast.And() | ast.Or():
            parts = {printer.write(part): part for part in map(_sorted, condition.operands)}
            ordered = tuple(parts[key] for key in sorted(parts))
            return ordered[0] if len(ordered) == 1 else type(condition)(ordered, condition.span)
        case ast.In():
            return ast.In(condition.name, tuple(sorted(set(condition.words))), condition.span)
        case ast.Not():
            return ast.Not(_sorted(condition.operand), condition.span)
        case _:
            return condition


def disjunctive_normal(condition: ast.Condition, *, cap: int = 64) -> tuple[tuple[Literal, ...], ...]:
    """An OR of ANDs of clauses. No conjunction: never true; an empty one: always true.

    `errors.LimitExceeded` if there would be more than ``cap`` conjunctions, which is found out by
    counting, before any is made.
    """
    tree = canonical(condition)
    if (count := _conjunctions(tree)) > cap:
        raise errors.LimitExceeded(
            f"as an OR of ANDs the expression has {count:,} terms, and at most {cap:,} are allowed",
            hint="fewer ORs inside ANDs; IN ('a', 'b') counts once",
        )
    distinct: dict[frozenset[Literal], tuple[Literal, ...]] = {}
    for product in _expand(tree):
        parts = frozenset(product)
        # No clause is both true and false: such a conjunction cannot hold.
        if not any(isinstance(part, ast.Not) and part.operand in parts for part in parts):
            distinct.setdefault(parts, tuple(dict.fromkeys(product)))
    return tuple(distinct.values())


def _conjunctions(condition: ast.Condition) -> int:
    match condition:
        case ast.And():
            return math.prod(map(_conjunctions, condition.operands))
        case ast.Or():
            return sum(map(_conjunctions, condition.operands))
        case _:
            return 1


def _expand(condition: ast.Condition) -> list[tuple[Literal, ...]]:
    match condition:
        case ast.And():
            return [
                tuple(itertools.chain.from_iterable(choice))
                for choice in itertools.product(*map(_expand, condition.operands))
            ]
        case ast.Or():
            return [product for part in condition.operands for product in _expand(part)]
        case ast.Constant():
            return [()] if condition.value else []
        case _:
            return [(condition,)]
