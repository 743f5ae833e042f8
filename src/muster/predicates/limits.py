"""Limits on the cost of an expression, checked in advance.

Predicates come from outside: every subscriber, receiver and search has one. A limit on the text limits the
work of parsing; a limit on nesting makes every later pass safe to recurse; the limits on LIKE limit matching
(`like_patterns`), which takes place between the other work of a service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PredicateLimits:
    text_length: int = 65_536
    clauses: int = 1_000
    depth: int = 50  # of parentheses, and of the tree: NOT, arithmetic and groups each add to it
    pattern_length: int = 256  # of LIKE
    pattern_wildcards: int = 32  # runs of % in one pattern: SQL engines may backtrack on each
    gaps_length: int = 256  # of all parts of patterns that contain _ between two %: each is tried everywhere


DEFAULT: Final = PredicateLimits()
