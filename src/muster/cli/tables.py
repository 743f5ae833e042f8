"""Columns of tables on a terminal, and times in sentences. Pure.

A table that is wider than the terminal first loses its optional columns, last one first; then the long texts
wrap; then it loses other columns, last one first, because a column of six characters cannot be read. The
first column, which identifies the row, keeps its width. Where the user chooses the columns (SQL), none is
omitted: if they do not fit (`fits`), each row is printed as a list of its values.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

from muster.core.formats import cell_texts

GAP = 2  # between columns
SHORT = 12  # columns up to this width are not made narrower
NARROW = 16  # long columns keep at least this width, or that of a word
WORD = 32  # longer words are broken
LEAST = 6
RULE = 40  # width of the line above a row that is printed as a list


def utc(at_s: float) -> str:
    """A time in UTC, for lines of a stream and sentences; empty for 0, an unknown time."""
    if not at_s:
        return ""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def local(at_s: float) -> str:
    """A time of this machine with its zone, for tables; empty for 0."""
    return datetime.datetime.fromtimestamp(at_s).astimezone().isoformat(" ", "seconds") if at_s else ""


def longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def fits(columns: Sequence[str], widths: Sequence[int], words: Sequence[int], room: int) -> bool:
    """Whether the columns that are not optional fit into ``room`` if only long texts wrap."""
    shown = {index: width for index, width in enumerate(widths) if width and not columns[index].endswith("?")}
    return _total(_narrowest(columns, shown, words)) <= room


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _narrowest(columns: Sequence[str], widths: Mapping[int, int], words: Sequence[int]) -> dict[int, int]:
    """The least widths at which only long texts wrap."""
    least = _least(columns, widths)
    return {
        index: width
        if width == least[index]
        else min(width, max(NARROW, least[index], min(words[index], WORD)))
        for index, width in widths.items()
    }


def _least(columns: Sequence[str], widths: Mapping[int, int]) -> dict[int, int]:
    """The least widths at which long words break, but no title, number or name."""
    return {
        index: min(width, max(SHORT, len(cell_texts.title(columns[index])))) if index else width
        for index, width in widths.items()
    }


def _squeeze(widths: dict[int, int], least: Mapping[int, int], columns: Iterable[int], room: int) -> None:
    """Make ``columns`` narrower until all fit into ``room``, the widest first."""
    for index in sorted(columns, key=lambda index: -widths[index]):
        excess = max(0, _total(widths) - room)
        widths[index] = min(widths[index], max(least[index], widths[index] - excess))


def choose(
    columns: Sequence[str], widths: Sequence[int], words: Sequence[int], room: int | None
) -> dict[int, int]:
    """The columns to show, by index, with their widths; ``room`` None: all, at their full width.

    ``words``: the longest word of each column. A width of 0 marks an empty column. The name of an optional
    column ends with ``?``.
    """
    shown = {index: width for index, width in enumerate(widths) if width or not index}
    if room is None:
        return shown

    optional = [index for index in shown if columns[index].endswith("?")]
    while _total(_narrowest(columns, shown, words)) > room and optional:
        del shown[optional.pop()]
    whole = _narrowest(columns, shown, words)
    least = _least(columns, shown)
    while _total(least) > room and len(least) > 2:
        least.popitem()
    narrow = {index: whole[index] for index in least}
    if _total(narrow) > room:  # the identifying column is made narrower only if there is no other way
        _squeeze(narrow, least, [index for index in narrow if index], room)
        _squeeze(narrow, dict.fromkeys(narrow, LEAST), narrow, room)
        return narrow
    spare = room - _total(narrow)
    for index in sorted(narrow, key=lambda index: shown[index] - narrow[index]):
        wider = min(spare, shown[index] - narrow[index])
        narrow[index] += wider
        spare -= wider
    return narrow
