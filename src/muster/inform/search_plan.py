"""The plan of a search: which keys a predicate can select, and which bytes their attributes must contain.

A search usually selects few of many contexts.  If the predicate restricts the key to a prefix or to a list,
only those keys are read.  Attributes are packed in memory, so a clause that must be true (an operand of the
top-level AND) is first checked as a search for bytes: ``floor = 'attic'`` is true only if the packed value
follows the packed name.  Contexts that pass are unpacked and tested with the complete predicate, so the
first check only needs to be a necessary condition.

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

OWN = frozenset({"key", "version", "writer"})  # properties of every context besides its attributes


class SearchPlan(NamedTuple):
    key_prefix: str  # all selected keys begin with it
    keys: tuple[str, ...] | None  # only these, sorted
    needles: tuple[bytes, ...]  # each occurs in the packed attributes
    attribute_names: tuple[str, ...]  # that the predicate uses
    matches: python.Matches

    def selects(self, key: str, version: int, writer: str, attributes: dict[str, Any]) -> bool:
        """Test a context with the complete predicate. ``attributes`` may be modified."""
        for name in self.attribute_names:
            value = attributes.get(name)
            if value.__class__ is list:
                attributes[name] = frozenset(value)  # predicates treat a list as a set
        attributes["key"], attributes["version"], attributes["writer"] = key, version, writer
        return self.matches(attributes.get)

    def reaches(self, prefix: str) -> bool:
        """Whether the plan can select keys that begin with ``prefix``."""
        if self.keys is not None:
            return any(key.startswith(prefix) for key in self.keys)
        return self.key_prefix.startswith(prefix) or prefix.startswith(self.key_prefix)


@functools.lru_cache(64)
def plan(predicate: str) -> SearchPlan:
    """Return the plan of a predicate; `errors.ParseError` if it is invalid."""
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
                begins = max(begins, _key_prefix(clause), key=len)
            case _:
                needed |= dict.fromkeys(_bytes(clause))
    names = {name.key for name in ast.names(condition)}
    return SearchPlan(begins, keys, tuple(needed), tuple(names - OWN), python.compile(condition))


def _key_prefix(clause: ast.Like) -> str:
    first = like_patterns.shape(clause.pattern, clause.escape).segments[0]
    plain = first[: first.index(like_patterns.ANY_ONE)] if like_patterns.ANY_ONE in first else first
    return like_patterns.plain(plain) or ""


def _bytes(clause: ast.Condition) -> Iterable[bytes]:
    """Bytes in the attributes if the clause is true: only IS NULL is true of a missing attribute."""
    match clause:
        case ast.And() | ast.Or() | ast.Constant() | ast.IsNull():
            return ()
        case ast.Comparison(operator="=", left=ast.Name() as name, right=ast.Literal(str() as value)):
            return () if name.key in OWN else (protocol.encode(name.key) + protocol.encode(value),)
        case ast.Contains():
            return (protocol.encode(clause.name.key), protocol.encode(clause.word))
        case _:
            return (protocol.encode(name.key) for name in ast.names(clause) if name.key not in OWN)
