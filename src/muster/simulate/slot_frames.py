"""The single reports of a slot as the bytes that a connection sends: one packed report in each message.

What a sensor sends each time (its names, its metrics' names, the sizes) is written once.  At each tick only
times, sequence numbers and values are written over those of the last tick, for all machines of a slot with a
few array operations.  So a fleet that is played takes little of the machine that it measures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from muster.bus import message_format
from muster.core.reports import columns, packed
from muster.simulate import fleet, realistic

_NUMBERS_AT = packed.HEADER.size - 40  # of boot, sequence and time in a report
_END = 2  # bytes after the report


class SlotFrames:
    """``subject``: of all messages. Memory: all messages of a slot."""

    def __init__(self, slot: fleet.FleetSlot, subject: str, period_s: float) -> None:
        self._subject = subject
        self._period_s = period_s
        self._machines = [name.encode() for name in slot.names.to_pylist()]
        self._zones = [name.encode() for name in slot.zones.to_pylist()]
        self._groups = slot.group_numbers
        rows = len(self._machines)
        if slot.lives is None:
            self._roles = [0] * rows
            self._members: tuple[npt.NDArray[np.int64], ...] = (np.arange(rows),)
            extra: tuple[tuple[str, ...], ...] = ((),)
        else:
            self._roles, self._members = slot.lives.roles.tolist(), slot.lives.members
            extra = realistic.ROLES
        names = [(*columns.STANDARD_METRICS, *more) for more in extra]
        self._parts = [(packed.pack_names(of_role), bytes(8 * len(of_role))) for of_role in names]
        messages = [self._message(row, group) for row, group in enumerate(self._groups.tolist())]
        self._buffer = bytearray(b"".join(data for data, _ in messages))
        self._ends = np.cumsum([len(data) for data, _ in messages])
        self._reports = self._ends - [size for _, size in messages] - _END  # where the reports begin

    def _message(self, row: int, group: int) -> tuple[bytes, int]:
        """A message without numbers and values, and the size of the report in it."""
        names, values = self._parts[self._roles[row]]
        texts = (self._machines[row], b"g%d" % group, self._zones[row])
        data = packed.pack((0, 0, 0, self._period_s, 0), texts, names, values)
        return b"".join(message_format.publish_parts(self._subject, data)), len(data)

    def fill(self, made: fleet.FleetReports) -> None:
        """Write the reports of another tick."""
        if made.slot.group_numbers is not self._groups:
            self._move(made.slot.group_numbers)
        numbers = np.stack([made.boot, made.sequence, made.reported_ms], axis=1)
        self._write(self._reports + _NUMBERS_AT, numbers)
        extra = made.extra or [np.zeros((len(numbers), 0))]
        for members, more in zip(self._members, extra, strict=True):
            values = np.concatenate([made.standard[members], more], axis=1)
            self._write(self._reports[members] + packed.HEADER.size, values)

    def _move(self, groups: npt.NDArray[np.int64]) -> None:
        for row in np.flatnonzero(groups != self._groups).tolist():
            data, size = self._message(row, int(groups[row]))
            begin = int(self._ends[row - 1]) if row else 0
            self._buffer[begin : int(self._ends[row])] = data
            more = begin + len(data) - int(self._ends[row])
            self._ends[row:] += more
            self._reports[row + 1 :] += more
            self._reports[row] = self._ends[row] - size - _END
        self._groups = groups

    def _write(self, starts: npt.NDArray[np.int64], rows: npt.NDArray[np.generic]) -> None:
        size = rows.itemsize * rows.shape[1]
        if len(rows):
            # A view of the bytes from each place on, which overlap.
            places = np.ndarray((len(self._buffer) - size + 1,), f"V{size}", self._buffer, strides=(1,))
            places[starts] = rows.view(f"V{size}")[:, 0]

    def frames(self, reporting: npt.NDArray[np.bool_], rows: int) -> Iterator[tuple[int, bytes]]:
        """The messages of the machines that report, in pieces of about ``rows`` machines: how many messages,
        and their bytes."""
        view = memoryview(self._buffer)
        starts = np.concatenate([[0], self._ends[:-1]])
        for first in range(0, len(reporting), rows):
            part = slice(first, first + rows)
            kept = np.concatenate([[False], reporting[part], [False]])
            begins, ends = (np.flatnonzero(kept[1:] > kept[:-1]), np.flatnonzero(kept[1:] < kept[:-1]) - 1)
            spans = zip(starts[part][begins].tolist(), self._ends[part][ends].tolist(), strict=True)
            yield int(np.count_nonzero(reporting[part])), b"".join([view[begin:end] for begin, end in spans])

    def reports(self, reporting: npt.NDArray[np.bool_]) -> list[bytes]:
        """The reports without the messages around them."""
        rows = np.flatnonzero(reporting)
        spans = zip(self._reports[rows].tolist(), (self._ends[rows] - _END).tolist(), strict=True)
        return [bytes(self._buffer[begin:end]) for begin, end in spans]
