"""Selectors, compiled once and indexed so that a message is tested only against selectors that may match.

For each selector, the index picks one equality (``region = 'north'``) or list (``region IN (…)``) that must
be true for the selector to be true, and stores the selector under that name and value. A message is then
tested against the selectors stored under its own values and those without such a term. Each candidate is
evaluated completely, so the index may only return too many candidates, never too few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from muster.core import errors
from muster.message import errors as message_errors
from muster.message import messages
from muster.predicates import ast
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import python
from muster.predicates.syntax import parser

K = TypeVar("K", bound=Hashable)
Matches = Callable[[Callable[[str], object]], bool]


@functools.lru_cache(4096)
def compiled(selector: str) -> Matches:
    """Compile a selector. Raises `message_errors.InvalidSelector` if it is not a JMS selector."""
    return python.compile(parse(selector))


def parse(selector: str) -> ast.Condition:
    try:
        return parser.parse(selector, strict=True)
    except errors.ParseError as error:
        raise message_errors.InvalidSelector(
            error.message, text=error.text, position=error.position, hint=error.hint
        ) from error


def accepts(selector: str | None, meta: messages.MessageMeta) -> bool:
    return not selector or compiled(selector)(meta.lookup())


@functools.lru_cache(4096)
def terms(selector: str) -> tuple[str, tuple[object, ...]] | None:
    """A name and its possible values, if the selector requires one of them; otherwise None."""
    condition = normal_forms.negation_normal(parse(selector))
    clauses = condition.operands if isinstance(condition, ast.And) else (condition,)
    for clause in clauses:
        match clause:
            case ast.Comparison(operator="=", left=ast.Name() as name, right=ast.Literal() as literal):
                return name.key, (literal.value,)
            case ast.In():
                return clause.name.key, tuple(clause.words)
    return None


class SelectorIndex(Generic[K]):
    """Keys with their selectors. The cost of `matching` depends on the number of candidates only."""

    def __init__(self) -> None:
        self._selectors: dict[K, str | None] = {}
        self._filed: dict[str, dict[object, dict[K, Matches]]] = {}
        self._others: dict[K, Matches | None] = {}

    def __len__(self) -> int:
        return len(self._selectors)

    def add(self, key: K, selector: str | None) -> None:
        self.remove(key)
        self._selectors[key] = selector
        term = terms(selector) if selector else None
        if term is None:
            self._others[key] = compiled(selector) if selector else None
            return
        name, accepted = term
        for value in accepted:
            self._filed.setdefault(name, {}).setdefault(value, {})[key] = compiled(selector or "")

    def remove(self, key: K) -> None:
        if key not in self._selectors:
            return
        selector = self._selectors.pop(key)
        self._others.pop(key, None)
        term = terms(selector) if selector else None
        if term is None:
            return
        name, accepted = term
        by_value = self._filed[name]
        for value in accepted:
            by_value[value].pop(key, None)
            if not by_value[value]:
                del by_value[value]
        if not by_value:
            del self._filed[name]

    def matching(self, meta: messages.MessageMeta) -> Iterator[K]:
        get = meta.lookup()
        for name, by_value in self._filed.items():
            value = get(name)
            if value is not None and (candidates := by_value.get(value)) is not None:
                yield from (key for key, matches in candidates.items() if matches(get))
        for key, test in self._others.items():
            if test is None or test(get):
                yield key
