"""What a predicate says beforehand: which keys it can select, and what their attributes must hold.

Of a million contexts a search wants few.  Where all that it selects have keys that begin alike, or are
named, only those are looked at; and as attributes lie packed in memory, a clause that must be true (one of
the ANDs at the top) is first asked for as bytes: ``floor = 'attic'`` is true only where the packed name is
followed by the packed value.  What passes is unpacked and put to the whole predicate, so all of this need
only be necessary, never sufficient.

Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from muster.inform import protocol
from muster.predicates import ast, like_patterns
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import python
from muster.predicates.syntax import parser

OWN = frozenset({"key", "version", "writer"})  # what every context has, beside its attributes


class SearchPlan(NamedTuple):
    begins: str  # all keys do
    keys: tuple[str, ...] | None  # these only, in their order
    bytes: tuple[bytes, ...]  # each stands in the packed attributes
    asks: tuple[str, ...]  # for these attributes
    matches: python.Matches

    def selects(self, key: str, version: int, writer: str, attributes: dict[str, Any]) -> bool:
        """``attributes`` may be changed."""
        for name in self.asks:
            value = attributes.get(name)
            if value.__class__ is list:
                attributes[name] = frozenset(value)  # as predicates see them: a list is a set
        attributes["key"], attributes["version"], attributes["writer"] = key, version, writer
        return self.matches(attributes.get)

    def reaches(self, prefix: str) -> bool:
        """Whether a key that begins so can be among what it selects."""
        if self.keys is not None:
            return any(key.startswith(prefix) for key in self.keys)
        return self.begins.startswith(prefix) or prefix.startswith(self.begins)


@functools.lru_cache(64)
def plan(predicate: str) -> SearchPlan:
    """`errors.ParseError` where it is none."""
    condition = parser.parse(predicate)
    tree = normal_forms.negation_normal(condition)
    clauses = tree.operands if isinstance(tree, ast.And) else (tree,)
    begins = ""
    keys: tuple[str, ...] | None = None
    needed: dict[bytes, None] = {}
    for clause in clauses:
        match clause:
            case ast.Comparison(operator="=", left=ast.Name(name="key", scope=""), right=ast.Literal(value)):
                keys = (str(value),)
            case ast.In(name=ast.Name(name="key", scope="")):
                keys = keys or tuple(sorted(set(clause.words)))
            case ast.Like(name=ast.Name(name="key", scope="")):
                begins = max(begins, _beginning(clause), key=len)
            case _:
                needed |= dict.fromkeys(_bytes(clause))
    names = {name.key for name in ast.names(condition)}
    return SearchPlan(begins, keys, tuple(needed), tuple(names - OWN), python.compile(condition))


def _beginning(clause: ast.Like) -> str:
    first = like_patterns.shape(clause.pattern, clause.escape).segments[0]
    plain = first[: first.index(like_patterns.ANY_ONE)] if like_patterns.ANY_ONE in first else first
    return like_patterns.plain(plain) or ""


def _bytes(clause: ast.Condition) -> Iterable[bytes]:
    """Of a clause that is true: nothing but IS NULL is true of an attribute that is not there."""
    match clause:
        case ast.And() | ast.Or() | ast.Constant() | ast.IsNull():
            return ()
        case ast.Comparison(operator="=", left=ast.Name() as name, right=ast.Literal(str() as value)):
            return () if name.key in OWN else (protocol.encode(name.key) + protocol.encode(value),)
        case ast.Contains():
            return (protocol.encode(clause.name.key), protocol.encode(clause.word))
        case _:
            return (protocol.encode(name.key) for name in ast.names(clause) if name.key not in OWN)
