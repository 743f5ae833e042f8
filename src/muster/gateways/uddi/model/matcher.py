"""Whether an entity matches a UDDI search.

One of the names must match (or), all categories and tModels (and), and one of the identifiers (or), unless a
qualifier changes that.  Wildcards are used only with ``approximateMatch``: ``%`` for any characters, ``_``
for one, a backslash before either for the character itself.

Extension of the standard: a group under `BOX` in a search matches entities whose location intersects that
box.

Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from muster.core import errors
from muster.gateways.uddi.model import entities, faults, find_qualifiers

KEYWORDS = "uddi:uddi.org:categorization:general_keywords"
BOX = "uddi:muster:boundingbox"
LEASE = "uddi:muster:lease"
_SIDES = ("minx", "miny", "maxx", "maxy")

T = TypeVar("T")


@functools.lru_cache(256)
def _pattern(text: str) -> re.Pattern[str]:
    """The pattern of a run between two ``%``."""
    made, escaped = "", False
    for character in text:
        if not escaped and character == "\\":
            escaped = True
        else:
            made += "[\\s\\S]" if character == "_" and not escaped else re.escape(character)
            escaped = False
    return re.compile(made)


def _compare(how: find_qualifiers.FindQualifiers) -> Callable[[str, str], bool]:
    """A function that compares a searched text with an existing one."""
    if "approximateMatch" in how:
        return lambda pattern, there: like(how.fold(pattern), how.fold(there))
    return lambda text, there: how.fold(text) == how.fold(there)


def like(pattern: str, there: str) -> bool:
    """Linear in both: the runs between ``%`` are searched one after the other, each as early as possible."""
    parts = _runs(pattern)
    if len(parts) == 1:
        return _pattern(pattern).fullmatch(there) is not None
    first, *middle, last = parts
    begin = first.match(there)
    if begin is None:
        return False
    place = begin.end()
    for run in middle:
        match = run.search(there, place)
        if match is None:
            return False
        place = match.end()
    # The last run must end at the end of the text; it has no ``%``, so its length is fixed.
    length = _length(pattern)
    return len(there) - length >= place and last.fullmatch(there, len(there) - length) is not None


@functools.lru_cache(256)
def _runs(text: str) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(part) for part in _split(text))


@functools.lru_cache(256)
def _length(text: str) -> int:
    """The number of characters that the run after the last ``%`` matches."""
    last = _split(text)[-1]
    return len(re.sub(r"\\(.)", r"\1", last, flags=re.DOTALL))


def _split(text: str) -> list[str]:
    parts, current, escaped = [], "", False
    for character in text:
        if escaped:
            current, escaped = current + character, False
        elif character == "\\":
            current, escaped = current + character, True
        elif character == "%":
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def names_match(
    searched: Sequence[entities.UddiName],
    there: Iterable[entities.UddiName],
    how: find_qualifiers.FindQualifiers,
) -> bool:
    if not searched:
        return True
    same = _compare(how)
    there = list(there)
    return any(
        same(pattern.text, name.text) and _language(pattern.language, name.language)
        for pattern in searched
        for name in there
    )


def _language(searched: str, there: str) -> bool:
    searched, there = searched.lower(), there.lower()
    return not searched or there == searched or there.startswith(f"{searched}-")


def bag_matches(
    searched: entities.CategoryBag,
    there: entities.CategoryBag,
    how: find_qualifiers.FindQualifiers,
    *,
    default: str,
) -> bool:
    """``default``: andAllKeys or orAllKeys, without a qualifier."""
    if not searched:
        return True
    same = _compare(how)

    def has(reference: entities.KeyedReference) -> bool:
        return any(_same_reference(reference, held, same) for held in there.references)

    def has_group(group: tuple[str, tuple[entities.KeyedReference, ...]]) -> bool:
        model, references = group
        held = [inner for name, inner in there.groups if name == model]
        if model == BOX:
            wanted_box = box(references)
            return any(boxes_meet(wanted_box, each) for each in map(box_of, held) if each is not None)
        return any(
            all(any(_same_reference(each, other, same) for other in inner) for each in references)
            for inner in held
        )

    mode = next(
        (qualifier for qualifier in ("andAllKeys", "orAllKeys", "orLikeKeys") if qualifier in how), default
    )
    if mode == "orAllKeys":
        return any(map(has, searched.references)) or any(map(has_group, searched.groups))
    if mode == "orLikeKeys":
        alike: dict[tuple[str, bool], list[bool]] = {}
        for reference in searched.references:
            alike.setdefault((reference.model, False), []).append(has(reference))
        for group in searched.groups:
            alike.setdefault((group[0], True), []).append(has_group(group))
        return all(map(any, alike.values()))
    return all(map(has, searched.references)) and all(map(has_group, searched.groups))


def _same_reference(
    searched: entities.KeyedReference, there: entities.KeyedReference, same: Callable[[str, str], bool]
) -> bool:
    if searched.model != there.model or not same(searched.value, there.value):
        return False
    # The name is significant only for keywords; otherwise it is for display.
    return searched.model != KEYWORDS or same(searched.name, there.name)


def models_match(searched: Sequence[str], there: set[str], how: find_qualifiers.FindQualifiers) -> bool:
    if not searched:
        return True
    if "orAllKeys" in how or "orLikeKeys" in how:
        return any(model in there for model in searched)
    return all(model in there for model in searched)


# Boxes.

Box = tuple[float, float, float, float]  # west, south, east, north


def box(references: Iterable[entities.KeyedReference]) -> Box:
    sides = {reference.name.lower(): reference.value for reference in references}
    try:
        west, south, east, north = (float(sides[side]) for side in _SIDES)
    except (KeyError, ValueError) as error:
        raise faults.fault(
            faults.UddiErrorCode.INVALID_VALUE,
            f"a box needs references with the key names {', '.join(_SIDES)} and numbers as values",
        ) from error
    if not (-90 <= south <= north <= 90 and -180 <= west <= 180 and -180 <= east <= 180):
        raise faults.fault(
            faults.UddiErrorCode.INVALID_VALUE,
            f"{(west, south, east, north)} is not a valid box in degrees",
        )
    return west, south, east, north


def box_of(references: Iterable[entities.KeyedReference]) -> Box | None:
    """The box of an existing entity, which may have invalid values."""
    try:
        return box(references)
    except errors.Refused:
        return None


def boxes_meet(first: Box, second: Box) -> bool:
    """Whether two boxes intersect. If a box crosses the date line, its west is greater than its east."""
    return (
        first[1] <= second[3]
        and second[1] <= first[3]
        and any(a[0] <= b[1] and b[0] <= a[1] for a in _spans(first) for b in _spans(second))
    )


def _spans(area: Box) -> list[tuple[float, float]]:
    west, _, east, _ = area
    return [(west, east)] if west <= east else [(west, 180.0), (-180.0, east)]


def slice_results(results: Sequence[T], head: int, rows: int) -> Sequence[T]:
    return results[head - 1 : head - 1 + rows]
