"""What an expression may cost, said beforehand.

Predicates come from outside: every subscriber, receiver and search has one.  A bound on the text bounds the
work of parsing; a bound on nesting lets every later pass recurse without fear of Python's stack; the bounds
on LIKE bound matching, whose time is at most the length of the value times the length of the pattern.
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
    pattern_wildcards: int = 32  # runs of % in one pattern: engines we hand SQL to may backtrack on each


DEFAULT: Final = PredicateLimits()
