"""Conversion of packed reports (`core.reports.packed`) to columns, a thousand at a time.

The reports are joined to one buffer, from which fixed fields, texts and values are gathered with a few array
operations.  Names of metrics are not read: their block is looked up in a table of known sets (`MetricSet`).
Reports that are not exactly as expected are left to `packed.decode`, one by one.
"""

from __future__ import annotations

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
_STANDARD = {name: code for code, name in enumerate(columns.STANDARD_METRICS)}

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MetricSet:
    codes: Codes  # of its names, in their order
    extra: int  # how many of them are not standard


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Reports that are valid, each by itself."""

    places: list[int]  # among the reports that were read
    batch: pa.RecordBatch  # of `columns.node_schema`
    machines: list[str]
    boot: Ints
    sequence: Ints
    at_ms: Ints
    period_s: Floats


class PackedReader:
    """Reads reports, and remembers sets of metrics. Its memory is bounded."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._codes = dict(_STANDARD)
        self._sets: dict[bytes, MetricSet | None] = {}  # None: the block is invalid

    def read(self, reports: Sequence[bytes]) -> tuple[PackedRows | None, list[int]]:
        """The rows, and the places of the other reports: of invalid and unusual ones."""
        if len(self._sets) > SETS_MAX or len(self._codes) > NAMES_MAX:
            self._forget()
        left: list[int] = []
        places = list(range(len(reports)))
        while places:
            chunk = _Chunk([reports[place] for place in places])
            valid = self._check(chunk)
            if valid.all():
                return self._rows(chunk, places), left
            left += [place for place, good in zip(places, valid.tolist(), strict=True) if not good]
            places = [place for place, good in zip(places, valid.tolist(), strict=True) if good]
        return None, left

    def _check(self, chunk: _Chunk) -> Bools:
        """Which reports are valid; with the sets of their metrics where all are."""
        valid = chunk.has_valid_fields()
        if not valid.all():
            return valid
        get = self._sets.get
        blocks = [
            report[start:end]
            for report, start, end in zip(
                chunk.reports, chunk.ends[2].tolist(), chunk.ends[3].tolist(), strict=True
            )
        ]
        sets = [get(block) or self._learn(block) for block in blocks]
        valid = np.array(
            [
                known is not None and len(known.codes) == count
                for known, count in zip(sets, chunk.counts.tolist(), strict=True)
            ],
            np.bool_,
        )
        if valid.all():
            chunk.sets = [known for known in sets if known is not None]
            valid = chunk.has_valid_content()
        return valid

    def _learn(self, block: bytes) -> MetricSet | None:
        if block in self._sets:
            return None
        try:
            names = packed.unpack_names(block)
        except errors.MusterError:
            known = None
        else:
            codes = np.array([self._codes.setdefault(name, len(self._codes)) for name in names], np.int32)
            known = MetricSet(codes, int(np.count_nonzero(codes >= len(_STANDARD))))
        self._sets[block] = known
        return known

    def _rows(self, chunk: _Chunk, places: list[int]) -> PackedRows:
        rows = len(places)
        codes = np.concatenate([known.codes for known in chunk.sets])
        standard = np.full((len(_STANDARD), rows), np.nan)
        is_standard = codes < len(_STANDARD)
        row = np.repeat(np.arange(rows), chunk.counts)
        standard[codes[is_standard], row[is_standard]] = chunk.values[is_standard]
        is_extra = ~is_standard
        extra = _extra(
            np.array([known.extra for known in chunk.sets]),
            codes[is_extra],
            chunk.values[is_extra],
            list(self._codes),
        )
        machine, group, zone = chunk.texts
        boot, sequence, at_ms, dropped = (chunk.numbers[:, place] for place in (2, 3, 4, 6))
        period_s = chunk.numbers[:, 5].copy().view(np.float64)
        services = chunk.services
        arrays = {
            "machine": machine,
            "group": group,
            "zone": zone,
            "boot": pa.array(boot),
            "sequence": pa.array(sequence),
            "reported_at": pa.array(at_ms * 1000),
            "period_s": pa.array(period_s),
            "state": pa.array([columns.worst_state(entry) for entry in services])
            if services
            else pa.repeat("up", rows),
            "dropped": pa.array(dropped),
            "partial": pa.repeat(pa.scalar(False), rows),
            **{
                name: pa.array(standard[code], from_pandas=True)  # NaN, which no report contains, is null
                for name, code in _STANDARD.items()
            },
            "extra": extra,
            "services": pa.array([columns.service_rows(entry) for entry in services], _SERVICES)
            if services
            else pa.nulls(rows, _SERVICES),
        }
        schema = columns.node_schema()
        batch = pa.RecordBatch.from_arrays(
            [arrays[field.name].cast(field.type) for field in schema], schema=schema
        )
        return PackedRows(places, batch, chunk.machines(), boot, sequence, at_ms, period_s)


