"""Whether an entity is what a search of UDDI asks for.

Names are one of the wanted (or); category bags and technical fingerprints hold all of the wanted (and), and
identifier bags one of them (or), unless a qualifier says otherwise.  Wildcards count only under
``approximateMatch``: ``%`` for any run of characters, ``_`` for one, a backslash before either for itself.

Beyond the standard, and visible to its clients as it stands: a group under `BOX` among the wanted matches
whatever lies in that box of the earth, at least in part.

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
    """Of a run between two ``%``."""
    made, escaped = "", False
    for one in text:
        if not escaped and one == "\\":
            escaped = True
        else:
            made += "[\\s\\S]" if one == "_" and not escaped else re.escape(one)
            escaped = False
    return re.compile(made)


def _compare(how: find_qualifiers.FindQualifiers) -> Callable[[str, str], bool]:
    """From the wanted text and the one that is there."""
    if "approximateMatch" in how:
        return lambda wanted, there: like(how.fold(wanted), how.fold(there))
    return lambda wanted, there: how.fold(wanted) == how.fold(there)


def like(wanted: str, there: str) -> bool:
    """Linear in both: the runs between ``%`` are looked for one after the other, each as early as can be."""
    parts = _runs(wanted)
    if len(parts) == 1:
        return _pattern(wanted).fullmatch(there) is not None
    first, *middle, last = parts
    begin = first.match(there)
    if begin is None:
        return False
    place = begin.end()
    for one in middle:
        found = one.search(there, place)
        if found is None:
            return False
        place = found.end()
    # The last run must end where the text ends; being free of stars, its length is fixed.
    length = _length(wanted)
    return len(there) - length >= place and last.fullmatch(there, len(there) - length) is not None


@functools.lru_cache(256)
def _runs(text: str) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(part) for part in _split(text))


@functools.lru_cache(256)
def _length(text: str) -> int:
    """Characters that the part after the last ``%`` matches."""
    last = _split(text)[-1]
    return len(re.sub(r"\\(.)", r"\1", last, flags=re.DOTALL))


def _split(text: str) -> list[str]:
    parts, current, escaped = [], "", False
    for one in text:
        if escaped:
            current, escaped = current + one, False
        elif one == "\\":
            current, escaped = current + one, True
        elif one == "%":
            parts.append(current)
            current = ""
        else:
            current += one
    return [*parts, current]


def names_match(
    wanted: Sequence[entities.UddiName],
    there: Iterable[entities.UddiName],
    how: find_qualifiers.FindQualifiers,
) -> bool:
    if not wanted:
        return True
    same = _compare(how)
    there = list(there)
    return any(
        same(one.text, name.text) and _language(one.language, name.language)
        for one in wanted
        for name in there
    )


def _language(wanted: str, there: str) -> bool:
    wanted, there = wanted.lower(), there.lower()
    return not wanted or there == wanted or there.startswith(f"{wanted}-")


def bag_matches(
    wanted: entities.CategoryBag,
    there: entities.CategoryBag,
    how: find_qualifiers.FindQualifiers,
    *,
    default: str,
) -> bool:
    """``default``: andAllKeys or orAllKeys, where no qualifier says which."""
    if not wanted:
        return True
    same = _compare(how)

    def has(one: entities.KeyedReference) -> bool:
        return any(_same_reference(one, held, same) for held in there.references)

    def has_group(one: tuple[str, tuple[entities.KeyedReference, ...]]) -> bool:
        model, references = one
        held = [inner for name, inner in there.groups if name == model]
        if model == BOX:
            wanted_box = box(references)
            return any(boxes_meet(wanted_box, each) for each in map(box_of, held) if each is not None)
        return any(
            all(any(_same_reference(each, other, same) for other in inner) for each in references)
            for inner in held
        )

    mode = next((one for one in ("andAllKeys", "orAllKeys", "orLikeKeys") if one in how), default)
    if mode == "orAllKeys":
        return any(map(has, wanted.references)) or any(map(has_group, wanted.groups))
    if mode == "orLikeKeys":
        alike: dict[str, list[entities.KeyedReference]] = {}
        for one in wanted.references:
            alike.setdefault(one.model, []).append(one)
        return all(any(map(has, each)) for each in alike.values()) and all(map(has_group, wanted.groups))
    return all(map(has, wanted.references)) and all(map(has_group, wanted.groups))


def _same_reference(
    wanted: entities.KeyedReference, there: entities.KeyedReference, same: Callable[[str, str], bool]
) -> bool:
    if wanted.model != there.model or not same(wanted.value, there.value):
        return False
    # Only among keywords does the name belong to what is said; else it is for human eyes.
    return wanted.model != KEYWORDS or same(wanted.name, there.name)


def models_match(wanted: Sequence[str], there: set[str], how: find_qualifiers.FindQualifiers) -> bool:
    if not wanted:
        return True
    if "orAllKeys" in how or "orLikeKeys" in how:
        return any(one in there for one in wanted)
    return all(one in there for one in wanted)


# Boxes.

Box = tuple[float, float, float, float]  # west, south, east, north


def box(references: Iterable[entities.KeyedReference]) -> Box:
    found = {one.name.lower(): one.value for one in references}
    try:
        west, south, east, north = (float(found[side]) for side in _SIDES)
    except (KeyError, ValueError) as error:
        raise faults.fault(
            faults.UddiErrorCode.INVALID_VALUE, f"a box needs the numbers {', '.join(_SIDES)}, each named so"
        ) from error
    if not (-90 <= south <= north <= 90 and -180 <= west <= 180 and -180 <= east <= 180):
        raise faults.fault(
            faults.UddiErrorCode.INVALID_VALUE,
            f"{(west, south, east, north)} is no box of the earth, in degrees",
        )
    return west, south, east, north


def box_of(references: Iterable[entities.KeyedReference]) -> Box | None:
    """Of what is held, here or elsewhere: it may say anything of its place."""
    try:
        return box(references)
    except errors.Refused:
        return None


def boxes_meet(one: Box, other: Box) -> bool:
    """A box may cross the date line: then its west is above its east."""
    return (
        one[1] <= other[3]
        and other[1] <= one[3]
        and any(a[0] <= b[1] and b[0] <= a[1] for a in _spans(one) for b in _spans(other))
    )


def _spans(one: Box) -> list[tuple[float, float]]:
    west, _, east, _ = one
    return [(west, east)] if west <= east else [(west, 180.0), (-180.0, east)]


def slice_results(found: Sequence[T], head: int, rows: int) -> Sequence[T]:
    return found[head - 1 : head - 1 + rows]
