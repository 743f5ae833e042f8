"""The windows of event time, numbered in order. Pure.

All windows of a grid have the same length until the setting changes.  A change adds a section that starts at
a boundary of the windows before it, so every report still belongs to exactly one window, and no window is
shorter or longer than those of its section.  Numbers continue across sections: the windows in which a machine
was counted are a bitmap over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ALIGN_MS = 3_600_000  # how long a change waits for a time that is a multiple of both lengths


@dataclass(frozen=True, slots=True)
class GridSection:
    """Windows of one length from a time on."""

    from_ms: int
    number: int  # of the first window
    width_ms: int


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """The sections in order; each ends where the next one starts."""

    sections: tuple[GridSection, ...]

    @classmethod
    def of_width(cls, width_ms: int) -> WindowGrid:
        return cls((GridSection(0, 0, width_ms),))

    @property
    def width_ms(self) -> int:
        """The length of windows in the last section."""
        return self.sections[-1].width_ms

    def numbers(self, times_ms: Ints) -> Ints:
        """The window of each time."""
        numbers = _numbers(self.sections[0], times_ms)
        for section in self.sections[1:]:
            numbers = np.where(times_ms >= section.from_ms, _numbers(section, times_ms), numbers)
        return numbers

    def number(self, time_ms: int) -> int:
        section = self._section(time_ms)
        return section.number + (time_ms - section.from_ms) // section.width_ms

    def start_ms(self, number: int) -> int:
        section = next(
            (section for section in reversed(self.sections) if section.number <= number), self.sections[0]
        )
        return section.from_ms + (number - section.number) * section.width_ms

    def width_of(self, number: int) -> int:
        return self.start_ms(number + 1) - self.start_ms(number)

    def floor_ms(self, time_ms: int) -> int:
        """The latest boundary that is not after a time."""
        return self.start_ms(self.number(time_ms))

    def changed(self, width_ms: int, after_ms: int) -> WindowGrid:
        """Windows of another length, from the next boundary after a time on.

        If possible from a time that is a multiple of both lengths, so that windows stay aligned to the clock.
        """
        section = self._section(after_ms)
        start_ms = self.start_ms(self.number(after_ms) + 1)
        period_ms = math.lcm(section.width_ms, width_ms)
        common_ms = -(-start_ms // period_ms) * period_ms
        is_boundary = (common_ms - section.from_ms) % section.width_ms == 0
        if is_boundary and common_ms - start_ms <= ALIGN_MS:
            start_ms = common_ms
        number = section.number + (start_ms - section.from_ms) // section.width_ms
        kept = tuple(earlier for earlier in self.sections if earlier.from_ms <= section.from_ms)
        return WindowGrid((*kept, GridSection(start_ms, number, width_ms)))

    def pruned(self, closed_ms: int) -> WindowGrid:
        """Without the sections whose windows are all closed."""
        current = self._section(closed_ms)
        return WindowGrid(tuple(section for section in self.sections if section.from_ms >= current.from_ms))

    def pack(self) -> list[Any]:
        return [[section.from_ms, section.number, section.width_ms] for section in self.sections]

    @classmethod
    def unpack(cls, packed: list[Any]) -> WindowGrid:
        return cls(tuple(GridSection(*section) for section in packed))

    def _section(self, time_ms: int) -> GridSection:
        return next(
            (section for section in reversed(self.sections) if section.from_ms <= time_ms), self.sections[0]
        )


def _numbers(section: GridSection, times_ms: Ints) -> Ints:
    numbers: Ints = section.number + (times_ms - section.from_ms) // section.width_ms
    return numbers
