"""Columns of a shard's machines: their names, and a few numbers for each.

Names rarely change and are most of the data.  So they are stored separately (`NodeNames`, with a version),
written only when a machine joined or was removed, and cached by a worker between micro-batches.  The numbers
are compressed; most values of a column are equal.

**Deduplication.**  (machine, boot, sequence) identifies a report.  For each machine the highest sequence is
stored, with a bitmap of the 63 sequences before it, so duplicates are detected even if reports are reordered.
The same is stored for the boot before: its last reports may arrive after the first ones of the new boot.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core.reports import duplicate_columns

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

GROUPS_MAX = 100_000
ZONES_MAX = 1024

_CODEC = "lz4"

#: For each column: the type, and the initial value of a new machine.
COLUMNS: Mapping[str, tuple[Any, float]] = {
    "boot": (np.int64, 0),
    "sequence": (np.int64, -1),
    "seen": (np.uint64, 0),  # bit i: sequence (highest - i) was received
    "former_boot": (np.int64, 0),
    "former_sequence": (np.int64, -1),
    "former_seen": (np.uint64, 0),
    "received_ms": (np.int64, 0),  # by the broker's clock
    "period_ms": (np.int32, 0),
    "window": (np.int64, -1),  # number of the last window in which it was counted
    "windows": (np.uint64, 0),  # bit i: counted in the window i before the last
    "group": (np.int32, 0),
    "zone": (np.int32, 0),
}


@dataclass(frozen=True, slots=True)
class NodeNames:
    """``hints``: first row of the machines of a message, by the name of its first machine."""

    version: str = ""
    array: pa.StringArray = field(default_factory=lambda: pa.array([], pa.string()))
    hints: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_array(cls, array: pa.StringArray) -> NodeNames:
        return cls(uuid.uuid4().hex, array)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: int) -> str:
        name: str = self.array[place].as_py()
        return name

    def hinted(self, machines: pa.StringArray) -> Ints | None:
        """The rows of the machines, if consecutive: channels mostly keep the order of machines."""
        start = self.hints.get(machines[0].as_py(), -1)
        if start < 0 or not self.array.slice(start, len(machines)).equals(machines):
            return None
        return np.arange(start, start + len(machines))

    def pack(self) -> bytes:
        batch = pa.RecordBatch.from_arrays([self.array], ["names"])
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=_CODEC)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed

    @classmethod
    def unpack(cls, version: str, packed: bytes) -> NodeNames:
        with pa.ipc.open_stream(packed) as reader:
            return cls(version, reader.read_next_batch().column(0))


@dataclass(slots=True)
class NodeColumns:
    """``schema``: the columns of this plan: `COLUMNS` and the columns of its rules."""

    schema: Mapping[str, tuple[Any, float]] = field(default_factory=lambda: COLUMNS)
    names: NodeNames = field(default_factory=NodeNames)
    data: dict[str, Array] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # names, and their codes in the column
    zones: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (kind, start) in self.schema.items():
            self.data.setdefault(name, np.full(len(self.names), start, kind))

    def __len__(self) -> int:
        return len(self.names)

    # Names to rows

    def places(self, arrays: Sequence[pa.StringArray]) -> list[Ints]:
        """The row of each machine; new machines get a new row.

        Call it once for many arrays: Arrow hashes all known names in each call.
        """
        places = [self.names.hinted(array) for array in arrays]
        odd = [number for number, located in enumerate(places) if located is None]
        if odd:
            together = pa.concat_arrays([arrays[number] for number in odd])
            known = pc.index_in(together, value_set=self.names.array)
            if known.null_count:
                self._grow(pc.unique(together.filter(known.is_null())))
                known = pc.index_in(together, value_set=self.names.array)
            ends = np.cumsum([len(arrays[number]) for number in odd])
            for number, part in zip(odd, np.split(known.to_numpy().astype(np.int64), ends[:-1]), strict=True):
                places[number] = part
                if part[-1] - part[0] == len(part) - 1 and (np.diff(part) == 1).all():
                    self.names.hints[arrays[number][0].as_py()] = int(part[0])
        return [located for located in places if located is not None]

    def group_codes(self, groups: pa.StringArray) -> Ints:
        """-1 for groups beyond the limit."""
        return _codes(groups, self.groups, GROUPS_MAX, -1)

    def zone_codes(self, zones: pa.StringArray) -> Ints:
        """Beyond the limit, all zones share the last code."""
        return _codes(zones, self.zones, ZONES_MAX, ZONES_MAX - 1)

    def _grow(self, names: pa.StringArray) -> None:
        hints = self.names.hints
        self.names = NodeNames(
            uuid.uuid4().hex, pa.concat_arrays([self.names.array, names.cast(pa.string())]), hints
        )
        self.data = {
            name: np.concatenate([self.data[name], np.full(len(names), start, kind)])
            for name, (kind, start) in self.schema.items()
        }

    def keep(self, kept: Bools) -> Ints:
        """Remove the other machines. The new row of each machine; -1 for removed ones."""
        moved = np.where(kept, np.cumsum(kept) - 1, -1)
        self.names = NodeNames.from_array(self.names.array.filter(pa.array(kept)))
        self.data = {name: column[kept] for name, column in self.data.items()}
        return moved

    # Deduplication

    def unseen(self, place: Array, boot: Array, sequence: Array) -> Bools:
        """Which of these reports (at most one for each machine) are new; records them."""
        data = self.data
        same_boot = data["boot"][place] == boot
        ahead = sequence - data["sequence"][place]
        seen = data["seen"][place]
        if same_boot.all() and (ahead == 1).all():  # the usual case
            data["seen"][place] = seen << np.uint64(1) | np.uint64(1)
            data["sequence"][place] = sequence
            return np.ones(len(place), np.bool_)
        unseen: Bools = np.ones(len(place), np.bool_)
        unseen[same_boot] = self._observe("", place[same_boot], sequence[same_boot])
        former = ~same_boot & (data["former_boot"][place] == boot)
        unseen[former] = self._observe("former_", place[former], sequence[former])
        restarted = ~(same_boot | former)
        at = place[restarted]
        for name in ("boot", "sequence", "seen"):
            data[f"former_{name}"][at] = data[name][at]
        data["boot"][at] = boot[restarted]
        data["sequence"][at] = sequence[restarted]
        data["seen"][at] = 1
        return unseen

    def _observe(self, prefix: str, place: Array, sequence: Array) -> Bools:
        """As `unseen`, for reports of one boot."""
        highest, bitmap = self.data[f"{prefix}sequence"], self.data[f"{prefix}seen"]
        unseen, highest[place], bitmap[place] = duplicate_columns.observe(
            highest[place], bitmap[place], sequence
        )
        return unseen

    def first_in_window(self, place: Array, window: Array, counted: Array) -> Bools:
        """Which of these reports (at most one for each machine) are the first of their machine in a window;
        records them. Only ``counted`` reports are considered."""
        last, bits = self.data["window"][place], self.data["windows"][place]
        unseen, _, marked = duplicate_columns.observe(last, bits, window)
        first: Bools = counted & unseen
        self.data["windows"][place] = np.where(first, marked, bits)
        self.data["window"][place] = np.where(counted, np.maximum(last, window), last)
        return first

    # Serialization

    def pack(self) -> list[Any]:
        """Everything except the names."""
        columns = {
            name: pa.compress(column, codec=_CODEC, asbytes=True) for name, column in self.data.items()
        }
        return [self.names.version, len(self.names), list(self.groups), list(self.zones), columns]

    @classmethod
    def unpack(
        cls, packed: Sequence[Any], names: NodeNames, schema: Mapping[str, tuple[Any, float]]
    ) -> NodeColumns:
        """A new column has initial values; a column that is no longer in the schema is dropped."""
        _, rows, groups, zones, columns = packed
        if rows < 0:
            raise ValueError(f"it has {rows} rows")
        data_ = {}
        for name, (kind, _) in schema.items():
            if name in columns:
                size = rows * np.dtype(kind).itemsize
                raw = pa.decompress(columns[name], decompressed_size=size, codec=_CODEC, asbytes=True)
                data_[name] = np.frombuffer(bytearray(raw), kind)
        codes = [{word: code for code, word in enumerate(words)} for words in (groups, zones)]
        return cls(schema, names, data_, *codes)


def split_rounds(place: Ints, sequence: Array) -> Iterator[Ints | slice]:
    """Split rows into rounds with at most one row for each machine, in the order of sequence."""
    if len(place) == 0:
        return
    if (np.diff(place) > 0).all() or len(np.unique(place)) == len(place):
        yield slice(None)
        return
    order = np.lexsort((sequence, place))
    ordered = place[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.arange(len(place)) - np.repeat(starts, np.diff(starts, append=len(place)))
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


def _codes(words: pa.StringArray, known: dict[str, int], most: int, beyond: int) -> Ints:
    encoded = words.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    codes: list[Any] = list(map(known.get, names))
    if None in codes:
        for place, name in enumerate(names):
            if codes[place] is None:
                codes[place] = known.setdefault(name, len(known)) if len(known) < most else beyond
    result: Ints = np.array(codes, np.int64)[encoded.indices.to_numpy()]
    return result
