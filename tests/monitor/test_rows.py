"""Packed reports: decoding a thousand together gives the same result as one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, messages
from muster.core.reports import columns, packed
from muster.monitor.channel import packed_rows
from tests.core import test_packed, test_reports


def read(reader: packed_rows.PackedReader, data: list[bytes]) -> dict[int, messages.NodeReport]:
    """By place, those that were read together."""
    rows, left = reader.read(data)
    assert left == sorted(left)
    if rows is None:
        assert sorted(left) == list(range(len(data)))
        return {}
    assert sorted([*rows.places, *left]) == list(range(len(data)))
    reports = columns.from_batch(rows.batch)
    assert [report.machine.encode() for report in reports] == rows.machines
    for name in ("boot", "sequence", "at_ms", "period_s"):
        assert [getattr(report, name) for report in reports] == getattr(rows, name).tolist()
    return dict(zip(rows.places, reports, strict=True))


@given(test_reports.rows, test_reports.rows)
def test_reports_are_read_together_as_one_by_one(first, second):
    reader = packed_rows.PackedReader()
    for rows in (first, second, first):
        reports = read(reader, [packed.encode(row) for row in rows])
        for place, row in enumerate(rows):
            if place in reports:
                assert reports[place] == row
            else:  # one by one
                longest = max(len(name.encode()) for name in (row.machine, row.group, row.zone))
                assert longest > 256 or "\0" in row.machine


def test_the_columns_are_those_of_messages():
    metrics = {f"m{number}": float(number) for number in range(60)}
    sent = [
        test_reports.node_report(metrics=metrics),
        test_reports.node_report(group="g" * 256),
        test_reports.node_report(metrics={"cpu_percent": 3.0, **metrics}, zone="ü"),
        test_reports.node_report(metrics={"m7": 1.0, "cpu_percent": 7.0}),
        test_packed.REPORT,
    ]
    rows, left = packed_rows.PackedReader().read([packed.encode(row) for row in sent])
    assert left == []
    assert rows is not None
    assert rows.batch.cast(columns.node_schema()).equals(columns.to_batch(sent))


def changed(data: bytes, place: int, part: bytes) -> bytes:
    return data[:place] + part + data[place + len(part) :]


GOOD = packed.encode(test_reports.node_report(metrics={"a": 1.0}))
INVALID = {
    "too short": GOOD[:40],
    "another length": GOOD + bytes(8),
    "no multiple of eight": GOOD[:-1],
    "negative boot": changed(GOOD, 16, b"\xff" * 8),
    "negative sequence": changed(GOOD, 24, b"\xff" * 8),
    "negative time": changed(GOOD, 32, b"\xff" * 8),
    "time too large": changed(GOOD, 32, (1 << 53).to_bytes(8, "little")),
    "no period": changed(GOOD, 40, bytes(8)),
    "negative drops": changed(GOOD, 48, b"\xff" * 8),
    "infinite": changed(GOOD, 56, bytes.fromhex("000000000000f07f")),
    "not a number": changed(GOOD, 56, bytes.fromhex("000000000000f87f")),
    "machine not Unicode": changed(GOOD, 64, b"\xff"),
    "names": changed(GOOD, 73, b"\xff\xff"),
    "no machine": packed.pack((0, 1, 5, 10.0, 0), (b"", b"g", b"z"), b"", b""),
    "no group": packed.pack((0, 1, 5, 10.0, 0), (b"m", b"", b"z"), b"", b""),
    "services": packed.pack((0, 1, 5, 10.0, 0), (b"m", b"g", b"z"), b"", b"", b"[{}]"),
    "two values, one name": packed.pack(
        (0, 1, 5, 10.0, 0), (b"m", b"g", b"z"), packed.pack_names(("a",)), bytes(16)
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_report_is_left_out_and_the_others_are_read(name):
    with pytest.raises(errors.MusterError):
        packed.decode(INVALID[name])
    reader = packed_rows.PackedReader()
    expected = packed.decode(GOOD)
    for _ in range(2):  # with a set of metrics that is new, and known
        assert read(reader, [GOOD, INVALID[name], GOOD]) == {0: expected, 2: expected}
        assert read(reader, [INVALID[name]]) == {}


def test_reports_that_are_not_packed_are_left_out_in_their_order():
    other = [b"", b"{}", b"x" * 64, b"y" * 57, GOOD, b"z" * 64, INVALID["negative boot"], b"{}"]
    assert read(packed_rows.PackedReader(), other) == {4: packed.decode(GOOD)}


def test_all_invalid_reports_together_are_left_out():
    assert read(packed_rows.PackedReader(), [*INVALID.values(), GOOD]) == {len(INVALID): packed.decode(GOOD)}


@given(st.lists(st.binary(max_size=200).map(lambda data: packed.MAGIC + data), max_size=5))
def test_rubbish_is_left_out(data):
    for place in read(packed_rows.PackedReader(), data):
        packed.decode(data[place])


def test_the_memory_for_names_is_bounded(monkeypatch):
    monkeypatch.setattr(packed_rows, "SETS_MAX", 3)
    monkeypatch.setattr(packed_rows, "NAMES_MAX", 40)
    reader: Any = packed_rows.PackedReader()
    for number in range(50):
        sent = [test_reports.node_report(metrics={f"m{number}": 1.0}), test_packed.REPORT]
        assert list(read(reader, [packed.encode(row) for row in sent]).values()) == sent
        assert len(reader._numbers) <= 3 + len(sent)
        assert len(reader._codes) <= 40 + len(sent)
    monkeypatch.setattr(packed_rows, "SETS_MAX", 1000)
    for number in range(50):
        sent = [test_reports.node_report(metrics={f"m{number}": 1.0})]
        assert list(read(reader, [packed.encode(row) for row in sent]).values()) == sent
        assert len(reader._codes) <= 40 + len(sent)