_SERVICES = columns.node_schema().field("services").type


class _Chunk:
    """Some reports in one buffer."""

    def __init__(self, reports: Sequence[bytes]) -> None:
        self.reports = reports
        self.sets: list[MetricSet] = []
        self.texts: list[pa.StringArray] = []
        self.services: list[tuple[messages.ServiceReport, ...]] = []  # of each report, if any has some
        self.sizes = np.fromiter(map(len, reports), np.int64, len(reports))
        self.buffer = b"".join(reports)
        self.starts = np.cumsum(self.sizes) - self.sizes

    def has_valid_fields(self) -> Bools:
        """Check the sizes of all parts, and the fixed fields."""
        whole: Bools = (self.sizes >= _SIZE) & (self.sizes % 8 == 0)
        if not whole.all():
            return whole
        self.words = np.frombuffer(self.buffer, np.dtype("<i8"))
        at = self.starts // 8
        self.numbers = self.words[at[:, None] + np.arange(_SIZE // 8)]
        heads = self.numbers[:, :2].copy().view(np.dtype("<u2")).astype(np.int64)
        machine, group, zone, self.counts, names, services = heads[:, 2:].T
        self.ends = np.cumsum([_SIZE + 8 * self.counts + machine, group, zone, names, services], axis=0)
        boot, sequence, at_ms, dropped = (self.numbers[:, place] for place in (2, 3, 4, 6))
        period_s = self.numbers[:, 5].copy().view(np.float64)
        last = self.ends[-1]
        self.text_sizes = (machine, group, zone)
        valid: Bools = (
            (last + -last % 8 == self.sizes)
            & (np.minimum(np.minimum(boot, sequence), dropped) >= 0)
            & (at_ms >= 0)
            & (at_ms <= messages.TIME_MS_MAX)
            & (period_s > 0)
            & (period_s <= 86400)
        )
        for size in self.text_sizes:
            valid &= (size > 0) & (size <= _SHORT)
        return valid

    def has_valid_content(self) -> Bools:
        """Check values, texts and services, which are read here."""
        rows = len(self.reports)
        valid = np.ones(rows, np.bool_)
        self.values = self.words.view(np.float64)[_ranges(self.starts // 8 + _SIZE // 8, self.counts)]
        finite = np.isfinite(self.values)
        if not finite.all():
            valid[np.repeat(np.arange(rows), self.counts)[~finite]] = False
        text = np.frombuffer(self.buffer, np.uint8)
        for end, size in zip(self.ends, self.text_sizes, strict=False):
            array, is_text = _text(text, self.starts + end - size, size)
            self.texts.append(array)
            valid &= is_text
        _, _, _, names_end, services_end = self.ends
        if (services_end > names_end).any():
            spans = zip(self.reports, names_end.tolist(), services_end.tolist(), strict=True)
            for row, (report, start, end) in enumerate(spans):
                try:
                    self.services.append(packed.unpack_services(report[start:end]))
                except errors.MusterError:
                    self.services.append(())
                    valid[row] = False
        return valid

    def machines(self) -> list[str]:
        names: list[str] = self.texts[0].to_pylist()
        return names


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """The numbers from each start on, as many as its size."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(starts - ends + sizes, sizes)


def _text(text: npt.NDArray[np.uint8], starts: Ints, sizes: Ints) -> tuple[pa.StringArray, Bools]:
    """The texts, and which of them are valid."""
    content = text[_ranges(starts, sizes)]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    array = pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(content))
    valid = np.ones(len(sizes), np.bool_)
    if (content >= 0x80).any():
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            data = content.tobytes()
            for row, (start, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=False)):
                valid[row] = _is_text(data[start : start + size])
    return array, valid


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _extra(sizes: Ints, codes: Codes, values: Floats, names: list[str]) -> pa.MapArray:
    """The column ``extra``. Its dictionary has the names that occur."""
    used = np.zeros(len(names), np.bool_)
    used[codes] = True
    kept = np.flatnonzero(used)
    place = np.zeros(len(names), np.int32)
    place[kept] = np.arange(len(kept))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(offsets, mask=np.append(sizes == 0, False)),
        pa.DictionaryArray.from_arrays(
            pa.array(place[codes]), pa.array([names[code] for code in kept.tolist()], pa.string())
        ),
        pa.array(values),
    )
