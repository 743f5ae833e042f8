"""Selectors, compiled once and indexed so that a message is tested only against selectors that may match.

For each selector, the index picks one equality (``region = 'north'``) or list (``region IN (…)``) that must
be true for the selector to be true, and stores the selector under that name and value. A message is then
tested against the selectors stored under its own values and those without such a term. Each candidate is
evaluated completely, so the index may only return too many candidates, never too few.

A selector comes from a client and costs the dispatcher its compilation, so its length and its number of
clauses are limited, as is the total length of those that are cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from muster.core import errors
from muster.message import errors as message_errors
from muster.message import messages
from muster.predicates import ast, limits
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import python
from muster.predicates.syntax import parser

K = TypeVar("K", bound=Hashable)
Matches = Callable[[Callable[[str], object]], bool]


LIMITS: Final = limits.PredicateLimits(text_length=8_192, clauses=256)
CACHED_CHARACTERS_MAX: Final = 256 << 10  # a compiled selector takes up to 80 bytes for each character
CACHED_MAX: Final = 4096


class RequiredTerm(NamedTuple):
    """A message needs one of these values of an attribute for the selector to be true."""

    name: str
    values: tuple[object, ...]


class CompiledSelector(NamedTuple):
    matches: Matches
    term: RequiredTerm | None


class SelectorCache:
    """The most recently used selectors. Connections of several threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, CompiledSelector] = OrderedDict()  # the least recently used are first
        self.characters = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, selector: str) -> CompiledSelector:
        with self._lock:
            entry = self._entries.get(selector)
            if entry is not None:
                self._entries.move_to_end(selector)
                return entry
        entry = _compile(selector)
        with self._lock:
            if selector not in self._entries:
                self.characters += len(selector)
            self._entries[selector] = entry
            while self.characters > CACHED_CHARACTERS_MAX or len(self._entries) > CACHED_MAX:
                oldest, _ = self._entries.popitem(last=False)
                self.characters -= len(oldest)
        return entry


cache: Final = SelectorCache()


def compiled(selector: str) -> Matches:
    """Compile a selector. Raises `message_errors.InvalidSelector` if it is not a JMS selector, and
    `errors.LimitExceeded` if it is too long.
    """
    return cache.get(selector).matches


def _compile(selector: str) -> CompiledSelector:
    condition = parse(selector)
    return CompiledSelector(python.compile(condition), _required_term(condition))


def parse(selector: str) -> ast.Condition:
    try:
        return parser.parse(selector, strict=True, bounds=LIMITS)
    except errors.ParseError as error:
        raise message_errors.InvalidSelector(
            error.message, text=error.text, position=error.position, hint=error.hint
        ) from error


def accepts(selector: str | None, meta: messages.MessageMeta) -> bool:
    return not selector or compiled(selector)(meta.lookup())


def _required_term(condition: ast.Condition) -> RequiredTerm | None:
    condition = normal_forms.negation_normal(condition)
    clauses = condition.operands if isinstance(condition, ast.And) else (condition,)
    for clause in clauses:
        match clause:
            case ast.Comparison(operator="=", left=ast.Name() as name, right=ast.Literal() as literal):
                return RequiredTerm(name.key, (literal.value,))
            case ast.In():
                return RequiredTerm(clause.name.key, tuple(clause.words))
    return None


class SelectorIndex(Generic[K]):
    """Keys with their selectors. The cost of `matching` depends on the number of candidates only."""

    def __init__(self) -> None:
        self._terms: dict[K, RequiredTerm | None] = {}
        self._filed: dict[str, dict[object, dict[K, Matches]]] = {}
        self._others: dict[K, Matches | None] = {}

    def __len__(self) -> int:
        return len(self._terms)

    def add(self, key: K, selector: str | None) -> None:
        self.remove(key)
        if not selector:
            self._terms[key] = self._others[key] = None
            return
        matches, term = cache.get(selector)
        self._terms[key] = term
        if term is None:
            self._others[key] = matches
            return
        for value in term.values:
            self._filed.setdefault(term.name, {}).setdefault(value, {})[key] = matches

    def remove(self, key: K) -> None:
        if key not in self._terms:
            return
        term = self._terms.pop(key)
        self._others.pop(key, None)
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
