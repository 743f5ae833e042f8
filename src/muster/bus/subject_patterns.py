"""Match subjects with patterns: ``*`` is one level, ``>`` at the end is one or more."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


def matches(pattern: str, subject: str) -> bool:
    if pattern == subject:
        return True
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    for place, token in enumerate(pattern_tokens):
        if token == ">" and place == len(pattern_tokens) - 1:
            return len(tokens) > place
        if place >= len(tokens) or token not in ("*", tokens[place]):
            return False
    return len(pattern_tokens) == len(tokens)


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression that matches the same subjects, for patterns that are compared very often."""
    tokens = pattern.split(".")
    levels = ["[^.]*" if token == "*" else re.escape(token) for token in tokens]
    if tokens[-1] == ">":
        levels[-1] = ".*"
    return re.compile(r"\.".join(levels) + r"\Z", re.DOTALL)


class SubjectPatternSet:
    """Whether any of several patterns matches; results for recent subjects are cached."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __str__(self) -> str:
        return ", ".join(self._patterns)

    def match(self, subject: str) -> bool:
        known = self._known.get(subject)
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[subject] = any(matches(pattern, subject) for pattern in self._patterns)
        return known
