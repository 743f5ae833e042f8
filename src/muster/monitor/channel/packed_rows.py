"""Conversion of packed reports (`core.reports.packed`) to columns, a thousand at a time.

The reports are joined to one buffer, from which fixed fields, texts and values are copied with a few array
operations.  Names of metrics are not read: their block is looked up in a table of known sets (`MetricSet`).
Rows are ordered by their set of metrics, so that values are copied as whole blocks, and compress better.
Reports that are not exactly as expected are left to `packed.decode`, one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import errors, messages
from muster.core.reports import columns, packed

SETS_MAX = 4096
NAMES_MAX = 65_536
_SIZE = packed.HEADER.size
_SHORT = 256  # bytes of a name: then it has not more characters
_COMMON_SETS = 8  # of metrics in some reports, which are compared all at once
_UNKNOWN, _INVALID = -1, -2  # instead of the number of a set
_STANDARD = {name: code for code, name in enumerate(columns.STANDARD_METRICS)}

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MetricSet:
    """The names of metrics of some reports. Sets with the same ``form`` have their values in the same
    places."""

    count: int
    form: int
    standard: Ints  # codes of standard metrics, and their places
    standard_at: Ints | slice
    extra: Codes  # codes of the others, and their places
    extra_at: Ints | slice


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Reports that are valid, each by itself."""

    places: list[int]  # among the reports that were read
    batch: pa.RecordBatch  # of `columns.node_schema`
    machines: list[bytes]
    letters: Bytes  # of the machines: a row for each, with zeros at the end
    boot: Ints
    sequence: Ints
    at_ms: Ints
    period_s: Floats

    def are_named(self, senders: Sequence[bytes]) -> Bools:
        """Which reports are of a machine with the name of its sender, or with a dot and more after it."""
        names = np.array(senders)
        width = names.itemsize
        sizes = np.fromiter(map(len, senders), np.int64, len(senders))
        letters = np.zeros((len(senders), max(width + 1, self.letters.shape[1])), np.uint8)
        letters[:, : self.letters.shape[1]] = self.letters
        after = letters[np.arange(len(senders)), sizes]
        begin = letters[:, :width] * (np.arange(width) < sizes[:, None])
        same: Bools = (begin.view(names.dtype)[:, 0] == names) & ((after == 0) | (after == ord(".")))
        return same


