from __future__ import annotations

import contextlib
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, messages
from muster.core.reports import packed
from tests.core import test_reports

REPORT = test_reports.node_report(
    group="web",
    boot=7,
    dropped=2,
    metrics={"cpu_percent": 4.0, "a": -0.5},
    services=(messages.ServiceReport(name="db", metrics={"queries_s": 3.0}),),
)
SEQUENCE_AT = 24


@given(test_reports.rows)
def test_reports_survive(rows):
    assert [packed.decode(packed.encode(row)) for row in rows] == rows


def test_the_layout_is_fixed():
    names = zlib.compress(b'["cpu_percent","a"]', 9)
    services = b'[{"name":"db","metrics":{"queries_s":3.0}}]'
    head = struct.pack("<4s6Hqqqdq", b"\xc1nr2", 1, 3, 7, 2, len(names), len(services), 7, 1, 5, 10.0, 2)
    data = head + struct.pack("<2d", 4.0, -0.5) + b"mwebdefault" + names + services
    assert packed.encode(REPORT) == data + bytes(-len(data) % 8)


def test_a_report_is_half_as_large_as_in_json():
    report = test_reports.node_report(metrics={f"http_{n}_responses_total": 12345.678 * n for n in range(36)})
    assert len(packed.encode(report)) < len(messages.encode(report)) / 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_figure_that_is_no_finite_number_is_refused(value):
    report = messages.NodeReport(machine="m", sequence=1, at_ms=5, period_s=10.0, metrics={})
    report.metrics["a"] = value
    with pytest.raises(messages.MalformedMessage):
        packed.decode(packed.encode(report))


@pytest.mark.parametrize(
    "fields",
    [
        {"machine": ""},
        {"machine": "m" * 257},
        {"zone": "\ud800"},
        {"boot": -1},
        {"sequence": 1 << 63},
        {"at_ms": 1 << 53},
        {"period_s": 0.0},
        {"period_s": float("nan")},
        {"dropped": -1},
        {"metrics": {"": 1.0}},
        {"metrics": {"\ud800": 1.0}},
        {"metrics": {f"m{number}": 1.0 for number in range(1025)}},
        {"services": tuple(messages.ServiceReport(name=f"s{number}") for number in range(257))},
    ],
)
def test_a_report_that_json_would_not_carry_is_refused(fields):
    report = messages.NodeReport(**{"machine": "m", "sequence": 1, "at_ms": 5, "period_s": 10.0, **fields})
    with pytest.raises(messages.MalformedMessage):
        packed.decode(packed.encode(report))


def test_a_report_is_bounded():
    many = {f"{number:0200}": 1.0 for number in range(1000)}
    text = "".join(chr(33 + number * 7919 % 90) for number in range(4096))
    services = tuple(messages.ServiceReport(name=f"s{number}", reason=text) for number in range(16))
    for fields in ({"metrics": many}, {"services": services}):
        with pytest.raises(messages.MessageTooLarge):
            packed.encode(test_reports.node_report(**fields))


def test_names_that_expand_without_end_are_refused():
    bomb = zlib.compress(b'["' + b"a" * (1 << 20) + b'"]', 9)
    assert len(bomb) < 2000
    data = packed.pack((0, 1, 5, 10.0, 0), (b"m", b"g", b"z"), bomb, bytes(8))
    with pytest.raises(messages.MalformedMessage, match="no end"):
        packed.decode(data)


@pytest.mark.parametrize(
    "names", [b"x", zlib.compress(b'["a","a"]'), zlib.compress(b'["a"]'), zlib.compress(b'{"a":1}'), b""]
)
def test_names_that_do_not_belong_to_the_values_are_refused(names):
    data = packed.pack((0, 1, 5, 10.0, 0), (b"m", b"g", b"z"), names, bytes(16))
    with pytest.raises(messages.MalformedMessage):
        packed.decode(data)


def test_a_report_of_another_length_than_its_parts_is_refused():
    data = packed.encode(REPORT)
    for other in (data[:-8], data + bytes(8), data[:-1], data[:40], data[:4]):
        with pytest.raises(messages.MalformedMessage):
            packed.decode(other)


@given(st.binary(max_size=80), st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_rubbish_is_an_error_of_ours(data, place, change):
    valid = packed.encode(REPORT)
    for rubbish in (data, packed.MAGIC + data, valid[:place] + change + valid[place + len(change) :]):
        with contextlib.suppress(errors.MusterError):
            packed.decode(rubbish)
