"""LIKE patterns: ``%`` for any sequence of characters, ``_`` for any one character, in linear time.

A pattern is split at its ``%`` into *segments*. The first must match at the start of the value, the last at
its end, and each one between at the leftmost position after the previous one: if there is a match at all,
then there is one with every segment as far left as possible, so there is no backtracking. A regular
expression does the same with atomic groups. The time is at most the length of the value times that of the
segments between two ``%`` that contain ``_`` (`gap_length`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ANY_ONE: Final = None  # marks an unescaped _ of the pattern in a segment

_END: Final = "(?!.)"  # with (?s), the very end; $ would also match before a final line feed

Segment = tuple[str | None, ...]  # characters, and ANY_ONE


@dataclass(frozen=True, slots=True)
class PatternShape:
    """``segments`` has one element where there is no ``%``, and one more than there are runs of ``%``."""

    segments: tuple[Segment, ...]

    @property
    def literal(self) -> str | None:
        """The only value it matches, where there are no wildcards."""
        return plain(self.segments[0]) if len(self.segments) == 1 else None


def plain(segment: Segment) -> str | None:
    return None if ANY_ONE in segment else "".join(segment)  # type: ignore[arg-type]


@functools.lru_cache(1024)
def shape(pattern: str, escape: str = "") -> PatternShape:
    """Raises ValueError if the pattern ends with its escape character."""
    segments: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                raise ValueError("the pattern ends with its escape character")
            segments[-1].append(escaped)
        elif character == "_":
            segments[-1].append(ANY_ONE)
        elif character == "%":
            # %% is the same as %
            if len(segments) == 1 or segments[-1]:
                segments.append([])
        else:
            segments[-1].append(character)
    return PatternShape(tuple(tuple(segment) for segment in segments))


def write(form: PatternShape, *, any_one: str, any_run: str, quote: Callable[[str], str]) -> str:
    """The same pattern in another notation."""
    return any_run.join(
        "".join(any_one if character is None else quote(character) for character in segment)
        for segment in form.segments
    )


def canonical(form: PatternShape) -> tuple[str, str]:
    """Pattern and escape: the escape is empty unless it is needed."""
    needed = any(character in ("%", "_") for segment in form.segments for character in segment)
    if not needed:
        return write(form, any_one="_", any_run="%", quote=str), ""
    return (
        write(form, any_one="_", any_run="%", quote=lambda c: "\\" + c if c in "%_\\" else c),
        "\\",
    )


def regular_expression(form: PatternShape) -> str:
    """An anchored regular expression for Python and Java, which both support atomic groups."""
    first, *rest = (_expression(segment) for segment in form.segments)
    if not rest:
        return f"(?s)^{first}{_END}"
    *middle, last = rest
    return f"(?s)^{first}{''.join(f'(?>.*?{part})' for part in middle)}.*{last}{_END}"


@functools.lru_cache(1024)
def matcher(pattern: str, escape: str = "") -> Callable[[str], bool]:
    first, *rest = shape(pattern, escape).segments
    if not rest:
        match = re.compile(_expression(first), re.S).fullmatch
        return lambda value: match(value) is not None
    *middle, last = rest
    start, end = plain(first), plain(last)
    if not middle and start is not None and end is not None:
        least = len(start) + len(end)
        return lambda value: len(value) >= least and value.startswith(start) and value.endswith(end)
    if len(middle) == 1 and not first and not last and (inside := plain(middle[0])) is not None:
        return lambda value: inside in value
    # The last segment has a fixed length, so its place is known; the others must end before it.
    head, tail = _search(first), _search(last)
    parts = [(_search(part), len(part)) for part in middle]

    def matches(value: str) -> bool:
        at, end = len(first), len(value) - len(last)
        if at > end or head(value, 0, at) < 0 or tail(value, end, len(value)) < 0:
            return False
        for search, length in parts:
            at = search(value, at, end)
            if at < 0:
                return False
            at += length
        return True

    return matches


def _search(segment: Segment) -> Callable[[str, int, int], int]:
    """Where the segment begins between two positions of a value; -1: nowhere. In linear time if it is
    plain."""
    if (text := plain(segment)) is not None:
        return lambda value, start, end: value.find(text, start, end)
    search = re.compile(_expression(segment), re.S).search
    return lambda value, start, end: -1 if (match := search(value, start, end)) is None else match.start()


def gap_length(form: PatternShape) -> int:
    """The length of the segments that can begin anywhere and contain wildcards: the time of a match grows
    with it, for each character of the value."""
    return sum(len(segment) for segment in form.segments[1:-1] if ANY_ONE in segment)


def _expression(segment: Segment) -> str:
    return "".join("." if character is None else re.escape(character) for character in segment)