class PackedReader:
    """Reads reports, and remembers sets of metrics. Its memory is bounded."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._codes = dict(_STANDARD)
        self._sets: list[MetricSet] = []
        self._numbers: dict[bytes, int] = {}  # of sets, by their block
        self._forms: dict[tuple[int, bytes, bytes], int] = {}

    def read(self, reports: Sequence[bytes]) -> tuple[PackedRows | None, list[int]]:
        """The rows, and the places of the other reports, in their order: of invalid and unusual ones."""
        if len(self._numbers) > SETS_MAX or len(self._codes) > NAMES_MAX:
            self._forget()
        left: list[int] = []
        places = list(range(len(reports)))
        while places:
            chunk = _Chunk([reports[place] for place in places] if left else reports)
            valid = self._check(chunk)
            if valid.all():
                return self._rows(chunk, places), sorted(left)
            left += [place for place, good in zip(places, valid.tolist(), strict=True) if not good]
            places = [place for place, good in zip(places, valid.tolist(), strict=True) if good]
        return None, sorted(left)

    def _check(self, chunk: _Chunk) -> Bools:
        """Which reports are valid; in the order of their sets of metrics where all are."""
        valid = chunk.has_valid_fields()
        if not valid.all():
            return valid
        sets = self._set_numbers(chunk)
        valid = sets >= 0
        if valid.all():
            forms = np.array([known.form for known in self._sets])[sets]
            chunk.sort(np.lexsort((sets, forms)), sets, forms)
            valid = chunk.has_valid_content()
            if not valid.all():
                valid[chunk.order] = valid.copy()
        return valid

    def _set_numbers(self, chunk: _Chunk) -> Ints:
        """The set of each report, or a negative number."""
        sets = np.full(len(chunk.starts), _UNKNOWN)
        sizes = chunk.ends[3] - chunk.ends[2]
        starts = chunk.starts + chunk.ends[2]
        rows = np.arange(len(sets))
        for _ in range(_COMMON_SETS):
            if not len(rows):
                return sets
            size, count = sizes[rows[0]], chunk.counts[rows[0]]
            alike = rows[(sizes[rows] == size) & (chunk.counts[rows] == count)]
            blocks = chunk.copied(starts[alike], int(size))
            first = blocks[0].tobytes()
            if blocks.tobytes() != first * len(alike):
                alike = alike[(blocks == blocks[0]).all(axis=1)]
            sets[alike] = self._set_number(first, int(count))
            rows = rows[sets[rows] == _UNKNOWN]
        for row in rows.tolist():
            block = chunk.buffer[starts[row] : starts[row] + sizes[row]]
            sets[row] = self._set_number(block, int(chunk.counts[row]))
        return sets

    def _set_number(self, block: bytes, count: int) -> int:
        number = self._numbers.get(block)
        if number is None:
            number = self._numbers[block] = self._learn(block)
        return number if number >= 0 and self._sets[number].count == count else _INVALID

    def _learn(self, block: bytes) -> int:
        try:
            names = packed.unpack_names(block)
        except errors.MusterError:
            return _INVALID
        codes = np.array([self._codes.setdefault(name, len(self._codes)) for name in names], np.int64)
        is_standard = codes < len(_STANDARD)
        standard = codes[is_standard]
        form = (len(codes), standard.tobytes(), is_standard.tobytes())
        self._sets.append(
            MetricSet(
                len(codes),
                self._forms.setdefault(form, len(self._forms)),
                standard,
                _places(is_standard),
                codes[~is_standard].astype(np.int32),
                _places(~is_standard),
            )
        )
        return len(self._sets) - 1

    def _rows(self, chunk: _Chunk, places: list[int]) -> PackedRows:
        rows = len(places)
        standard, extra = self._metrics(chunk)
        machine, group, zone = chunk.texts
        boot, sequence, at_ms, dropped = (np.ascontiguousarray(chunk.numbers[:, at]) for at in (2, 3, 4, 6))
        period_s = np.ascontiguousarray(chunk.numbers[:, 5]).view(np.float64)
        services = chunk.services
        arrays = {
            "machine": machine,
            "group": group,
            "zone": zone,
            "boot": pa.array(boot),
            "sequence": pa.array(sequence),
            "reported_at": pa.array(at_ms * 1000).view(_REPORTED_AT),
            "period_s": pa.array(period_s),
            "state": pa.array([columns.worst_state(entry) for entry in services])
            if services
            else pa.repeat("up", rows),
            "dropped": pa.array(dropped),
            "partial": pa.repeat(pa.scalar(False), rows),
            **standard,
            "extra": extra,
            "services": pa.array([columns.service_rows(entry) for entry in services], _SERVICES)
            if services
            else pa.nulls(rows, _SERVICES),
        }
        schema = columns.node_schema()
        batch = pa.RecordBatch.from_arrays([arrays[field.name] for field in schema], schema=schema)
        ordered = [places[at] for at in chunk.order.tolist()]
        return PackedRows(ordered, batch, chunk.machines, chunk.letters, boot, sequence, at_ms, period_s)

    def _metrics(self, chunk: _Chunk) -> tuple[dict[str, pa.Array], pa.MapArray]:
        """The columns of standard metrics, and the column ``extra``, whose dictionary has the names that
        occur."""
        rows = len(chunk.sets)
        ends = np.append(np.flatnonzero(np.diff(chunk.sets)) + 1, rows)
        runs = np.diff(ends, prepend=0)  # of the same set
        sets = [self._sets[number] for number in chunk.sets[ends - 1].tolist()]
        used = np.unique(np.concatenate([known.extra for known in sets]))
        standard = np.full((len(_STANDARD), rows), np.nan)
        offsets = np.zeros(rows + 1, np.int32)
        np.cumsum(np.repeat([len(known.extra) for known in sets], runs), out=offsets[1:])
        values, codes = np.empty(offsets[-1]), np.empty(offsets[-1], np.int32)
        row = run = 0
        for block in chunk.blocks:
            last = row + len(block)
            of_form = sets[run : 1 + int(np.searchsorted(ends, last))]
            known, flat = of_form[0], slice(offsets[row], offsets[last])
            standard[known.standard, row:last] = block[:, known.standard_at].T
            values[flat].reshape(len(block), -1)[:] = block[:, known.extra_at]
            names = np.searchsorted(used, np.stack([each.extra for each in of_form])).astype(np.int32)
            codes[flat] = np.repeat(names, runs[run : run + len(of_form)], axis=0).reshape(-1)
            row, run = last, run + len(of_form)
        names_used = list(self._codes)
        extra = pa.MapArray.from_arrays(
            pa.array(offsets, mask=np.append(np.diff(offsets) == 0, False)),
            pa.DictionaryArray.from_arrays(
                pa.array(codes), pa.array([names_used[code] for code in used.tolist()], pa.string())
            ),
            pa.array(values),
        )
        # NaN, which no report contains, is null.
        has_nulls = any(len(known.standard) < len(_STANDARD) for known in sets)
        return {
            name: pa.array(standard[code], from_pandas=has_nulls) for name, code in _STANDARD.items()
        }, extra


def _places(chosen: Bools) -> Ints | slice:
    """As an index; a slice, which is faster, if they are next to each other."""
    places = np.flatnonzero(chosen)
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


_SERVICES = columns.node_schema().field("services").type
_REPORTED_AT = columns.node_schema().field("reported_at").type


class _Chunk:
    """Some reports in one buffer."""

    def __init__(self, reports: Sequence[bytes]) -> None:
        self.blocks: list[Floats] = []  # of values: one for each form, with a row for each report
        self.texts: list[pa.StringArray] = []
        self.machines: list[bytes] = []
        self.services: list[tuple[messages.ServiceReport, ...]] = []  # of each report, if any has some
        self.sizes = np.fromiter(map(len, reports), np.int64, len(reports))
        self.buffer = b"".join([*reports, bytes(_SHORT)])  # after each name are as many bytes
        self.starts = np.cumsum(self.sizes) - self.sizes

    def copied(self, starts: Ints, size: int) -> Bytes:
        """So many bytes from each start on: a row for each."""
        # A view of the bytes from each place on, which overlap.
        places = np.ndarray((len(self.buffer) - size + 1,), f"V{size}", self.buffer, strides=(1,))
        return places[starts].view(np.uint8).reshape(len(starts), size)

    def has_valid_fields(self) -> Bools:
        """Check the sizes of all parts, and the fixed fields."""
        whole: Bools = (self.sizes >= _SIZE) & (self.sizes % 8 == 0)
        if not whole.all():
            return whole
        fields = self.copied(self.starts, _SIZE)
        self.numbers = fields.view(np.dtype("<i8"))
        heads = fields.view(np.dtype("<u2"))[:, 2:8].astype(np.int64)
        machine, group, zone, self.counts, names, services = heads.T
        self.ends = np.cumsum([_SIZE + 8 * self.counts + machine, group, zone, names, services], axis=0)
        boot, sequence, at_ms, dropped = (self.numbers[:, place] for place in (2, 3, 4, 6))
        period_s = self.numbers[:, 5].copy().view(np.float64)
        last = self.ends[-1]
        self.text_sizes = np.stack((machine, group, zone))
        valid: Bools = (
            (fields.view("V4")[:, 0] == np.void(packed.MAGIC))
            & (last + -last % 8 == self.sizes)
            & (np.minimum(np.minimum(boot, sequence), dropped) >= 0)
            & (at_ms >= 0)
            & (at_ms <= messages.TIME_MS_MAX)
            & (period_s > 0)
            & (period_s <= 86400)
            & (self.text_sizes.min(axis=0) > 0)
            & (self.text_sizes.max(axis=0) <= _SHORT)
        )
        return valid

    def sort(self, order: Ints, sets: Ints, forms: Ints) -> None:
        self.order, self.sets, self.forms = order, sets[order], forms[order]
        self.starts, self.counts, self.numbers = self.starts[order], self.counts[order], self.numbers[order]
        self.ends, self.text_sizes = self.ends[:, order], self.text_sizes[:, order]

    def has_valid_content(self) -> Bools:
        """Check values, texts and services, which are read here."""
        valid = self._has_valid_values()
        for place, (end, size) in enumerate(zip(self.ends, self.text_sizes, strict=False)):
            width = int(size.max())
            names = self.copied(self.starts + end - size, width)
            inside = np.arange(width) < size[:, None]
            content = names[inside]
            array, is_text = _text(content, size)
            self.texts.append(array)
            valid &= is_text
            if place == 0:
                self.letters = names * inside
                self.machines = self.letters.view(f"S{width}")[:, 0].tolist()
                if not content.all():  # a zero at the end would not be seen
                    valid &= (self.letters > 0).sum(axis=1) == size
        _, _, _, names_end, services_end = self.ends
        if (services_end > names_end).any():
            for row, (start, end) in enumerate(
                zip((self.starts + names_end).tolist(), (self.starts + services_end).tolist(), strict=True)
            ):
                try:
                    self.services.append(packed.unpack_services(self.buffer[start:end]))
                except errors.MusterError:
                    self.services.append(())
                    valid[row] = False
        return valid

    def _has_valid_values(self) -> Bools:
        valid = np.ones(len(self.starts), np.bool_)
        ends = np.append(np.flatnonzero(np.diff(self.forms)) + 1, len(valid))
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            count = int(self.counts[start])
            block = np.zeros((end - start, 0))
            if count:
                block = self.copied(self.starts[start:end] + _SIZE, 8 * count).view(np.dtype("<f8"))
            finite = np.isfinite(block)
            if not finite.all():
                valid[start:end] = finite.all(axis=1)
            self.blocks.append(block)
        return valid


def _text(content: Bytes, sizes: Ints) -> tuple[pa.StringArray, Bools]:
    """The texts, which are joined in ``content``, and which of them are valid."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    array = pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(content))
    valid = np.ones(len(sizes), np.bool_)
    if (content >= 0x80).any():
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            data = content.tobytes()
            for row, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
                valid[row] = _is_text(data[start:end])
    return array, valid


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
